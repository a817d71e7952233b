//! A server of a few registers that follows the protocol, except where a test replaces one reply.

use super::super::VfioUser;
use super::super::connection::ServerConnection;
use crate::error::Result;
use nvme_core::spec::register::offset;
use nvme_vfio_user::{
    CAP_SPARSE_MMAP, DEVICE_PCI, DEVICE_RESETS, DeviceInfo, ERROR, InfoCapability, MessageHeader,
    REGION_CAPS, REGION_MMAP, REGION_READABLE, REGION_WRITABLE, REPLY, RegionInfo, SparseArea,
    SparseMmap, command,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

pub const BAR_BYTES: u64 = 0x4000;
pub const CAP: u64 = 0x0020_0000_0101_00FF;
/// Bytes at 8h of the configuration space: revision, then the class code.
pub const CLASS: [u8; 4] = [0, 0x02, 0x08, 0x01];

/// A command and its payload; for a write only the data.
pub type Message = (u16, Vec<u8>);
type Seen = Arc<Mutex<Vec<Message>>>;

/// The server's answer to one message, in place of the correct reply.
#[derive(Clone)]
pub enum Act {
    /// A reply with this payload.
    Say(Vec<u8>),
    /// An error reply.
    Refuse(i32),
    /// The first bytes of the polite reply, then the end.
    First(usize),
    /// The first bytes, then nothing more.
    FirstThenSilence(usize),
    /// The polite reply byte by byte, with a pause after each.
    Dribble(Duration),
    /// The polite reply with another header.
    Changed(fn(&mut MessageHeader)),
    /// The correct reply with one of its bits flipped.
    Flip(usize),
    /// The correct reply, with this number of descriptors.
    WithFiles(usize),
    /// A DMA_READ of the server with these flags comes first.
    AskBefore(u32),
}

/// Description of BAR0, and other properties in which servers differ.
pub struct Bar {
    pub areas: Vec<(u64, u64)>,
    pub file: bool,
    pub file_bytes: u64,
    pub file_offset: u64,
    /// Capabilities and descriptor come with the first answer, however little room there is.
    pub at_once: bool,
    /// The reply reports capabilities only if they fit into it.
    pub coy: bool,
    pub resets: bool,
    /// Deadline of the client's waits.
    pub patience: Duration,
}

impl Default for Bar {
    fn default() -> Self {
        Self {
            areas: vec![(0x1000, 0x1000)],
            file: true,
            file_bytes: 0x10_0000 + BAR_BYTES,
            file_offset: 0x10_0000,
            at_once: false,
            coy: false,
            resets: true,
            patience: Duration::from_secs(10),
        }
    }
}

/// The messages that the server saw, and the memory behind its doorbells.
pub struct Log {
    seen: Seen,
    thread: JoinHandle<()>,
    file: File,
    offset: u64,
}

impl Log {
    /// Returns the doorbell at `at` bytes from the first.
    pub fn doorbell(&self, at: u64) -> u32 {
        let mut word = [0; 4];
        self.file
            .read_exact_at(&mut word, self.offset + 0x1000 + at)
            .unwrap();
        u32::from_le_bytes(word)
    }

    /// Returns the messages that the client sent, after it has left.
    pub fn finish(self) -> Vec<Message> {
        self.thread.join().unwrap();
        self.seen.lock().unwrap().clone()
    }
}

type Choice = Box<dyn FnMut(&MessageHeader, &[u8]) -> Option<Act> + Send>;

/// Returns a device behind a server that asks `choice` what to do with each message.
pub fn start(
    choice: impl FnMut(&MessageHeader, &[u8]) -> Option<Act> + Send + 'static,
) -> (Result<VfioUser>, Log) {
    start_with(Bar::default(), choice)
}

pub fn start_with(
    bar: Bar,
    choice: impl FnMut(&MessageHeader, &[u8]) -> Option<Act> + Send + 'static,
) -> (Result<VfioUser>, Log) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = rustix::fs::memfd_create("test-bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(file);
    file.set_len(bar.file_bytes).unwrap();
    let seen = Arc::new(Mutex::default());
    let offset = bar.file_offset;
    let patience = bar.patience;
    let server = Server {
        stream: theirs,
        file: file.try_clone().unwrap(),
        registers: BTreeMap::from([
            (offset::CAP, CAP as u32),
            (offset::CAP + 4, (CAP >> 32) as u32),
            (offset::VS, 0x0002_0000),
        ]),
        seen: Arc::clone(&seen),
        choice: Box::new(choice),
        bar,
    };
    let thread = std::thread::spawn(move || server.run());
    let device = VfioUser::start("test", ServerConnection::new(ours.into(), patience));
    let log = Log {
        seen,
        thread,
        file,
        offset,
    };
    (device, log)
}

struct Server {
    stream: UnixStream,
    file: File,
    registers: BTreeMap<u32, u32>,
    seen: Seen,
    choice: Choice,
    bar: Bar,
}

impl Server {
    fn run(mut self) {
        let mut header = [0; size_of::<MessageHeader>()];
        while self.stream.read_exact(&mut header).is_ok() {
            let header = MessageHeader::read_from_bytes(&header).unwrap();
            let mut payload = vec![0; header.size as usize - size_of::<MessageHeader>()];
            self.stream.read_exact(&mut payload).unwrap();
            let data = match header.command {
                command::REGION_WRITE => payload[16..].to_vec(),
                _ => payload.clone(),
            };
            self.seen.lock().unwrap().push((header.command, data));
            if header.flags & REPLY != 0 {
                // Our own request was declined.
                assert_eq!(header.flags, REPLY | ERROR);
                continue;
            }
            let act = (self.choice)(&header, &payload);
            // A client that has had enough closes its end: then this fails.
            match self.answer(header, &payload, act) {
                Ok(true) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Answers a message; returns whether the server continues.
    fn answer(
        &mut self,
        asked: MessageHeader,
        payload: &[u8],
        act: Option<Act>,
    ) -> std::io::Result<bool> {
        let (polite, with_file) = self.polite(&asked, payload);
        let reply = |payload: &[u8]| {
            let header = MessageHeader {
                size: (size_of::<MessageHeader>() + payload.len()) as u32,
                flags: REPLY,
                ..asked
            };
            [header.as_bytes(), payload].concat()
        };
        let whole = reply(&polite);
        match act {
            None => self.send(&whole, usize::from(with_file))?,
            Some(Act::Say(payload)) => self.send(&reply(&payload), 0)?,
            Some(Act::WithFiles(files)) => self.send(&whole, files)?,
            Some(Act::Refuse(error)) => {
                let header = MessageHeader {
                    size: size_of::<MessageHeader>() as u32,
                    flags: REPLY | ERROR,
                    error: error as u32,
                    ..asked
                };
                self.send(header.as_bytes(), 0)?;
            }
            Some(Act::First(bytes)) => {
                self.stream
                    .write_all(&whole[..bytes.min(whole.len() - 1)])?;
                return Ok(false);
            }
            Some(Act::FirstThenSilence(bytes)) => {
                self.stream
                    .write_all(&whole[..bytes.min(whole.len() - 1)])?;
                // Until the client closes its end.
                let _ = self.stream.read(&mut [0])?;
                return Ok(false);
            }
            Some(Act::Dribble(pause)) => {
                for byte in &whole {
                    self.stream.write_all(&[*byte])?;
                    std::thread::sleep(pause);
                }
            }
            Some(Act::Changed(change)) => {
                let mut header = MessageHeader::read_from_prefix(&whole).unwrap().0;
                change(&mut header);
                self.send(&[header.as_bytes(), &polite].concat(), 0)?;
            }
            Some(Act::Flip(bit)) => {
                let mut whole = whole;
                let at = bit / 8 % whole.len();
                whole[at] ^= 1 << (bit % 8);
                self.send(&whole, usize::from(with_file))?;
            }
            Some(Act::AskBefore(flags)) => {
                let ask = MessageHeader {
                    id: 0xABCD,
                    command: command::DMA_READ,
                    size: 32,
                    flags,
                    error: 0,
                };
                self.send(&[ask.as_bytes(), &[0; 16]].concat(), 0)?;
                self.send(&whole, 0)?;
            }
        }
        Ok(true)
    }

    fn send(&self, bytes: &[u8], files: usize) -> std::io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = (0..files).map(|_| self.file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        }
        let slices = [IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    /// Returns the payload of a correct reply, and whether a descriptor belongs to it.
    fn polite(&mut self, header: &MessageHeader, payload: &[u8]) -> (Vec<u8>, bool) {
        let word = |at: usize| u32::from_ne_bytes(payload[at..at + 4].try_into().unwrap());
        let reply = match header.command {
            command::VERSION => {
                [&payload[..4], b"{\"capabilities\":{\"max_msg_fds\":8}}\0"].concat()
            }
            command::DEVICE_GET_INFO => {
                let resets = if self.bar.resets { DEVICE_RESETS } else { 0 };
                let info = DeviceInfo {
                    argsz: 16,
                    flags: DEVICE_PCI | resets,
                    num_regions: 9,
                    num_irqs: 5,
                };
                info.as_bytes().to_vec()
            }
            command::DEVICE_GET_REGION_INFO => return self.describe(word(0)),
            command::REGION_READ => {
                let data = match (word(8), word(0)) {
                    (7, 8) => CLASS,
                    (0, register) => self
                        .registers
                        .get(&register)
                        .copied()
                        .unwrap_or(0)
                        .to_le_bytes(),
                    _ => [0; 4],
                };
                [&payload[..16], &data[..word(12) as usize]].concat()
            }
            command::REGION_WRITE => {
                if word(8) == 0 {
                    self.registers.insert(word(0), word(16));
                }
                payload[..16].to_vec()
            }
            _ => Vec::new(),
        };
        (reply, false)
    }

    fn describe(&self, room: u32) -> (Vec<u8>, bool) {
        let capability = InfoCapability {
            id: CAP_SPARSE_MMAP,
            version: 1,
            next: 0,
        };
        let count = SparseMmap {
            areas: self.bar.areas.len() as u32,
            reserved: 0,
        };
        let mut rest = [capability.as_bytes(), count.as_bytes()].concat();
        for (offset, size) in self.bar.areas.iter().copied() {
            rest.extend_from_slice(SparseArea { offset, size }.as_bytes());
        }
        let needed = size_of::<RegionInfo>() + rest.len();
        let fits = self.bar.at_once || room as usize >= needed;
        let caps = if fits || !self.bar.coy {
            REGION_CAPS
        } else {
            0
        };
        let info = RegionInfo {
            argsz: needed as u32,
            flags: REGION_READABLE | REGION_WRITABLE | REGION_MMAP | caps,
            index: 0,
            cap_offset: if fits { 32 } else { 0 },
            size: BAR_BYTES,
            offset: self.bar.file_offset,
        };
        let mut bytes = info.as_bytes().to_vec();
        if fits {
            bytes.extend_from_slice(&rest);
        }
        (bytes, fits && self.bar.file)
    }
}
