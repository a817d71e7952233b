//! Waiting for file descriptors with poll, and eventfds that end such a wait.

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// An eventfd of this process.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    pub fn signal(&self) {
        // A full counter is signalled already, so a failed write loses nothing.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub fn is_signalled(&self) -> bool {
        ready(self.fd(), PollFlags::IN, Duration::ZERO)
    }

    /// Waits until it is signalled, at most `most`. Returns whether it is.
    pub fn wait(&self, most: Duration) -> bool {
        ready(self.fd(), PollFlags::IN, most)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits for `what` on `fd`, at most `most`. An interrupted wait counts as not ready.
pub(crate) fn ready(fd: BorrowedFd<'_>, what: PollFlags, most: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, what)];
    poll_for(&mut fds, Some(most)) && !fds[0].revents().is_empty()
}

pub(crate) fn poll_for(fds: &mut [PollFd<'_>], most: Option<Duration>) -> bool {
    let most = most.and_then(|most| most.try_into().ok());
    poll(fds, most.as_ref()).is_ok_and(|count| count != 0)
}

/// Waits without limit until `fd` can be read. False if `stop` was signalled first.
pub(crate) fn readable(fd: BorrowedFd<'_>, stop: &EventFd) -> bool {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stop.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(fd, PollFlags::IN),
        ];
        if !poll_for(&mut fds, None) {
            continue;
        }
        if !fds[0].revents().is_empty() {
            return false;
        }
        if !fds[1].revents().is_empty() {
            return true;
        }
    }
}
