//! Words in memory of the host through which kernels and the host exchange their state.
//!
//! A launch may be captured in a graph, and replayed after the store was closed that it was made for: the launch keeps
//! these words alive. A kernel learns from them that it may touch nothing else.
// UNSAFETY: the words are pages that kernels access too, used as atomics.
#![allow(unsafe_code)]

use super::super::driver::Gpu;
use super::super::registered::RegisteredMemory;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_driver::dma::DmaPages;
use nvme_driver::error::Result;
use nvme_gpu_kernel::gate::{self, AdmissionGate};
use nvme_gpu_kernel::row_cache::{WRITE_WORDS, WriteCounts};
use nvme_gpu_kernel::rows::{LaunchSummary, of_worst};
use std::sync::Arc;

/// A [`LaunchSummary`] as the host reads it while a kernel writes it.
#[derive(Debug)]
#[repr(C)]
struct SummaryWords {
    failed: AtomicU64,
    worst: AtomicU64,
    ended: AtomicU32,
    reserved: AtomicU32,
    failed_ever: AtomicU64,
}
const _: () = assert!(size_of::<SummaryWords>() == size_of::<LaunchSummary>());

/// Rows of a launch that were not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowFailures {
    /// Number of rows.
    pub rows: u64,
    /// The failed row with the lowest number in the order of the ids, and its code.
    pub first: Option<(u64, i32)>,
    /// The member of a stripe on which that row failed, if the GPU read it.
    pub member: Option<u32>,
}

/// The gate and the summaries of launches, in host memory that kernels access too.
///
/// Its owner is [`StationMemory`](super::state::StationMemory), which every launch keeps that may read the words.
pub(super) struct LaunchMailbox {
    /// Dropped before the pages.
    registered: RegisteredMemory,
    pages: Arc<DmaPages>,
    gate_words: usize,
    launches: usize,
    stations: usize,
}

impl LaunchMailbox {
    /// Allocates the words for `stations` stations and `launches` launches at a time.
    ///
    /// # Errors
    /// Without memory that the GPU reaches.
    pub fn new(gpu: &Arc<Gpu>, stations: u32, launches: u32) -> Result<Self> {
        let (gate_words, launches) = (gate::words(stations), launches as usize);
        let late = late_bytes(stations as usize);
        let distinct = 2 * size_of::<AtomicU64>();
        let stations = stations as usize;
        let bytes =
            head(gate_words, stations) + launches * size_of::<SummaryWords>() + late + distinct;
        let (pages, registered) = RegisteredMemory::pinned(gpu, bytes)?;
        Ok(Self {
            registered,
            pages,
            gate_words,
            launches,
            stations,
        })
    }

