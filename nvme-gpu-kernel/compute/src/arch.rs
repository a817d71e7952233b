//! Instructions of the GPU that compute, and memory by address. The one file of this crate with inline PTX.
// UNSAFETY: inline PTX, and loads and stores through addresses that the host vouches for.
#![allow(unsafe_code)]

use core::arch::asm;
use nvme_gpu_kernel::arch;

/// 2 to the power of `x`, to 2 units of the last place.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("ex2.approx.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// e to the power of `x`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// The square root, rounded.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("sqrt.rn.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// Numbers in memory of the GPU.
#[derive(Clone, Copy)]
pub struct Numbers(*mut f32);

impl Numbers {
    /// # Safety
    /// All that is loaded or stored through it lies in memory that the kernel may use so.
    #[inline(always)]
    pub unsafe fn at(address: u64) -> Self {
        Self(address as usize as *mut f32)
    }

    /// Number `index`.
    #[inline(always)]
    pub fn load(self, index: u64) -> f32 {
        // SAFETY: vouched for in `at`.
        unsafe { *self.0.add(index as usize) }
    }

    /// Sets number `index`.
    #[inline(always)]
    pub fn store(self, index: u64, value: f32) {
        // SAFETY: vouched for in `at`.
        unsafe { *self.0.add(index as usize) = value };
    }
}

/// The sum of `value` over the lanes of the warp. Every lane calls it.
#[inline(always)]
pub fn sum_of_warp(value: f32) -> f32 {
    let mut sum = value;
    let mut bits = 16;
    while bits != 0 {
        sum += f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), bits));
        bits /= 2;
    }
    sum
}

/// The number of this warp among those of the launch, and how many there are.
#[inline(always)]
pub fn warp() -> (u64, u64) {
    let of_block = arch::block_threads() / 32;
    let mine = arch::block() * of_block + arch::thread() / 32;
    (u64::from(mine), u64::from(arch::blocks() * of_block))
}

/// The number of this thread among those of the launch, and how many there are.
#[inline(always)]
pub fn thread() -> (u64, u64) {
    let of_block = arch::block_threads();
    let mine = u64::from(arch::block()) * u64::from(of_block) + u64::from(arch::thread());
    (mine, u64::from(arch::blocks()) * u64::from(of_block))
}
