//! Memory that cannot be mapped: its pages are fetched at the first access, used, and written back
//! where they changed.
//!
//! The changes of a batch are written back at its end: data first, completions last, so that a
//! driver which sees a completion also finds its data.

use super::dma::DmaRegion;
use super::span::MemorySpan;
use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

/// Bytes that are fetched at once.
const PAGE: u64 = 4096;

/// Memory that is read and written by requests to its owner.
pub(crate) trait RemoteMemory: Send + Sync {
    /// Reads from address `at` on. False if that failed.
    fn read(&self, at: u64, into: &mut [u8]) -> bool;

    /// Writes from address `at` on. False if that failed; like a posted write on a bus, the caller
    /// has no place to report it.
    fn write(&self, at: u64, from: &[u8]) -> bool;
}

struct StagedPage {
    start: u64,
    len: usize,
    words: Box<[AtomicU64]>,
    before: Box<[u64]>,
    remote: Arc<dyn RemoteMemory>,
}

/// The pages that one batch has fetched.
#[derive(Default)]
pub(crate) struct StagedPages {
    pages: RefCell<Vec<StagedPage>>,
    /// Ranges that are written back after all others.
    last: RefCell<Vec<(u64, u64)>>,
    bytes: Cell<usize>,
}

impl StagedPages {
    /// Returns the number of bytes fetched.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    /// Makes the `len` bytes at `start` be written back last.
    pub fn write_back_last(&self, start: u64, len: u64) {
        self.last
            .borrow_mut()
            .push((start, start.saturating_add(len)));
    }

    /// Returns the page around `iova` of the remote range `start..end`; `None` if it cannot be
    /// read.
    pub fn page(
        &self,
        iova: u64,
        (start, end): (u64, u64),
        remote: &Arc<dyn RemoteMemory>,
    ) -> Option<DmaRegion<'_>> {
        let start = start.max(iova / PAGE * PAGE);
        let end = end.min((iova / PAGE).saturating_add(1).saturating_mul(PAGE));
        let mut pages = self.pages.borrow_mut();
        let known = pages.iter().rev().position(|page| page.start == start);
        let index = match known {
            Some(from_end) => pages.len() - 1 - from_end,
            None => {
                let page = fetch(start, (end - start) as usize, remote)?;
                self.bytes.set(self.bytes.get() + page.len);
                pages.push(page);
                pages.len() - 1
            }
        };
        let page = &pages[index];
        let ptr = page.words.as_ptr().cast_mut().cast();
        // SAFETY: the words are on the heap, so they do not move when the list of pages grows. They
        // are used as atomics, and are not freed before `self`, which the returned region borrows.
        let span = unsafe { MemorySpan::from_raw(ptr, page.len) };
        Some(DmaRegion { start, span })
    }

    /// Writes back the words that have changed.
    pub fn write_back_all(&mut self) {
        let ranges = self.last.get_mut();
        let is_last = |page: &StagedPage| {
            let end = page.start + page.len as u64;
            ranges
                .iter()
                .any(|(from, to)| page.start < *to && end > *from)
        };
        // Rings are fetched before the data, so the reversed order writes data first, even for
        // pages that were not marked as last. A completion must never be visible before its data.
        let (last, first): (Vec<_>, Vec<_>) =
            self.pages.get_mut().drain(..).rev().partition(is_last);
        first.iter().chain(&last).for_each(write_back);
    }
}

fn fetch(start: u64, len: usize, remote: &Arc<dyn RemoteMemory>) -> Option<StagedPage> {
    let mut bytes = std::vec![0; len.next_multiple_of(8)];
    if !remote.read(start, &mut bytes[..len]) {
        return None;
    }
    let words = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_ne_bytes(*word));
    let before: Box<[u64]> = words.collect();
    Some(StagedPage {
        start,
        len,
        words: before.iter().map(|word| AtomicU64::new(*word)).collect(),
        before,
        remote: remote.clone(),
    })
}

/// Writes each run of words that differ from what was fetched.
fn write_back(page: &StagedPage) {
    let now = |i: usize| page.words[i].load(Ordering::Relaxed);
    let changed = |i: usize| now(i) != page.before[i];
    let mut i = 0;
    while i < page.words.len() {
        if !changed(i) {
            i += 1;
            continue;
        }
        let first = i;
        while i < page.words.len() && changed(i) {
            i += 1;
        }
        let mut bytes: Vec<u8> = (first..i).flat_map(|i| now(i).to_ne_bytes()).collect();
        bytes.truncate(page.len - first * 8);
        page.remote.write(page.start + first as u64 * 8, &bytes);
    }
}
