//! The content of failed rows in the output.
// UNSAFETY: stores at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::rows::{GatherLaunch, failed_byte};

/// The warp stores the content of failed rows in those of the lanes that want it. Every lane calls it.
#[inline(always)]
pub fn clear(rows: &GatherLaunch, index: u64, wants: bool) {
    let mut left = arch::ballot(arch::FULL, wants);
    let first = index - u64::from(arch::lane());
    while left != 0 {
        let lane = left.trailing_zeros();
        left &= left - 1;
        let to = rows.out + (first + u64::from(lane)) * rows.out_stride;
        fill(to, rows.row_bytes, rows.failed_as);
    }
}

/// Stores the content of a failed row in `bytes` bytes of the output at `to`. Every lane calls it, with the same
/// arguments.
#[inline(always)]
pub fn fill(to: u64, bytes: u32, failed_as: u32) {
    let mut at = arch::lane();
    while at < bytes {
        let byte = failed_byte(failed_as, at);
        // SAFETY: `at` is below `bytes`, so inside the output's row.
        unsafe { arch::store_u8(to + u64::from(at), byte) };
        at += 32;
    }
}
