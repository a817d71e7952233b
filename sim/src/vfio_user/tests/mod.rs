//! A small client, and the server's answers to it.

mod controller;
mod dma;
mod irq;
mod messages;
mod socket;

use super::wire::{self, MessageHeader, command};
use super::{ClientExit, Server, Stopper};
use crate::config::settings::Config;
use crate::testing::{config, judge};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::string::String;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::vec::Vec;
use std::{format, vec};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A server that runs in a thread.
struct ServeOutcome {
    path: PathBuf,
    stopper: Stopper,
    thread: Option<JoinHandle<Vec<ClientExit>>>,
}

/// Returns a path for a socket that no other test uses.
fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("nvme-sim-{}-{number}.sock", std::process::id()))
}

impl ServeOutcome {
    fn new(mut config: Config, threads: usize) -> Self {
        config.audit = true;
        let explained = config.faults.breaks();
        let path = socket_path();
        let mut server = Server::bind(config, &path, threads).expect("a server");
        let stopper = server.stopper();
        let thread = std::thread::spawn(move || {
            let mut left = vec![];
            while let Some(one) = server.serve_one().expect("the listening socket") {
                left.push(one);
            }
            judge(&server.controller().findings(), &[], &explained);
            left
        });
        Self {
            path,
            stopper,
            thread: Some(thread),
        }
    }

    fn simple() -> Self {
        Self::new(config(), 1)
    }

    /// Connects without a word.
    fn raw(&self) -> UnixStream {
        let socket = UnixStream::connect(&self.path).expect("a connection");
        let limit = Some(Duration::from_secs(20));
        socket.set_read_timeout(limit).unwrap();
        socket
    }

    /// Connects and agrees on the version.
    fn client(&self) -> Client {
        let mut client = Client::new(self.raw());
        client.greet(r#"{"capabilities":{"max_msg_fds":8}}"#);
        client
    }

    /// Returns a client that keeps its server.
    fn hold_client(self) -> Held {
        let client = self.client();
        Held {
            client,
            _served: self,
        }
    }

    /// Ends the server; returns how its clients left.
    fn stop(mut self) -> Vec<ClientExit> {
        self.stopper.stop();
        self.thread.take().unwrap().join().expect("the server")
    }
}

impl Drop for ServeOutcome {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join().is_ok();
            assert!(ended || std::thread::panicking(), "the server panicked");
        }
    }
}

/// A client and its server; the client goes first.
struct Held {
    client: Client,
    _served: ServeOutcome,
}

