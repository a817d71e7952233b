//! The submission queue: tail, head, `push`, `ring`.
//!
//! Invariant: at most `entries - 1` entries are occupied, so tail never catches up with head; the
//! head moves only by SQHD from a completion.
//!
//! NVMe Base 2.0c, 3.3.1.2 (Queue Size) and "Full Queue".

use crate::mem::{Doorbell, SqRing};
use crate::spec::{Iova, Sqe};

/// The driver's side of a submission queue.
#[derive(Debug)]
pub struct SubmissionQueue<'a> {
    ring: SqRing<'a>,
    doorbell: Doorbell<'a>,
    tail: u32,
    rung: u32,
    head: u32,
}

impl<'a> SubmissionQueue<'a> {
    /// An empty queue over `ring`.
    pub fn new(ring: SqRing<'a>, doorbell: Doorbell<'a>) -> Self {
        Self {
            ring,
            doorbell,
            tail: 0,
            rung: 0,
            head: 0,
        }
    }

    /// Entries of the ring; one always stays empty.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Where the controller finds the ring.
    pub fn iova(&self) -> Iova {
        self.ring.iova()
    }

    #[inline]
    fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from {
            to - from
        } else {
            to + self.entries() - from
        }
    }

    /// Entries that can be pushed now.
    #[inline]
    pub fn free(&self) -> u32 {
        self.entries() - 1 - self.distance(self.head, self.tail)
    }

    /// Places an entry at the tail; the controller sees it after [`ring`](Self::ring). `false` when full.
    #[inline]
    pub fn push(&mut self, sqe: Sqe) -> bool {
        if self.free() == 0 {
            return false;
        }
        self.ring.write(self.tail, sqe);
        self.tail = if self.tail + 1 == self.entries() {
            0
        } else {
            self.tail + 1
        };
        true
    }

    /// Publishes everything pushed since the last ring with one doorbell store; none if nothing was.
    #[inline]
    pub fn ring(&mut self) {
        if self.rung != self.tail {
            self.rung = self.tail;
            self.doorbell.ring(self.tail);
        }
    }

    /// Whether `sqhd` lies among the published entries the controller has not reported yet.
    #[inline]
    pub fn accepts_head(&self, sqhd: u16) -> bool {
        let sqhd = u32::from(sqhd);
        sqhd < self.entries()
            && self.distance(self.head, sqhd) <= self.distance(self.head, self.rung)
    }

    /// Entries from `sqhd` on, published or not: their commands have not been fetched.
    #[inline]
    pub fn after_head(&self, sqhd: u16) -> u32 {
        self.distance(u32::from(sqhd), self.tail)
    }

    /// Frees the entries before `sqhd`, which [`accepts_head`](Self::accepts_head) has approved.
    #[inline]
    pub fn set_head(&mut self, sqhd: u16) {
        self.head = u32::from(sqhd);
    }

    /// Empty again, as after Create I/O Submission Queue.
    pub fn restart(&mut self) {
        (self.tail, self.rung, self.head) = (0, 0, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mem::SqCell;
    use crate::spec::Nsid;
    use crate::sync::{AtomicU32, Order, Scope};

    #[test]
    fn full_ring_keeps_one_slot_empty() {
        for entries in [2usize, 3, 5, 64] {
            let cells: Vec<SqCell> = (0..entries).map(|_| SqCell::default()).collect();
            let bell = AtomicU32::new(0);
            let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), Doorbell::new(&bell));
            for lap in 0..3 * entries as u32 {
                let before = sq.tail;
                for _ in 0..entries - 1 {
                    assert!(sq.push(Sqe::new(0, Nsid(lap))));
                }
                assert!(!sq.push(Sqe::new(0, Nsid(lap))));
                sq.ring();
                let tail = bell.load(Order::Relaxed, Scope::Sys);
                assert_eq!(tail, (before + entries as u32 - 1) % entries as u32);
                assert!(sq.accepts_head(tail as u16));
                sq.set_head(tail as u16);
                assert_eq!(sq.free(), entries as u32 - 1);
            }
        }
    }

    #[test]
    fn head_outside_what_was_published_is_refused() {
        let cells: [SqCell; 4] = Default::default();
        let bell = AtomicU32::new(0);
        let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), Doorbell::new(&bell));
        sq.push(Sqe::new(0, Nsid(1)));
        sq.push(Sqe::new(0, Nsid(1)));
        assert!(!sq.accepts_head(1), "nothing was rung yet");
        sq.ring();
        assert!(sq.accepts_head(0) && sq.accepts_head(1) && sq.accepts_head(2));
        assert!(!sq.accepts_head(3) && !sq.accepts_head(4) && !sq.accepts_head(u16::MAX));
        sq.set_head(2);
        assert!(!sq.accepts_head(1), "the head does not go back");
    }

    #[test]
    fn ring_stores_only_when_something_is_new() {
        let cells: [SqCell; 4] = Default::default();
        let bell = AtomicU32::new(77);
        let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), Doorbell::new(&bell));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 77);
        sq.push(Sqe::new(0, Nsid(1)));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 1);
    }

    #[test]
    fn the_largest_ring_wraps() {
        let cells: Vec<SqCell> = (0..65_536).map(|_| SqCell::default()).collect();
        let bell = AtomicU32::new(0);
        let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), Doorbell::new(&bell));
        for _ in 0..65_535 {
            assert!(sq.push(Sqe::new(0, Nsid(1))));
        }
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 65_535);
        sq.set_head(65_535);
        assert!(sq.push(Sqe::new(0, Nsid(1))));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 0);
    }
}
