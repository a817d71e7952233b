//! Messages over a socket: each is received whole and sent whole, with its file descriptors.
//!
//! Descriptors are owned from the moment they arrive, so they are closed whatever is wrong with
//! their message. A message that has begun must end in time.

use super::wire::{self, MessageHeader};
use crate::event::{EventFd, readable, ready};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;
use zerocopy::{FromBytes, IntoBytes};

/// Limit of the time for the remaining bytes of a message, in either direction.
const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// Interval at which a wait inside a message checks the clock.
const TICK: Duration = Duration::from_millis(250);

/// Reason for the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// The client has closed its side, between two messages or inside one.
    Closed,
    /// The server is being stopped.
    Stopped,
    /// The bytes received are not the protocol, so the start of the next message is unknown.
    ProtocolError(&'static str),
    /// The socket failed with this error.
    Failed(Errno),
}

/// A message as it was received.
pub(crate) struct ReceivedMessage {
    pub header: MessageHeader,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A connection to a client. Any thread may send; one thread receives.
pub(crate) struct MessageChannel {
    socket: UnixStream,
    sending: Mutex<()>,
}

impl MessageChannel {
    pub fn new(socket: UnixStream) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            sending: Mutex::new(()),
        })
    }

    /// Receives the next message. Waits for its beginning without limit, or until `stop`.
    pub fn receive(&self, stop: &EventFd) -> Result<ReceivedMessage, ConnectionEnd> {
        if !readable(self.socket.as_fd(), stop) {
            return Err(ConnectionEnd::Stopped);
        }
        let mut header = MessageHeader {
            id: 0,
            command: 0,
            size: 0,
            flags: 0,
            error: 0,
        };
        let mut fds = Vec::new();
        self.fill(header.as_mut_bytes(), &mut fds, stop)?;
        let size = header.size as usize;
        if !(size_of::<MessageHeader>()..=wire::MAX_MESSAGE).contains(&size) {
            return Err(ConnectionEnd::ProtocolError("a message of impossible size"));
        }
        let mut body = std::vec![0; size - size_of::<MessageHeader>()];
        self.fill(&mut body, &mut fds, stop)?;
        Ok(ReceivedMessage { header, body, fds })
    }

    fn fill(
        &self,
        into: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        stop: &EventFd,
    ) -> Result<(), ConnectionEnd> {
        let started = Instant::now();
        let mut done = 0;
        while done < into.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut into[done..])];
            match recvmsg(
                &self.socket,
                &mut parts,
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(got) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            fds.extend(rights);
                        }
                    }
                    if got.bytes == 0 {
                        return Err(ConnectionEnd::Closed);
                    }
                    if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > wire::MAX_FDS {
                        return Err(ConnectionEnd::ProtocolError(
                            "more descriptors than a message may have",
                        ));
                    }
                    done += got.bytes;
                }
                Err(Errno::AGAIN) => {
                    if stop.is_signalled() {
                        return Err(ConnectionEnd::Stopped);
                    }
                    if started.elapsed() > MESSAGE_TIME {
                        return Err(ConnectionEnd::ProtocolError("a message that does not end"));
                    }
                    ready(self.socket.as_fd(), PollFlags::IN, TICK);
                }
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::PIPE) => return Err(ConnectionEnd::Closed),
                Err(error) => return Err(ConnectionEnd::Failed(error)),
            }
        }
        Ok(())
    }

    /// Sends a message whole. Fails if the client does not read in time.
    pub fn send(
        &self,
        header: MessageHeader,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ConnectionEnd> {
        let mut whole = Vec::with_capacity(size_of::<MessageHeader>() + body.len());
        whole.extend_from_slice(header.as_bytes());
        whole.extend_from_slice(body);
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        let mut done = 0;
        while done < whole.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let parts = [IoSlice::new(&whole[done..])];
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(bytes) => done += bytes,
                Err(Errno::AGAIN) if started.elapsed() > MESSAGE_TIME => {
                    return Err(ConnectionEnd::ProtocolError(
                        "a client that takes no replies",
                    ));
                }
                Err(Errno::AGAIN) => {
                    ready(self.socket.as_fd(), PollFlags::OUT, TICK);
                }
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::PIPE) => return Err(ConnectionEnd::Closed),
                Err(error) => return Err(ConnectionEnd::Failed(error)),
            }
        }
        Ok(())
    }
}

/// Reads the start of `body` as a structure of the protocol.
pub(crate) fn parse_front<T: FromBytes>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body)
        .map(|(value, _)| value)
        .map_err(|_| Errno::INVAL)
}
