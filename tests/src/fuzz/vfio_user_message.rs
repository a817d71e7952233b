//! Clients that send anything at all: the server answers a client or disconnects it, and serves the next one; its
//! controller breaks no rule.

use super::Input;
use crate::audit::controller_is_right;
use nvme_sim::config::NamespaceConfig;
use nvme_sim::vfio_user::wire::{self, MessageHeader, command};
use nvme_sim::vfio_user::{ClientExit, Server};
use nvme_sim::{Config, NullStore};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Number of messages in one run at most, so that the socket's buffer has room for every reply.
const MESSAGES: usize = 64;
/// The longest wait for the end of a command.
const PATIENCE: Duration = Duration::from_millis(5);

/// Sends messages with descriptors, chosen by the bytes, over a connection; then an honest client is served.
pub fn vfio_user_message(bytes: &[u8]) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("nvme-fuzz-{}-{number}.sock", std::process::id());
    let config = Config {
        namespaces: vec![NamespaceConfig::new(512, Box::new(NullStore::new(1 << 20)))],
        max_queues: 4,
        mqes: 64,
        audit: true,
        ..Config::empty()
    };
    let mut server = Server::bind(config, &std::env::temp_dir().join(name), 1).expect("a server");
    let controller = server.controller();
    let mut input = Input::new(bytes);
    let greets = input.byte() & 7 != 0;
    let mut ended = 0;
    converse(&mut server, |socket| {
        if greets {
            put(socket, command::VERSION, 0, &[0, 0, 1, 0], &[]);
        }
        for _ in 0..MESSAGES {
            if input.is_empty() {
                break;
            }
            match input.byte() {
                254 => ended = wait(|| controller.audited().1, ended),
                kind => message(socket, kind, &mut input),
            }
        }
    });
    let (left, replies) = converse(&mut server, |socket| {
        put(socket, command::VERSION, 0, &[0, 0, 1, 0], &[]);
        let read = wire::RegionAccess {
            offset: 0,
            region: wire::region::CONFIG,
            count: 4,
        };
        put(socket, command::REGION_READ, 0, read.as_bytes(), &[]);
    });
    assert_eq!(left, Some(ClientExit::Closed));
    let header = size_of::<MessageHeader>();
    assert_eq!(replies.len(), header + 4 + header + 16 + 4);
    assert_eq!(&replies[replies.len() - 4..], &[0x56, 0x4E, 1, 0]);
    controller_is_right(&server.controller().findings());
}

/// Waits until more commands have ended than `before`, not for long: how many have.
fn wait(ended: impl Fn() -> u64, before: u64) -> u64 {
    let start = Instant::now();
    while ended() == before && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    ended()
}

/// Sends what `speak` sends, serves the connection to its end, and returns the replies.
fn converse(
    server: &mut Server,
    speak: impl FnOnce(&UnixStream) + Send,
) -> (Option<ClientExit>, Vec<u8>) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            speak(&ours);
            // Descriptors that were sent over the socket may have closed it already.
            let _ = ours.shutdown(Shutdown::Write);
            let mut replies = Vec::new();
            let _ = (&ours).read_to_end(&mut replies);
            replies
        });
        let left = server.serve_connection(theirs);
        (left, reader.join().expect("the reader"))
    })
}

fn put(socket: &UnixStream, code: u16, flags: u32, body: &[u8], fds: &[OwnedFd]) {
    let header = MessageHeader {
        id: code,
        command: code,
        size: (size_of::<MessageHeader>() + body.len()) as u32,
        flags,
        error: 0,
    };
    raw(socket, &[header.as_bytes(), body].concat(), fds);
}

/// Sends bytes as long as the peer's buffer has room.
fn raw(socket: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let parts = [IoSlice::new(bytes)];
    // The server may have hung up.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if let Ok(sent) = sendmsg(socket, &parts, &mut control, flags) {
        let _ = send(socket, &bytes[sent..], SendFlags::NOSIGNAL);
    }
}

