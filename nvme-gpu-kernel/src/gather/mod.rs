//! `nvme_gather`: gathers rows of a table by ids in GPU memory.
//!
//! A block of threads holds a [station](crate::station) while it runs; each of its warps gathers 32 rows in
//! one chunk ([`warp`]).
//!
//! The order of calls in a block: [`WarpContext::enter`] takes a station and passes the gate;
//! [`GatherWarp::gather_all`] looks at the gate, submits reads, waits for them and copies rows, chunk by chunk;
//! [`launch::leave`] counts failures, frees the station and leaves the gate, and the last block of the launch reports
//! to the host.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

mod batched;
mod cached;
mod distinct;
#[cfg(feature = "rows")]
mod end;
mod failed;
#[cfg(feature = "rows")]
mod follow;
mod halves;
mod hits;
mod map;
mod mapped;
mod members;
#[cfg(feature = "rows")]
mod probe;
mod row;
mod striped;
mod warp;
#[cfg(feature = "rows")]
mod wide;
mod widened;

#[cfg(not(target_arch = "nvptx64"))]
pub use batched::nvme_gather_batched;
#[cfg(not(target_arch = "nvptx64"))]
pub use cached::nvme_gather_batched_cached;
#[cfg(not(target_arch = "nvptx64"))]
pub use distinct::{
    nvme_claim_rows, nvme_claim_rows_mapped, nvme_gather_listed, nvme_gather_listed_mapped,
    nvme_gather_listed_striped, nvme_gather_listed_striped_mapped, nvme_list_rows,
    nvme_repeat_rows,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use end::nvme_end_launch;
#[cfg(not(target_arch = "nvptx64"))]
pub use follow::nvme_follow_rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use halves::{nvme_begin_batched, nvme_finish_batched};
#[cfg(not(target_arch = "nvptx64"))]
pub use mapped::{
    nvme_begin_batched_mapped, nvme_finish_batched_mapped, nvme_gather_batched_cached_mapped,
    nvme_gather_batched_mapped, nvme_gather_batched_striped_mapped, nvme_gather_cached_mapped,
    nvme_gather_mapped, nvme_gather_striped_mapped,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use probe::{nvme_check_rows, nvme_copy_rows};
#[cfg(not(target_arch = "nvptx64"))]
pub use striped::{nvme_gather_batched_striped, nvme_gather_striped};
#[cfg(not(target_arch = "nvptx64"))]
pub use wide::nvme_widen_rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use widened::{
    nvme_finish_batched_wide, nvme_finish_batched_wide_mapped, nvme_gather_batched_wide,
    nvme_gather_batched_wide_mapped,
};

use crate::arch;
use crate::groups::WholeBlock;
use crate::launch::{self, WarpContext, WarpFailures};
use crate::launch_end;
use crate::row_cache::{RowCache, epoch, write_copy};
use crate::rows::{
    BLOCK_THREADS, BLOCK_WARPS, CacheWords, CachedGather, GatherLaunch, ListHead, ListedLaunch,
    RangeSplit, RangesLaunch, code, worst,
};
use crate::station::NO_STATION;
use hits::HitCount;
use map::{OneRange, RowMap};
use nvme_core::group::ThreadGroup;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use row::RangeSource;
use warp::{CacheOf, GatherWarp};

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows. Blocks of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads; any number of blocks.
    ///
    /// # Safety
    /// Every address in `rows` is valid as [`GatherLaunch`] documents; the queues exist on the controller and are
    /// shared.
    pub unsafe fn nvme_gather(rows: GatherLaunch) {
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { gather_some(&rows, OneRange, None, None, rows.count) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows through a cache of rows in GPU memory.
    ///
    /// # Safety
    /// As [`nvme_gather`]; the words of the cache are valid as [`CachedGather`] documents.
    pub unsafe fn nvme_gather_cached(rows: CachedGather) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_cached(&rows, OneRange) }
    }
}

/// # Safety
/// As [`nvme_gather_cached`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap) documents.
#[inline(always)]
unsafe fn gather_cached<M: RowMap>(rows: &CachedGather, map: M) {
    // SAFETY: the host vouches for the words of the cache.
    let Some(cache) = (unsafe { cache_of(&rows.cache) }) else {
        return;
    };
    let cache = CacheOf {
        cache,
        // SAFETY: as above.
        epoch: unsafe {
            epoch_of(
                &rows.cache,
                arch::block() * BLOCK_WARPS + arch::thread() / 32,
            )
        },
        data: rows.cache.data,
        line_bytes: rows.cache.line_bytes,
        words: rows.cache,
        hits: 0,
    };
    let gather = &rows.gather;
    // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
    unsafe { gather_some(gather, map, Some(cache), None, gather.count) }
}

entry! {
    #[cfg(feature = "rows")]
    /// Reads ranges of bytes.
    ///
    /// # Safety
    /// As [`nvme_gather`]; the ranges are valid as [`RangesLaunch`] documents.
    pub unsafe fn nvme_read_ranges(ranges: RangesLaunch) {
        arch::parameter(&ranges);
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe {
            gather_some(
                &ranges.gather,
                OneRange,
                None,
                Some((ranges.split, RangeSource::Parameter)),
                ranges.gather.count,
            )
        }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Reads ranges of bytes that an earlier kernel has listed in GPU memory.
    ///
    /// # Safety
    /// As [`nvme_gather`]; the list is valid as [`ListedLaunch`] documents.
    pub unsafe fn nvme_read_listed(listed: ListedLaunch) {
        // SAFETY: the host vouches for the list's address, and nothing writes the list meanwhile.
        let head = unsafe { *(listed.list as usize as *const ListHead) };
        if !listed.takes(&head) {
            refuse(&listed.gather, head.pieces);
            return;
        }
        let split = RangeSplit {
            // At most `most_ranges`, as `takes` has checked.
            range_count: head.range_count as u32,
            piece_shift: listed.piece_shift,
        };
        let source = RangeSource::Memory(listed.list + size_of::<ListHead>() as u64);
        let pieces = if split.range_count == 0 {
            0
        } else {
            head.pieces
        };
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { gather_some(&listed.gather, OneRange, None, Some((split, source)), pieces) }
    }
}

/// Fails the `pieces` pieces of a list that the launch does not accept, and reads nothing.
#[inline(always)]
fn refuse(rows: &GatherLaunch, pieces: u64) {
    let block = WholeBlock::here();
    let threads = u64::from(arch::blocks()) * u64::from(BLOCK_THREADS);
    let mut index = u64::from(arch::block()) * u64::from(BLOCK_THREADS) + u64::from(arch::thread());
    while rows.status != 0 && index < pieces && index < rows.count {
        // SAFETY: the host vouches for an `i32` for each of `count` pieces; `index` is below it.
        unsafe { arch::store_u32(rows.status + index * 4, code::OUT_OF_RANGE as u32) };
        index += threads;
    }
    block.sync();
    if block.leads() {
        let mut reports = 0;
        if arch::block() == 0 {
            let failed = if pieces == 0 { 1 } else { pieces };
            let worst = worst(0, None, code::OUT_OF_RANGE);
            reports = u32::from(launch_end::report(rows, failed, worst));
        }
        launch_end::end_block(rows, reports);
    }
}

/// Returns the launch's cache; `None` without lines.
///
/// # Safety
/// The words are valid as [`CacheWords`] documents.
#[inline(always)]
unsafe fn cache_of(words: &CacheWords) -> Option<RowCache<'_>> {
    let lines = words.lines as usize;
    if lines == 0 {
        return None;
    }
    // SAFETY: the host vouches for as many words of each kind as there are lines, used through atomics alone.
    let (states, ids, epochs) = unsafe {
        (
            core::slice::from_raw_parts(words.states as usize as *const AtomicU32, lines),
            core::slice::from_raw_parts(words.ids as usize as *const AtomicU64, lines),
            core::slice::from_raw_parts(words.epochs as usize as *const AtomicU64, lines),
        )
    };
    RowCache::new(states, ids, epochs)
}

/// Returns the epoch of the reads that the calling thread begins afterwards; warp `warp` of the launch calls it.
///
/// # Safety
/// As [`cache_of`].
#[inline(always)]
unsafe fn epoch_of(words: &CacheWords, warp: u32) -> u64 {
    // SAFETY: the host vouches for the counts of writes.
    let (by_host, by_gpu) = unsafe {
        (
            &*(words.written_by_host as usize as *const AtomicU64).add(write_copy(warp)),
            &*(words.written_by_gpu as usize as *const AtomicU64),
        )
    };
    // Acquire: pairs with the writer that incremented the count after its write; reads of the drive that come later
    // cannot return older data.
    epoch(
        by_host.load(Order::Acquire, Scope::Sys),
        by_gpu.load(Order::Acquire, Scope::Gpu),
    )
}

/// Gathers the first `count` rows, or all if there are fewer.
///
/// # Safety
/// As [`nvme_gather`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap) documents.
#[inline(always)]
unsafe fn gather_some<M: RowMap>(
    rows: &GatherLaunch,
    map: M,
    cache: Option<CacheOf<'_>>,
    ranges: Option<(RangeSplit, RangeSource)>,
    count: u64,
) {
    // SAFETY: this function's caller vouches for the launch.
    let Some((inside, block, count)) = (unsafe { enter_warp(rows, count) }) else {
        return;
    };
    let gate = inside.gate;
    let mut work = GatherWarp {
        rows,
        gate: Some(gate),
        queue: inside.queue,
        cache,
        ranges,
        map,
        count,
        members: None,
        cell: inside.cell,
        slots: inside.slots,
        ends: inside.ends,
        has_lost: false,
        failed: WarpFailures::default(),
    };
    work.gather_all(
        arch::block() * BLOCK_WARPS + arch::thread() / 32,
        arch::blocks() * BLOCK_WARPS,
    );
    let hits = match &work.cache {
        Some(of) if inside.station != NO_STATION => {
            // SAFETY: this function's caller vouches for the launch; the block holds the station.
            let count = unsafe { HitCount::of(&of.words, inside.station) };
            if arch::lane() == 0 {
                count.add(of.hits);
            }
            Some(count)
        }
        _ => None,
    };
    let left = (&work.failed, work.has_lost);
    // The barriers before the last call come after all additions.
    launch::leave(rows, (&gate, inside.station), &block, left, || {
        if let Some(count) = hits {
            count.show(count.sum());
        }
    });
}

/// Takes a station for the block; returns it, the block, and the number of the launch's rows, `count` at most. Returns
/// `None` if there are none for the block, which has ended then.
///
/// # Safety
/// As [`gather_some`].
#[inline(always)]
unsafe fn enter_warp(
    rows: &GatherLaunch,
    count: u64,
) -> Option<(WarpContext<'_>, WholeBlock, u64)> {
    let block = WholeBlock::here();
    let count = if count < rows.count {
        count
    } else {
        rows.count
    };
    if is_block_without(rows, count) {
        return None;
    }
    // SAFETY: this function's caller vouches for the launch.
    let inside = (unsafe { WarpContext::enter(rows, &block) })?;
    Some((inside, block, count))
}

/// True if none of the `count` rows of the launch is for the block, which has ended then. Every thread of the block calls
/// it.
#[inline(always)]
fn is_block_without(rows: &GatherLaunch, count: u64) -> bool {
    let lanes = rows.lanes.clamp(1, 32);
    let is_without = u64::from(arch::block() * BLOCK_WARPS * lanes) >= count;
    if is_without && WholeBlock::here().leads() {
        // A list may be much shorter than its limit, and passing the gate takes a block without rows tens of
        // microseconds, so such a block skips it.
        launch_end::end_block(rows, 0);
    }
    is_without
}
