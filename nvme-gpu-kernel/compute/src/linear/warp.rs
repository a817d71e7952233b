//! Gradients of linear layers by reductions over the lanes of a warp, without tiles in shared memory.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::{BackwardParameters, WARP_COLUMNS, WARP_ROWS};
use crate::arch::{FloatArray, warp};
use crate::tile::{fma, un};
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Computes the gradients of inputs and of weights.
    ///
    /// # Safety
    /// All memory that [`BackwardParameters`] names is allocated and stays so while the kernel runs, the gradient of the
    /// sums too.
    pub unsafe fn nvme_linear_backward_warp_reduce(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, weights, dsums) = (numbers(job.x), numbers(job.weights), numbers(job.dsums));
        let (tokens, outputs) = (u64::from(job.tokens), u64::from(job.outputs));
        if job.dx != 0 {
            // Row `token`: terms are outputs.
            let gradient = |token: u64, output: u64| dsums.load(token * outputs + output);
            rows(&job, (tokens, outputs), gradient, weights, numbers(job.dx));
        }
        if job.dweights != 0 {
            // Row `output`: terms are tokens.
            let gradient = |output: u64, token: u64| dsums.load(token * outputs + output);
            rows(&job, (outputs, tokens), gradient, x, numbers(job.dweights));
        }
    }
}

/// Computes rows of `inputs` elements, each the sum of `terms` rows of `matrix` times a factor.
///
/// A warp computes [`WARP_ROWS`] rows of [`WARP_COLUMNS`] elements at once, each lane over its share of the
/// terms; at the end each lane holds one of the 32 sums.
#[inline(always)]
#[allow(clippy::int_plus_one, reason = "the committed PTX is of this form")]
fn rows(
    job: &BackwardParameters,
    (count, terms): (u64, u64),
    factor: impl Fn(u64, u64) -> f32,
    matrix: FloatArray,
    to: FloatArray,
) {
    let inputs = u64::from(job.inputs);
    let across = u64::from(job.inputs.div_ceil(WARP_COLUMNS)).max(1);
    let down = count.div_ceil(u64::from(WARP_ROWS));
    let lane = u64::from(arch::lane());
    let (mut item, warps) = warp();
    while item < down * across {
        let row = item / across * u64::from(WARP_ROWS);
        let column = item % across * u64::from(WARP_COLUMNS);
        // At the edges of the result, only the rows and columns inside it.
        let rows = if count - row < u64::from(WARP_ROWS) {
            count - row
        } else {
            u64::from(WARP_ROWS)
        };
        let is_whole = column + u64::from(WARP_COLUMNS) <= inputs && inputs.is_multiple_of(4);
        let mut sums = [0.0; 32];
        let mut term = lane;
        while term < terms {
            let at = term * inputs + column;
            let mut numbers = [0.0; 8];
            if is_whole {
                let (low, high) = (matrix.four(at), matrix.four(at + 4));
                un!(c in [0, 1, 2, 3] { (numbers[c], numbers[c + 4]) = (low[c], high[c]); });
            } else {
                un!(c in [0, 1, 2, 3, 4, 5, 6, 7] {
                    if column + c as u64 <= inputs - 1 { numbers[c] = matrix.load(at + c as u64); }
                });
            }
            un!(r in [0, 1, 2, 3] {
                let factor = if (r as u64) < rows { factor(row + r as u64, term) } else { 0.0 };
                un!(c in [0, 1, 2, 3, 4, 5, 6, 7] {
                    sums[r * 8 + c] = fma(factor, numbers[c], sums[r * 8 + c]);
                });
            });
            term += 32;
        }
        let sum = scattered(sums);
        let (row, column) = (row + lane / 8, column + lane % 8);
        if row < count && column < inputs {
            to.store(row * inputs + column, sum);
        }
        item += warps;
    }
}

/// Returns sum number `lane` of 32, added over all lanes: with each exchange a lane keeps half of its sums.
/// Every lane calls it.
#[inline(always)]
fn scattered(sums: [f32; 32]) -> f32 {
    let mut sums = sums;
    let lane = arch::lane();
    macro_rules! halve {
        ($bits:literal, [$($i:literal),*]) => {
            let is_upper = lane & $bits != 0;
            un!(i in [$($i),*] {
                let (keep, give) = match is_upper {
                    true => (sums[i + $bits], sums[i]),
                    false => (sums[i], sums[i + $bits]),
                };
                sums[i] = keep + f32::from_bits(arch::butterfly(arch::FULL, give.to_bits(), $bits));
            });
        };
    }
    halve!(16, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    halve!(8, [0, 1, 2, 3, 4, 5, 6, 7]);
    halve!(4, [0, 1, 2, 3]);
    halve!(2, [0, 1]);
    halve!(1, [0]);
    sums[0]
}
