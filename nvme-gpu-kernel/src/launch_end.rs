//! The end of a launch: its blocks count themselves, and the last one reports the failures to the host.
//!
//! A captured graph that was instantiated twice can run one launch twice at the same time, with the same
//! words. Blocks of the two differ only in the number that the GPU assigns to each grid. The host gets a
//! report whenever as many blocks have ended as a launch has. Failures are kept until no launch has only some
//! of its blocks ended, so the last report of launches that overlapped includes the failures of all of them.
//! The next launch may report them once more.
//!
//! The order of calls: [`report`] by each thread that counted failures; then, after a barrier, [`end_block`]
//! by one thread of the block.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::rows::{GatherLaunch, LaunchProgress, LaunchSummary};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence};

/// Number of the lower bits of the word of blocks, which count the blocks that have ended and were not
/// reported yet. The upper bits are a sum of marks, which is 0 if every launch with an ended block has ended
/// as a whole.
const COUNT_BITS: u32 = 24;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// Adds `failed` rows to the launch's failures, with `worst`, the word of the first of these rows; returns true if
/// there are any. The caller counts the threads that got true and passes the number to [`end_block`]. One thread for
/// each count calls it, before its block ends.
#[inline(always)]
pub fn report(rows: &GatherLaunch, failed: u64, worst: u64) -> bool {
    if failed == 0 {
        return false;
    }
    let progress = rows.progress as usize as *mut LaunchProgress;
    // SAFETY: the host vouches for the words, which are only accessed by such atomic instructions.
    unsafe {
        // The mark comes before the counts: a block that takes these counts for its report then also sees the
        // mark of this block, which has not ended.
        arch::add_ordered(&raw mut (*progress).blocks, mark(1) << COUNT_BITS);
        arch::raise(&raw mut (*progress).worst, worst);
        arch::add_ordered(&raw mut (*progress).failed, failed);
    }
    true
}

/// Accounts for a block that has ended, `reports` of whose threads have [reported](report) failures; the last
/// block of the launch reports to the host. One thread of the block calls it, after the others.
#[inline(always)]
pub fn end_block(rows: &GatherLaunch, reports: u32) {
    let progress = rows.progress as usize as *mut LaunchProgress;
    let blocks = arch::blocks();
    let weight = match arch::block() + 1 == blocks {
        true => u64::from(blocks - 1).wrapping_neg(),
        false => 1,
    };
    let marks = mark(weight).wrapping_sub(mark(reports.into()));
    let change = (marks << COUNT_BITS).wrapping_add(1);
    // Release: rows and counts of this block. Acquire: those of the blocks before it, which this block may
    // report.
    // SAFETY: the host vouches for the words, which are only accessed by such atomic instructions.
    let was = unsafe { arch::add_ordered(&raw mut (*progress).blocks, change) };
    if !((was & COUNT) as u32 + 1).is_multiple_of(blocks) {
        return;
    }
    // SAFETY: the host vouches for the words; the field is only accessed as an atomic while blocks run.
    let ending = unsafe { &*(&raw const (*progress).ending).cast::<AtomicU32>() };
    // One block reports all ends in turn: two blocks at once could overwrite a later report with an earlier
    // one. The others only add their end, which the reporting block finds when it takes its own back.
    if ending.fetch_add(1, Order::AcqRel, Scope::Gpu) != 0 {
        return;
    }
    let mut ends = 1u32;
    while ends != 0 {
        // SAFETY: the host vouches for the words, and the counter above admits one block.
        unsafe { tell(rows, ends) };
        let was = ending.fetch_add(ends.wrapping_neg(), Order::AcqRel, Scope::Gpu);
        ends = was.wrapping_sub(ends);
    }
}

/// Returns `weight` times a number that identifies the grid.
#[inline(always)]
fn mark(weight: u64) -> u64 {
    // Mixed, because sums of consecutive grid numbers would be equal for different sets of grids.
    let mixed = arch::grid()
        .wrapping_add(1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(weight)
}

/// Reports `ends` ends to the host.
///
/// # Safety
/// `progress` and `summary` are valid as [`GatherLaunch`] documents, and no other thread reports.
#[inline(always)]
unsafe fn tell(rows: &GatherLaunch, ends: u32) {
    let progress = rows.progress as usize as *mut LaunchProgress;
    let summary = rows.summary as usize as *mut LaunchSummary;
    // SAFETY: the caller vouches for the words; the fields are only accessed as atomics while blocks run.
    let (launches, has_failed, kept_failed, kept_worst, to_failed, to_worst, failed_ever, ended) = unsafe {
        (
            &*(&raw const (*progress).launches).cast::<AtomicU32>(),
            &*(&raw const (*progress).failed).cast::<AtomicU64>(),
            &*(&raw const (*progress).kept_failed).cast::<AtomicU64>(),
            &*(&raw const (*progress).kept_worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).failed).cast::<AtomicU64>(),
            &*(&raw const (*summary).worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).failed_ever).cast::<AtomicU64>(),
            &*(&raw const (*summary).ended).cast::<AtomicU32>(),
        )
    };
    let told = u64::from(ends.wrapping_mul(arch::blocks()));
    // Acquire: pairs with the addition to the failures, so that the worst of them is there. Mostly there are none, and
    // nothing has to be taken; those of a thread that is between its two additions are left for the next report.
    let (mut failed, mut worst) = (has_failed.load(Order::Acquire, Scope::Gpu), 0);
    // SAFETY: the caller vouches for the words, which are only accessed by such atomic instructions.
    let left = unsafe {
        if failed != 0 {
            failed = arch::swap(&raw mut (*progress).failed, 0);
            worst = arch::swap(&raw mut (*progress).worst, 0);
            // Added before the kept failures are, so that each failure is counted once.
            let ever = failed_ever.load(Order::Relaxed, Scope::Sys) + failed;
            failed_ever.store(ever, Order::Relaxed, Scope::Sys);
        }
        let was = arch::add_ordered(&raw mut (*progress).blocks, told.wrapping_neg());
        was.wrapping_sub(told)
    };
    let failed = failed + kept_failed.load(Order::Relaxed, Scope::Gpu);
    let worst = worst.max(kept_worst.load(Order::Relaxed, Scope::Gpu));
    // If another launch has only some of its blocks ended, some of the failures belong to it.
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
    // Release: a host that sees the count also sees the rows and the failures. The host polls this word
    // without a call of the driver, so nothing else orders its later reads of the output.
    fence(Order::Release, Scope::Sys);
    ended.store(now, Order::Relaxed, Scope::Sys);
}
