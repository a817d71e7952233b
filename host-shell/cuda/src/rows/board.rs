//! Words in memory of the host by which kernels and the host tell each other what they do.
//!
//! A launch may be captured in a graph, and replayed when the store that it was made for is gone: these words are
//! never freed. A kernel reads in them that it may touch nothing else.
// UNSAFETY: the words are leaked memory, used as atomics.
#![allow(unsafe_code)]

use super::super::driver::Gpu;
use super::super::registered::Registered;
use nvme_core::gate::{self, Gate};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_driver::error::Result;
use nvme_gpu_kernel::rows::{Summary, of_worst};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as WriteCount, Ordering};

/// A [`Summary`] as the host reads it while a kernel writes it.
#[derive(Debug)]
#[repr(C)]
struct SummaryWords {
    failed: AtomicU64,
    worst: AtomicU64,
    ended: AtomicU32,
    reserved: AtomicU32,
}
const _: () = assert!(size_of::<SummaryWords>() == size_of::<Summary>());

/// Rows of a launch that were not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// Number of rows.
    pub rows: u64,
    /// The first of them in the order of the ids, and its code.
    pub first: Option<(u64, i32)>,
    /// The member of a stripe that failed it, where the GPU read it.
    pub member: Option<u32>,
}

/// The gate and the summaries of launches, in host memory that kernels access too. The memory is never freed.
#[derive(Debug)]
pub(super) struct Board {
    gate: &'static [AtomicU32],
    gate_address: u64,
    /// Number of writes of the host that have ended.
    written: &'static WriteCount,
    written_address: u64,
    summaries: &'static [SummaryWords],
    summaries_address: u64,
}

impl Board {
    /// Allocates the words for `stations` stations and `launches` launches at a time.
    ///
    /// # Errors
    /// Without memory that the GPU reaches.
    pub fn new(gpu: &Arc<Gpu>, stations: u32, launches: u32) -> Result<Self> {
        let words = gate::words(stations);
        let gate_bytes = (words * 4).next_multiple_of(64);
        let written_bytes = 64;
        let head = gate_bytes + written_bytes;
        let bytes = head + launches as usize * size_of::<SummaryWords>();
        let (pages, registered) = Registered::pinned(gpu, bytes)?;
        let (start, address) = (pages.start(), registered.address());
        std::mem::forget(registered);
        std::mem::forget(pages);
        // SAFETY: `bytes` zeroed bytes, aligned to a page, that are never freed: the registration and the pages
        // were forgotten. Both sides use them as atomics alone.
        let (gate, written, summaries) = unsafe {
            let gate = std::slice::from_raw_parts(start.cast::<AtomicU32>(), words);
            let written = &*start.add(gate_bytes).cast::<WriteCount>();
            let first = start.add(head).cast::<SummaryWords>();
            let summaries = std::slice::from_raw_parts(first, launches as usize);
            (gate, written, summaries)
        };
        Ok(Self {
            gate,
            gate_address: address,
            written,
            written_address: address + gate_bytes as u64,
            summaries,
            summaries_address: address + head as u64,
        })
    }

    pub fn gate(&self) -> Gate<'static> {
        // There are words of a gate: `new` made them.
        Gate::new(self.gate).unwrap_or_else(|| unreachable!())
    }

    /// Returns the GPU's address of the gate's words.
    pub fn gate_address(&self) -> u64 {
        self.gate_address
    }

    /// Returns the GPU's address of the count of writes.
    pub fn written_address(&self) -> u64 {
        self.written_address
    }

    /// Counts a write that has ended.
    pub fn wrote(&self) {
        // Release: pairs with the acquire load of the count by a gather's kernel. A gather that sees the new
        // count also reads the bytes that were written, and treats older lines of its cache as stale.
        self.written.fetch_add(1, Ordering::Release);
    }

    /// Returns the GPU's address of summary `index`.
    pub fn summary_address(&self, index: u32) -> u64 {
        self.summaries_address + u64::from(index) * size_of::<SummaryWords>() as u64
    }

    /// Returns the number of launches with summary `index` that have ended.
    pub fn ended(&self, index: u32) -> u32 {
        // Acquire: pairs with the system-scope fence of the launch's last block. A host thread that sees the
        // count grow may read the rows that all blocks stored, and the failures of the summary.
        let summary = self.summaries.get(index as usize);
        summary.map_or(0, |summary| summary.ended.load(Order::Acquire, Scope::Sys))
    }

    /// Returns the rows that the last launch with summary `index` did not read.
    pub fn failures(&self, index: u32) -> Failures {
        let Some(summary) = self.summaries.get(index as usize) else {
            return Failures::default();
        };
        let rows = summary.failed.load(Order::Relaxed, Scope::Sys);
        let worst = summary.worst.load(Order::Relaxed, Scope::Sys);
        if rows == 0 {
            return Failures::default();
        }
        let (row, member, code) = of_worst(worst);
        Failures {
            rows,
            first: Some((row, code)),
            member,
        }
    }
}
