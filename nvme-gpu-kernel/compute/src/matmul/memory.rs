//! Matrices in global memory, and the tile of the result that a block computes. Rows outside of a matrix are
//! read as zeros and never stored, so that the kernels need no case for odd sizes.
// UNSAFETY: loads and stores through addresses that the host vouches for.
#![allow(unsafe_code)]

use super::MatmulParameters;
use crate::tile::mma::{pack_bf16, pack_f16};
use crate::tile::{BlockShared, load4, store4, un};
use nvme_gpu_kernel::arch;

/// Number of rows of tiles that consecutive blocks share, so that their operands stay in L2.
const GROUP: u32 = 8;

/// Returns the first row and column of the calling block's tile. Consecutive blocks go down [`GROUP`] tiles,
/// then one to the right.
#[inline(always)]
pub fn tile_of(job: &MatmulParameters, rows: u32, columns: u32) -> (u32, u32) {
    tile_at(job, arch::block(), rows, columns)
}

/// Returns the first row and column of tile `tile`.
#[inline(always)]
pub fn tile_at(job: &MatmulParameters, tile: u32, rows: u32, columns: u32) -> (u32, u32) {
    let (down, across) = (job.m.div_ceil(rows), job.n.div_ceil(columns));
    let of_group = GROUP * across.max(1);
    let (first, at) = (tile / of_group * GROUP, tile % of_group);
    let height = (down - first).clamp(1, GROUP);
    ((first + at % height) * rows, at / height * columns)
}

/// The numbers of a matrix whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub struct StridedMatrix {
    address: u64,
    stride: u64,
}

impl StridedMatrix {
    /// Returns the three matrices of a product.
    ///
    /// # Safety
    /// As in [`Self::at`].
    #[inline(always)]
    pub unsafe fn of(job: &MatmulParameters) -> (Self, Self, Self) {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe {
            (
                Self::at(job.a, job.a_stride),
                Self::at(job.b, job.b_stride),
                Self::at(job.c, job.c_stride),
            )
        }
    }

    /// Makes a matrix.
    ///
    /// # Safety
    /// Every element that is loaded or stored through it is inside memory that the kernel may use in that
    /// way.
    #[inline(always)]
    pub unsafe fn at(address: u64, stride: u64) -> Self {
        Self { address, stride }
    }

    #[inline(always)]
    fn address<const BYTES: u64>(self, row: u32, column: u32) -> u64 {
        self.address + (u64::from(row) * self.stride + u64::from(column)) * BYTES
    }

    #[inline(always)]
    pub fn load(self, row: u32, column: u32) -> f32 {
        // SAFETY: the caller of `at` vouched for every element that is used.
        unsafe { *(self.address::<4>(row, column) as usize as *const f32) }
    }

    #[inline(always)]
    pub fn store(self, row: u32, column: u32, value: f32) {
        // SAFETY: the caller of `at` vouched for every element that is used.
        unsafe { *(self.address::<4>(row, column) as usize as *mut f32) = value };
    }
}

/// The numbers of a matrix, with zeros outside it.
pub struct FloatMatrix {
    matrix: StridedMatrix,
    rows: u32,
    columns: u32,
    /// True if rows begin at multiples of 16 bytes.
    is_aligned: bool,
}

impl FloatMatrix {
    /// Returns the first factor.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    #[inline(always)]
    pub unsafe fn a(job: &MatmulParameters) -> Self {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { Self::at(job.a, job.a_stride, job.m, job.k) }
    }

    /// Returns the second factor.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    #[inline(always)]
    pub unsafe fn b(job: &MatmulParameters) -> Self {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { Self::at(job.b, job.b_stride, job.k, job.n) }
    }

    #[inline(always)]
    unsafe fn at(address: u64, stride: u64, rows: u32, columns: u32) -> Self {
        Self {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            matrix: unsafe { StridedMatrix::at(address, stride) },
            rows,
            columns,
            is_aligned: (address | (stride * 4)).is_multiple_of(16),
        }
    }

