//! Halves in memory of the GPU as numbers.
// UNSAFETY: loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::Flash;
use crate::arch::of_half;
use crate::tile::mma::{mma_bf16, mma_f16, pack_bf16, pack_f16};
use core::arch::asm;

/// A number of 16 bits at `address`.
///
/// # Safety
/// It is there, and nothing writes it meanwhile.
#[inline(always)]
pub unsafe fn half(address: u64, is_bf16: bool) -> f32 {
    // SAFETY: the caller's.
    let bits = unsafe { *(address as usize as *const u16) };
    match is_bf16 {
        true => f32::from_bits(u32::from(bits) << 16),
        false => of_half(bits),
    }
}

/// Stores a number as 16 bits, rounded.
///
/// # Safety
/// The place is there, and nothing else uses it meanwhile.
#[inline(always)]
pub unsafe fn store_half(address: u64, value: f32, is_bf16: bool) {
    // SAFETY: the caller's.
    unsafe { *(address as usize as *mut u16) = packed(value, 0.0, is_bf16) as u16 };
}

/// Stores two, at a multiple of 4.
///
/// # Safety
/// As [`store_half`].
#[inline(always)]
pub unsafe fn store_pair(address: u64, low: f32, high: f32, is_bf16: bool) {
    // SAFETY: the caller's.
    unsafe { *(address as usize as *mut u32) = packed(low, high, is_bf16) };
}

/// Two numbers as halves, the first in the lower one.
#[inline(always)]
pub fn packed(low: f32, high: f32, is_bf16: bool) -> u32 {
    match is_bf16 {
        true => pack_bf16(low, high),
        false => pack_f16(low, high),
    }
}

/// Adds a product of tensor cores.
#[inline(always)]
pub fn mma(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2], is_bf16: bool) {
    match is_bf16 {
        true => mma_bf16(sums, a, b),
        false => mma_f16(sums, a, b),
    }
}

/// The keys of a sequence that count.
///
/// # Safety
/// What [`Flash::counts`] names is there.
#[inline(always)]
pub unsafe fn keys_of(job: &Flash, sequence: u32) -> u32 {
    if job.counts == 0 {
        return job.key_tokens;
    }
    let count = (job.counts + u64::from(sequence) * 4) as usize as *const u32;
    // SAFETY: the caller's.
    let count = unsafe { *count };
    if count < job.key_tokens {
        count
    } else {
        job.key_tokens
    }
}

/// The larger one; NaN is none.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    let larger: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("max.f32 {}, {}, {};", out(reg32) larger, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    larger
}

/// 2 to the power of `x`, to 2 units of the last place; what is below 2^-126 is 0.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("ex2.approx.ftz.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// The value as one that the compiler knows nothing of: what follows from it is worked out where it is used, and takes
/// no register meanwhile.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register. Not pure: it is not moved out of loops.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nostack)) };
    same
}
