//! Products of a matrix, as it is stored, and vectors.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{Numbers, Window, sum_of_warp, thread, warp};
use crate::strip::{Cursor, Shape, TILE_BYTES, first_row};
use crate::sums::sum_of_units;
use crate::{Gemv, Unpack};
use core::num::NonZeroU64;
use core::ops::Range;
use nvme_formats::{Stored, UNIT};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::code;

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

/// The products of some rows and vector `token`. Every lane of the warp calls it.
///
/// # Safety
/// As [`nvme_gemv`].
#[inline(always)]
unsafe fn strip(gemv: &Gemv, (stored, shape): (Stored, Shape), token: u64, rows: Range<u64>) {
    // SAFETY: the caller's.
    let (x, y) = unsafe { (Numbers::at(gemv.x), Numbers::at(gemv.y)) };
    let window = Window::here();
    let vector = token * u64::from(gemv.columns);
    let dot = |byte: u64, groups: u32, group: u32| {
        let first = vector + u64::from(group * shape.group_units * UNIT + arch::lane());
        let at = |unit: u32| x.load(first + u64::from(unit * UNIT));
        sum_of_units(stored, window, byte as u32, groups * shape.group_units, at)
    };
    let mut done = |row: u64, sum: f32, _: i32| {
        let sum = sum_of_warp(sum);
        if arch::lane() == 0 {
            let to = token * u64::from(gemv.stride) + row;
            let before = if gemv.adds == 0 { 0.0 } else { y.load(to) };
            y.store(to, before + sum);
        }
    };
    let byte = |row: u64| gemv.weights + row * gemv.row_bytes;
    let (begin, until) = (byte(rows.start), byte(rows.end));
    let mut cursor = Cursor::new(rows.start, begin);
    let mut tile = begin & !(TILE_BYTES - 1);
    while rows.start < rows.end && tile < until {
        let next = tile + TILE_BYTES;
        let end = if until < next { until } else { next };
        window.take(tile, tile, (begin, end));
        cursor.advance(shape, end, code::OK, dot, &mut done);
        tile = next;
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
