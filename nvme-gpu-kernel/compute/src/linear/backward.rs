//! Gradients of linear layers without atomic operations, so that results have the same bits in every run.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::ApproximateLogistic;
use super::forward::put;
use super::gemm::{F32, FewRowsTile, GemmOperand, LargeTile, TileShape, product};
use super::{ActivationKind, BackwardParameters, SUMS_COLUMNS};
use crate::arch::FloatArray;
use crate::tile::BlockShared;
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Computes the gradients of sums and biases. A block takes [`SUMS_COLUMNS`] columns: each warp every eighth
    /// token, then one warp adds the warps' results.
    ///
    /// # Safety
    /// All memory that [`BackwardParameters`] names is allocated and stays so while the kernel runs; the launch has the
    /// shared memory of a number a thread.
    pub unsafe fn nvme_linear_backward_sums(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (dy, sums, dsums) = (numbers(job.dy), numbers(job.sums), numbers(job.dsums));
        let activation = ActivationKind::of_number(job.activation);
        let (lane, warp, warps) = (
            arch::lane(),
            arch::thread() / 32,
            arch::block_threads() / 32,
        );
        let column = arch::block() * SUMS_COLUMNS + lane;
        let mut total = 0.0;
        let mut token = warp;
        while token < job.tokens && column < job.outputs {
            let at = u64::from(token) * u64::from(job.outputs) + u64::from(column);
            let mut gradient = dy.load(at);
            if activation != ActivationKind::None {
                gradient *= activation.slope::<ApproximateLogistic>(sums.load(at));
                dsums.store(at, gradient);
            }
            total += gradient;
            token += warps;
        }
        // SAFETY: the host launched with the bytes of one number a thread.
        let shared = unsafe { BlockShared::dynamic() };
        shared.at(arch::thread() * 4).store(total);
        arch::sync_block();
        if warp == 0 && column < job.outputs && job.dbias != 0 {
            let (mut sum, mut other) = (0.0, 0);
            while other < warps {
                sum += shared.at((other * 32 + lane) * 4).load();
                other += 1;
            }
            numbers(job.dbias).store(column.into(), sum);
        }
    }
}

/// Computes the gradient of the inputs.
///
/// # Safety
/// All memory that [`BackwardParameters`] names is allocated and stays so while the kernel runs, the gradient of the
/// sums too; the launch has the shared memory of the stages.
#[inline(always)]
unsafe fn inputs<C: TileShape>(job: &BackwardParameters) {
    let of_sums = GemmOperand {
        address: job.dsums,
        rows: job.tokens,
        terms: job.outputs,
        stride: job.outputs,
    };
    let weights = GemmOperand {
        address: job.weights,
        rows: job.inputs,
        terms: job.outputs,
        stride: job.inputs,
    };
    let tiles = (arch::block(), arch::blocks());
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        product::<C, true, false, F32>(&of_sums, &weights, tiles, zero, |row, column, both| {
            put::<F32>(job.dx, (job.tokens, job.inputs), (row, column), both);
        });
    }
}

entry! {
    /// Computes the gradient of the inputs in large tiles.
    ///
    /// # Safety
    /// As `inputs`.
    pub unsafe fn nvme_linear_backward_inputs(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { inputs::<LargeTile>(&job) }
    }
}

entry! {
    /// Computes the gradient of the inputs in small tiles, for few tokens.
    ///
    /// # Safety
    /// As `inputs`.
    pub unsafe fn nvme_linear_backward_inputs_few(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { inputs::<FewRowsTile>(&job) }
    }
}

entry! {
    /// Computes the gradient of the weights.
    ///
    /// # Safety
    /// As `inputs`.
    pub unsafe fn nvme_linear_backward_weights(job: BackwardParameters) {
        let of_sums = GemmOperand {
            address: job.dsums,
            rows: job.outputs,
            terms: job.tokens,
            stride: job.outputs,
        };
        let x = GemmOperand {
            address: job.x,
            rows: job.inputs,
            terms: job.tokens,
            stride: job.inputs,
        };
        let tiles = (arch::block(), arch::blocks());
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            product::<LargeTile, false, false, F32>(&of_sums, &x, tiles, zero, |row, column, both| {
                put::<F32>(job.dweights, (job.outputs, job.inputs), (row, column), both);
            });
        }
    }
}

fn zero(_: u32) -> f32 {
    0.0
}
