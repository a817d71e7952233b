//! The bus between the driver's doorbells and the controller's: stores arrive when the schedule says, or never.

use nvme_core::mem::DoorbellRegister;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_sim::Doorbells;
use std::cell::RefCell;
use std::sync::atomic::Ordering;

/// Value of a doorbell without a store since the last delivery: no driver writes it.
const QUIET: u32 = u32::MAX;

/// The doorbells of the admin queue and two I/O queues, as the driver sees them.
#[derive(Debug)]
pub struct Bells {
    /// The tail and the head doorbell of each queue.
    words: [[AtomicU32; 2]; 3],
    /// True for each doorbell that loses its next store.
    lossy: RefCell<[[bool; 2]; 3]>,
    entries: [u32; 3],
}

/// The submission or the completion doorbell of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Submission queue tail.
    Tail,
    /// Completion queue head.
    Head,
}

impl Bells {
    /// Doorbells that were not rung yet, with the entries of their submission rings.
    pub fn new(entries: [u32; 3]) -> Self {
        Self {
            words: [(); 3].map(|()| [(); 2].map(|()| AtomicU32::new(QUIET))),
            lossy: RefCell::default(),
            entries,
        }
    }

    /// Returns the driver's doorbell.
    pub fn bell(&self, qid: u16, side: Side) -> DoorbellRegister<'_> {
        DoorbellRegister::new(&self.words[usize::from(qid)][side as usize])
    }

    /// Returns the address of the driver's doorbell in this process, for code that takes addresses.
    pub fn address(&self, qid: u16, side: Side) -> u64 {
        let word = &self.words[usize::from(qid)][side as usize];
        core::ptr::from_ref(word).expose_provenance() as u64
    }

    /// Loses the next store to this doorbell.
    pub fn lose(&self, qid: u16, side: Side) {
        self.lossy.borrow_mut()[usize::from(qid)][side as usize] = true;
    }

    /// Forgets the stores that have not arrived, and the losses that were planned.
    pub fn clear(&self) {
        for word in self.words.iter().flatten() {
            word.store(QUIET, Order::Relaxed, Scope::Sys);
        }
    }

    /// Returns whether a store has not arrived yet.
    pub fn is_rung(&self) -> bool {
        let rung = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Sys) != QUIET;
        self.words.iter().flatten().any(rung)
    }

    /// Cancels the planned losses of stores.
    pub fn mend(&self) {
        *self.lossy.borrow_mut() = Default::default();
    }

    /// Lets stores arrive, of a tail only the next entry when it `crawls`; `lost` is called for dropped ones.
    pub fn deliver(&self, to: &Doorbells, crawls: bool, mut lost: impl FnMut(u16, Side)) {
        for (qid, words) in (0..).zip(&self.words) {
            for side in [Side::Head, Side::Tail] {
                let word = &words[side as usize];
                let value = word.load(Order::Acquire, Scope::Sys);
                if value == QUIET {
                    continue;
                }
                word.store(QUIET, Order::Relaxed, Scope::Sys);
                let lossy = &mut self.lossy.borrow_mut()[usize::from(qid)][side as usize];
                if std::mem::take(lossy) {
                    lost(qid, side);
                    continue;
                }
                let register = match side {
                    Side::Tail => to.sq_tail(qid),
                    Side::Head => to.cq_head(qid),
                };
                let next = (register.load(Ordering::Relaxed) + 1) % self.entries[usize::from(qid)];
                let rest = crawls && side == Side::Tail && value != next;
                if rest {
                    word.store(value, Order::Relaxed, Scope::Sys);
                }
                let value = if rest { next } else { value };
                register.store(value, Ordering::Release); // Release: pairs with the controller's load.
            }
        }
    }
}
