//! The product of rows of a matrix, in its stored format in GPU memory, with a vector.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::GemvParameters;
use crate::arch::{FloatArray, Window, sum_of_warp};
use crate::strip::{GroupShape, RowCursor, TILE_BYTES};
use crate::sums::sum_of_units;
use core::ops::Range;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::code;

/// Computes the products of some rows with vector `token`. Every lane of the warp calls it.
///
/// # Safety
/// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn strip(
    gemv: &GemvParameters,
    (stored, shape): (StoredFormat, GroupShape),
    token: u64,
    rows: Range<u64>,
) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let (x, y) = unsafe { (FloatArray::at(gemv.x), FloatArray::at(gemv.y)) };
    let window = Window::here();
    let vector = token * u64::from(gemv.columns);
    let dot = |byte: u64, groups: u32, group: u32| {
        let first = vector + u64::from(group * shape.group_units * UNIT);
        let units = groups * shape.group_units;
        sum_of_units(stored, window, byte as u32, units, (x, first))
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
    let mut cursor = RowCursor::new(rows.start, begin);
    let mut tile = begin & !(TILE_BYTES - 1);
    while rows.start < rows.end && tile < until {
        let next = tile + TILE_BYTES;
        let end = if until < next { until } else { next };
        window.take(tile, tile, (begin, end));
        cursor.advance(shape, end, code::OK, dot, &mut done);
        tile = next;
    }
}