impl std::ops::Deref for Held {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// Answer to a command: the body and descriptors, or the errno.
type Answered = Result<(Vec<u8>, Vec<OwnedFd>), i32>;

/// The client's end.
struct Client {
    socket: UnixStream,
    /// Bytes received behind the last message.
    rest: Vec<u8>,
    next_id: u16,
}

impl Client {
    fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            rest: vec![],
            next_id: 7,
        }
    }

    fn greet(&mut self, json: &str) -> String {
        let version = wire::VersionPayload { major: 0, minor: 1 };
        let text = match json {
            "" => vec![],
            json => [json.as_bytes(), &[0]].concat(),
        };
        let body = [version.as_bytes(), &text].concat();
        let (body, _) = self.send(command::VERSION, &body, &[]).expect("a version");
        let (version, text) = wire::VersionPayload::read_from_prefix(&body).unwrap();
        assert_eq!((version.major, version.minor), (0, 1));
        String::from_utf8(text.to_vec()).unwrap()
    }

    /// Sends a message without waiting.
    fn post(&mut self, code: u16, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        let header = MessageHeader {
            id: self.next_id,
            command: code,
            size: (size_of::<MessageHeader>() + body.len()) as u32,
            flags,
            error: 0,
        };
        self.put(header, body, fds);
        header.id
    }

    fn put(&mut self, header: MessageHeader, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.try_put(header, body, fds).unwrap();
    }

    fn try_put(
        &mut self,
        header: MessageHeader,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> std::io::Result<()> {
        let whole = [header.as_bytes(), body].concat();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let parts = [IoSlice::new(&whole)];
        let sent = sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
        self.socket.write_all(&whole[sent..])
    }

    /// Returns the next message, whole and with its descriptors: one `recvmsg` must bring all of a small one.
    fn take(&mut self) -> (MessageHeader, Vec<u8>, Vec<OwnedFd>) {
        let mut bytes = vec![0; wire::MAX_MESSAGE];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut fds = vec![];
        if self.rest.is_empty() {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = recvmsg(&self.socket, &mut parts, &mut control, flags).expect("a message");
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            self.rest.extend_from_slice(&bytes[..got.bytes]);
        }
        let (header, _) = MessageHeader::read_from_prefix(&self.rest).expect("a whole header");
        let (size, got) = (header.size as usize, self.rest.len());
        if size > got {
            assert!(got > 4096, "a small message came in pieces");
            self.rest.resize(size, 0);
            self.socket.read_exact(&mut self.rest[got..]).unwrap();
        }
        let message: Vec<u8> = self.rest.drain(..size).collect();
        (header, message[size_of::<MessageHeader>()..].to_vec(), fds)
    }

    fn send(&mut self, code: u16, body: &[u8], fds: &[BorrowedFd<'_>]) -> Answered {
        let id = self.post(code, wire::COMMAND, body, fds);
        // Requests of the server are left unanswered here.
        let (header, body, fds) = loop {
            let message = self.take();
            if message.0.flags & wire::TYPE_MASK == wire::REPLY {
                break message;
            }
        };
        assert_eq!((header.id, header.command), (id, code));
        if header.flags & wire::ERROR != 0 {
            assert!(body.is_empty() && fds.is_empty() && header.error != 0);
            return Err(header.error as i32);
        }
        Ok((body, fds))
    }

    /// Sends a command of one structure, and returns the errno of its refusal.
    fn refused<T: IntoBytes + Immutable>(&mut self, code: u16, body: &T) -> i32 {
        match self.send(code, body.as_bytes(), &[]) {
            Err(errno) => errno,
            Ok(_) => 0,
        }
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, i32> {
        let access = wire::RegionAccess {
            offset,
            region,
            count,
        };
        let (body, _) = self.send(command::REGION_READ, access.as_bytes(), &[])?;
        assert_eq!(&body[..16], access.as_bytes());
        assert_eq!(body.len(), 16 + count as usize);
        Ok(body[16..].to_vec())
    }

    fn read32(&mut self, region: u32, offset: u64) -> u32 {
        let bytes = self.read(region, offset, 4).expect("a register");
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), i32> {
        let access = wire::RegionAccess {
            offset,
            region,
            count: data.len() as u32,
        };
        let body = [access.as_bytes(), data].concat();
        let (body, _) = self.send(command::REGION_WRITE, &body, &[])?;
        assert_eq!(body, access.as_bytes());
        Ok(())
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.write(0, offset.into(), &value.to_le_bytes())
            .expect("a register");
    }

    fn map(&mut self, address: u64, size: u64, fd: Option<&OwnedFd>) -> Result<(), i32> {
        let map = wire::DmaMap {
            argsz: 32,
            flags: wire::DMA_READABLE | wire::DMA_WRITABLE,
            offset: 0,
            address,
            size,
        };
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        let (body, _) = self.send(command::DMA_MAP, map.as_bytes(), &fds)?;
        assert!(body.is_empty());
        Ok(())
    }

    fn unmap(&mut self, flags: u32, address: u64, size: u64) -> Result<(), i32> {
        let unmap = wire::DmaUnmap {
            argsz: 24,
            flags,
            address,
            size,
        };
        let (body, _) = self.send(command::DMA_UNMAP, unmap.as_bytes(), &[])?;
        assert_eq!(body, unmap.as_bytes());
        Ok(())
    }
}

/// Returns a memfd of `len` bytes.
fn memfd(len: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}
