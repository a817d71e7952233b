//! Matrices in global memory, and which part of the result a block computes.
// UNSAFETY: loads and stores through addresses that the host vouches for.
#![allow(unsafe_code)]

use super::Matmul;
use crate::tile::Shared;
use crate::tile::mma::{pack_bf16, pack_f16};
use nvme_gpu_kernel::arch;

/// Rows of tiles that blocks go through together, so that what they read is in L2.
const GROUP: u32 = 8;

/// The first row and column of the calling block's tile. Blocks that follow on each other go down [`GROUP`] tiles, then
/// one to the right.
#[inline(always)]
pub fn tile_of(job: &Matmul, rows: u32, columns: u32) -> (u32, u32) {
    let (down, across) = (job.m.div_ceil(rows), job.n.div_ceil(columns));
    let of_group = GROUP * across.max(1);
    let (first, at) = (arch::block() / of_group * GROUP, arch::block() % of_group);
    let height = (down - first).clamp(1, GROUP);
    ((first + at % height) * rows, at / height * columns)
}

/// Numbers of a matrix whose rows lie `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Matrix {
    address: u64,
    stride: u64,
}

impl Matrix {
    /// Those of a product.
    ///
    /// # Safety
    /// As in [`Self::at`].
    #[inline(always)]
    pub unsafe fn of(job: &Matmul) -> (Self, Self, Self) {
        // SAFETY: the caller's.
        unsafe {
            (
                Self::at(job.a, job.a_stride),
                Self::at(job.b, job.b_stride),
                Self::at(job.c, job.c_stride),
            )
        }
    }

    /// # Safety
    /// All that is loaded or stored through it lies in memory that the kernel may use so.
    #[inline(always)]
    pub unsafe fn at(address: u64, stride: u64) -> Self {
        Self { address, stride }
    }

    /// The address of an element of `BYTES` bytes.
    #[inline(always)]
    fn address<const BYTES: u64>(self, row: u32, column: u32) -> u64 {
        self.address + (u64::from(row) * self.stride + u64::from(column)) * BYTES
    }

    #[inline(always)]
    pub fn load(self, row: u32, column: u32) -> f32 {
        // SAFETY: vouched for in `at`.
        unsafe { *(self.address::<4>(row, column) as usize as *const f32) }
    }

    #[inline(always)]
    pub fn store(self, row: u32, column: u32, value: f32) {
        // SAFETY: vouched for in `at`.
        unsafe { *(self.address::<4>(row, column) as usize as *mut f32) = value };
    }
}

/// Halves of 16 bits, zeros outside.
pub struct Halves {
    matrix: Matrix,
    rows: u32,
    columns: u32,
    /// Rows begin at multiples of 16 bytes.
    is_aligned: bool,
}

impl Halves {
    /// # Safety
    /// As in [`Matrix::at`].
    #[inline(always)]
    pub unsafe fn at(address: u64, stride: u64, rows: u32, columns: u32) -> Self {
        Self {
            // SAFETY: the caller's.
            matrix: unsafe { Matrix::at(address, stride) },
            rows,
            columns,
            is_aligned: (address | stride * 2).is_multiple_of(16),
        }
    }

    /// Brings the 8 halves of `row` from `column` on to `to`: by an asynchronous copy, or at once where they are not
    /// aligned.
    #[inline(always)]
    pub fn copy(&self, to: Shared, row: u32, column: u32) {
        let left = if row < self.rows {
            self.columns.saturating_sub(column)
        } else {
            0
        };
        let count = left.min(8);
        let from = match count {
            0 => self.matrix.address,
            _ => self.matrix.address::<2>(row, column),
        };
        if self.is_aligned {
            // SAFETY: vouched for in `at`: so many elements are inside.
            unsafe { to.copy16(from, count * 2) };
            return;
        }
        let mut i = 0;
        while i < 8 {
            // SAFETY: as above.
            let half = if i < count {
                unsafe { *(from as usize as *const u16).add(i as usize) }
            } else {
                0
            };
            to.at(i * 2).store_half(half);
            i += 1;
        }
    }
}

/// The result of a product of halves: f32, or rounded to what they are.
pub struct Result<const IS_BF16: bool> {
    matrix: Matrix,
    rows: u32,
    columns: u32,
    is_wide: bool,
    /// Pairs of elements begin at multiples of their size.
    has_pairs: bool,
}

impl<const IS_BF16: bool> Result<IS_BF16> {
    /// # Safety
    /// What [`Matmul`] names is there.
    #[inline(always)]
    pub unsafe fn at(job: &Matmul) -> Self {
        let pair = if job.is_wide == 0 { 4 } else { 8 };
        Self {
            // SAFETY: the caller's.
            matrix: unsafe { Matrix::at(job.c, job.c_stride) },
            rows: job.m,
            columns: job.n,
            is_wide: job.is_wide != 0,
            has_pairs: job.c % pair == 0 && job.c_stride % 2 == 0,
        }
    }

    /// Stores two elements that follow on each other, as far as they are inside. The first column is even.
    #[inline(always)]
    pub fn store(&self, row: u32, column: u32, left: f32, right: f32) {
        if row >= self.rows || column >= self.columns {
            return;
        }
        let both = column + 1 < self.columns;
        // SAFETY: vouched for in `at`: inside the matrix, and aligned as pairs where they are stored so.
        unsafe {
            if self.is_wide {
                let to = self.matrix.address::<4>(row, column) as usize as *mut f32;
                if both && self.has_pairs {
                    *to.cast::<Pair>() = Pair([left, right]);
                } else {
                    *to = left;
                    if both {
                        *to.add(1) = right;
                    }
                }
                return;
            }
            let word = if IS_BF16 {
                pack_bf16(left, right)
            } else {
                pack_f16(left, right)
            };
            let to = self.matrix.address::<2>(row, column) as usize as *mut u16;
            if both && self.has_pairs {
                *to.cast::<u32>() = word;
            } else {
                *to = word as u16;
                if both {
                    *to.add(1) = (word >> 16) as u16;
                }
            }
        }
    }
}

#[repr(C, align(8))]
struct Pair([f32; 2]);
