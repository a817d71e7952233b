//! 8 x 8 elements of the result for each thread, in registers: 16 loaded numbers make 64 products. Tiles pass
//! through three stages by asynchronous copies.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::memory::{FloatMatrix, store_four, tile_of};
use super::{COARSENED, MatmulParameters};
use crate::tile::{BlockShared, commit, fma, un, wait_for_copies};
use nvme_gpu_kernel::{arch, entry};

const ROWS: u32 = COARSENED.rows;
const COLUMNS: u32 = COARSENED.columns;
/// Terms of a stage.
const DEPTH: u32 = 16;
const STAGES: u32 = 3;
/// Distance of the rows of `a` in shared memory: 16 bytes more than a row has, so that four rows are in
/// different banks.
const ROW_BYTES: u32 = DEPTH * 4 + 16;
const A_BYTES: u32 = ROWS * ROW_BYTES;
const STAGE_BYTES: u32 = A_BYTES + DEPTH * COLUMNS * 4;
const _: () = assert!(STAGES * STAGE_BYTES == COARSENED.shared_bytes);

/// The copies of a thread for each stage: four terms of two rows of `a`, four columns of two rows of `b`.
struct CoarsenedCopies {
    a: FloatMatrix,
    b: FloatMatrix,
    shared: BlockShared,
    first_row: u32,
    first_column: u32,
}

impl CoarsenedCopies {
    #[inline(always)]
    fn begin<const IS_ALIGNED: bool>(&self, tile: u32) {
        let to = self.shared.at(tile % STAGES * STAGE_BYTES);
        let thread = arch::thread();
        un!(part in [0, 1] {
            let (row, four) = (thread / 4 + part as u32 * 64, thread % 4 * 4);
            self.a.copy::<IS_ALIGNED>(to.at(row * ROW_BYTES + four * 4), self.first_row + row, tile * DEPTH + four);
        });
        un!(part in [0, 1] {
            let (row, four) = (thread / 32 + part as u32 * 8, thread % 32 * 4);
            let to = to.at(A_BYTES + (row * COLUMNS + four) * 4);
            self.b.copy::<IS_ALIGNED>(to, tile * DEPTH + row, self.first_column + four);
        });
    }
}

entry! {
    /// Multiplies.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_coarsened(job: MatmulParameters) {
        let (first_row, first_column) = tile_of(&job, ROWS, COLUMNS);
        // SAFETY: the host vouches for the matrices, and launched with the bytes of the stages.
        let copies = unsafe {
            CoarsenedCopies {
                a: FloatMatrix::a(&job),
                b: FloatMatrix::b(&job),
                shared: BlockShared::dynamic(),
                first_row,
                first_column,
            }
        };
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            match copies.a.is_aligned() && copies.b.is_aligned() {
                true => multiply::<true>(&job, &copies),
                false => multiply::<false>(&job, &copies),
            }
        }
    }
}

/// Multiplies by warps of 32 rows and 64 columns; a lane has every fourth row, and four columns of each half.
///
/// # Safety
/// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn multiply<const IS_ALIGNED: bool>(job: &MatmulParameters, copies: &CoarsenedCopies) {
    let (warp, lane) = (arch::thread() / 32, arch::thread() % 32);
    let row = warp / 2 * 32 + lane / 8;
    let column = warp % 2 * 64 + lane % 8 * 4;
    let tiles = job.k.div_ceil(DEPTH);
    copies.begin::<IS_ALIGNED>(0);
    commit();
    copies.begin::<IS_ALIGNED>(1);
    commit();
    let mut sums = [[0f32; 8]; 8];
    let mut tile = 0;
    while tile < tiles {
        wait_for_copies::<{ STAGES - 2 }>();
        arch::sync_block();
        if tile + STAGES - 1 < tiles {
            copies.begin::<IS_ALIGNED>(tile + STAGES - 1);
        }
        commit();
        let stage = copies.shared.at(tile % STAGES * STAGE_BYTES);
        let of_a = stage.at(row * ROW_BYTES);
        let of_b = stage.at(A_BYTES + column * 4);
        un!(four in [0, 1, 2, 3] {
            let mut terms = [[0f32; 4]; 8];
            un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
                terms[i] = of_a.at(i as u32 * 4 * ROW_BYTES + four as u32 * 16).load4();
            });
            un!(k in [0, 1, 2, 3] {
                let of_b = of_b.at((four as u32 * 4 + k as u32) * COLUMNS * 4);
                let (left, right) = (of_b.load4(), of_b.at(128).load4());
                un!(i in [0, 1, 2, 3, 4, 5, 6, 7] { un!(j in [0, 1, 2, 3] {
                    sums[i][j] = fma(terms[i][k], left[j], sums[i][j]);
                    sums[i][j + 4] = fma(terms[i][k], right[j], sums[i][j + 4]);
                }); });
            });
        });
        tile += 1;
    }
    un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
        let row = copies.first_row + row + i as u32 * 4;
        let [a, b, c, d, e, f, g, h] = sums[i];
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe {
            store_four(job, row, copies.first_column + column, [a, b, c, d]);
            store_four(job, row, copies.first_column + column + 32, [e, f, g, h]);
        }
    });
}
