//! Products of a matrix, as it is stored, and vectors.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{Numbers, sum_of_warp, thread, warp};
use crate::{Gemv, Unpack};
use core::num::NonZeroU64;
use nvme_formats::{Stored, UNIT};
use nvme_gpu_kernel::arch;

/// A warp takes a row and a vector at a time, each lane units 32 apart.
///
/// # Safety
/// What [`Gemv`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gemv(gemv: Gemv) {
    let Some(stored) = Stored::of_number(gemv.stored) else {
        return;
    };
    // The format is the same for all: one loop each, without a choice inside.
    // SAFETY: the caller's.
    unsafe {
        match stored {
            Stored::F32 => rows(&gemv, Stored::F32),
            Stored::F16 => rows(&gemv, Stored::F16),
            Stored::Bf16 => rows(&gemv, Stored::Bf16),
            Stored::Q4_0 => rows(&gemv, Stored::Q4_0),
            Stored::Q4_1 => rows(&gemv, Stored::Q4_1),
            Stored::Q8_0 => rows(&gemv, Stored::Q8_0),
            Stored::Q4K => rows(&gemv, Stored::Q4K),
            Stored::Q6K => rows(&gemv, Stored::Q6K),
        }
    }
}

/// # Safety
/// As [`nvme_gemv`].
#[inline(always)]
unsafe fn rows(gemv: &Gemv, stored: Stored) {
    // SAFETY: the caller's.
    let (x, y) = unsafe { (Numbers::at(gemv.x), Numbers::at(gemv.y)) };
    let lane = arch::lane();
    let (mut at, warps) = warp();
    let Some(rows) = NonZeroU64::new(u64::from(gemv.rows)) else {
        return;
    };
    let all = rows.get() * u64::from(gemv.tokens);
    while at < all {
        let (row, token) = (at % rows, at / rows);
        let weights = (gemv.weights + row * gemv.row_bytes) as usize as *const u16;
        // SAFETY: the caller's: the words of the row.
        let half = |k: u32| unsafe { *weights.add(k as usize) };
        let vector = token * u64::from(gemv.columns);
        let mut sum = 0.0;
        let mut unit = lane;
        while unit < gemv.columns / UNIT {
            let first = vector + u64::from(unit * UNIT);
            sum += stored.dot(unit, half, |i| x.load(first + u64::from(i)));
            unit += 32;
        }
        let sum = sum_of_warp(sum);
        if lane == 0 {
            let to = token * u64::from(gemv.stride) + row;
            let before = if gemv.adds == 0 { 0.0 } else { y.load(to) };
            y.store(to, before + sum);
        }
        at += warps;
    }
}

/// A thread takes a unit at a time.
///
/// # Safety
/// What [`Unpack`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_unpack(unpack: Unpack) {
    let Some(stored) = Stored::of_number(unpack.stored) else {
        return;
    };
    let Some(units) = NonZeroU64::new(u64::from(unpack.columns / UNIT)) else {
        return;
    };
    // SAFETY: the caller's.
    let y = unsafe { Numbers::at(unpack.y) };
    let (mut at, threads) = thread();
    while at < units.get() * u64::from(unpack.tokens) {
        let (unit, token) = ((at % units) as u32, at / units);
        let row = (unpack.rows + token * unpack.row_stride) as usize as *const u16;
        // SAFETY: the caller's: the words of the row.
        let half = |k: u32| unsafe { *row.add(k as usize) };
        let first = at * u64::from(UNIT);
        stored.each(unit, half, |i, value| y.store(first + u64::from(i), value));
        at += threads;
    }
}
