//! Counts of the rows that a gather found in a cache: a word for each station in GPU memory, which its block alone changes
//! while it holds the station, and a copy of it in memory of the host, which the host reads at any time.
//!
//! The order of calls: [`add`](HitCount::add) by one lane of each warp; after a barrier [`sum`](HitCount::sum) and
//! [`show`](HitCount::show) by one thread of the block, before the station is freed.
// UNSAFETY: the words lie at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::row_cache::WRITE_WORDS;
use crate::rows::CacheWords;
use nvme_core::sync::{AtomicU64, Order, Scope};

/// The count of a station.
#[derive(Clone, Copy)]
pub struct HitCount {
    word: u64,
    shown: u64,
}

impl HitCount {
    /// Returns the count of `station`.
    ///
    /// # Safety
    /// The words are valid as [`CacheWords`] documents, and the caller's block holds the station.
    #[inline(always)]
    pub unsafe fn of(words: &CacheWords, station: u32) -> Self {
        let station = u64::from(station);
        Self {
            word: words.written_by_gpu + 8 * (1 + station),
            shown: words.written_by_host + 8 * (WRITE_WORDS as u64 + station),
        }
    }

    /// Adds `rows` rows.
    #[inline(always)]
    pub fn add(self, rows: u32) {
        if rows != 0 {
            // SAFETY: `of`'s caller vouches for the word, which only such instructions and atomics access.
            unsafe { arch::add(self.word as usize as *mut u64, rows.into()) };
        }
    }

    /// Returns the sum, those of earlier launches included.
    #[inline(always)]
    pub fn sum(self) -> u64 {
        // SAFETY: `of`'s caller vouches for the word, which is accessed as an atomic alone.
        let word = unsafe { &*(self.word as usize as *const AtomicU64) };
        word.load(Order::Relaxed, Scope::Gpu)
    }

    /// Stores the sum for the host. The end of the launch makes it visible.
    #[inline(always)]
    pub fn show(self, sum: u64) {
        // SAFETY: `of`'s caller vouches for the word, which is accessed as an atomic alone.
        let shown = unsafe { &*(self.shown as usize as *const AtomicU64) };
        shown.store(sum, Order::Relaxed, Scope::Sys);
    }
}