    #[inline(always)]
    pub fn one(&self, row: u32, column: u32) -> f32 {
        match row < self.rows && column < self.columns {
            true => self.matrix.load(row, column),
            false => 0.0,
        }
    }

    /// Loads four numbers of `row` from `column`, a multiple of 4, on.
    #[inline(always)]
    pub fn four(&self, row: u32, column: u32) -> [f32; 4] {
        if self.is_aligned && row < self.rows && column.saturating_add(4) <= self.columns {
            // SAFETY: the caller of `at` vouched for the matrix; the four are inside it and aligned.
            return unsafe { load4(self.matrix.address::<4>(row, column)) };
        }
        [
            self.one(row, column),
            self.one(row, column + 1),
            self.one(row, column + 2),
            self.one(row, column + 3),
        ]
    }

    /// True if rows begin at multiples of 16 bytes.
    #[inline(always)]
    pub fn is_aligned(&self) -> bool {
        self.is_aligned
    }

    /// Copies the numbers of [`Self::four`] to `to` asynchronously.
    #[inline(always)]
    pub fn copy<const IS_ALIGNED: bool>(&self, to: BlockShared, row: u32, column: u32) {
        let left = if row < self.rows {
            self.columns.saturating_sub(column)
        } else {
            0
        };
        let from = self.matrix.address::<4>(row, column);
        if IS_ALIGNED {
            // SAFETY: the caller of `at` vouched for the matrix; at most the elements inside it are copied.
            unsafe { to.copy16(from, left.min(4) * 4) };
            return;
        }
        un!(i in [0, 1, 2, 3] {
            let bytes = if (i as u32) < left { 4 } else { 0 };
            // SAFETY: as above, one element or none.
            unsafe { to.at(i as u32 * 4).copy4(from + i as u64 * 4, bytes) };
        });
    }
}

/// Stores four numbers of a row of the result, from `column`, a multiple of 4, on, as far as they are inside.
///
/// # Safety
/// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn store_four(job: &MatmulParameters, row: u32, column: u32, numbers: [f32; 4]) {
    if row >= job.m || column >= job.n {
        return;
    }
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let c = unsafe { StridedMatrix::at(job.c, job.c_stride) };
    let left = job.n - column;
    if left >= 4 && (job.c | (job.c_stride * 4)).is_multiple_of(16) {
        // SAFETY: the four are inside the result and aligned, as checked above.
        unsafe { store4(c.address::<4>(row, column), numbers) };
        return;
    }
    un!(i in [0, 1, 2, 3] {
        if (i as u32) < left {
            c.store(row, column + i as u32, numbers[i]);
        }
    });
}

/// 16-bit numbers of a matrix, with zeros outside it.
pub struct HalvesMatrix {
    matrix: StridedMatrix,
    rows: u32,
    columns: u32,
    /// True if rows begin at multiples of 16 bytes.
    is_aligned: bool,
}

impl HalvesMatrix {
    /// Makes a matrix.
    ///
    /// # Safety
    /// As in [`StridedMatrix::at`].
    #[inline(always)]
    pub unsafe fn at(address: u64, stride: u64, rows: u32, columns: u32) -> Self {
        Self {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            matrix: unsafe { StridedMatrix::at(address, stride) },
            rows,
            columns,
            is_aligned: (address | (stride * 2)).is_multiple_of(16),
        }
    }

    /// True if rows begin at multiples of 16 bytes.
    #[inline(always)]
    pub fn is_aligned(&self) -> bool {
        self.is_aligned
    }

