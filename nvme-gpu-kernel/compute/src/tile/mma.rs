//! Products of small matrices by the tensor cores, one warp each: `ldmatrix` and `mma.sync`.
//!
//! Fragments of a lane, in PTX's layout, with `group = lane / 4` and `pair = lane % 4 * 2`: of a 16 x 16 `a`,
//! rows `group` and `group + 8` of columns `pair` and `pair + 1`, then the same of columns 8 higher; of a 16
//! x 8 `b`, rows `pair` and `pair + 1` of column `group`, then the same 8 rows lower; of a 16 x 8 result,
//! columns `pair` and `pair + 1` of row `group`, then of row `group + 8`.

use super::BlockShared;
use core::arch::asm;

macro_rules! four_matrices {
    ($(#[$doc:meta])* $name:ident, $form:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(self) -> [u32; 4] {
            let (a, b, c, d): (u32, u32, u32, u32);
            // SAFETY: the caller of `dynamic` vouched for the addresses; the whole warp calls it together.
            unsafe {
                asm!(concat!("ldmatrix.sync.aligned.m8n8.x4", $form, ".shared.b16 {{{a}, {b}, {c}, {d}}}, [{at}];"),
                    at = in(reg32) self.address(), a = out(reg32) a, b = out(reg32) b, c = out(reg32) c,
                    d = out(reg32) d, options(readonly, nostack));
            }
            [a, b, c, d]
        }
    };
}

macro_rules! two_matrices {
    ($(#[$doc:meta])* $name:ident, $form:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(self) -> [u32; 2] {
            let (a, b): (u32, u32);
            // SAFETY: the caller of `dynamic` vouched for the addresses; the whole warp calls it together.
            unsafe {
                asm!(concat!("ldmatrix.sync.aligned.m8n8.x2", $form, ".shared.b16 {{{a}, {b}}}, [{at}];"),
                    at = in(reg32) self.address(), a = out(reg32) a, b = out(reg32) b, options(readonly, nostack));
            }
            [a, b]
        }
    };
}

impl BlockShared {
    four_matrices!(
        /// Loads four matrices of 8 x 8 halves: lane `i` passes the address of row `i % 8` of matrix `i / 8`,
        /// a multiple of 16.
        /// Of each a lane gets two halves of row `lane / 4`. Every lane of the warp calls it.
        matrices4, ""
    );
    four_matrices!(
        /// Loads as [`Self::matrices4`] does, each matrix transposed.
        matrices4_transposed, ".trans"
    );
    two_matrices!(
        /// Loads as [`Self::matrices4`] does, two matrices, whose rows lanes 0 to 15 pass.
        matrices2, ""
    );
    two_matrices!(
        /// Loads as [`Self::matrices2`] does, both matrices transposed.
        matrices2_transposed, ".trans"
    );
}

macro_rules! product {
    ($(#[$doc:meta])* $name:ident, $form:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: computes in registers; the whole warp calls it together.
            unsafe {
                asm!(concat!("mma.sync.aligned.m16n8k16.row.col.f32.", $form, ".", $form,
                        ".f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                    inout(reg32) sums[0], inout(reg32) sums[1], inout(reg32) sums[2], inout(reg32) sums[3],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg32) b[0], in(reg32) b[1], options(pure, nomem, nostack));
            }
        }
    };
}

product!(
    /// Adds the product of 16 x 16 and 16 x 8 bf16 to 16 x 8 sums. Every lane of the warp calls it.
    mma_bf16, "bf16"
);
product!(
    /// Adds the product as [`mma_bf16`] does, for f16.
    mma_f16, "f16"
);

/// Adds the product of 16 x 8 and 8 x 8 numbers, of which the tensor cores use the upper 19 bits, to 16 x 8
/// sums.
///
/// Of `a` a lane has column `lane % 4` of rows `group` and `group + 8`, then column 4 higher; of `b` row
/// `lane % 4` of column `group`, then row 4 lower. Every lane of the warp calls it.
#[inline(always)]
pub fn mma_tf32(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    // SAFETY: computes in registers; the whole warp calls it together.
    unsafe {
        asm!("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}},",
            "{{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) sums[0], inout(reg32) sums[1], inout(reg32) sums[2], inout(reg32) sums[3],
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
            in(reg32) b[0], in(reg32) b[1], options(pure, nomem, nostack));
    }
}

/// Returns `sums` plus the product of 16 x 32 and 32 x 8 signed bytes.
///
/// Of `a` a lane has columns `lane % 4 * 4` to 3 further of rows `group` and `group + 8`, then those 16
/// higher; of `b` the same rows of column `group`, then those 16 lower. Every lane of the warp calls it.
#[inline(always)]
pub fn mma_bytes(a: [u32; 4], b: [u32; 2], sums: [u32; 4]) -> [u32; 4] {
    let (s0, s1, s2, s3): (u32, u32, u32, u32);
    // SAFETY: computes in registers; the whole warp calls it together.
    unsafe {
        asm!("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}},",
            "{{{8}, {9}}}, {{{10}, {11}, {12}, {13}}};",
            out(reg32) s0, out(reg32) s1, out(reg32) s2, out(reg32) s3,
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
            in(reg32) b[0], in(reg32) b[1],
            in(reg32) sums[0], in(reg32) sums[1], in(reg32) sums[2], in(reg32) sums[3],
            options(pure, nomem, nostack));
    }
    [s0, s1, s2, s3]
}

/// Rounds two numbers to bf16 and packs them, the first in the lower half.
#[inline(always)]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let both: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) both, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack));
    }
    both
}

/// Rounds two numbers to f16 and packs them, the first in the lower half.
#[inline(always)]
pub fn pack_f16(low: f32, high: f32) -> u32 {
    let both: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) both, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack));
    }
    both
}
