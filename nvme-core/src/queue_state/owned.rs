//! The state of a queue as a [`Collective`](crate::Collective) uses it.

use super::{DEADLINES, HEAD, QueueState, RUNG, SEQUENCES, TAIL};
use crate::sync::AtomicU32;
use core::ops::Deref;

/// Head and tail between two kernels, the free ring and deadlines, beside what every queue has.
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

    /// Position of the next entry to write.
    #[inline(always)]
    pub fn tail(&self) -> &'a AtomicU32 {
        self.0.all.named::<TAIL>()
    }

    /// Position up to which the tail doorbell was rung.
    #[inline(always)]
    pub fn rung(&self) -> &'a AtomicU32 {
        self.0.all.named::<RUNG>()
    }

    /// Position of the next completion to read.
    #[inline(always)]
    pub fn head(&self) -> &'a AtomicU32 {
        self.0.all.named::<HEAD>()
    }

    /// Whether reading the completions from `head` to `next` passes a quarter of the ring: time to ring.
    #[inline(always)]
    pub fn passes_quarter(&self, head: u32, next: u32) -> bool {
        self.quarter_of(head ^ next) != 0
    }

    /// The free ring: slots that are free, with their generations, oldest first.
    #[inline(always)]
    pub fn free_ring(&self, place: u32) -> &'a AtomicU32 {
        self.0.array(SEQUENCES, place)
    }

    /// A slot's deadline.
    #[inline(always)]
    pub fn deadline(&self, slot: u32) -> &'a AtomicU32 {
        self.0.array(DEADLINES, slot)
    }
}
