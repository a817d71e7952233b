//! Gradients of linear layers by sums over the lanes of a warp: for few tokens, which leave most of a tile empty.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::{Backward, WARP_ELEMENTS};
use crate::arch::{Numbers, sum_of_warp, warp};
use crate::tile::{fma, un};
use nvme_gpu_kernel::arch;

/// # Safety
/// What [`Backward`] names is there, the gradient of the sums too.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_linear_backward_warp_reduce(job: Backward) {
    // SAFETY: the caller's.
    let numbers = |address| unsafe { Numbers::at(address) };
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

/// Rows of `inputs` elements: each the sum of `terms` rows of `matrix` times a factor. A warp has [`WARP_ELEMENTS`]
/// elements at a time, its lanes terms of their own.
#[inline(always)]
fn rows(
    job: &Backward,
    (count, terms): (u64, u64),
    factor: impl Fn(u64, u64) -> f32,
    matrix: Numbers,
    to: Numbers,
) {
    let inputs = u64::from(job.inputs);
    let across = u64::from(job.inputs.div_ceil(WARP_ELEMENTS)).max(1);
    let lane = u64::from(arch::lane());
    let (mut item, warps) = warp();
    while item < count * across {
        let (row, first) = (item / across, item % across * u64::from(WARP_ELEMENTS));
        let mut sums = [0.0; 8];
        let mut term = lane;
        while term < terms {
            let factor = factor(row, term);
            un!(e in [0, 1, 2, 3, 4, 5, 6, 7] {
                let column = first + e as u64;
                if column < inputs {
                    sums[e] = fma(factor, matrix.load(term * inputs + column), sums[e]);
                }
            });
            term += 32;
        }
        un!(e in [0, 1, 2, 3, 4, 5, 6, 7] {
            let sum = sum_of_warp(sums[e]);
            if lane == e as u64 && first + lane < inputs {
                to.store(row * inputs + first + lane, sum);
            }
        });
        item += warps;
    }
}
