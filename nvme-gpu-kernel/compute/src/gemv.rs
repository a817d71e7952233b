//! Products of a matrix, in its stored format, with vectors.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{FloatArray, thread, warp};
use crate::product::strip;
use crate::quantised::tiles;
use crate::strip::{GroupShape, first_row};
use crate::wide::tile;
use crate::{GemvParameters, UnpackParameters};
use core::num::NonZeroU64;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Multiplies in any format. Each vector gets a share of the warps, and each warp consecutive rows, which
    /// pass through its window by coalesced loads of 16 bytes a lane.
    ///
    /// # Safety
    /// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_gemv(gemv: GemvParameters) {
        let Some(stored) = StoredFormat::of_number(gemv.stored) else {
            return;
        };
        let shape = GroupShape::of(stored, gemv.columns);
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
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { strip(&gemv, (stored, shape), token, rows(part)..rows(part + 1)) };
            item += warps;
        }
    }
}

entry! {
    /// Multiplies in f32, f16 or bf16. Each block takes tiles of rows.
    ///
    /// # Safety
    /// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs, and it [is
    /// wide](GemvParameters::is_wide).
    pub unsafe fn nvme_gemv_wide(gemv: GemvParameters) {
        let Some(tokens) = NonZeroU64::new(gemv.tokens.into()) else {
            return;
        };
        let mut item = u64::from(arch::block());
        while item < gemv.tiles() {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { tile(&gemv, item % tokens, (item / tokens) as u32) };
            item += u64::from(arch::blocks());
        }
    }
}

entry! {
    /// Multiplies in a quantised format. Each block takes tiles of rows.
    ///
    /// # Safety
    /// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs, it [is
    /// quantised](GemvParameters::is_quantised), and blocks have [`GemvParameters::QUANTISED_SHARED`] bytes.
    pub unsafe fn nvme_gemv_quantised(gemv: GemvParameters) {
        let Some(tokens) = NonZeroU64::new(gemv.tokens.into()) else {
            return;
        };
        let mut item = u64::from(arch::block());
        while item < gemv.items() {
            let first = (item / tokens) as u32 * gemv.block_tiles();
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { tiles(&gemv, item % tokens, first) };
            item += u64::from(arch::blocks());
        }
    }
}

entry! {
    /// Converts rows to `f32`. A thread takes one unit a turn.
    ///
    /// # Safety
    /// All memory that [`UnpackParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_unpack(unpack: UnpackParameters) {
        let Some(stored) = StoredFormat::of_number(unpack.stored) else {
            return;
        };
        let Some(units) = NonZeroU64::new(u64::from(unpack.columns / UNIT)) else {
            return;
        };
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let y = unsafe { FloatArray::at(unpack.y) };
        let (mut at, threads) = thread();
        while at < units.get() * u64::from(unpack.tokens) {
            let (unit, token) = ((at % units) as u32, at / units);
            let row = (unpack.rows + token * unpack.row_stride) as usize as *const u16;
            // SAFETY: the host vouches for the words of the row, and the format reads only those of `unit`.
            let half = |k: u32| unsafe { *row.add(k as usize) };
            let first = at * u64::from(UNIT);
            stored.each(unit, half, |i, value| y.store(first + u64::from(i), value));
            at += threads;
        }
    }
}
