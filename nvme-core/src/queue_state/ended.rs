//! Checks of a completion against the state: whether it is new, to which slot it belongs, and whether it is
//! possible.

use super::QueueState;
use super::slot::{PENDING, SlotWord};
use crate::error::ControllerFault;
use crate::spec::{Cqe, Status};
use crate::sync::{Order, Scope};

/// Returns the slot in the CID of the entry with this upper word.
#[inline(always)]
pub(crate) fn slot_of(upper: u64) -> u32 {
    (upper >> 32) as u32 & 0xFFF
}

/// Returns the status field in the upper word of an entry.
#[inline(always)]
pub(crate) fn status_of(upper: u64) -> Status {
    Status((upper >> 49) as u16)
}

impl QueueState<'_> {
    /// Returns the phase tag that the entry at `position` will have.
    #[inline(always)]
    pub(crate) fn phase(&self, position: u32) -> bool {
        position & (self.mask + 1) == 0
    }

    /// Returns 1 when an entry with this upper word is new at `position`, else 0.
    ///
    /// Computed without a comparison: a GPU has few predicates, and would wait for one entry before it reads
    /// the next.
    #[inline(always)]
    pub(crate) fn is_new(&self, upper: u64, position: u32) -> u32 {
        // Bit 48 is the phase tag: 1 in even passes, 0 in odd ones.
        ((upper >> 48) as u32 ^ position >> self.mask.count_ones()) & 1
    }

    /// Does [`take_out_of_flight`](Self::take_out_of_flight) without an atomic, for a queue that no other
    /// thread uses.
    #[inline(always)]
    pub(crate) fn take_out_of_flight_unshared(&self, upper: u64) -> SlotWord {
        let slot = slot_of(upper);
        if slot >= self.slots {
            return SlotWord::NONE;
        }
        let word = SlotWord(self.slot(slot).load(Order::Relaxed, Scope::Cta));
        self.slot(slot)
            .store(word.0 & !PENDING, Order::Relaxed, Scope::Cta);
        word
    }

    /// Clears the pending bit of the slot that the entry with this upper word names, and returns the word
    /// that was there, for [`classify_fault`](Self::classify_fault).
    ///
    /// One atomic: of two completions with one CID, even in one pass, only one finds the slot pending, so a
    /// command never ends twice.
    #[inline(always)]
    pub(crate) fn take_out_of_flight(&self, upper: u64) -> SlotWord {
        let slot = slot_of(upper);
        if slot >= self.slots {
            return SlotWord::NONE;
        }
        SlotWord(
            self.slot(slot)
                .fetch_and(!PENDING, Order::Relaxed, Scope::Gpu),
        )
    }

    /// Does [`take_out_of_flight`](Self::take_out_of_flight) if `when` is true; without a branch.
    #[inline(always)]
    pub(crate) fn take_out_of_flight_if(&self, when: bool, upper: u64) -> SlotWord {
        let slot = slot_of(upper);
        SlotWord(
            self.slot(slot)
                .fetch_and_if(when & (slot < self.slots), !PENDING),
        )
    }

    /// True if `word`, taken out of flight for the entry with this upper word, was the entry's own
    /// command. False means an entry of an earlier use of the slot, or one of another queue.
    #[inline(always)]
    pub(crate) fn matches(&self, upper: u64, word: SlotWord) -> bool {
        // The slot is the lower part of the CID and matches already; generation and queue are compared here.
        let same = word.generation() == (upper >> 44) as u32 & 0xF;
        word.pending() & same & ((upper >> 16) as u16 == self.qid.0)
    }

    /// Returns to flight the command that was taken out for an impossible entry (by
    /// [`matches`](Self::matches) or [`is_possible`](Self::is_possible)), and returns the code of the
    /// [`ControllerFault`].
    #[inline(always)]
    pub(crate) fn classify_fault(&self, upper: u64, word: SlotWord) -> u32 {
        let cqe = Cqe::from_words(0, upper);
        if word.pending() {
            // The slot holds the entry's command or another one, which is still in flight.
            self.slot(slot_of(upper))
                .fetch_or(PENDING, Order::Relaxed, Scope::Gpu);
        }
        if cqe.sqid() != self.qid {
            ControllerFault::SqId(cqe.sqid).code()
        } else if self.matches(upper, word) & (u32::from(cqe.sqhd) > self.mask) {
            ControllerFault::SqHead(cqe.sqhd).code()
        } else if word.pending() & !self.matches(upper, word) {
            ControllerFault::StaleCid(cqe.cid()).code()
        } else {
            ControllerFault::UnknownCid(cqe.cid()).code()
        }
    }

    /// True if this upper word can belong to the `completed`th completion when `rung` commands were
    /// published, whichever command it ends: its SQHD is in the ring, and at most as many commands have
    /// completed as were published.
    ///
    /// Nothing here depends on the order of SQHD values, and one may be older than the one before: see
    /// [`SubmissionQueue`](crate::SubmissionQueue).
    #[inline(always)]
    pub(crate) fn is_possible(&self, upper: u64, completed: u32, rung: u32) -> bool {
        // Modulo 2^28, as the head is. The upper half of that range means that more has completed
        // than was published. No working controller completes what it could not have fetched, so
        // this is a protocol violation.
        let room = rung.wrapping_sub(completed) & (u32::MAX >> 4);
        (u32::from(upper as u16) <= self.mask) & (room <= u32::MAX >> 5)
    }
}
