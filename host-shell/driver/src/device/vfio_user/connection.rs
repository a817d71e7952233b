//! The socket to a vfio-user server: one request and its reply at a time.
//!
//! Invariant: every wait ends at the request's deadline. A connection that broke in the middle of a
//! message is of no further use: the caller that gets [`RequestFault::Broken`] drops it.

use nvme_vfio_user::{COMMAND, ERROR, MessageHeader, NO_REPLY, REPLY, TYPE_MASK};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Limit of the descriptors of one message, as announced in the negotiation.
pub(super) const MAX_FDS: usize = 8;
/// The longest reply that any of our requests can have.
pub(super) const LONGEST: usize = 64 << 10;

/// Cause of a request's failure.
#[derive(Debug)]
pub(super) enum RequestFault {
    /// The server answered with this error number, whatever it may mean; the connection stays usable.
    Refused(i32),
    /// The connection is at its end.
    Broken(String),
}

/// Answer of a server.
#[derive(Debug)]
pub(super) struct ServerReply {
    /// The bytes that follow the header.
    pub payload: Vec<u8>,
    /// The descriptors that were received with the message.
    pub files: Vec<OwnedFd>,
}

/// A connected socket.
pub(super) struct ServerConnection {
    socket: OwnedFd,
    patience: Duration,
    next_id: u16,
}

impl ServerConnection {
    /// Connects to the socket at `path`. Nothing here and later takes longer than `patience`.
    pub fn open(path: &Path, patience: Duration) -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // A server that does not accept lets connect wait once its backlog is full.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self::new(socket, patience))
    }

    /// Creates the client's side of `socket`.
    pub fn new(socket: OwnedFd, patience: Duration) -> Self {
        Self {
            socket,
            patience,
            next_id: 0,
        }
    }

    /// Sends `command` with `payload` and at most one descriptor, and waits for its reply.
    pub fn request(
        &mut self,
        command: u16,
        payload: &[u8],
        file: Option<BorrowedFd<'_>>,
    ) -> Result<ServerReply, RequestFault> {
        let deadline = Instant::now() + self.patience;
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = MessageHeader {
            id,
            command,
            size: (size_of::<MessageHeader>() + payload.len()) as u32,
            flags: COMMAND,
            error: 0,
        };
        let message = [header.as_bytes(), payload].concat();
        self.send(&message, file, deadline)?;
        loop {
            let (header, reply) = self.receive(deadline)?;
            if header.flags & TYPE_MASK == COMMAND {
                self.decline(header, deadline)?;
                continue;
            }
            if header.flags & TYPE_MASK != REPLY || header.id != id || header.command != command {
                return Err(RequestFault::Broken(format!(
                    "message {}, command {}, flags {:#x} is no reply to message {id}, command {command}",
                    header.id, header.command, header.flags
                )));
            }
            if header.flags & ERROR != 0 {
                return Err(RequestFault::Refused(header.error as i32));
            }
            return Ok(reply);
        }
    }

    /// Answers a request of the server with an error: memory is shared by descriptor, so that the server need not ask
    /// for it.
    fn decline(&mut self, asked: MessageHeader, deadline: Instant) -> Result<(), RequestFault> {
        if asked.flags & NO_REPLY != 0 {
            return Ok(());
        }
        let header = MessageHeader {
            size: size_of::<MessageHeader>() as u32,
            flags: REPLY | ERROR,
            error: libc::ENOTSUP as u32,
            ..asked
        };
        self.send(header.as_bytes(), None, deadline)
    }

    fn send(
        &mut self,
        mut bytes: &[u8],
        file: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), RequestFault> {
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let mut with_files = !files.is_empty();
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if with_files {
                control.push(SendAncillaryMessage::ScmRights(&files));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(sent) => {
                    bytes = &bytes[sent.min(bytes.len())..];
                    with_files = false;
                }
                Err(errno) => self.wait(errno, PollFlags::OUT, deadline)?,
            }
        }
        Ok(())
    }

    /// Returns the next message, whole, with its header apart.
    fn receive(&mut self, deadline: Instant) -> Result<(MessageHeader, ServerReply), RequestFault> {
        let mut files = Vec::new();
        let mut header = [0; size_of::<MessageHeader>()];
        self.fill(&mut header, &mut files, deadline)?;
        let header = MessageHeader::read_from_bytes(&header).map_err(|_| broken("short header"))?;
        let rest = (header.size as usize)
            .checked_sub(size_of::<MessageHeader>())
            .filter(|rest| *rest <= LONGEST)
            .ok_or_else(|| broken(format!("a message of {} bytes", header.size)))?;
        let mut payload = vec![0; rest];
        self.fill(&mut payload, &mut files, deadline)?;
        Ok((header, ServerReply { payload, files }))
    }

    fn fill(
        &mut self,
        mut into: &mut [u8],
        files: &mut Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), RequestFault> {
        while !into.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let mut slices = [IoSliceMut::new(into)];
            let received = match recvmsg(&self.socket, &mut slices, &mut control, flags) {
                Ok(received) => received,
                Err(errno) => {
                    self.wait(errno, PollFlags::IN, deadline)?;
                    continue;
                }
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    files.extend(rights);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || files.len() > MAX_FDS {
                return Err(broken(format!("more than {MAX_FDS} descriptors")));
            }
            if received.bytes == 0 {
                return Err(broken("the server closed the connection"));
            }
            into = into.split_at_mut(received.bytes.min(into.len())).1;
        }
        Ok(())
    }

    /// Waits until the call that failed with `errno` can be repeated.
    fn wait(&self, errno: Errno, events: PollFlags, deadline: Instant) -> Result<(), RequestFault> {
        match errno {
            Errno::INTR => return Ok(()),
            Errno::AGAIN => {}
            Errno::PIPE | Errno::CONNRESET => {
                return Err(broken("the server closed the connection"));
            }
            errno => return Err(broken(format!("the socket failed: {errno}"))),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let patience = self.patience.as_millis();
            return Err(broken(format!(
                "the server did not answer in {patience} ms"
            )));
        }
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.socket, events)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(broken(format!("poll failed: {errno}"))),
        }
    }
}

fn broken(cause: impl Into<String>) -> RequestFault {
    RequestFault::Broken(cause.into())
}
