//! Gathers that read each distinct row once: the launches before and after the gather ([`DistinctLaunch`]).
//!
//! No block waits for another one: each launch uses what the one before it has stored. A row whose status still is
//! [`UNREAD`] at the end fails, so that runs which disturb one another cause errors and never wrong rows.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::failed::clear;
use super::map::{OneRange, RowMap};
use super::striped::{ListedRows, gather_striped};
use super::warp::GatherWarp;
use super::{enter_warp, is_block_without};
use crate::arch;
use crate::copy::{self, CopyShape};
use crate::distinct::{DistinctLaunch, DistinctStripes};
use crate::exchange::{exchanged64, of_lane64};
use crate::extents::MappedLaunch;
use crate::groups::WholeBlock;
use crate::launch::{self, WarpFailures};
use crate::launch_end;
use crate::rows::{BLOCK_THREADS, BLOCK_WARPS, StripedGather, code};
use nvme_core::group::ThreadGroup;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};

/// Status of a row that no launch has read yet.
const UNREAD: i32 = i32::MIN;
/// Slots that a thread looks at for its id. A row that finds none there is read apart.
const MOST_PROBES: u32 = 1024;
/// Number in place of a slot's, for ids without one.
const NO_SLOT: u32 = u32::MAX;

/// Number of the grid that uses the memory; 0 if none does.
const OWNER: u32 = 0;
/// Number of blocks of first launches whose run has not ended.
const INSIDE: u32 = 1;
/// 1 if another run began before the owner's had ended.
const CONTENDED: u32 = 2;
/// Number of positions in the list.
const LISTED: u32 = 3;

