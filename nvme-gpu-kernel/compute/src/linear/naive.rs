//! Linear layers with one element a thread, and gradients that are added up by atomic operations.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{ApproximateLogistic, add};
use super::{ActivationKind, BackwardParameters, ForwardParameters, NAIVE_TOKENS};
use crate::arch::{FloatArray, thread};
use nvme_gpu_kernel::entry;

entry! {
    /// Computes sums and biases.
    ///
    /// # Safety
    /// All memory that [`ForwardParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_linear_forward_naive(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, weights, y) = (numbers(job.x), numbers(job.weights), numbers(job.y));
        let (inputs, outputs) = (u64::from(job.inputs), u64::from(job.outputs.max(1)));
        let (mut at, threads) = thread();
        while at < u64::from(job.tokens) * u64::from(job.outputs) {
            let (token, output) = (at / outputs, at % outputs);
            let mut sum = 0.0;
            let mut input = 0;
            while input < inputs {
                sum += x.load(token * inputs + input) * weights.load(output * inputs + input);
                input += 1;
            }
            if job.bias != 0 {
                sum += numbers(job.bias).load(output);
            }
            y.store(at, sum);
            at += threads;
        }
    }
}

entry! {
    /// Applies the activation.
    ///
    /// # Safety
    /// As [`nvme_linear_forward_naive`], which has run.
    pub unsafe fn nvme_linear_activate(job: ForwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let y = numbers(job.y);
        let activation = ActivationKind::of_number(job.activation);
        let (mut at, threads) = thread();
        while at < u64::from(job.tokens) * u64::from(job.outputs) {
            let sum = y.load(at);
            if job.sums != 0 {
                numbers(job.sums).store(at, sum);
            }
            y.store(at, activation.of::<ApproximateLogistic>(sum));
            at += threads;
        }
    }
}

entry! {
    /// Zeroes the gradients of weights and biases.
    ///
    /// # Safety
    /// All memory that [`BackwardParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_linear_backward_clear(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let clear = |address: u64, count: u64| {
            let (mut at, threads) = thread();
            while address != 0 && at < count {
                numbers(address).store(at, 0.0);
                at += threads;
            }
        };
        clear(job.dweights, u64::from(job.outputs) * u64::from(job.inputs));
        clear(job.dbias, job.outputs.into());
    }
}

entry! {
    /// Computes all gradients.
    ///
    /// # Safety
    /// All memory that [`BackwardParameters`] names is allocated and stays so while the kernel runs; gradients of weights
    /// and biases are zeros, or are added to.
    pub unsafe fn nvme_linear_backward_naive(job: BackwardParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, weights) = (numbers(job.x), numbers(job.weights));
        let (dy, sums) = (numbers(job.dy), numbers(job.sums));
        let activation = ActivationKind::of_number(job.activation);
        let (inputs, outputs) = (u64::from(job.inputs.max(1)), u64::from(job.outputs.max(1)));
        let gradient = |token: u64, output: u64| {
            let at = token * outputs + output;
            match activation {
                ActivationKind::None => dy.load(at),
                _ => dy.load(at) * activation.slope::<ApproximateLogistic>(sums.load(at)),
            }
        };
        let (mut at, threads) = thread();
        while job.dx != 0 && at < u64::from(job.tokens) * u64::from(job.inputs) {
            let (token, input) = (at / inputs, at % inputs);
            let (mut sum, mut output) = (0.0, 0);
            while output < outputs {
                sum += gradient(token, output) * weights.load(output * inputs + input);
                output += 1;
            }
            numbers(job.dx).store(at, sum);
            at += threads;
        }
        let parts = u64::from(job.tokens.div_ceil(NAIVE_TOKENS));
        let each = u64::from(NAIVE_TOKENS);
        let of = |part: u64| {
            let end = (part + 1) * each;
            let tokens = u64::from(job.tokens);
            (part * each, if end < tokens { end } else { tokens })
        };
        (at, _) = thread();
        while job.dweights != 0 && at < parts * outputs * u64::from(job.inputs) {
            let (input, rest) = (at % inputs, at / inputs);
            let (output, (begin, end)) = (rest % outputs, of(rest / outputs));
            let (mut sum, mut token) = (0.0, begin);
            while token < end {
                sum += gradient(token, output) * x.load(token * inputs + input);
                token += 1;
            }
            // SAFETY: the host vouches for the gradient of the weights; output and input are below its sizes.
            unsafe { add(job.dweights + (output * inputs + input) * 4, sum) };
            at += threads;
        }
        (at, _) = thread();
        while job.dbias != 0 && at < parts * outputs {
            let (output, (begin, end)) = (at % outputs, of(at / outputs));
            let (mut sum, mut token) = (0.0, begin);
            while token < end {
                sum += gradient(token, output);
                token += 1;
            }
            // SAFETY: the host vouches for the gradient of the biases; `output` is below its size.
            unsafe { add(job.dbias + output * 4, sum) };
            at += threads;
        }
    }
}
