//! Memory for a device that accepts few DMA ranges: large shared mappings, each divided into many
//! allocations.
//!
//! A vfio-user server maps each range that is announced to it, and stock libvfio-user refuses the 65th.
//! Therefore the client maps large chunks, and every allocation is a part of one. A new chunk is as long as
//! all chunks before it together, so their number grows with the logarithm of the memory in use. A chunk's
//! file has no pages before they are touched.
//!
//! Invariant: a byte belongs to at most one allocation. An allocation that is leaked, because the device may
//! still write to it, is never reused, and keeps its chunk alive.

use crate::dma::addresses::IovaAllocator;
use crate::dma::pages::{DmaPages, GRANULE};
use crate::error::Result;
use crate::lock::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// The shortest chunk, and with how many ranges all shortest chunks together are [`FEW_BYTES`].
const LEAST: usize = 2 << 20;
const FEW_BYTES: usize = 32 << 20;

/// Allocates parts of shared mappings.
#[derive(Debug)]
pub struct PagePool {
    chunks: Mutex<Vec<Weak<PoolChunk>>>,
    /// The length of the first chunk.
    first: usize,
}

/// A mapping and its free bytes. It lives as long as a part of it does.
#[derive(Debug)]
struct PoolChunk {
    pages: Arc<DmaPages>,
    state: Mutex<ChunkState>,
}

#[derive(Debug)]
struct ChunkState {
    free: IovaAllocator,
    /// Bytes from here on were never allocated: they are zero.
    fresh: usize,
}

/// Gives a part back to its chunk.
#[derive(Debug)]
struct TakenPages {
    chunk: Arc<PoolChunk>,
    range: Range<usize>,
}

impl Drop for TakenPages {
    fn drop(&mut self) {
        let range = self.range.start as u64..self.range.end as u64;
        lock(&self.chunk.state).free.give(range);
    }
}

impl PagePool {
    /// Creates a pool for a device that takes `most` ranges of memory.
    pub fn new(most: usize) -> Self {
        let share = FEW_BYTES / most.clamp(1, FEW_BYTES / LEAST);
        Self {
            chunks: Mutex::default(),
            first: share.next_multiple_of(GRANULE),
        }
    }

    /// Allocates at least `bytes` zeroed bytes from a chunk, in whole granules.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) when memory is exhausted.
    pub fn take(&self, bytes: usize) -> Result<DmaPages> {
        let mut chunks = lock(&self.chunks);
        chunks.retain(|chunk| chunk.strong_count() > 0);
        let mut total = 0usize;
        for chunk in chunks.iter().filter_map(Weak::upgrade) {
            if let Some(part) = chunk.take(bytes) {
                return Ok(part);
            }
            total += chunk.pages.len();
        }
        let long = bytes.max(total).max(self.first);
        let chunk = match PoolChunk::new(long) {
            // The system may have too little memory for a chunk of the preferred length.
            Err(_) if long > bytes => PoolChunk::new(bytes)?,
            made => made?,
        };
        chunks.push(Arc::downgrade(&chunk));
        chunk.take(bytes).ok_or_else(too_much)
    }
}

