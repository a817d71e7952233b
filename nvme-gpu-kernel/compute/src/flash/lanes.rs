//! The counterpart of `arch.rs` on the host, for lanes.
// UNSAFETY: loads and stores at addresses that the host vouches for.
#![allow(unsafe_code)]

pub use crate::arch::maximum;
use crate::tile::mma::{mma_bf16, mma_f16, pack_bf16, pack_f16};
use nvme_formats::{f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::arch;
pub use nvme_gpu_kernel::arch::opaque;

/// Loads a 16-bit number at `address`.
///
/// # Safety
/// The two bytes are allocated, and nothing writes them meanwhile.
pub unsafe fn half(address: u64, is_bf16: bool) -> f32 {
    // SAFETY: this function's caller vouches for the address.
    let bits = unsafe { arch::load_u16(address) };
    match is_bf16 {
        true => f32_of_bf16(bits),
        false => f32_of_f16(bits),
    }
}

/// Stores a number as 16 bits, rounded.
///
/// # Safety
/// The two bytes are allocated, and nothing else accesses them meanwhile.
pub unsafe fn store_half(address: u64, value: f32, is_bf16: bool) {
    // SAFETY: this function's caller vouches for the address.
    unsafe { arch::store_u16(address, packed(value, 0.0, is_bf16) as u16) };
}

/// Stores two numbers as one word, at a multiple of 4.
///
/// # Safety
/// As [`store_half`].
pub unsafe fn store_pair(address: u64, low: f32, high: f32, is_bf16: bool) {
    // SAFETY: this function's caller vouches for the address.
    unsafe { arch::store_u32(address, packed(low, high, is_bf16)) };
}

/// Packs two numbers as halves of a word, the first in the lower one.
pub fn packed(low: f32, high: f32, is_bf16: bool) -> u32 {
    match is_bf16 {
        true => pack_bf16(low, high),
        false => pack_f16(low, high),
    }
}

/// Adds a product of the tensor cores to `sums`. Every lane of the warp calls it.
#[track_caller]
pub fn mma(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2], is_bf16: bool) {
    match is_bf16 {
        true => mma_bf16(sums, a, b),
        false => mma_f16(sums, a, b),
    }
}

/// Returns 2 to the power of `x`; results below 2^-126 are 0.
pub fn exp2(x: f32) -> f32 {
    let power = x.exp2();
    if power < f32::MIN_POSITIVE {
        0.0
    } else {
        power
    }
}