/// Returns one message that is mostly plausible, so that it passes the first check.
fn message(socket: &UnixStream, kind: u8, input: &mut Input<'_>) {
    if kind == 255 {
        let len = usize::from(input.byte() % 64);
        return raw(socket, input.take(len), &[]);
    }
    let fds = descriptors(input.byte(), input);
    let flags = match input.byte() {
        0 => input.word(),
        1..=16 => wire::NO_REPLY,
        17..=24 => wire::REPLY,
        _ => wire::COMMAND,
    };
    let (code, body) = body(kind, input);
    put(socket, code, flags, &body, &fds);
}

/// Returns memory, an eventfd, both, or a descriptor that is neither.
fn descriptors(which: u8, input: &mut Input<'_>) -> Vec<OwnedFd> {
    let mut memory = || {
        let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, 64 << 10).expect("its size");
        for _ in 0..input.byte() % 4 {
            // The bytes go to an offset that can be an entry of a submission ring.
            let at = u64::from(input.byte()) * 64;
            pwrite(&fd, input.take(64), at).expect("its contents");
        }
        fd
    };
    let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    match which % 8 {
        1 | 2 => vec![memory()],
        3 | 4 => vec![event()],
        5 => vec![event(), event()],
        6 => vec![memory(), event()],
        7 => UnixStream::pair().map_or(vec![], |(one, _)| vec![one.into()]),
        _ => vec![],
    }
}

/// Returns a number that is small, near a page, or anything.
fn number(input: &mut Input<'_>) -> u64 {
    match input.byte() % 8 {
        0 => input.long(),
        1..=3 => u64::from(input.byte()) << 12,
        4 => u64::from(input.half()),
        _ => u64::from(input.byte() % 64),
    }
}

fn body(kind: u8, input: &mut Input<'_>) -> (u16, Vec<u8>) {
    let mut small = || number(input) as u32;
    let (code, mut bytes) = match kind % 16 {
        0..=2 => {
            let access = wire::RegionAccess {
                region: [0, 0, 4, 7][small() as usize % 4],
                count: small() % 64,
                offset: u64::from(small()),
            };
            let code = match kind % 2 {
                0 => command::REGION_READ,
                _ => command::REGION_WRITE,
            };
            (code, [access.as_bytes(), input.take(64)].concat())
        }
        3 | 4 => {
            let map = wire::DmaMap {
                argsz: 32,
                flags: small() % 5,
                offset: number(input),
                address: number(input),
                size: number(input),
            };
            (command::DMA_MAP, map.as_bytes().to_vec())
        }
        5 => {
            let unmap = wire::DmaUnmap {
                argsz: 24,
                flags: small() % 4,
                address: number(input),
                size: number(input),
            };
            (command::DMA_UNMAP, unmap.as_bytes().to_vec())
        }
        6 | 7 => {
            let set = wire::IrqSet {
                argsz: 20,
                flags: 1 << (small() % 3) | 8 << (small() % 3),
                index: small() % 6,
                start: small(),
                count: small() % 4,
            };
            let code = command::DEVICE_SET_IRQS;
            (code, [set.as_bytes(), input.take(4)].concat())
        }
        8 => {
            let info = wire::RegionInfo {
                argsz: small(),
                flags: 0,
                index: small() % 10,
                cap_offset: 0,
                size: 0,
                offset: 0,
            };
            (command::DEVICE_GET_REGION_INFO, info.as_bytes().to_vec())
        }
        9 => {
            let ask = wire::RegionIoFds {
                argsz: small() << 4,
                flags: 0,
                index: small() % 10,
                count: 0,
            };
            (command::DEVICE_GET_REGION_IO_FDS, ask.as_bytes().to_vec())
        }
        10 => (command::DEVICE_RESET, vec![]),
        11 => (command::VERSION, [&[0, 0, 1, 0], input.take(40)].concat()),
        12 => {
            let count = u64::from(input.byte());
            let writes = input.take(96);
            let code = command::REGION_WRITE_MULTI;
            (code, [count.as_bytes(), writes].concat())
        }
        _ => (u16::from(input.byte() % 24), input.take(48).to_vec()),
    };
    if input.byte() == 0 {
        bytes.truncate(usize::from(input.byte()));
    }
    (code, bytes)
}
