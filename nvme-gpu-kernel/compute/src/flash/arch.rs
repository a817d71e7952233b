//! Conversions of halves in GPU memory, and instructions for attention.
// UNSAFETY: loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

use crate::arch::of_half;
use crate::tile::mma::{mma_bf16, mma_f16, pack_bf16, pack_f16};
use core::arch::asm;

/// Loads a 16-bit number at `address`.
///
/// # Safety
/// The two bytes are allocated, and nothing writes them meanwhile.
#[inline(always)]
pub unsafe fn half(address: u64, is_bf16: bool) -> f32 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let bits = unsafe { *(address as usize as *const u16) };
    match is_bf16 {
        true => f32::from_bits(u32::from(bits) << 16),
        false => of_half(bits),
    }
}

/// Stores a number as 16 bits, rounded.
///
/// # Safety
/// The two bytes are allocated, and nothing else accesses them meanwhile.
#[inline(always)]
pub unsafe fn store_half(address: u64, value: f32, is_bf16: bool) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { *(address as usize as *mut u16) = packed(value, 0.0, is_bf16) as u16 };
}

/// Stores two numbers as one word, at a multiple of 4.
///
/// # Safety
/// As [`store_half`].
#[inline(always)]
pub unsafe fn store_pair(address: u64, low: f32, high: f32, is_bf16: bool) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { *(address as usize as *mut u32) = packed(low, high, is_bf16) };
}

/// Packs two numbers as halves of a word, the first in the lower one.
#[inline(always)]
pub fn packed(low: f32, high: f32, is_bf16: bool) -> u32 {
    match is_bf16 {
        true => pack_bf16(low, high),
        false => pack_f16(low, high),
    }
}

/// Adds a product of the tensor cores to `sums`.
#[inline(always)]
pub fn mma(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2], is_bf16: bool) {
    match is_bf16 {
        true => mma_bf16(sums, a, b),
        false => mma_f16(sums, a, b),
    }
}

/// Returns the larger number; the other one if one is NaN.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    let larger: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("max.f32 {}, {}, {};", out(reg32) larger, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    larger
}

/// Returns 2 to the power of `x`, with an error of at most 2 units in the last place; results below 2^-126
/// are 0.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("ex2.approx.ftz.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// Optimisation barrier: keeps values derived from `value` from being computed early and held in registers.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register; touches no memory. Not `pure`, so that the compiler does not hoist it out of
    // loops.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nostack)) };
    same
}
