//! Loads and stores of 16 bytes: a thread has four columns of one row, for which it loads four terms of `a`
//! at once, and four numbers of `b` for each of them.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::memory::{FloatMatrix, store_four, tile_of};
use super::{MatmulParameters, VECTORIZED};
use crate::tile::{BlockShared, fma, un};
use nvme_gpu_kernel::{arch, entry};

const ROWS: u32 = VECTORIZED.rows;
const COLUMNS: u32 = VECTORIZED.columns;
/// Terms of a tile.
const DEPTH: u32 = 32;
const A_BYTES: u32 = ROWS * DEPTH * 4;
const _: () = assert!(A_BYTES + DEPTH * COLUMNS * 4 == VECTORIZED.shared_bytes);
const _: () = assert!(ROWS * COLUMNS == 4 * VECTORIZED.threads);

entry! {
    /// Multiplies.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_vectorized(job: MatmulParameters) {
        // SAFETY: the host vouches for the matrices, and launched with the bytes of both tiles.
        let (a, b, shared) = unsafe {
            (
                FloatMatrix::a(&job),
                FloatMatrix::b(&job),
                BlockShared::dynamic(),
            )
        };
        let (first_row, first_column) = tile_of(&job, ROWS, COLUMNS);
        let thread = arch::thread();
        let (row, column) = (thread / (COLUMNS / 4), thread % (COLUMNS / 4) * 4);
        let of_b = shared.at(A_BYTES);
        let (mut sums, mut k) = ([0f32; 4], 0);
        while k < job.k {
            if thread < ROWS * DEPTH / 4 {
                let (row, four) = (thread / (DEPTH / 4), thread % (DEPTH / 4) * 4);
                shared
                    .at(thread * 16)
                    .store4(a.four(first_row + row, k + four));
            }
            un!(part in [0, 1] {
                let row = row + part as u32 * ROWS;
                of_b.at((row * COLUMNS + column) * 4).store4(b.four(k + row, first_column + column));
            });
            arch::sync_block();
            un!(four in [0, 1, 2, 3, 4, 5, 6, 7] {
                let terms = shared.at((row * DEPTH + four as u32 * 4) * 4).load4();
                un!(i in [0, 1, 2, 3] {
                    let b = of_b.at(((four as u32 * 4 + i as u32) * COLUMNS + column) * 4).load4();
                    un!(j in [0, 1, 2, 3] { sums[j] = fma(terms[i], b[j], sums[j]); });
                });
            });
            arch::sync_block();
            k += DEPTH;
        }
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { store_four(&job, first_row + row, first_column + column, sums) };
    }
}
