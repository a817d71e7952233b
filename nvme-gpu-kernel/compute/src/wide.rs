//! Products of rows in GPU memory at the memory's full bandwidth: a block keeps a part of the vector in
//! shared memory, and each of its warps multiplies several rows with it at once.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{FloatArray, SharedVector, sum_of_warp};
use crate::part::{Bf16, F16, FloatFragment, RowFragment};
use crate::{GemvParameters, VECTOR_ELEMENTS};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// Columns that a warp computes in one step, 8 for each lane.
const STEP: u32 = 256;
/// Columns of a pass.
const PASS: u32 = 2 * STEP;
const _: () = assert!(VECTOR_ELEMENTS.is_multiple_of(PASS));

/// Computes the products of tile `tile` of `gemv`'s rows, [`GemvParameters::tile_rows`] rows, with vector `token`.
/// Every thread of the block calls it.
///
/// # Safety
/// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs, and
/// [`GemvParameters::is_wide`].
#[inline(always)]
pub unsafe fn tile(gemv: &GemvParameters, token: u64, tile: u32) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match (StoredFormat::of_number(gemv.stored), gemv.warp_rows()) {
            (Some(StoredFormat::F32), 1) => rows::<FloatFragment, 1>(gemv, token, tile),
            (Some(StoredFormat::F32), _) => rows::<FloatFragment, 2>(gemv, token, tile),
            (Some(StoredFormat::F16), 1) => rows::<F16, 1>(gemv, token, tile),
            (Some(StoredFormat::F16), _) => rows::<F16, 4>(gemv, token, tile),
            (Some(StoredFormat::Bf16), 1) => rows::<Bf16, 1>(gemv, token, tile),
            (Some(StoredFormat::Bf16), _) => rows::<Bf16, 4>(gemv, token, tile),
            _ => (),
        }
    }
}

/// Computes `R` rows for each warp.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn rows<P: RowFragment, const R: usize>(gemv: &GemvParameters, token: u64, tile: u32) {
    let warp = tile * BLOCK_WARPS + arch::thread() / 32;
    let first = u64::from(warp) * R as u64;
    let last = u64::from(gemv.rows) - 1;
    // Rows past the end are replaced by the last one, so that every address is valid; their sums are not
    // stored.
    let mut number = 0;
    let addresses = [(); R].map(|()| {
        let row = if first + number < last {
            first + number
        } else {
            last
        };
        number += 1;
        gemv.weights + row * gemv.row_bytes
    });
    let x = gemv.x + token * u64::from(gemv.columns) * 4;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let sums = unsafe { sums_of::<P, R>(addresses, gemv.columns, x) };
    let mut number = 0;
    while number < R {
        let sum = sum_of_warp(sums[number]);
        let row = first + number as u64;
        if arch::lane() == 0 && row <= last {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            let y = unsafe { FloatArray::at(gemv.y) };
            let to = token * u64::from(gemv.stride) + row;
            let before = if gemv.adds == 0 { 0.0 } else { y.load(to) };
            y.store(to, before + sum);
        }
        number += 1;
    }
}

/// Returns the lane's sums of `columns` columns of each row. Registers are refilled for the next pass right
/// after their use, so that most of a pass is in flight at any time.
///
/// # Safety
/// The columns are allocated, and as many elements of the vector at `x`. Every thread of the block calls it.
#[inline(always)]
unsafe fn sums_of<P: RowFragment, const R: usize>(
    rows: [u64; R],
    columns: u32,
    x: u64,
) -> [f32; R] {
    let (lane, vector) = (arch::lane(), SharedVector::of_block());
    let whole = columns / PASS * PASS;
    let left = columns.saturating_sub(STEP);
    // SAFETY: this function's caller vouches for the columns, and nothing is loaded beyond them.
    let (mut first, mut second) = unsafe {
        (
            rows.map(|row| P::load_until(row, 0, lane, columns)),
            rows.map(|row| P::load_until(row, STEP, lane, left)),
        )
    };
    let mut sums = [0.0; R];
    let mut at = 0;
    while at < columns {
        let place = at % VECTOR_ELEMENTS;
        if place == 0 {
            arch::sync_block();
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe { vector.fill(x + u64::from(at) * 4, columns - at, P::FLIP) };
            arch::sync_block();
        }
        if at < whole {
            let ahead = if at + PASS < whole { at + PASS } else { at };
            sums = added::<P, R>(sums, first, vector, place);
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            first = rows.map(|row| unsafe { P::load(row, ahead, lane) });
            sums = added::<P, R>(sums, second, vector, place + STEP);
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            second = rows.map(|row| unsafe { P::load(row, ahead + STEP, lane) });
            at += PASS;
        } else {
            // SAFETY: as above.
            let last = rows.map(|row| unsafe { P::load_until(row, at, lane, columns - at) });
            sums = added::<P, R>(sums, last, vector, place);
            at += STEP;
        }
    }
    sums
}

#[inline(always)]
fn added<P: RowFragment, const R: usize>(
    sums: [f32; R],
    raw: [P::Raw; R],
    vector: SharedVector,
    place: u32,
) -> [f32; R] {
    let lane = arch::lane();
    let x = P::fours(lane).map(|four| vector.four(place / 4 + four, P::FLIP));
    let mut number = 0;
    raw.map(|raw| {
        number += 1;
        sums[number - 1] + P::dot(raw, x)
    })
}
