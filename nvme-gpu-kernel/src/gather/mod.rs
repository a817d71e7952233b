//! `nvme_gather`: rows of a table by ids that lie in GPU memory.
//!
//! A block of threads holds a [station](crate::station) while it runs; each warp of it gathers 32 rows at a time
//! ([`warp`]).
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

mod copy;
mod members;
mod probe;
mod warp;
mod wide;

use crate::arch;
use crate::groups::Block;
use crate::rows::{
    BLOCK_WARPS, Cached, Gather, Progress, Ranges, STATION_CELLS, Split, Striped, Summary,
    WARP_BYTES, Widened, code,
};
use crate::station::{self, NO_STATION};
use members::Members;
use nvme_core::group::Group;
use nvme_core::row_cache::RowCache;
use nvme_core::stripes::Stripes;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence};
use warp::{CacheOf, Warp};
use wide::Widening;

/// Gathers rows: blocks of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads, as many as are useful.
///
/// # Safety
/// Every address in `rows` is what [`Gather`] says; the queues exist on the controller and are shared.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gather(rows: Gather) {
    // SAFETY: the caller's.
    unsafe { gather(&rows, None, None, None) }
}

/// The same with a cache of rows in GPU memory.
///
/// # Safety
/// As [`nvme_gather`]; the words of the cache are what [`Cached`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gather_cached(rows: Cached) {
    // SAFETY: the caller's.
    let Some(cache) = (unsafe { cache_of(&rows) }) else {
        return;
    };
    // SAFETY: the caller's.
    unsafe { gather(&rows.gather, Some(cache), None, None) }
}

/// The same with elements that become wider on the way, with a cache where there are lines.
///
/// # Safety
/// As [`nvme_gather_cached`]; the wide rows are where [`Widened`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gather_wide(rows: Widened) {
    let Some(widening) = Widening::new(&rows) else {
        return;
    };
    // SAFETY: the caller's.
    unsafe {
        let cache = cache_of(&rows.cached);
        gather(&rows.cached.gather, cache, Some(widening), None);
    }
}

/// Reads ranges of bytes.
///
/// # Safety
/// As [`nvme_gather`]; the ranges are what [`Ranges`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_read_ranges(ranges: Ranges) {
    // SAFETY: the caller's.
    unsafe { gather(&ranges.gather, None, None, Some(ranges.split)) }
}

/// Gathers rows of several drives in stripes.
///
/// # Safety
/// As [`nvme_gather`]; the members are what [`Striped`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gather_striped(rows: Striped) {
    gather_striped(&rows);
}

/// # Safety
/// As [`nvme_gather_cached`].
#[inline(always)]
unsafe fn cache_of(rows: &Cached) -> Option<CacheOf<'_>> {
    let lines = rows.lines as usize;
    if lines == 0 {
        return None;
    }
    // SAFETY: the caller's: as many words of each kind as lines, which are atomics; and the word of the epoch.
    let (states, ids, epochs, epoch) = unsafe {
        (
            core::slice::from_raw_parts(rows.states as usize as *const AtomicU32, lines),
            core::slice::from_raw_parts(rows.ids as usize as *const AtomicU64, lines),
            core::slice::from_raw_parts(rows.epochs as usize as *const AtomicU32, lines),
            &*(rows.epoch as usize as *const AtomicU32),
        )
    };
    let cache = RowCache::new(states, ids, epochs)?;
    Some(CacheOf {
        cache,
        // Acquire: pairs with who counted it up, after a write.
        epoch: epoch.load(Order::Acquire, Scope::Sys),
        data: rows.data,
        line_bytes: rows.line_bytes,
    })
}

