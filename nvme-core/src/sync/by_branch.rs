//! Conditional atomic operations as a branch, for back ends where a branch is cheap; the GPU's back end has
//! predicated ones.

use super::{AtomicU32, AtomicU64, Order, Scope};

impl AtomicU64 {
    /// Stores `value` if `when` is true; relaxed, for the threads of one GPU.
    #[inline]
    pub fn store_if(&self, when: bool, value: u64) {
        if when {
            self.store(value, Order::Relaxed, Scope::Gpu);
        }
    }
}

impl AtomicU32 {
    /// Does [`fetch_and`](Self::fetch_and) if `when` is true, else returns 0; relaxed, for the threads of one
    /// GPU.
    #[inline]
    pub fn fetch_and_if(&self, when: bool, value: u32) -> u32 {
        match when {
            true => self.fetch_and(value, Order::Relaxed, Scope::Gpu),
            false => 0,
        }
    }

    /// Sets the bits of `value` if `when` is true; relaxed, for the threads of one GPU.
    #[inline]
    pub fn set_bits_if(&self, when: bool, value: u32) {
        if when {
            self.fetch_or(value, Order::Relaxed, Scope::Gpu);
        }
    }
}
