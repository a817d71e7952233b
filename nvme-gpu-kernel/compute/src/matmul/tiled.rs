//! A tile of 32 x 32 elements of the result for each block: the operands are loaded into shared memory once
//! for all of its threads, 32 terms in one pass.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::memory::{FloatMatrix, StridedMatrix, tile_of};
use super::{MatmulParameters, TILED};
use crate::tile::{BlockShared, fma, un};
use nvme_gpu_kernel::{arch, entry};

const SIDE: u32 = TILED.rows;
const TILE_BYTES: u32 = SIDE * SIDE * 4;
const _: () = assert!(2 * TILE_BYTES == TILED.shared_bytes && TILED.threads == SIDE * SIDE);

entry! {
    /// Multiplies.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_tiled(job: MatmulParameters) {
        // SAFETY: the host vouches for the matrices, and launched with the bytes of two tiles.
        let (a, b, shared) = unsafe {
            (
                FloatMatrix::a(&job),
                FloatMatrix::b(&job),
                BlockShared::dynamic(),
            )
        };
        let (first_row, first_column) = tile_of(&job, SIDE, SIDE);
        let (row, column) = (arch::thread() / SIDE, arch::thread() % SIDE);
        let of_b = shared.at(TILE_BYTES);
        let place = (row * SIDE + column) * 4;
        let (mut sum, mut k) = (0.0, 0);
        while k < job.k {
            shared.at(place).store(a.one(first_row + row, k + column));
            of_b.at(place).store(b.one(k + row, first_column + column));
            arch::sync_block();
            un!(term in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27,
                      28, 29, 30, 31] {
                let i = term as u32;
                let a = shared.at((row * SIDE + i) * 4).load();
                let b = of_b.at((i * SIDE + column) * 4).load();
                sum = fma(a, b, sum);
            });
            arch::sync_block();
            k += SIDE;
        }
        if first_row + row < job.m && first_column + column < job.n {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let c = unsafe { StridedMatrix::at(job.c, job.c_stride) };
            c.store(first_row + row, first_column + column, sum);
        }
    }
}
