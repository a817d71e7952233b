//! The state of a queue as a [`CollectiveQueue`](crate::CollectiveQueue) uses it.

use super::{DEADLINES, HEAD, QueueState, RUNG, SEQUENCES, TAIL};
use crate::sync::AtomicU32;
use core::ops::Deref;

/// Head and tail between two kernels, the free ring and deadlines, beside the fields that every queue has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnedState<'a>(QueueState<'a>);

impl<'a> Deref for OwnedState<'a> {
    type Target = QueueState<'a>;

    #[inline(always)]
    fn deref(&self) -> &QueueState<'a> {
        &self.0
    }
}

impl<'a> OwnedState<'a> {
    #[inline(always)]
    pub fn of(state: QueueState<'a>) -> Self {
        Self(state)
    }

    /// Returns the position of the next entry to write.
    #[inline(always)]
    pub fn tail(&self) -> &'a AtomicU32 {
        self.0.all.named::<TAIL>()
    }

    /// Returns the position up to which the tail doorbell was rung.
    #[inline(always)]
    pub fn rung(&self) -> &'a AtomicU32 {
        self.0.all.named::<RUNG>()
    }

    /// Returns the position of the next completion to read.
    #[inline(always)]
    pub fn head(&self) -> &'a AtomicU32 {
        self.0.all.named::<HEAD>()
    }

    /// True if reading the completions from `head` to `next` passes the end of a quarter of the
    /// ring, the time to ring. Ringing for each entry would cost a write over the bus each time.
    #[inline(always)]
    pub fn passes_quarter(&self, head: u32, next: u32) -> bool {
        // The highest bit in which the two positions differ is at or above the quarter's size exactly if a
        // multiple of the quarter lies between them.
        self.quarter_of(head ^ next) != 0
    }

    /// Returns an entry of the free ring: the free slots with their generations, oldest first.
    #[inline(always)]
    pub fn free_ring(&self, place: u32) -> &'a AtomicU32 {
        self.0.array(SEQUENCES, place)
    }

    /// Returns a slot's deadline.
    #[inline(always)]
    pub fn deadline(&self, slot: u32) -> &'a AtomicU32 {
        self.0.array(DEADLINES, slot)
    }
}