entry! {
    #[cfg(feature = "rows")]
    /// Enters each id of the table with its lowest position in the hash table. Blocks of
    /// [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads; any number of blocks.
    ///
    /// # Safety
    /// Every address in `distinct` is valid as [`DistinctLaunch`] documents.
    pub unsafe fn nvme_claim_rows(distinct: DistinctLaunch) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { claim(&distinct, OneRange) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Does the same as `nvme_claim_rows` for a table in several ranges.
    ///
    /// # Safety
    /// As `nvme_claim_rows`; the ranges as for [`nvme_gather_mapped`](super::nvme_gather_mapped).
    pub unsafe fn nvme_claim_rows_mapped(mapped: MappedLaunch<DistinctLaunch>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { claim(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Lists the positions of distinct rows, and finds for each row the position that it is copied from. Blocks and
    /// threads as of `nvme_claim_rows`.
    ///
    /// # Safety
    /// As `nvme_claim_rows`, which comes before it in the stream.
    pub unsafe fn nvme_list_rows(distinct: DistinctLaunch) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { list(&distinct) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Gathers the listed rows. Blocks and threads as of `nvme_gather`.
    ///
    /// # Safety
    /// As `nvme_gather` and `nvme_list_rows`, which comes before it in the stream.
    pub unsafe fn nvme_gather_listed(distinct: DistinctLaunch) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_listed(&distinct, OneRange) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Does the same as `nvme_gather_listed` for a table in several ranges.
    ///
    /// # Safety
    /// As `nvme_gather_listed`; the ranges as for [`nvme_gather_mapped`](super::nvme_gather_mapped).
    pub unsafe fn nvme_gather_listed_mapped(mapped: MappedLaunch<DistinctLaunch>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_listed(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Gathers the listed rows from striped drives. Blocks and threads as of `nvme_gather_striped`.
    ///
    /// # Safety
    /// As `nvme_gather_striped` and `nvme_list_rows`, which comes before it in the stream.
    pub unsafe fn nvme_gather_listed_striped(stripes: DistinctStripes) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_listed_striped(&stripes, OneRange) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Does the same as `nvme_gather_listed_striped` for a table in several ranges.
    ///
    /// # Safety
    /// As `nvme_gather_listed_striped`; the ranges as for [`nvme_gather_mapped`](super::nvme_gather_mapped).
    pub unsafe fn nvme_gather_listed_striped_mapped(mapped: MappedLaunch<DistinctStripes>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_listed_striped(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Copies gathered rows to the remaining positions of their ids, with their status, and leaves the hash table
    /// empty. Blocks and threads as of `nvme_claim_rows`.
    ///
    /// # Safety
    /// As `nvme_claim_rows`; `nvme_gather_listed` comes before it in the stream.
    pub unsafe fn nvme_repeat_rows(distinct: DistinctLaunch) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { repeat(&distinct) }
    }
}

/// Returns the number of the thread in the grid, and the number of threads.
#[inline(always)]
fn place_in_grid() -> (u64, u64) {
    let threads = u64::from(arch::blocks()) * u64::from(BLOCK_THREADS);
    let first = u64::from(arch::block()) * u64::from(BLOCK_THREADS);
    (first + u64::from(arch::thread()), threads)
}

/// Returns word `number` of the run.
///
/// # Safety
/// The words are valid as [`DistinctLaunch`] documents.
#[inline(always)]
unsafe fn word(distinct: &DistinctLaunch, number: u32) -> &AtomicU32 {
    // SAFETY: the caller vouches for the words, which are used through atomics alone.
    unsafe { &*((distinct.words + u64::from(number) * 4) as usize as *const AtomicU32) }
}

/// Returns slot `number` of the hash table: a position plus 1, or 0.
///
/// # Safety
/// The slots are valid as [`DistinctLaunch`] documents, and `number` is below their number.
#[inline(always)]
unsafe fn slot(distinct: &DistinctLaunch, number: u32) -> &AtomicU32 {
    // SAFETY: the caller vouches for the slots, which are used through atomics alone.
    unsafe { &*((distinct.slots + u64::from(number) * 4) as usize as *const AtomicU32) }
}

/// True if another run has disturbed this one. Every thread of the block calls it, and all get the same.
///
/// # Safety
/// As [`word`].
#[inline(always)]
unsafe fn is_contended(distinct: &DistinctLaunch, block: &WholeBlock) -> bool {
    let mut seen = 0;
    if block.leads() {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        seen = unsafe { word(distinct, CONTENDED) }.load(Order::Relaxed, Scope::Gpu);
    }
    block.broadcast(seen) != 0
}

/// Enters the run of this grid; returns false if another run uses the memory.
///
/// # Safety
/// As [`word`].
#[inline(always)]
unsafe fn enter(distinct: &DistinctLaunch, block: &WholeBlock) -> bool {
    let mut is_mine = false;
    if block.leads() {
        // Never 0. Grids that run at the same time differ in their lower bits.
        let grid = arch::grid() as u32 | 1 << 31;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let (inside, owner) = unsafe { (word(distinct, INSIDE), word(distinct, OWNER)) };
        inside.fetch_add(1, Order::Acquire, Scope::Gpu);
        let was = owner.compare_exchange(0, grid, Order::AcqRel, Scope::Gpu);
        is_mine = was == 0 || was == grid;
        if !is_mine {
            // SAFETY: as above.
            unsafe { word(distinct, CONTENDED) }.store(1, Order::Release, Scope::Gpu);
        }
    }
    block.broadcast(u32::from(is_mine)) != 0
}

/// Leaves the run; the last block makes the memory ready for the next one and shows the counts. One thread of each block
/// of the last launch calls it, after the others.
///
/// # Safety
/// As [`nvme_claim_rows`].
#[inline(always)]
unsafe fn leave(distinct: &DistinctLaunch) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let (inside, owner, contended, listed) = unsafe {
        (
            word(distinct, INSIDE),
            word(distinct, OWNER),
            word(distinct, CONTENDED),
            word(distinct, LISTED),
        )
    };
    // Release: what this block used. Acquire: what the blocks before it used.
    if inside.fetch_add(u32::MAX, Order::AcqRel, Scope::Gpu) != 1 {
        return;
    }
    let read = listed.load(Order::Relaxed, Scope::Gpu);
    // SAFETY: the host vouches for both counts.
    unsafe { show(distinct, 0, distinct.gather.count) };
    // SAFETY: the host vouches for both counts.
    unsafe { show(distinct, 1, u64::from(read)) };
    listed.store(0, Order::Relaxed, Scope::Gpu);
    contended.store(0, Order::Relaxed, Scope::Gpu);
    owner.store(0, Order::Release, Scope::Gpu);
}

/// Adds `rows` to count `number`, and shows the sum to the host.
///
/// # Safety
/// The counts are valid as [`DistinctLaunch`] documents.
#[inline(always)]
unsafe fn show(distinct: &DistinctLaunch, number: u64, rows: u64) {
    let count = (distinct.counts + number * 8) as usize as *mut u64;
    // SAFETY: the caller vouches for both counts, used through atomics alone.
    let (now, shown) = unsafe {
        arch::add_ordered(count, rows);
        (
            &*count.cast::<AtomicU64>(),
            &*((distinct.shown + number * 8) as usize as *const AtomicU64),
        )
    };
    // Another run may show an older sum after a newer one: whoever finds the sum changed stores it again.
    let mut sum = now.load(Order::Acquire, Scope::Gpu);
    loop {
        shown.store(sum, Order::Release, Scope::Sys);
        let later = now.load(Order::Acquire, Scope::Gpu);
        if later == sum {
            return;
        }
        sum = later;
    }
}

/// # Safety
/// As [`nvme_claim_rows`].
#[inline(always)]
unsafe fn claim<M: RowMap>(distinct: &DistinctLaunch, map: M) {
    let rows = &distinct.gather;
    let block = WholeBlock::here();
    // SAFETY: the caller vouches for the words.
    let is_mine = unsafe { enter(distinct, &block) };
    let (mut index, step) = place_in_grid();
    while index < rows.count {
        // SAFETY: the host vouches for an id, a status and a word of `firsts` for each row, and for the extents.
        unsafe {
            arch::store_u32(rows.status + index * 4, UNREAD as u32);
            if is_mine {
                let id = launch::id(rows, index);
                let found = match map.span(rows, (id, 0)) {
                    Some(span) => claim_slot(distinct, (id, index as u32), span.place.byte),
                    None => NO_SLOT,
                };
                arch::store_u32(distinct.firsts + index * 4, found);
            }
        }
        index += step;
    }
}

/// Enters an id of the table with its position, unless a lower position has it; returns the number of the slot. If there
/// is none, it lists the position.
///
/// # Safety
/// As [`nvme_claim_rows`]; position `position` has the id `id`, whose row begins at byte `byte` of the namespace.
#[inline(always)]
unsafe fn claim_slot(distinct: &DistinctLaunch, (id, position): (i64, u32), byte: u64) -> u32 {
    let rows = &distinct.gather;
    let last = (1u32 << distinct.slot_shift) - 1;
    let mut number = distinct.home(byte);
    let mut left = MOST_PROBES;
    while left != 0 {
        // SAFETY: the number is below that of the slots.
        let slot = unsafe { slot(distinct, number) };
        let mut was = slot.load(Order::Relaxed, Scope::Gpu);
        if was == 0 {
            was = slot.compare_exchange(0, position + 1, Order::Relaxed, Scope::Gpu);
        }
        let first = was.wrapping_sub(1);
        // SAFETY: the position is below the number of rows.
        let is_here = was == 0
            || u64::from(first) < rows.count && unsafe { launch::id(rows, u64::from(first)) } == id;
        if is_here {
            // Whichever thread comes first, the lowest position stays, so that runs do not differ.
            while was > position + 1 {
                let then = slot.compare_exchange(was, position + 1, Order::Relaxed, Scope::Gpu);
                if then == was {
                    return number;
                }
                was = then;
            }
            return number;
        }
        number = (number + 1) & last;
        left -= 1;
    }
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe {
        let at = word(distinct, LISTED).fetch_add(1, Order::Relaxed, Scope::Gpu);
        put(distinct, at, position);
    }
    NO_SLOT
}

/// Stores a position in the list.
///
/// # Safety
/// As [`nvme_claim_rows`].
#[inline(always)]
unsafe fn put(distinct: &DistinctLaunch, at: u32, position: u32) {
    // The list has room for all positions; only runs that disturb one another list more.
    if u64::from(at) < distinct.gather.count {
        // SAFETY: the caller vouches for a word for each row.
        unsafe { arch::store_u32(distinct.list + u64::from(at) * 4, position) };
    }
}

/// # Safety
/// As [`nvme_list_rows`].
#[inline(always)]
unsafe fn list(distinct: &DistinctLaunch) {
    let count = distinct.gather.count;
    let block = WholeBlock::here();
    // SAFETY: the caller keeps the conditions under `# Safety`.
    if unsafe { is_contended(distinct, &block) } {
        return;
    }
    let (index, step) = place_in_grid();
    // All threads of a block run the same number of turns, since they vote.
    let mut number = index;
    while number < 1 << distinct.slot_shift {
        // SAFETY: the number is below that of the slots.
        let was = unsafe { slot(distinct, number as u32) }.load(Order::Relaxed, Scope::Gpu);
        let position = was.wrapping_sub(1);
        let is_first = was != 0 && u64::from(position) < count;
        let vote = block.vote(is_first);
        let mut at = 0;
        if block.leads() && vote.total != 0 {
            // SAFETY: the caller vouches for the words.
            at =
                unsafe { word(distinct, LISTED) }.fetch_add(vote.total, Order::Relaxed, Scope::Gpu);
        }
        let at = block.broadcast(at);
        if is_first {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            unsafe { put(distinct, at.wrapping_add(vote.before), position) };
        }
        number += step;
    }
    let mut index = index;
    while index < count {
        // SAFETY: the host vouches for a word of `firsts` for each row; the first launch stored a slot's number there.
        unsafe {
            let found = arch::load_u32(distinct.firsts + index * 4);
            let first = match found >> distinct.slot_shift {
                0 => slot(distinct, found)
                    .load(Order::Relaxed, Scope::Gpu)
                    .wrapping_sub(1),
                _ => index as u32,
            };
            arch::store_u32(distinct.firsts + index * 4, first);
        }
        index += step;
    }
}

/// Returns the number of positions in the list: 0 if another run has disturbed this one.
///
/// # Safety
/// As [`nvme_gather_listed`].
#[inline(always)]
unsafe fn listed(distinct: &DistinctLaunch) -> u64 {
    // SAFETY: the caller vouches for the words.
    match unsafe { is_contended(distinct, &WholeBlock::here()) } {
        true => 0,
        // SAFETY: the caller vouches for the words, which no launch changes meanwhile.
        false => unsafe { word(distinct, LISTED) }
            .load(Order::Relaxed, Scope::Gpu)
            .into(),
    }
}

/// # Safety
/// As [`nvme_gather_listed_striped`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap)
/// documents.
#[inline(always)]
pub(super) unsafe fn gather_listed_striped<M: RowMap>(stripes: &DistinctStripes, map: M) {
    let distinct = &stripes.distinct;
    let striped = StripedGather {
        gather: distinct.gather,
        members: stripes.members,
        stripe_shift: stripes.stripe_shift,
        member_count: stripes.member_count,
    };
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let count = unsafe { listed(distinct) };
    if !is_block_without(&striped.gather, count) {
        gather_striped(&striped, map, (count, ListedRows(distinct.list)));
    }
}

/// # Safety
/// As [`nvme_gather_listed`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap) documents.
#[inline(always)]
unsafe fn gather_listed<M: RowMap>(distinct: &DistinctLaunch, map: M) {
    let rows = &distinct.gather;
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let Some((inside, block, count)) = (unsafe { enter_warp(rows, listed(distinct)) }) else {
        return;
    };
    let gate = inside.gate;
    let mut work = GatherWarp {
        rows,
        gate: Some(gate),
        queue: inside.queue,
        cache: None,
        ranges: None,
        map,
        count,
        members: None,
        cell: inside.cell,
        slots: inside.slots,
        ends: inside.ends,
        has_lost: false,
        failed: WarpFailures::default(),
    };
    work.gather_listed(
        distinct.list,
        arch::block() * BLOCK_WARPS + arch::thread() / 32,
        arch::blocks() * BLOCK_WARPS,
    );
    let left = (&work.failed, work.has_lost);
    launch::leave(rows, (&gate, inside.station), &block, left, || {});
}

/// # Safety
/// As [`nvme_repeat_rows`].
#[inline(always)]
unsafe fn repeat(distinct: &DistinctLaunch) {
    let rows = &distinct.gather;
    let block = WholeBlock::here();
    // SAFETY: the caller vouches for the words.
    let is_contended = unsafe { is_contended(distinct, &block) };
    let mut failed = WarpFailures::default();
    let (begin, step) = place_in_grid();
    // All lanes of a warp run the same number of turns, since they copy together.
    let mut first = begin - u64::from(arch::lane());
    while first < rows.count {
        let index = first + u64::from(arch::lane());
        let is_live = index < rows.count;
        let (mut from, mut code) = (index, code::OK);
        if is_live {
            // SAFETY: the host vouches for what is loaded, for each row.
            (from, code) = unsafe { source(distinct, index) };
        }
        if is_contended {
            code = code::NOT_RUN;
        }
        // A row that the gather has read, or has counted as failed, is done.
        let is_open = is_live && (from != index || code == UNREAD || is_contended);
        if code == UNREAD {
            code = code::NOT_RUN;
        }
        let wanted = arch::ballot(arch::FULL, is_open && code == code::OK);
        if wanted != 0 {
            let to = exchanged64(rows.out + index * rows.out_stride);
            let to = |lane| of_lane64(&to, lane);
            let from = rows.out + from * rows.out_stride;
            copy::rows(CopyShape::of(rows), from, to, wanted);
        }
        clear(rows, index, is_open && code != code::OK);
        failed.note(rows, index, is_open, (None, code));
        first += step;
    }
    let mut number = begin;
    while number < 1 << distinct.slot_shift {
        // SAFETY: the number is below that of the slots, which no launch of this run uses any more.
        unsafe { slot(distinct, number as u32) }.store(0, Order::Relaxed, Scope::Gpu);
        number += step;
    }
    let reports = launch::report(rows, &block, (failed.rows, failed.worst));
    if block.leads() {
        // Before the end is reported: the host then gives the memory to another run.
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { leave(distinct) };
        launch_end::end_block(rows, reports);
    }
}

/// Returns the position that row `index` is copied from, and the code of the row there; of an id that the table does not
/// have, no position and the code.
///
/// # Safety
/// As [`nvme_repeat_rows`]; `index` is below the number of rows.
#[inline(always)]
unsafe fn source(distinct: &DistinctLaunch, index: u64) -> (u64, i32) {
    let rows = &distinct.gather;
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let (id, first) = unsafe {
        (
            launch::id(rows, index),
            u64::from(arch::load_u32(distinct.firsts + index * 4)),
        )
    };
    if id < 0 || id as u64 >= rows.rows {
        return (u64::MAX, code::OUT_OF_RANGE);
    }
    // Whatever another run has stored there, a row is copied from one with the same id.
    // SAFETY: the position is below the number of rows.
    if first >= rows.count || unsafe { launch::id(rows, first) } != id {
        return (u64::MAX, code::NOT_RUN);
    }
    // SAFETY: as above.
    (first, unsafe { arch::load_u32(rows.status + first * 4) }
        as i32)
}
