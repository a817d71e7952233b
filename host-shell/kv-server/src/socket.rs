//! Sockets of one user's processes: messages of limited length that arrive whole, each wait with a deadline.

use crate::message::MOST_MESSAGE;
use nvme_kv::KvError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, sockopt,
};
use rustix::process::PidfdFlags;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Reason why a message was not sent or received.
#[derive(Debug)]
pub(crate) enum SocketFault {
    /// The other process has ended, or closed its side.
    Closed,
    /// The deadline passed.
    TimedOut,
    /// What arrived is no message of this protocol.
    Garbage(&'static str),
    /// The system refused.
    Failed(Errno),
}

impl std::fmt::Display for SocketFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("it has ended"),
            Self::TimedOut => f.write_str("it did not answer in time"),
            Self::Garbage(rule) => write!(f, "it sent {rule}"),
            Self::Failed(errno) => write!(f, "{errno}"),
        }
    }
}

/// A message, and the descriptor that came with it.
pub(crate) struct ReceivedPacket {
    pub bytes: Vec<u8>,
    pub file: Option<OwnedFd>,
}

/// A connected socket whose other side is a process of the same user.
pub(crate) struct MessageSocket {
    socket: OwnedFd,
    /// The other process. A child of a fork may keep a socket open whose process has ended.
    peer: Option<OwnedFd>,
}

impl MessageSocket {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`SocketFault::Closed`] if no process listens there.
    pub fn connect(path: &Path, deadline: Instant) -> Result<Self, SocketFault> {
        let socket = new_socket().map_err(SocketFault::Failed)?;
        let address = SocketAddrUnix::new(path).map_err(SocketFault::Failed)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Self::of(socket),
                Err(Errno::NOENT | Errno::CONNREFUSED) => return Err(SocketFault::Closed),
                // The backlog is full: nothing tells when it is not.
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(Errno::AGAIN) => return Err(SocketFault::TimedOut),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(SocketFault::Failed(errno)),
            }
        }
    }

    /// Takes a connected socket.
    ///
    /// # Errors
    /// [`SocketFault::Garbage`] if the other process is another user's; [`SocketFault::Closed`] if it has ended: a child of
    /// it may keep the socket on which it listened.
    pub fn of(socket: OwnedFd) -> Result<Self, SocketFault> {
        let peer = sockopt::socket_peercred(&socket).map_err(SocketFault::Failed)?;
        if peer.uid != rustix::process::geteuid() {
            return Err(SocketFault::Garbage("a connection of another user"));
        }
        let peer = match rustix::process::pidfd_open(peer.pid, PidfdFlags::empty()) {
            Ok(peer) => Some(peer),
            Err(Errno::SRCH) => return Err(SocketFault::Closed),
            // Without it, the end of a process whose children keep the socket shows by a deadline.
            Err(_) => None,
        };
        Ok(Self { socket, peer })
    }

    /// Sends a message, with at most one descriptor.
    pub fn send(
        &self,
        bytes: &[u8],
        file: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), SocketFault> {
        let files: Vec<_> = file.into_iter().collect();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&files));
            }
            let parts = [IoSlice::new(bytes)];
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) if sent == bytes.len() => return Ok(()),
                Ok(_) => return Err(SocketFault::Garbage("a message in parts")),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Err(SocketFault::Closed);
                }
                Err(errno) => return Err(SocketFault::Failed(errno)),
            }
        }
    }

    /// Receives a message.
    pub fn receive(&self, deadline: Instant) -> Result<ReceivedPacket, SocketFault> {
        loop {
            let mut bytes = vec![0; MOST_MESSAGE];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            // Taken out before anything is judged, so that each descriptor is closed.
            let mut files: Vec<OwnedFd> = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    files.extend(rights);
                }
            }
            match received {
                Ok(got) if got.flags.contains(ReturnFlags::TRUNC) => {
                    return Err(SocketFault::Garbage("a message that is too long"));
                }
                Ok(got) if got.flags.contains(ReturnFlags::CTRUNC) || files.len() > 1 => {
                    return Err(SocketFault::Garbage("more than one descriptor"));
                }
                // No message of this protocol is empty.
                Ok(got) if got.bytes == 0 => return Err(SocketFault::Closed),
                Ok(got) => {
                    bytes.truncate(got.bytes);
                    let file = files.pop();
                    return Ok(ReceivedPacket { bytes, file });
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(SocketFault::Closed),
                Err(errno) => return Err(SocketFault::Failed(errno)),
            }
        }
    }

    /// Waits until the socket is ready.
    fn wait(&self, ready: PollFlags, deadline: Instant) -> Result<(), SocketFault> {
        let mut waited = vec![PollFd::new(&self.socket, ready)];
        waited.extend(
            self.peer
                .iter()
                .map(|peer| PollFd::new(peer, PollFlags::IN)),
        );
        match wait_for(&mut waited, deadline) {
            Ok(0) => Err(SocketFault::TimedOut),
            // What the other process sent before its end is read first.
            Ok(_) if !waited[0].revents().is_empty() => Ok(()),
            Ok(_) => Err(SocketFault::Closed),
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(SocketFault::Failed(errno)),
        }
    }
}

/// Waits until one of `waited` is ready, or the deadline has passed.
fn wait_for(waited: &mut [PollFd<'_>], deadline: Instant) -> Result<usize, Errno> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec {
        tv_sec: left.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    poll(waited, Some(&left))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A socket that waits for connections. Its file is removed when this is dropped.
pub(crate) struct ListeningSocket {
    socket: OwnedFd,
    path: std::path::PathBuf,
    /// Device and number of the file.
    file: Option<(u64, u64)>,
}

impl ListeningSocket {
    /// Listens at `path`, in place of a process that has ended. The caller holds the area's lock.
    ///
    /// # Errors
    /// [`KvError::Usage`] for a path that the system does not take.
    pub fn bind(path: &Path) -> nvme_kv::Result<Self> {
        let made = || {
            let _ = std::fs::remove_file(path);
            let socket = new_socket()?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(socket)
        };
        let socket = made().map_err(|errno: Errno| KvError::Usage {
            cause: format!("the socket {} cannot be made: {errno}", path.display()),
            remedy: "name another directory, with a shorter path, for the sockets".to_owned(),
        })?;
        Ok(Self {
            socket,
            path: path.to_owned(),
            file: file_at(path),
        })
    }

    /// Returns the next connection of the same user; `None` if none came before the deadline.
    pub fn accept(&self, deadline: Instant) -> Option<MessageSocket> {
        let mut waited = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        wait_for(&mut waited, deadline)
            .ok()
            .filter(|ready| *ready > 0)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => MessageSocket::of(socket).ok(),
            // As without descriptors: the listener stays ready, and must not spin.
            Err(_) => {
                std::thread::sleep(Duration::from_millis(10));
                None
            }
        }
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        // The next owner may listen there: a cleaner of old files has removed the lock then.
        if file_at(&self.path) == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}