impl PoolChunk {
    fn new(bytes: usize) -> Result<Arc<Self>> {
        let pages = Arc::new(DmaPages::shared(bytes)?);
        let mut free = IovaAllocator::empty(GRANULE as u64);
        free.give(0..pages.len() as u64);
        let state = Mutex::new(ChunkState { free, fresh: 0 });
        Ok(Arc::new(Self { pages, state }))
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Option<DmaPages> {
        let mut state = lock(&self.state);
        let range = state.free.take(bytes as u64)?;
        let range = range.start as usize..range.end as usize;
        let used = state.fresh.saturating_sub(range.start).min(range.len());
        state.fresh = state.fresh.max(range.end);
        drop(state);
        let taken = TakenPages {
            chunk: Arc::clone(self),
            range: range.clone(),
        };
        let mut part = DmaPages::part(&self.pages, range, Box::new(taken))?;
        part.clear(used);
        Some(part)
    }
}

fn too_much() -> crate::error::Error {
    crate::error::Error::System {
        call: "taking memory for DMA",
        source: std::io::Error::from_raw_os_error(libc::ENOMEM),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(part: &Arc<DmaPages>) -> usize {
        part.whole().start().addr()
    }

    fn take(pool: &PagePool, bytes: usize) -> Arc<DmaPages> {
        Arc::new(pool.take(bytes).unwrap())
    }

    #[test]
    fn parts_of_a_chunk_are_disjoint_granules() {
        let pool = PagePool::new(64);
        let parts: Vec<_> = (1..40).map(|n| take(&pool, n * 5000)).collect();
        let mut places: Vec<_> = parts
            .iter()
            .map(|part| (part.start().addr(), part.len()))
            .collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
        for part in &parts {
            assert!(part.start().addr().is_multiple_of(GRANULE) && part.file().is_none());
            let (start, whole) = (part.start().addr(), part.whole());
            let first = whole.start().addr();
            assert!(first <= start && start + part.len() <= first + whole.len());
            assert!(whole.file().is_some());
        }
    }

    #[test]
    fn the_number_of_chunks_grows_with_the_logarithm_of_their_length() {
        // 128 queues of 1,024 entries: rings, lists and buffers of 64 KiB each.
        let pool = PagePool::new(64);
        let parts: Vec<_> = (0..128)
            .flat_map(|_| [take(&pool, 5 << 20), take(&pool, 64 << 20)])
            .collect();
        let mut chunks: Vec<_> = parts.iter().map(whole).collect();
        chunks.sort_unstable();
        chunks.dedup();
        assert!(chunks.len() <= 20, "{} chunks", chunks.len());
    }

    #[test]
    fn few_ranges_are_long_ones() {
        for (most, first) in [
            (0, 32 << 20),
            (1, 32 << 20),
            (4, 8 << 20),
            (16, LEAST),
            (65_535, LEAST),
        ] {
            let part = take(&PagePool::new(most), 1);
            assert_eq!(part.whole().len(), first, "{most}");
        }
    }

    #[test]
    fn what_is_given_back_is_taken_again_and_is_zero() {
        let pool = PagePool::new(64);
        let keep = take(&pool, 1);
        let one = take(&pool, 3 * GRANULE);
        let place = one.start();
        File::from(one.whole().file().unwrap().try_clone_to_owned().unwrap())
            .write_all_at(&[0xA5; 3 * GRANULE], GRANULE as u64)
            .unwrap();
        drop(one);
        let again = take(&pool, 4 * GRANULE);
        assert_eq!((again.start(), whole(&again)), (place, whole(&keep)));
        let mut bytes = vec![1; 4 * GRANULE];
        File::from(again.whole().file().unwrap().try_clone_to_owned().unwrap())
            .read_exact_at(&mut bytes, GRANULE as u64)
            .unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_chunk_without_parts_is_freed() {
        let pool = PagePool::new(64);
        let small = take(&pool, 1);
        let long = take(&pool, 64 << 20);
        let chunk = Arc::downgrade(long.whole());
        drop(long);
        assert!(chunk.upgrade().is_none());
        drop(small);
        assert_eq!(
            lock(&pool.chunks)
                .iter()
                .filter(|chunk| chunk.strong_count() > 0)
                .count(),
            0
        );
    }

    #[test]
    fn a_leaked_part_is_never_given_out_again() {
        let pool = PagePool::new(64);
        let leaked = take(&pool, GRANULE);
        let place = leaked.start().addr();
        std::mem::forget(leaked);
        let all: Vec<_> = (0..100).map(|_| take(&pool, GRANULE)).collect();
        assert!(all.iter().all(|part| part.start().addr() != place));
    }

    #[test]
    fn what_no_memory_holds_is_refused() {
        let pool = PagePool::new(64);
        assert!(pool.take(usize::MAX).is_err());
        assert!(pool.take(1 << 60).is_err());
        assert!(pool.take(1).is_ok());
    }

    use std::fs::File;
    use std::os::unix::fs::FileExt;
}
