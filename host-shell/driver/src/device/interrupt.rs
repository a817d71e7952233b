//! Waiting for completions by interrupt instead of by polling.
//!
//! Polling alone decides that a command has ended: an interrupt only ends a nap early, so one that is lost or shared
//! costs time and nothing else.

use nvme_core::spec::Qid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Limit of a nap: an interrupt can be lost, and a device that has gone sends none, so the completion queue and
/// CSTS are read again at least this often.
const NAP: Duration = Duration::from_millis(5);

/// The interrupt vectors of a controller, as event descriptors; if there are none, completions are polled.
#[derive(Debug, Default)]
pub(crate) struct VectorEvents(Vec<OwnedFd>);

impl VectorEvents {
    pub fn new(events: Vec<OwnedFd>) -> Self {
        Self(events)
    }

    /// Returns the vector of an I/O queue. Vector 0 belongs to the admin queue, and to all queues if it is the only
    /// one.
    pub fn vector(&self, qid: Qid) -> Option<u16> {
        match self.0.len() as u16 {
            0 => None,
            1 => Some(0),
            count => Some(1 + qid.0.wrapping_sub(1) % (count - 1)),
        }
    }

    /// Sleeps until the vector's interrupt came, for `most` and 5 ms at most.
    pub fn nap(&self, vector: u16, most: Duration) {
        let Some(event) = self.0.get(usize::from(vector)) else {
            return;
        };
        let mut fds = [PollFd::new(event, PollFlags::IN)];
        // A signal may end it early; the waiter looks again.
        let nap = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(most.min(NAP).subsec_nanos()),
        };
        if poll(&mut fds, Some(&nap)).is_ok_and(|ready| ready > 0) {
            // Another thread that shares the vector may have read the event: then there is nothing to read.
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::time::Instant;

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn queues_share_the_vectors_that_there_are() {
        let vectors = |count: usize| {
            let all = VectorEvents::new((0..count).map(|_| event()).collect());
            [1, 2, 3, 4, 65_535].map(|qid| all.vector(Qid(qid)))
        };
        assert_eq!(vectors(0), [None; 5]);
        assert_eq!(vectors(1), [Some(0); 5]);
        assert_eq!(vectors(3), [Some(1), Some(2), Some(1), Some(2), Some(1)]);
    }

    #[test]
    fn an_interrupt_is_taken_once_and_ends_a_nap() {
        let all = VectorEvents::new(vec![event()]);
        rustix::io::write(&all.0[0], &2u64.to_ne_bytes()).unwrap();
        all.nap(0, NAP);
        assert!(rustix::io::read(&all.0[0], &mut [0; 8]).is_err(), "taken");
        // Without an interrupt a nap ends, too; a vector that does not exist takes no time.
        let begin = Instant::now();
        all.nap(0, Duration::from_secs(60));
        assert!(begin.elapsed() >= Duration::from_millis(4));
        all.nap(7, NAP);
        // A deadline that has passed is no reason to sleep.
        let begin = Instant::now();
        (0..10).for_each(|_| all.nap(0, Duration::ZERO));
        assert!(begin.elapsed() < 10 * NAP);
    }
}