    pub fn gate(&self) -> AdmissionGate<'_> {
        let start = self.pages.start().cast::<AtomicU32>();
        // SAFETY: the pages begin with these words, zeroed and aligned to a page, and live as long as the borrow.
        // Both sides use them as atomics alone.
        let words = unsafe { std::slice::from_raw_parts(start, self.gate_words) };
        // `new` made the words of a gate, so that they are enough.
        AdmissionGate::new(words).unwrap_or_else(|| unreachable!())
    }

    /// Returns the counts of the host's writes that have ended.
    fn written(&self) -> WriteCounts<'_> {
        let start = self.pages.start().wrapping_add(gate_bytes(self.gate_words));
        // SAFETY: the words lie inside the pages, zeroed and aligned to 64 bytes, alive as long as the borrow, and used
        // as atomics alone.
        let words = unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), WRITE_WORDS) };
        WriteCounts::new(words).unwrap_or_else(|| unreachable!())
    }

    /// Returns the number of rows that gathers found in caches.
    pub fn cache_hits(&self) -> u64 {
        let counts = gate_bytes(self.gate_words) + WRITE_WORDS * size_of::<AtomicU64>();
        let start = self.pages.start().wrapping_add(counts);
        // SAFETY: behind the counts of writes is a word for each station, zeroed and aligned to 64 bytes, alive as long as
        // the borrow. Both sides use them as atomics alone.
        let counts: &[AtomicU64] =
            unsafe { std::slice::from_raw_parts(start.cast(), self.stations) };
        let count = |count: &AtomicU64| count.load(Order::Relaxed, Scope::Sys);
        counts.iter().map(count).sum()
    }

    fn head(&self) -> usize {
        head(self.gate_words, self.stations)
    }

    fn summaries(&self) -> &[SummaryWords] {
        let start = self.pages.start().wrapping_add(self.head());
        // SAFETY: the pages hold these summaries, aligned to 64 bytes, and live as long as the
        // borrow. Both sides use them as atomics alone. A kernel may store to them while the host
        // reads.
        unsafe { std::slice::from_raw_parts(start.cast(), self.launches) }
    }

    /// Returns the offset of the counts of late rows, behind the summaries.
    fn late_rows_offset(&self) -> usize {
        self.head() + self.launches * size_of::<SummaryWords>()
    }

    /// Returns the GPU's address of a `u32` for each station: rows that second launches read by themselves.
    pub fn late_rows_address(&self) -> u64 {
        self.registered.address() + self.late_rows_offset() as u64
    }

    /// Returns the number of rows of gathers in halves that second launches read by themselves.
    pub fn late_rows(&self) -> u64 {
        let start = self.pages.start().wrapping_add(self.late_rows_offset());
        // SAFETY: behind the summaries is a word for each station, aligned to 8 bytes, and live as long as the borrow. Both
        // sides use them as atomics alone.
        let counts: &[AtomicU32] =
            unsafe { std::slice::from_raw_parts(start.cast(), self.stations) };
        let count = |count: &AtomicU32| u64::from(count.load(Order::Relaxed, Scope::Sys));
        counts.iter().map(count).sum()
    }

    /// Returns the offset of the counts of distinct rows, behind those of late rows.
    fn distinct_offset(&self) -> usize {
        self.late_rows_offset() + late_bytes(self.stations)
    }

    /// Returns the GPU's address of two `u64`: the rows that gathers of distinct rows were asked for, and those that
    /// they read.
    pub fn distinct_address(&self) -> u64 {
        self.registered.address() + self.distinct_offset() as u64
    }

    /// Returns both counts.
    pub fn distinct_rows(&self) -> (u64, u64) {
        let start = self.pages.start().wrapping_add(self.distinct_offset());
        // SAFETY: the pages end with these words, aligned to 8 bytes, and live as long as the borrow. Both sides use
        // them as atomics alone.
        let counts: &[AtomicU64; 2] = unsafe { &*start.cast() };
        let [asked, read] = counts;
        let count = |count: &AtomicU64| count.load(Order::Relaxed, Scope::Sys);
        (count(asked), count(read))
    }

    /// Returns the number of rows that failed in all launches that have ended.
    pub fn failed_rows(&self) -> u64 {
        let count = |summary: &SummaryWords| summary.failed_ever.load(Order::Relaxed, Scope::Sys);
        self.summaries().iter().map(count).sum()
    }

    /// Returns the GPU's address of the gate's words.
    pub fn gate_address(&self) -> u64 {
        self.registered.address()
    }

    /// Returns the GPU's address of the counts of writes, and of those of rows found in caches behind them.
    pub fn written_address(&self) -> u64 {
        self.registered.address() + gate_bytes(self.gate_words) as u64
    }

    /// Counts a write that has ended.
    pub fn wrote(&self) {
        self.written().ended();
    }

    /// Returns the GPU's address of summary `index`.
    pub fn summary_address(&self, index: u32) -> u64 {
        let first = self.registered.address() + self.head() as u64;
        first + u64::from(index) * size_of::<SummaryWords>() as u64
    }

    /// Returns the number of launches with summary `index` that have ended.
    pub fn ended(&self, index: u32) -> u32 {
        // Acquire: pairs with the system-scope fence of the launch's last block. A host thread that sees the
        // count grow may read the rows that all blocks stored, and the failures of the summary.
        let summary = self.summaries().get(index as usize);
        summary.map_or(0, |summary| summary.ended.load(Order::Acquire, Scope::Sys))
    }

    /// Returns the rows that the last launch with summary `index` did not read.
    pub fn failures(&self, index: u32) -> RowFailures {
        let Some(summary) = self.summaries().get(index as usize) else {
            return RowFailures::default();
        };
        let rows = summary.failed.load(Order::Relaxed, Scope::Sys);
        let worst = summary.worst.load(Order::Relaxed, Scope::Sys);
        if rows == 0 {
            return RowFailures::default();
        }
        let (row, member, code) = of_worst(worst);
        RowFailures {
            rows,
            first: Some((row, code)),
            member,
        }
    }
}

/// Bytes of the gate's words, with what fills their last line of 64.
fn gate_bytes(words: usize) -> usize {
    (words * size_of::<AtomicU32>()).next_multiple_of(64)
}

/// Bytes of the counts of late rows, with what fills their last word of 8.
fn late_bytes(stations: usize) -> usize {
    (stations * size_of::<AtomicU32>()).next_multiple_of(size_of::<AtomicU64>())
}

/// Bytes before the summaries: the gate, the counts of writes, and those of rows found in caches, with what fills their
/// last line of 64.
fn head(gate_words: usize, stations: usize) -> usize {
    let hits = (stations * size_of::<AtomicU64>()).next_multiple_of(64);
    gate_bytes(gate_words) + WRITE_WORDS * size_of::<AtomicU64>() + hits
}
