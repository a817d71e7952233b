//! The driver's side of a completion queue: head, phase tag, `pop`, `ring`.
//!
//! Invariant: the expected phase tag flips each time the head wraps, and the ring was zero when the queue was
//! created, so an entry is taken exactly once.
//!
//! NVMe Base 2.0c, 3.3.3.2 (Common Completion Queue Entry), "Phase Tag".

use crate::mem::{CqRing, DoorbellRegister};
use crate::spec::{Cqe, Iova};

/// The driver's side of a completion queue.
#[derive(Debug)]
pub struct CompletionQueue<'a> {
    ring: CqRing<'a>,
    doorbell: DoorbellRegister<'a>,
    head: u32,
    phase: bool,
    owed: u32,
}

impl<'a> CompletionQueue<'a> {
    /// Makes an empty queue over `ring` and zeroes the ring: call it before the controller knows the ring.
    pub fn new(ring: CqRing<'a>, doorbell: DoorbellRegister<'a>) -> Self {
        ring.zero();
        Self {
            ring,
            doorbell,
            head: 0,
            phase: true,
            owed: 0,
        }
    }

    /// Returns the number of entries of the ring.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Returns the I/O address of the ring.
    pub fn iova(&self) -> Iova {
        self.ring.iova()
    }

    /// Takes the next completion, or `None` while the phase tag at the head is stale.
    ///
    /// Does not ring the head doorbell; call [`ring`](Self::ring) once per batch.
    #[inline]
    pub fn pop(&mut self) -> Option<Cqe> {
        let cqe = self.ring.read(self.head, self.phase)?;
        self.head += 1;
        if self.head == self.entries() {
            self.head = 0;
            self.phase = !self.phase;
        }
        self.owed += 1;
        Some(cqe)
    }

    /// Returns the index of the entry that is popped next, and the phase tag that it will have.
    #[inline]
    pub fn next_entry(&self) -> (u32, bool) {
        (self.head, self.phase)
    }

    /// Returns the number of entries that were popped and not yet released to the controller.
    #[inline]
    pub fn owed(&self) -> u32 {
        self.owed
    }

    /// Releases the popped entries to the controller with one doorbell store; none if none are owed.
    #[inline]
    pub fn ring(&mut self) {
        if self.owed != 0 {
            self.owed = 0;
            self.doorbell.ring(self.head);
        }
    }

    /// Empties and zeroes the ring, as before Create I/O Completion Queue.
    pub fn restart(&mut self) {
        self.ring.zero();
        (self.head, self.phase, self.owed) = (0, true, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mem::CqCell;
    use crate::sync::{AtomicU32, Order, Scope};

    fn cqe(cid: u16, phase: bool) -> Cqe {
        Cqe {
            dw0: 0,
            dw1: 0,
            sqhd: 0,
            sqid: 0,
            cid,
            phase_status: u16::from(phase),
        }
    }

    #[test]
    fn phase_flips_on_wrap() {
        let cells: [CqCell; 3] = Default::default();
        let bell = AtomicU32::new(0);
        let mut cq =
            CompletionQueue::new(CqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        for n in 0..30u16 {
            assert_eq!(cq.pop(), None);
            let pass = n / 3;
            cells[usize::from(n % 3)].post(cqe(n, pass % 2 == 0));
            assert_eq!(cq.pop().unwrap().cid, n);
            cq.ring();
            assert_eq!(
                bell.load(Order::Relaxed, Scope::Sys),
                u32::from((n + 1) % 3)
            );
        }
    }

    #[test]
    fn one_doorbell_frees_a_batch() {
        let cells: [CqCell; 4] = Default::default();
        let bell = AtomicU32::new(99);
        let mut cq =
            CompletionQueue::new(CqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        cq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), 99);
        for (n, cell) in cells.iter().take(3).enumerate() {
            cell.post(cqe(n as u16, true));
            cq.pop().unwrap();
        }
        assert_eq!((cq.owed(), bell.load(Order::Relaxed, Scope::Sys)), (3, 99));
        cq.ring();
        assert_eq!((cq.owed(), bell.load(Order::Relaxed, Scope::Sys)), (0, 3));
    }

    #[test]
    fn restart_forgets_old_entries() {
        let cells: [CqCell; 2] = Default::default();
        let bell = AtomicU32::new(0);
        let mut cq =
            CompletionQueue::new(CqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
        cells[0].post(cqe(1, true));
        cells[1].post(cqe(2, true));
        cq.pop();
        cq.restart();
        assert_eq!(cq.pop(), None);
    }
}
