//! Products of a matrix, as it is stored, and vectors.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{Numbers, thread, warp};
use crate::product::strip;
use crate::quantised::tiles;
use crate::strip::{Shape, first_row};
use crate::wide::tile;
use crate::{Gemv, Unpack};
use core::num::NonZeroU64;
use nvme_formats::{Stored, UNIT};
use nvme_gpu_kernel::arch;

/// Each vector has its share of the warps, and of those each has rows that follow on each other, which pass through its
/// window: loads of 16 bytes a lane, side by side, whatever the format.
///
/// # Safety
/// What [`Gemv`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gemv(gemv: Gemv) {
    let Some(stored) = Stored::of_number(gemv.stored) else {
        return;
    };
    let shape = Shape::of(stored, gemv.columns);
    let Some(tokens) = NonZeroU64::new(gemv.tokens.into()) else {
        return;
    };
    let (mut item, warps) = warp();
    let share = if warps < tokens.get() {
        1
    } else {
        warps / tokens
    };
    while shape.groups != 0 && item < share * tokens.get() {
        let (token, part) = (item % tokens, (item / tokens) as u32);
        let rows = |part| first_row(gemv.rows.into(), part, share as u32);
        // SAFETY: the caller's.
        unsafe { strip(&gemv, (stored, shape), token, rows(part)..rows(part + 1)) };
        item += warps;
    }
}

/// Each block takes tiles of rows.
///
/// # Safety
/// What [`Gemv`] names is there, and it [is wide](Gemv::is_wide).
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gemv_wide(gemv: Gemv) {
    let Some(tokens) = NonZeroU64::new(gemv.tokens.into()) else {
        return;
    };
    let mut item = u64::from(arch::block());
    while item < gemv.tiles() {
        // SAFETY: the caller's.
        unsafe { tile(&gemv, item % tokens, (item / tokens) as u32) };
        item += u64::from(arch::blocks());
    }
}

/// Each block takes tiles of rows.
///
/// # Safety
/// What [`Gemv`] names is there, it [is quantised](Gemv::is_quantised), and blocks have [`Gemv::QUANTISED_SHARED`] bytes.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gemv_quantised(gemv: Gemv) {
    let Some(tokens) = NonZeroU64::new(gemv.tokens.into()) else {
        return;
    };
    let mut item = u64::from(arch::block());
    while item < gemv.items() {
        let first = (item / tokens) as u32 * gemv.block_tiles();
        // SAFETY: the caller's.
        unsafe { tiles(&gemv, item % tokens, first) };
        item += u64::from(arch::blocks());
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
