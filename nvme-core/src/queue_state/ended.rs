//! What a completion says, against the state: whether it is new, whose it is, whether it can be.

use super::QueueState;
use super::slot::{PENDING, SlotWord};
use crate::error::ControllerFault;
use crate::spec::{Cqe, Status};
use crate::sync::{Order, Scope};

/// The slot that the entry with this upper word names.
#[inline(always)]
pub(crate) fn slot_of(upper: u64) -> u32 {
    (upper >> 32) as u32 & 0xFFF
}

/// The status field in the upper word of an entry.
#[inline(always)]
pub(crate) fn status_of(upper: u64) -> Status {
    Status((upper >> 49) as u16)
}

impl QueueState<'_> {
    /// The phase tag that the entry at `position` will have.
    #[inline(always)]
    pub(crate) fn phase(&self, position: u32) -> bool {
        position & (self.mask + 1) == 0
    }

    /// 1 when an entry with this upper word is new at `position`, else 0. Without a comparison: a GPU has
    /// few predicates, and would wait for one entry before it reads the next.
    #[inline(always)]
    pub(crate) fn is_new(&self, upper: u64, position: u32) -> u32 {
        // Bit 48 is the phase tag: 1 in even passes, 0 in odd ones.
        ((upper >> 48) as u32 ^ position >> self.mask.count_ones()) & 1
    }

    /// As [`take_out_of_flight`](Self::take_out_of_flight), when no other thread does so at the same time.
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

    /// Takes the slot that the entry with this upper word names out of flight, whatever it holds: the word
    /// that was there, for [`classify_fault`](Self::classify_fault). One atomic: of two completions with one
    /// CID, even in one pass, one finds the slot pending.
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

    /// As [`take_out_of_flight`](Self::take_out_of_flight) when `when` holds, else none; without a branch.
    #[inline(always)]
    pub(crate) fn take_out_of_flight_if(&self, when: bool, upper: u64) -> SlotWord {
        let slot = slot_of(upper);
        SlotWord(
            self.slot(slot)
                .fetch_and_if(when & (slot < self.slots), !PENDING),
        )
    }

    /// Whether `word`, taken out of flight for the entry with this upper word, was its command.
    #[inline(always)]
    pub(crate) fn matches(&self, upper: u64, word: SlotWord) -> bool {
        // The slot is the lower part of the CID.
        let same = word.generation() == (upper >> 44) as u32 & 0xF;
        word.pending() & same & ((upper >> 16) as u16 == self.qid.0)
    }

    /// Puts back in flight what was taken out for an entry that cannot be, by [`matches`](Self::matches) or
    /// [`is_possible`](Self::is_possible); the code of the [`ControllerFault`].
    #[inline(always)]
    pub(crate) fn classify_fault(&self, upper: u64, word: SlotWord) -> u32 {
        let cqe = Cqe::from_words(0, upper);
        if word.pending() {
            // Its command or another one is in the slot, still in flight.
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

    /// Whether this upper word can be of the `completed`th completion when `rung` commands were published,
    /// whichever command it ends: its SQHD is in the ring, and no more have completed than were published.
    ///
    /// Nothing here depends on SQHD, and it may be older than one before: see
    /// [`SubmissionQueue`](crate::SubmissionQueue).
    #[inline(always)]
    pub(crate) fn is_possible(&self, upper: u64, completed: u32, rung: u32) -> bool {
        // Modulo 2^28, as the head is. Below zero when more has completed than was published.
        let room = rung.wrapping_sub(completed) & (u32::MAX >> 4);
        (u32::from(upper as u16) <= self.mask) & (room <= u32::MAX >> 5)
    }
}
