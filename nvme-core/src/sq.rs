//! The submission queue: `push`, `ring`, and the checks of a completion against it.
//!
//! Invariant: fewer commands than the ring has entries are pushed and not ended, so the tail never catches up
//! with the controller's head. SQHD is not needed for that: among as many entries behind the tail as the ring
//! has, at least one belongs to a command that has ended; the controller fetches in order, so it has fetched
//! that entry and all before it.
//!
//! NVMe Base 2.0c, "Queue Size", "Full Queue" and "Command fetching": commands are fetched in order.

use crate::mem::{DoorbellRegister, SqRing};
use crate::spec::{Iova, Sqe};

/// The driver's side of a submission queue.
#[derive(Debug)]
pub struct SubmissionQueue<'a> {
    ring: SqRing<'a>,
    doorbell: DoorbellRegister<'a>,
    tail: u32,
    /// Entries pushed since the start; of those, the ones that the doorbell has published.
    pushed: u64,
    rung: u64,
    in_flight: u32,
}

impl<'a> SubmissionQueue<'a> {
    /// Makes an empty queue over `ring`.
    pub fn new(ring: SqRing<'a>, doorbell: DoorbellRegister<'a>) -> Self {
        Self {
            ring,
            doorbell,
            tail: 0,
            pushed: 0,
            rung: 0,
            in_flight: 0,
        }
    }

    /// Returns the number of entries of the ring; one always stays empty.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Returns the I/O address of the ring.
    pub fn iova(&self) -> Iova {
        self.ring.iova()
    }

    /// Returns the number of entries that can be pushed now.
    #[inline]
    pub fn free(&self) -> u32 {
        self.entries() - 1 - self.in_flight
    }

    /// Returns the number of entries pushed since the start, which is the number of the next one.
    #[inline]
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Places an entry at the tail; the controller sees it after [`ring`](Self::ring). Returns
    /// false when the queue is full. Entries may be changed until then: the doorbell alone hands
    /// them to the controller.
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
        self.pushed += 1;
        self.in_flight += 1;
        true
    }

    /// Publishes the entries pushed since the last ring with one doorbell store; does nothing if there are
    /// none.
    #[inline]
    pub fn ring(&mut self) {
        if self.rung != self.pushed {
            self.rung = self.pushed;
            self.doorbell.ring(self.tail);
        }
    }

    /// True if the controller can have fetched entry `number`: it was published.
    #[inline]
    pub fn is_published(&self, number: u64) -> bool {
        number < self.rung
    }

    /// True if the completion of entry `number` can report `sqhd`: a head after that entry, up to the
    /// published tail.
    ///
    /// It may be older than one reported before, since it is the head when the controller made the
    /// completion, not when it posted it (NVMe Base 2.0c, "SQ Head Pointer").
    #[inline]
    pub fn is_head_of(&self, number: u64, sqhd: u16) -> bool {
        let (sqhd, entries) = (u32::from(sqhd), self.entries());
        // The unpublished entries are in flight, so there are fewer of them than the ring has.
        let unrung = (self.pushed - self.rung) as u32;
        let behind = (self.tail + 2 * entries).wrapping_sub(unrung + sqhd) % entries;
        sqhd < entries && u64::from(behind) < self.rung.saturating_sub(number)
    }

    /// Counts the end of one pushed command.
    #[inline]
    pub fn end_one(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Empties the queue, as after Create I/O Submission Queue.
    pub fn restart(&mut self) {
        (self.tail, self.pushed, self.rung, self.in_flight) = (0, 0, 0, 0);
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
            let mut sq =
                SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
            for pass in 0..3 * entries as u32 {
                let before = sq.tail;
                for _ in 0..entries - 1 {
                    assert!(sq.push(Sqe::new(0, Nsid(pass))));
                }
                assert!(!sq.push(Sqe::new(0, Nsid(pass))));
                sq.ring();
                let tail = bell.load(Order::Relaxed, Scope::Sys);
                assert_eq!(tail, (before + entries as u32 - 1) % entries as u32);
                assert!(sq.is_head_of(sq.pushed() - 1, tail as u16));
                (1..entries).for_each(|_| sq.end_one());
                assert_eq!(sq.free(), entries as u32 - 1);
            }
        }
    }

    #[test]
    fn a_head_is_after_its_command_and_within_what_was_published() {
        let cells: [SqCell; 4] = Default::default();
        let bell = AtomicU32::new(0);
        let mut sq =
            SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        sq.push(Sqe::new(0, Nsid(1)));
        sq.push(Sqe::new(0, Nsid(1)));
        assert!(!sq.is_published(0) && !sq.is_head_of(0, 1));
        sq.ring();
        assert!(sq.is_published(1) && !sq.is_published(2));
        let heads = [0, 1, 2, 3, 4, u16::MAX];
        let of = |number| heads.map(|head| sq.is_head_of(number, head));
        assert_eq!(of(0), [false, true, true, false, false, false]);
        assert_eq!(of(1), [false, false, true, false, false, false]);
    }

    #[test]
    fn heads_of_a_tail_that_has_wrapped() {
        let cells: [SqCell; 5] = Default::default();
        let bell = AtomicU32::new(0);
        let mut sq =
            SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        for _ in 0..4 {
            sq.push(Sqe::new(0, Nsid(1)));
        }
        sq.ring();
        (0..3).for_each(|_| sq.end_one());
        for _ in 0..3 {
            assert!(sq.push(Sqe::new(0, Nsid(1))));
        }
        assert_eq!(sq.free(), 0);
        let of = |sq: &SubmissionQueue<'_>, number| {
            [3, 4, 0, 1, 2].map(|head| sq.is_head_of(number, head))
        };
        assert_eq!(of(&sq, 3), [false, true, false, false, false]);
        sq.ring();
        assert_eq!(
            bell.load(Order::Relaxed, Scope::Sys),
            2,
            "the tail has wrapped"
        );
        assert_eq!(of(&sq, 3), [false, true, true, true, true]);
        assert_eq!(of(&sq, 5), [false, false, false, true, true]);
        assert_eq!(of(&sq, 0), [true; 5], "a whole pass behind, and more");
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
        let mut sq =
            SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
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
        let mut sq =
            SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        for _ in 0..65_535 {
            assert!(sq.push(Sqe::new(0, Nsid(1))));
        }
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 65_535);
        assert!(sq.is_head_of(65_534, 65_535) && !sq.is_head_of(65_534, 0));
        sq.end_one();
        assert!(sq.push(Sqe::new(0, Nsid(1))));
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 0);
    }
}
