//! The state of a queue as a [`SharedQueue`](crate::SharedQueue) uses it.

use super::{DRAIN, FREE, HEAD, QUARTERS, QueueState, RING_LOCK, RUNG, SEQUENCES, TAIL};
use crate::sync::AtomicU32;
use core::ops::Deref;

/// Tickets, locks, free bits and sequence numbers, beside the fields that every queue has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedState<'a>(QueueState<'a>);

impl<'a> Deref for SharedState<'a> {
    type Target = QueueState<'a>;

    #[inline(always)]
    fn deref(&self) -> &QueueState<'a> {
        &self.0
    }
}

impl<'a> SharedState<'a> {
    #[inline(always)]
    pub fn of(state: QueueState<'a>) -> Self {
        Self(state)
    }

    /// Returns the next ticket. Tickets are taken by fetch-and-add, and name ring entries modulo the number
    /// of entries.
    #[inline(always)]
    pub fn next_ticket(&self) -> &'a AtomicU32 {
        self.0.all.named::<TAIL>()
    }

    #[inline(always)]
    pub fn ring_lock(&self) -> &'a AtomicU32 {
        self.0.all.named::<RING_LOCK>()
    }

    /// Returns the ticket up to which the tail doorbell was rung.
    #[inline(always)]
    pub fn rung(&self) -> &'a AtomicU32 {
        self.0.all.named::<RUNG>()
    }

    /// Returns the word described at [`DrainWord`](super::DrainWord).
    #[inline(always)]
    pub fn drain_word(&self) -> &'a AtomicU32 {
        self.0.all.named::<DRAIN>()
    }

    /// Returns the count of completions read since the start.
    #[inline(always)]
    pub fn read(&self) -> &'a AtomicU32 {
        self.0.all.named::<HEAD>()
    }

    /// Returns the count of completions read since the start in the quarter of the ring that the
    /// `quarter`th quarter uses. It only grows while the queue runs: the lock's holder compares it with the
    /// count that the pass has to reach.
    #[inline(always)]
    pub fn read_of(&self, quarter: u32) -> &'a AtomicU32 {
        self.0.at(QUARTERS + (quarter & 3))
    }

    /// Returns the value of [`read_of`](Self::read_of) once the last entry of the `quarter`th quarter was
    /// read.
    #[inline(always)]
    pub fn read_after(&self, quarter: u32) -> u32 {
        self.quarter_start((quarter >> 2).wrapping_add(1))
    }

    /// Returns the first position of the `quarter`th quarter.
    #[inline(always)]
    pub fn quarter_start(&self, quarter: u32) -> u32 {
        quarter << self.0.quarter_shift()
    }

    /// Returns the number of words of free bits.
    #[inline(always)]
    pub fn free_words(&self) -> u32 {
        self.0.slots.div_ceil(32)
    }

    /// Returns word `index` of the free bits.
    #[inline(always)]
    pub fn free_bits(&self, index: u32) -> &'a AtomicU32 {
        self.0.at(FREE + index)
    }

    /// Frees a slot if `when` is true; without a branch.
    #[inline(always)]
    pub fn free_if(&self, when: bool, slot: u32) {
        self.free_bits(slot / 32)
            .set_bits_if(when, 1 << (slot % 32));
    }

    /// Returns the sequence number of a ring entry: the ticket that was last published there, plus 1.
    #[inline(always)]
    pub fn sequence(&self, ticket: u32) -> &'a AtomicU32 {
        self.0.array(SEQUENCES, ticket)
    }
}
