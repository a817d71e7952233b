//! The tensor cores by `mma.sync`: four warps, each with 64 x 64 elements of the result in registers. Halves
//! of `a` and `b` pass through four stages of shared memory by asynchronous copies, and from there by
//! `ldmatrix`.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::MatmulParameters;
use super::memory::{HalvesMatrix, ProductResult, tile_of};
use crate::tile::mma::{mma_bf16, mma_f16};
use crate::tile::{BlockShared, commit, un, wait_for_copies};
use nvme_gpu_kernel::{arch, entry};

const ROWS: u32 = super::MMA.rows;
const COLUMNS: u32 = super::MMA.columns;
/// Terms of a stage.
const DEPTH: u32 = 32;
const STAGES: u32 = 4;
const A_BYTES: u32 = ROWS * DEPTH * 2;
const STAGE_BYTES: u32 = A_BYTES + DEPTH * COLUMNS * 2;
const _: () = assert!(STAGES * STAGE_BYTES == super::MMA.shared_bytes);

entry! {
    /// Multiplies.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_mma(job: MatmulParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            let copies = MmaCopies::of(&job);
            let is_aligned = copies.a.is_aligned() && copies.b.is_aligned();
            match (job.is_bf16, is_aligned) {
                (0, true) => multiply::<false, true>(&job, &copies),
                (0, false) => multiply::<false, false>(&job, &copies),
                (_, true) => multiply::<true, true>(&job, &copies),
                (_, false) => multiply::<true, false>(&job, &copies),
            }
        }
    }
}

/// Returns the offset of 8 halves of `a` in a stage: rows of 64 bytes, swizzled so that eight rows cover all
/// banks.
#[inline(always)]
fn place_of_a(row: u32, eight: u32) -> u32 {
    row * 64 + ((eight ^ (row >> 1 & 3)) * 16)
}

/// Returns the offset of 8 halves of `b` in a stage: rows of 256 bytes, swizzled.
#[inline(always)]
fn place_of_b(row: u32, eight: u32) -> u32 {
    A_BYTES + row * 256 + ((eight ^ (row & 7)) * 16)
}

/// The copies of a thread for each stage: 8 halves of rows `row`, `row + 32` and so on of `a`, and of rows
/// `depth`, `depth + 8` and so on of `b`.
struct MmaCopies {
    a: HalvesMatrix,
    b: HalvesMatrix,
    shared: BlockShared,
    first_row: u32,
    first_column: u32,
}

impl MmaCopies {
    /// Returns the copies for the calling block's tile.
    ///
    /// # Safety
    /// All memory that the job names is allocated and stays so while the kernel runs; the launch has as many
    /// bytes as the stages.
    #[inline(always)]
    unsafe fn of(job: &MatmulParameters) -> Self {
        let (first_row, first_column) = tile_of(job, ROWS, COLUMNS);
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe {
            Self {
                a: HalvesMatrix::at(job.a, job.a_stride, job.m, job.k),
                b: HalvesMatrix::at(job.b, job.b_stride, job.k, job.n),
                shared: BlockShared::dynamic(),
                first_row,
                first_column,
            }
        }
    }

    #[inline(always)]
    fn begin<const IS_ALIGNED: bool>(&self, stage: u32, tile: u32) {
        let to = self.shared.at(stage % STAGES * STAGE_BYTES);
        let thread = arch::thread();
        let (row, eight) = (thread / 4, thread % 4);
        un!(i in [0, 1, 2, 3] {
            let row = row + 32 * i as u32;
            self.a.copy::<IS_ALIGNED>(to.at(place_of_a(row, eight)), self.first_row + row, tile * DEPTH + eight * 8);
        });
        let (row, eight) = (thread / 16, thread % 16);
        un!(i in [0, 1, 2, 3] {
            let row = row + 8 * i as u32;
            self.b.copy::<IS_ALIGNED>(to.at(place_of_b(row, eight)), tile * DEPTH + row, self.first_column + eight * 8);
        });
    }
}

/// Multiplies, for one number format and alignment.
///
/// # Safety
/// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn multiply<const IS_BF16: bool, const IS_ALIGNED: bool>(
    job: &MatmulParameters,
    copies: &MmaCopies,
) {
    let tiles = job.k.div_ceil(DEPTH);
    un!(stage in [0, 1, 2] {
        copies.begin::<IS_ALIGNED>(stage as u32, stage as u32);
        commit();
    });
    let (warp, lane) = (arch::thread() / 32, arch::thread() % 32);
    let (row, column) = (warp / 2 * 64, warp % 2 * 64);
    let mut sums = [[[0f32; 4]; 8]; 4];
    let mut tile = 0;
    while tile < tiles {
        wait_for_copies::<{ STAGES - 2 }>();
        arch::sync_block();
        if tile + STAGES - 1 < tiles {
            copies.begin::<IS_ALIGNED>(tile + STAGES - 1, tile + STAGES - 1);
        }
        commit();
        let stage = copies.shared.at(tile % STAGES * STAGE_BYTES);
        un!(half in [0, 1] {
            let step = half as u32;
            let mut a = [[0u32; 4]; 4];
            let mut b = [[0u32; 4]; 4];
            un!(i in [0, 1, 2, 3] {
                let row = row + i as u32 * 16 + lane % 16;
                a[i] = stage.at(place_of_a(row, step * 2 + lane / 16)).matrices4();
            });
            un!(j in [0, 1, 2, 3] {
                let eight = column / 8 + j as u32 * 2 + lane / 16;
                b[j] = stage.at(place_of_b(step * 16 + lane % 16, eight)).matrices4_transposed();
            });
            un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3] {
                let product = if IS_BF16 { mma_bf16 } else { mma_f16 };
                product(&mut sums[i][2 * j], a[i], [b[j][0], b[j][1]]);
                product(&mut sums[i][2 * j + 1], a[i], [b[j][2], b[j][3]]);
            }); });
        });
        tile += 1;
    }
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let c = unsafe { ProductResult::<IS_BF16>::at(job) };
    un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3, 4, 5, 6, 7] {
        let [left, right, below_left, below_right] = sums[i][j];
        let row = copies.first_row + row + i as u32 * 16 + lane / 4;
        let column = copies.first_column + column + j as u32 * 8 + lane % 4 * 2;
        c.store(row, column, left, right);
        c.store(row + 8, column, below_left, below_right);
    }); });
}
