//! Linear layers by the tensor cores; bias and activation are applied before the result is stored.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{ApproximateLogistic, store_halves, store_two};
use super::gemm::{
    BF16, F16, F32, FewRowsTile, GemmOperand, LargeTile, MixedTile, TileShape, product,
};
use super::{ActivationKind, ForwardParameters};
use crate::arch::FloatArray;
use crate::tile::mma::{pack_bf16, pack_f16};
use nvme_gpu_kernel::{arch, entry};

/// Multiplies both operands and applies bias and activation.
///
/// # Safety
/// All memory that [`ForwardParameters`] names is allocated and stays so while the kernel runs; the block has the
/// threads and the shared memory of `C`.
#[inline(always)]
unsafe fn forward<C: TileShape, const KIND: u32>(job: &ForwardParameters, tiles: (u32, u32)) {
    let operand = |address, rows| GemmOperand {
        address,
        rows,
        terms: job.inputs,
        stride: job.inputs,
    };
    let (x, weights) = (
        operand(job.x, job.tokens),
        operand(job.weights, job.outputs),
    );
    let activation = ActivationKind::of_number(job.activation);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let bias = |column: u32| unsafe {
        match job.bias == 0 || column >= job.outputs {
            true => 0.0,
            false => number::<KIND>(job.bias, column.into()),
        }
    };
    let shape = (job.tokens, job.outputs);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        product::<C, true, true, KIND>(&x, &weights, tiles, bias, |row, column, sums| {
            if job.sums != 0 {
                put::<F32>(job.sums, shape, (row, column), sums);
            }
            let y = sums.map(|sum| activation.of::<ApproximateLogistic>(sum));
            put::<KIND>(job.y, shape, (row, column), y);
        });
    }
}

/// Loads number `index` of the array at `address`.
///
/// # Safety
/// It is allocated.
#[inline(always)]
unsafe fn number<const KIND: u32>(address: u64, index: u64) -> f32 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match KIND {
            F32 => FloatArray::at(address).load(index),
            _ => super::arch::half((address + index * 2) as usize as *const u16, KIND == BF16),
        }
    }
}

/// Stores two neighbouring numbers to the matrix of `rows` and `columns` at `to`, as far as they are inside.
///
/// # Safety
/// The matrix is allocated.
#[inline(always)]
#[allow(
    clippy::manual_is_multiple_of,
    reason = "the committed PTX is of this form"
)]
pub unsafe fn put<const KIND: u32>(
    to: u64,
    (rows, columns): (u32, u32),
    (row, column): (u32, u32),
    both: [f32; 2],
) {
    let count = if row >= rows || column >= columns {
        0
    } else if column + 1 < columns {
        2
    } else {
        1
    };
    let at = u64::from(row) * u64::from(columns) + u64::from(column);
    let is_even = columns % 2 == 0 && to % 8 == 0;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match KIND {
            F32 => store_two(to + at * 4, both, count, is_even),
            BF16 => store_halves(to + at * 2, pack_bf16(both[0], both[1]), count, is_even),
            _ => store_halves(to + at * 2, pack_f16(both[0], both[1]), count, is_even),
        }
    }
}

entry! {
    /// Computes the layer with one tile a block.
    ///
    /// # Safety
    /// As `forward`; as many blocks as tiles.
    pub unsafe fn nvme_linear_forward_fused(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { forward::<LargeTile, F32>(&job, (arch::block(), ONE)) }
    }
}

/// Step to the next tile that is past every tile, so that a block computes one.
const ONE: u32 = 1 << 31;

entry! {
    /// Computes the layer with several tiles a block.
    ///
    /// # Safety
    /// As `forward`.
    pub unsafe fn nvme_linear_forward_persistent(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { forward::<LargeTile, F32>(&job, (arch::block(), arch::blocks())) }
    }
}

entry! {
    /// Computes the layer over bf16.
    ///
    /// # Safety
    /// As `forward`; `inputs` is a multiple of 8, `x` and weights begin at multiples of 16.
    pub unsafe fn nvme_linear_forward_mixed_bf16(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { forward::<MixedTile, BF16>(&job, (arch::block(), arch::blocks())) }
    }
}

entry! {
    /// Computes the layer over f16.
    ///
    /// # Safety
    /// As [`nvme_linear_forward_mixed_bf16`].
    pub unsafe fn nvme_linear_forward_mixed_f16(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe { forward::<MixedTile, F16>(&job, (arch::block(), arch::blocks())) }
    }
}

macro_rules! few {
    ($($name:ident, $kind:expr;)*) => { $( entry! {
        /// Computes the layer in small tiles, for few tokens.
        ///
        /// # Safety
        /// As the kernel for many tokens.
        pub unsafe fn $name(job: ForwardParameters) {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { forward::<FewRowsTile, { $kind }>(&job, (arch::block(), arch::blocks())) }
        }
    } )* };
}

few! {
    nvme_linear_forward_few, F32;
    nvme_linear_forward_few_bf16, BF16;
    nvme_linear_forward_few_f16, F16;
}
