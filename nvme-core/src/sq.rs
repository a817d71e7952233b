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
    /// Entries before the tail that the controller has not reported as fetched.
    used: u32,
    /// Of them, the last ones that were not published yet.
    unrung: u32,
}

impl<'a> SubmissionQueue<'a> {
    /// An empty queue over `ring`.
    pub fn new(ring: SqRing<'a>, doorbell: Doorbell<'a>) -> Self {
        Self {
            ring,
            doorbell,
            tail: 0,
            used: 0,
            unrung: 0,
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

    /// Entries that can be pushed now.
    #[inline]
    pub fn free(&self) -> u32 {
        self.entries() - 1 - self.used
    }

    /// Places an entry at the tail; the controller sees it after [`ring`](Self::ring). `false` when full.
    #[inline]
    pub fn push(&mut self, sqe: Sqe) -> bool {
        if self.free() == 0 {
            return false;
        }
        self.ring.write(self.tail, sqe);
        self.tail += 1;
        if self.tail == self.entries() {
            self.tail = 0;
        }
        self.used += 1;
        self.unrung += 1;
        true
    }

    /// Publishes everything pushed since the last ring with one doorbell store; none if nothing was.
    #[inline]
    pub fn ring(&mut self) {
        if self.unrung != 0 {
            self.unrung = 0;
            self.doorbell.ring(self.tail);
        }
    }

    /// Entries that the controller has yet to fetch when it reports `sqhd`, or `None` when `sqhd` is
    /// impossible: outside the ring, behind the last one, past what was published, or behind more
    /// than `most` entries.
    #[inline]
    pub fn unfetched(&self, sqhd: u16, most: u32) -> Option<u32> {
        let sqhd = u32::from(sqhd);
        if sqhd >= self.entries() {
            return None;
        }
        let behind = if self.tail >= sqhd {
            self.tail - sqhd
        } else {
            self.tail + self.entries() - sqhd
        };
        let possible = (self.unrung..=self.used.min(most)).contains(&behind);
        possible.then_some(behind)
    }

    /// Frees all entries but the `unfetched` ones that [`unfetched`](Self::unfetched) has found.
    #[inline]
    pub fn retain(&mut self, unfetched: u32) {
        self.used = unfetched;
    }

    /// Empty again, as after Create I/O Submission Queue.
    pub fn restart(&mut self) {
        (self.tail, self.used, self.unrung) = (0, 0, 0);
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
                assert_eq!(sq.unfetched(tail as u16, u32::MAX), Some(0));
                sq.retain(0);
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
        assert_eq!(sq.unfetched(1, 9), None, "nothing was rung yet");
        sq.ring();
        assert_eq!(
            [0, 1, 2].map(|head| sq.unfetched(head, 9)),
            [Some(2), Some(1), Some(0)]
        );
        assert_eq!(
            [3, 4, u16::MAX].map(|head| sq.unfetched(head, 9)),
            [None; 3]
        );
        assert_eq!(sq.unfetched(0, 1), None, "more than are in flight");
        sq.retain(0);
        assert_eq!(sq.unfetched(1, 9), None, "the head does not go back");
    }

    #[test]
    fn entries_behind_a_tail_that_has_wrapped_count_round_the_ring() {
        let cells: [SqCell; 5] = Default::default();
        let bell = AtomicU32::new(0);
        let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), Doorbell::new(&bell));
        for _ in 0..4 {
            sq.push(Sqe::new(0, Nsid(1)));
        }
        sq.ring();
        sq.retain(sq.unfetched(3, 9).unwrap());
        for _ in 0..3 {
            assert!(sq.push(Sqe::new(0, Nsid(1))));
        }
        assert_eq!(sq.free(), 0);
        sq.ring();
        assert_eq!(
            bell.load(Order::Relaxed, Scope::Sys),
            2,
            "the tail has wrapped"
        );
        assert_eq!(
            [3, 4, 0, 1, 2].map(|head| sq.unfetched(head, 9)),
            [4, 3, 2, 1, 0].map(Some)
        );
        sq.restart();
        assert_eq!(sq.free(), 4);
        assert!(sq.push(Sqe::new(7, Nsid(1))));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 1);
        assert_eq!(cells[0].load().opcode(), 7);
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
        sq.retain(sq.unfetched(65_535, u32::MAX).unwrap());
        assert!(sq.push(Sqe::new(0, Nsid(1))));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 0);
    }
}
