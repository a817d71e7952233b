//! One element of the result for each thread: each term costs two loads from global memory.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::memory::{StridedMatrix, tile_of};
use super::{MatmulParameters, NAIVE};
use crate::tile::fma;
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Multiplies. Consecutive threads have consecutive columns, so that their loads of `b` are coalesced into
    /// one, and all load the same element of `a`.
    ///
    /// # Safety
    /// All memory that [`MatmulParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_naive(job: MatmulParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (a, b, c) = unsafe { StridedMatrix::of(&job) };
        let (first_row, first_column) = tile_of(&job, NAIVE.rows, NAIVE.columns);
        let row = first_row + arch::thread() / 32;
        let column = first_column + arch::thread() % 32;
        if row >= job.m || column >= job.n {
            return;
        }
        let (mut sum, mut k) = (0.0, 0);
        while k < job.k {
            sum = fma(a.load(row, k), b.load(k, column), sum);
            k += 1;
        }
        c.store(row, column, sum);
    }
}
