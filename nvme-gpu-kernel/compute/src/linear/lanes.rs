//! The counterpart of `arch.rs` on the host, for lanes.
// UNSAFETY: loads and stores at addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::LogisticFunction;
use crate::arch::exp;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_formats::{f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::arch;

/// The logistic function of lanes.
pub struct LaneLogistic;

/// The name that kernels use.
pub use LaneLogistic as ApproximateLogistic;

impl LogisticFunction for LaneLogistic {
    fn of(x: f32) -> f32 {
        1.0 / (1.0 + exp(-x))
    }
}

/// Adds to a number in memory by an atomic operation.
///
/// # Safety
/// The number is allocated, and only such additions access it meanwhile.
pub unsafe fn add(to: u64, value: f32) {
    assert!(to.is_multiple_of(4), "a number is added to at {to:#x}");
    // SAFETY: this function's caller vouches for the number; its address is aligned.
    let number = unsafe { &*core::ptr::with_exposed_provenance::<AtomicU32>(to as usize) };
    let mut was = number.load(Order::Relaxed, Scope::Gpu);
    loop {
        let sum = (f32::from_bits(was) + value).to_bits();
        let found = number.compare_exchange(was, sum, Order::Relaxed, Scope::Gpu);
        if found == was {
            return;
        }
        was = found;
    }
}

/// Stores two neighbouring numbers, or the first alone, or none: `both` is their count. As one store if `is_even`: the
/// first is then at a multiple of 8.
///
/// # Safety
/// The counted numbers are allocated, and nothing else accesses them meanwhile.
pub unsafe fn store_two(to: u64, [low, high]: [f32; 2], both: u32, is_even: bool) {
    let (low, high) = (low.to_bits(), high.to_bits());
    // SAFETY: this function's caller vouches for the counted numbers.
    unsafe {
        if both == 2 && is_even {
            arch::store_u64(to, u64::from(high) << 32 | u64::from(low));
            return;
        }
        if both >= 1 {
            arch::store_u32(to, low);
        }
        if both == 2 {
            arch::store_u32(to + 4, high);
        }
    }
}

/// Does the same for two halves in one word; `is_even` if the first is at a multiple of 4.
///
/// # Safety
/// As [`store_two`].
pub unsafe fn store_halves(to: u64, word: u32, both: u32, is_even: bool) {
    // SAFETY: this function's caller vouches for the counted halves.
    unsafe {
        if both == 2 && is_even {
            arch::store_u32(to, word);
            return;
        }
        if both >= 1 {
            arch::store_u16(to, word as u16);
        }
        if both == 2 {
            arch::store_u16(to + 2, (word >> 16) as u16);
        }
    }
}

/// Loads a 16-bit number.
///
/// # Safety
/// It is allocated, and nothing writes it meanwhile.
pub unsafe fn half(from: *const u16, is_bf16: bool) -> f32 {
    // SAFETY: this function's caller vouches for the number.
    let bits = unsafe { arch::load_u16(from.expose_provenance() as u64) };
    match is_bf16 {
        true => f32_of_bf16(bits),
        false => f32_of_f16(bits),
    }
}
