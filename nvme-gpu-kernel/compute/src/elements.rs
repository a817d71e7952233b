//! Norms, activations and the largest number.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{Numbers, exp, sqrt, sum_of_warp, thread, warp};
use crate::{Argmax, RmsNorm, SiluMul, index_of, ranked};
use nvme_gpu_kernel::arch;

/// A warp takes a vector at a time.
///
/// # Safety
/// What [`RmsNorm`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_rms_norm(norm: RmsNorm) {
    // SAFETY: the caller's.
    let numbers = |address| unsafe { Numbers::at(address) };
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
        let factor = 1.0 / sqrt(mean + norm.epsilon);
        let mut at = lane;
        while at < elements {
            y.store(first + at, x.load(first + at) * factor * weight.load(at));
            at += 32;
        }
        token += warps;
    }
}

/// A thread takes an element at a time.
///
/// # Safety
/// What [`SiluMul`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_silu_mul(silu: SiluMul) {
    // SAFETY: the caller's.
    let numbers = |address| unsafe { Numbers::at(address) };
    let (x, factor, y) = (numbers(silu.x), numbers(silu.factor), numbers(silu.y));
    let (mut at, threads) = thread();
    while at < silu.elements {
        let value = x.load(at);
        y.store(at, value / (1.0 + exp(-value)) * factor.load(at));
        at += threads;
    }
}

/// Raises `best` to the largest number with its index.
///
/// # Safety
/// What [`Argmax`] names is there, with fewer than 2^32 numbers.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_argmax(argmax: Argmax) {
    // SAFETY: the caller's.
    let x = unsafe { Numbers::at(argmax.x) };
    let mut best = 0;
    let (mut at, threads) = thread();
    while at < argmax.elements {
        let mine = ranked(x.load(at), at as u32);
        best = if mine > best { mine } else { best };
        at += threads;
    }
    // SAFETY: the caller's: 8 bytes that only this kernel writes.
    unsafe { arch::raise(argmax.best as usize as *mut u64, best) };
}

/// Stores the index of what [`nvme_argmax`] found, and makes `best` ready for the next. One thread does it.
///
/// # Safety
/// As [`nvme_argmax`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_take_token(argmax: Argmax) {
    if thread().0 == 0 {
        let best = argmax.best as usize as *mut u64;
        // SAFETY: the caller's; the kernel before has ended.
        unsafe {
            *(argmax.index as usize as *mut i64) = i64::from(index_of(*best));
            *best = 0;
        }
    }
}
