//! Element-wise kernels: RMS norm, SiLU product and argmax.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{FloatArray, exp, sqrt, sum_of_warp, thread, warp};
use crate::{AddBias, ArgmaxParameters, RmsNorm, SiluMul, index_of, ranked};
use core::num::NonZeroU64;
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Computes the RMS norm. A warp takes one vector a turn.
    ///
    /// # Safety
    /// All memory that [`RmsNorm`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_rms_norm(norm: RmsNorm) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, weight, y) = (numbers(norm.x), numbers(norm.weight), numbers(norm.y));
        let (elements, lane) = (u64::from(norm.elements), u64::from(arch::lane()));
        let (mut token, warps) = warp();
        while token < u64::from(norm.tokens) {
            let first = token * elements;
            let mut sum = 0.0;
            let mut at = lane;
            while at < elements {
                let value = x.load(first + at);
                sum += value * value;
                at += 32;
            }
            let mean = sum_of_warp(sum) / norm.elements as f32;
            // A sum that overflows would make zeros of all numbers, which nobody would notice.
            let factor = if mean < f32::INFINITY {
                1.0 / sqrt(mean + norm.epsilon)
            } else {
                f32::NAN
            };
            let mut at = lane;
            while at < elements {
                y.store(first + at, x.load(first + at) * factor * weight.load(at));
                at += 32;
            }
            token += warps;
        }
    }
}

entry! {
    /// Computes `silu(x) * factor`. A thread takes one element a turn.
    ///
    /// # Safety
    /// All memory that [`SiluMul`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_silu_mul(silu: SiluMul) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, factor, y) = (numbers(silu.x), numbers(silu.factor), numbers(silu.y));
        let (mut at, threads) = thread();
        while at < silu.elements {
            let value = x.load(at);
            y.store(at, value / (1.0 + exp(-value)) * factor.load(at));
            at += threads;
        }
    }
}

entry! {
    /// Adds a bias to each vector. A thread takes one element a turn.
    ///
    /// # Safety
    /// All memory that [`AddBias`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_add_bias(add: AddBias) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (bias, y) = unsafe { (FloatArray::at(add.bias), FloatArray::at(add.y)) };
        let Some(elements) = NonZeroU64::new(add.elements.into()) else {
            return;
        };
        let (mut at, threads) = thread();
        while at < elements.get() * u64::from(add.tokens) {
            y.store(at, y.load(at) + bias.load(at % elements));
            at += threads;
        }
    }
}

entry! {
    /// Raises `best` to the largest number, combined with its index.
    ///
    /// # Safety
    /// All memory that [`ArgmaxParameters`] names is allocated and stays so while the kernel runs, with fewer than 2^32
    /// numbers.
    pub unsafe fn nvme_argmax(argmax: ArgmaxParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let x = unsafe { FloatArray::at(argmax.x) };
        let mut best = 0;
        let (mut at, threads) = thread();
        while at < argmax.elements {
            let mine = ranked(x.load(at), at as u32);
            best = if mine > best { mine } else { best };
            at += threads;
        }
        // SAFETY: the host vouches for the 8 bytes at `best`; only this kernel writes them, by atomics.
        unsafe { arch::raise(argmax.best as usize as *mut u64, best) };
    }
}

entry! {
    /// Stores the index found by [`nvme_argmax`], and resets `best` for the next launch. One thread does so.
    ///
    /// # Safety
    /// As [`nvme_argmax`].
    pub unsafe fn nvme_take_token(argmax: ArgmaxParameters) {
        if thread().0 == 0 {
            let best = argmax.best as usize as *mut u64;
            // SAFETY: the host vouches for both addresses; launches of one stream are ordered, so the kernel
            // before has ended.
            unsafe {
                *(argmax.index as usize as *mut i64) = i64::from(index_of(*best));
                *best = 0;
            }
        }
    }
}