    /// Copies 8 halves of `row` from `column` on to `to`: asynchronously, or at once if they are not aligned.
    #[inline(always)]
    pub fn copy<const IS_ALIGNED: bool>(&self, to: BlockShared, row: u32, column: u32) {
        let left = if row < self.rows {
            self.columns.saturating_sub(column)
        } else {
            0
        };
        let count = left.min(8);
        let from = self.matrix.address::<2>(row, column);
        if IS_ALIGNED {
            // SAFETY: the caller of `at` vouched for the matrix; at most the elements inside it are copied.
            unsafe { to.copy16(from, count * 2) };
            return;
        }
        let mut i = 0;
        while i < 8 {
            let half = match i < count {
                // SAFETY: as above; `i` is below the number of elements inside.
                true => unsafe { *(from as usize as *const u16).add(i as usize) },
                false => 0,
            };
            to.at(i * 2).store_half(half);
            i += 1;
        }
    }
}

/// The result of a product of halves: `f32`, or rounded to the format of the factors.
pub struct ProductResult<const IS_BF16: bool> {
    matrix: StridedMatrix,
    rows: u32,
    columns: u32,
    is_wide: bool,
    /// True if pairs of elements begin at multiples of their size.
    has_pairs: bool,
}

impl<const IS_BF16: bool> ProductResult<IS_BF16> {
    /// Makes the result of a product.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    #[inline(always)]
    #[allow(
        clippy::manual_is_multiple_of,
        reason = "the committed PTX is of this form"
    )]
    pub unsafe fn at(job: &MatmulParameters) -> Self {
        let pair = if job.is_wide == 0 { 4 } else { 8 };
        Self {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            matrix: unsafe { StridedMatrix::at(job.c, job.c_stride) },
            rows: job.m,
            columns: job.n,
            is_wide: job.is_wide != 0,
            has_pairs: job.c % pair == 0 && job.c_stride % 2 == 0,
        }
    }

    /// Stores a lane's share of 16 rows after `wgmma`: pairs of columns `column`, `column + 8` and so on, of
    /// `row` and of `row + 8`.
    #[inline(always)]
    pub fn store_sixteen_rows(&self, row: u32, column: u32, sums: &[[f32; 4]; 32]) {
        let is_inside = row + 8 < self.rows && column + 250 <= self.columns;
        if !self.is_wide && self.has_pairs && is_inside {
            let upper = self.matrix.address::<2>(row, column) as usize as *mut u32;
            let lower = self.matrix.address::<2>(row + 8, column) as usize as *mut u32;
            thirty_two!(j {
                // SAFETY: the caller of `at` vouched for the matrix; all pairs are inside it and aligned, as
                // checked above.
                unsafe {
                    *upper.add(j * 4) = Self::pack(sums[j][0], sums[j][1]);
                    *lower.add(j * 4) = Self::pack(sums[j][2], sums[j][3]);
                }
            });
            return;
        }
        thirty_two!(j {
            let column = column + j as u32 * 8;
            self.store(row, column, sums[j][0], sums[j][1]);
            self.store(row + 8, column, sums[j][2], sums[j][3]);
        });
    }

    #[inline(always)]
    fn pack(left: f32, right: f32) -> u32 {
        if IS_BF16 {
            pack_bf16(left, right)
        } else {
            pack_f16(left, right)
        }
    }

    /// Stores two neighbouring elements, as far as they are inside. The first column is even.
    #[inline(always)]
    pub fn store(&self, row: u32, column: u32, left: f32, right: f32) {
        if row >= self.rows || column >= self.columns {
            return;
        }
        let both = column + 1 < self.columns;
        // SAFETY: the caller of `at` vouched for the matrix; row and columns are checked, and pairs are
        // stored as one only if aligned.
        unsafe {
            if self.is_wide {
                let to = self.matrix.address::<4>(row, column) as usize as *mut f32;
                if both && self.has_pairs {
                    *to.cast::<ResultPair>() = ResultPair([left, right]);
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

macro_rules! thirty_two {
    ($j:ident $block:block) => {
        un!($j in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28,
                   29, 30, 31] $block)
    };
}
use thirty_two;

#[repr(C, align(8))]
struct ResultPair([f32; 2]);
