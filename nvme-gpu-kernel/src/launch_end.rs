//! The end of a launch: its blocks count themselves, and the last one tells the host what failed.
//!
//! A captured graph that was instantiated twice runs one launch twice at the same time, with the same words. Nothing
//! tells which of the two a block is of but the number that the GPU gives each grid. The host is told of an end whenever
//! as many blocks have ended as a launch has; what failed is kept until all launches of which a block has ended are
//! whole, so that the last end of launches that overlapped names the failures of all of them. The launch after them may
//! name them once more.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::rows::{Gather, Progress, Summary};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence};

/// The lower bits of the word of blocks count those that have ended and were not told yet. The upper ones sum up marks:
/// they are 0 when all blocks of each launch that has begun to end have ended.
const COUNT_BITS: u32 = 24;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// Adds `failed` rows to the launch's, and `worst` of them. Whether there are any: [`end_block`] of the block takes how
/// often there were. One thread for each count calls it, before its block ends.
#[inline(always)]
pub fn report(rows: &Gather, failed: u64, worst: u64) -> bool {
    if failed == 0 {
        return false;
    }
    let progress = rows.progress as usize as *mut Progress;
    // SAFETY: the host gives it; only such instructions touch it.
    unsafe {
        // Before the counts: who takes these sees that a block has not ended which they are of.
        arch::add_ordered(&raw mut (*progress).blocks, mark(1) << COUNT_BITS);
        arch::raise(&raw mut (*progress).worst, worst);
        arch::add_ordered(&raw mut (*progress).failed, failed);
    }
    true
}

/// Accounts for a block that has ended, whose threads have [reported](report) so many times; the last block of the
/// launch tells the host. One thread of the block calls it, after the others.
#[inline(always)]
pub fn end_block(rows: &Gather, reports: u32) {
    let progress = rows.progress as usize as *mut Progress;
    let blocks = arch::blocks();
    let weight = match arch::block() + 1 == blocks {
        true => u64::from(blocks - 1).wrapping_neg(),
        false => 1,
    };
    let marks = mark(weight).wrapping_sub(mark(reports.into()));
    let change = (marks << COUNT_BITS).wrapping_add(1);
    // Release: rows and counts of this block; acquire: those of the blocks before it.
    // SAFETY: the host gives it; only such instructions touch it.
    let was = unsafe { arch::add_ordered(&raw mut (*progress).blocks, change) };
    if !((was & COUNT) as u32 + 1).is_multiple_of(blocks) {
        return;
    }
    // SAFETY: the host gives it; the field is used as an atomic while blocks run.
    let ending = unsafe { &*(&raw const (*progress).ending).cast::<AtomicU32>() };
    // One block tells of all ends at a time: what it tells must not be overwritten by an earlier end.
    if ending.fetch_add(1, Order::AcqRel, Scope::Gpu) != 0 {
        return;
    }
    let mut ends = 1u32;
    while ends != 0 {
        // SAFETY: the host gives the words; this block alone tells.
        unsafe { tell(rows, ends) };
        let was = ending.fetch_add(ends.wrapping_neg(), Order::AcqRel, Scope::Gpu);
        ends = was.wrapping_sub(ends);
    }
}

/// `weight` times a number that is the grid's own.
#[inline(always)]
fn mark(weight: u64) -> u64 {
    // Sums of numbers that follow each other would be those of others, too.
    let mixed = arch::grid()
        .wrapping_add(1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(weight)
}

/// Tells the host of `ends` ends.
///
/// # Safety
/// `progress` and `summary` are what [`Gather`] says, and no other thread tells.
#[inline(always)]
unsafe fn tell(rows: &Gather, ends: u32) {
    let progress = rows.progress as usize as *mut Progress;
    let summary = rows.summary as usize as *mut Summary;
    // SAFETY: the caller's; the fields are used as atomics while blocks run.
    let (launches, kept_failed, kept_worst, to_failed, to_worst, ended) = unsafe {
        (
            &*(&raw const (*progress).launches).cast::<AtomicU32>(),
            &*(&raw const (*progress).kept_failed).cast::<AtomicU64>(),
            &*(&raw const (*progress).kept_worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).failed).cast::<AtomicU64>(),
            &*(&raw const (*summary).worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).ended).cast::<AtomicU32>(),
        )
    };
    let told = u64::from(ends.wrapping_mul(arch::blocks()));
    // SAFETY: the caller's; only such instructions touch these.
    let (failed, worst, left) = unsafe {
        let failed = arch::swap(&raw mut (*progress).failed, 0);
        let worst = arch::swap(&raw mut (*progress).worst, 0);
        let was = arch::add_ordered(&raw mut (*progress).blocks, told.wrapping_neg());
        (failed, worst, was.wrapping_sub(told))
    };
    let failed = failed + kept_failed.load(Order::Relaxed, Scope::Gpu);
    let worst = worst.max(kept_worst.load(Order::Relaxed, Scope::Gpu));
    // With another launch that has not ended as a whole, some of the failures are that one's.
    let (keeps_failed, keeps_worst) = match left {
        0 => (0, 0),
        _ => (failed, worst),
    };
    kept_failed.store(keeps_failed, Order::Relaxed, Scope::Gpu);
    kept_worst.store(keeps_worst, Order::Relaxed, Scope::Gpu);
    to_failed.store(failed, Order::Relaxed, Scope::Sys);
    to_worst.store(worst, Order::Relaxed, Scope::Sys);
    let now = launches.load(Order::Relaxed, Scope::Gpu).wrapping_add(ends);
    launches.store(now, Order::Relaxed, Scope::Gpu);
    // Release: who sees the count sees the rows.
    fence(Order::Release, Scope::Sys);
    ended.store(now, Order::Relaxed, Scope::Sys);
}