/// # Safety
/// As [`nvme_gather`].
#[inline(always)]
unsafe fn gather(
    rows: &Gather,
    cache: Option<CacheOf<'_>>,
    widening: Option<Widening>,
    ranges: Option<Split>,
) {
    // SAFETY: the caller's.
    let Some(gate) = (unsafe { station::gate(rows) }) else {
        return;
    };
    let block = Block::here();
    let mut station = NO_STATION;
    if block.leads() {
        station = station::claim(rows, &gate);
    }
    let station = block.broadcast(station);
    let warp = arch::thread() / 32;
    let number = station::queue_number(rows, station, warp);
    let queue = match station {
        NO_STATION => None,
        // SAFETY: the host vouches for the queues.
        _ => unsafe { rows.queues.shared(number) },
    };
    let mut work = Warp {
        rows,
        gate: Some(gate),
        queue,
        cache,
        widening,
        ranges,
        members: None,
        cell: station * STATION_CELLS + warp * 32,
        slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
        // A warp without a station writes codes alone.
        ends: match station {
            NO_STATION => station::why_none(&gate),
            _ => code::OK,
        },
        has_lost: false,
        failed: 0,
        worst: 0,
    };
    work.gather_all(
        arch::block() * BLOCK_WARPS + warp,
        arch::blocks() * BLOCK_WARPS,
    );
    if arch::lane() == 0 {
        work.report();
        if work.has_lost {
            gate.report_trouble();
        }
    }
    // Every warp has left its slots, and its writes are ordered before what the leader does.
    let keeps = block.vote(work.has_lost).total > 0;
    if block.leads() {
        station::leave(rows, &gate, station, keeps);
        end_block(rows);
    }
}

#[inline(always)]
fn gather_striped(striped: &Striped) {
    let rows = &striped.gather;
    let Some(stripes) = Stripes::shifted(striped.stripe_shift, striped.member_count) else {
        return;
    };
    let block = Block::here();
    let warp = arch::thread() / 32;
    let (mut station, mut inside) = (NO_STATION, 0);
    if warp == 0 {
        (station, inside) = members::enter(striped);
    }
    let station = block.broadcast(station);
    let inside = block.broadcast(inside);
    let mut work = Warp {
        rows,
        gate: None,
        queue: None,
        cache: None,
        widening: None,
        ranges: None,
        members: Some(Members::new(striped, stripes, station, inside)),
        cell: station * STATION_CELLS + warp * 32,
        slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
        ends: match (station, inside) {
            (NO_STATION, 0) => code::GONE,
            (NO_STATION, _) => code::NOT_RUN,
            _ => code::OK,
        },
        has_lost: false,
        failed: 0,
        worst: 0,
    };
    work.gather_all(
        arch::block() * BLOCK_WARPS + warp,
        arch::blocks() * BLOCK_WARPS,
    );
    if let Some(members) = &mut work.members {
        members.leave();
    }
    if arch::lane() == 0 {
        work.report();
    }
    // Every warp has left its slots and the members.
    block.sync();
    if block.leads() {
        if station != NO_STATION {
            station::give_back(rows, station);
        }
        end_block(rows);
    }
}

/// Accounts for a block that has ended; the last one tells the host.
#[inline(always)]
fn end_block(rows: &Gather) {
    let progress = rows.progress as usize as *mut Progress;
    let summary = rows.summary as usize as *mut Summary;
    // SAFETY: the host gives both; the fields are used as atomics while blocks run.
    let (blocks, launches, failed, first) = unsafe {
        (
            &*(&raw const (*progress).blocks).cast::<AtomicU32>(),
            &*(&raw const (*progress).launches).cast::<AtomicU32>(),
            &*(&raw const (*progress).failed).cast::<AtomicU64>(),
            &*(&raw const (*progress).worst).cast::<AtomicU64>(),
        )
    };
    // Release: rows and counts of this block; acquire: those of the blocks before it.
    if blocks.fetch_add(1, Order::AcqRel, Scope::Gpu) + 1 != arch::blocks() {
        return;
    }
    let count = failed.load(Order::Relaxed, Scope::Gpu);
    let word = first.load(Order::Relaxed, Scope::Gpu);
    failed.store(0, Order::Relaxed, Scope::Gpu);
    first.store(0, Order::Relaxed, Scope::Gpu);
    blocks.store(0, Order::Relaxed, Scope::Gpu);
    // SAFETY: as above; no other launch with this summary runs.
    let (to_failed, to_worst, ended) = unsafe {
        (
            &*(&raw const (*summary).failed).cast::<AtomicU64>(),
            &*(&raw const (*summary).worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).ended).cast::<AtomicU32>(),
        )
    };
    to_failed.store(count, Order::Relaxed, Scope::Sys);
    to_worst.store(word, Order::Relaxed, Scope::Sys);
    let now = launches.load(Order::Relaxed, Scope::Gpu).wrapping_add(1);
    launches.store(now, Order::Relaxed, Scope::Gpu);
    // Release: who sees the count sees the rows.
    fence(Order::Release, Scope::Sys);
    ended.store(now, Order::Relaxed, Scope::Sys);
}
