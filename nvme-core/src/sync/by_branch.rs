//! Operations that happen or not, where a branch costs nothing; the GPU's backend has predicated ones.

use super::{AtomicU32, AtomicU64, Order, Scope};

impl AtomicU64 {
    /// Stores `value` when `when` holds; relaxed, for the threads of one GPU.
    #[inline]
    pub fn store_if(&self, when: bool, value: u64) {
        if when {
            self.store(value, Order::Relaxed, Scope::Gpu);
        }
    }
}

impl AtomicU32 {
    /// As [`fetch_and`](Self::fetch_and) when `when` holds, else 0; relaxed, for the threads of one GPU.
    #[inline]
    pub fn fetch_and_if(&self, when: bool, value: u32) -> u32 {
        match when {
            true => self.fetch_and(value, Order::Relaxed, Scope::Gpu),
            false => 0,
        }
    }

    /// Sets the bits of `value` when `when` holds; relaxed, for the threads of one GPU.
    #[inline]
    pub fn set_bits_if(&self, when: bool, value: u32) {
        if when {
            self.fetch_or(value, Order::Relaxed, Scope::Gpu);
        }
    }
}
