//! Memory by address, and the histograms of the warps in shared memory.
// UNSAFETY: inline PTX, and loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::{BINS, MemoryAccess};
use crate::arch::of_half;
use core::arch::asm;
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// GPU memory by address.
#[derive(Clone, Copy)]
pub struct GlobalMemory(());

impl GlobalMemory {
    /// Makes the accessor.
    ///
    /// # Safety
    /// Every address that is loaded or stored through it is inside memory that the kernel may use in that
    /// way.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

impl MemoryAccess for GlobalMemory {
    #[inline(always)]
    fn word(self, address: u64) -> u32 {
        // SAFETY: the caller of `new` vouched for every address that is used.
        unsafe { *(address as usize as *const u32) }
    }

    #[inline(always)]
    fn put(self, address: u64, word: u32) {
        // SAFETY: the caller of `new` vouched for every address that is used.
        unsafe { *(address as usize as *mut u32) = word };
    }

    #[inline(always)]
    fn four(self, address: u64) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller of `new` vouched for the address, a multiple of 16.
        unsafe {
            asm!(
                "ld.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [{from}];", from = in(reg64) address,
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                options(pure, readonly, nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    fn two(self, address: u64) -> [u32; 2] {
        let (a, b): (u32, u32);
        // SAFETY: the caller of `new` vouched for the address, a multiple of 8.
        unsafe {
            asm!(
                "ld.global.v2.b32 {{{a}, {b}}}, [{from}];", from = in(reg64) address,
                a = out(reg32) a, b = out(reg32) b, options(pure, readonly, nostack));
        }
        [a, b]
    }

    #[inline(always)]
    fn pair(self, word: u32, is_bf16: bool) -> [f32; 2] {
        match is_bf16 {
            true => [
                f32::from_bits(word << 16),
                f32::from_bits(word & 0xFFFF_0000),
            ],
            false => [of_half(word as u16), of_half((word >> 16) as u16)],
        }
    }
}

/// The histogram of a warp in shared memory: [`BINS`] counts.
#[derive(Clone, Copy)]
pub struct WarpHistogram(u32);

impl WarpHistogram {
    /// Returns the histogram of the calling warp.
    #[inline(always)]
    pub fn of_warp() -> Self {
        let warp = arch::thread() / 32 % BLOCK_WARPS;
        Self(bins() + warp * BINS * 4)
    }

    #[inline(always)]
    fn at(self, bin: u32) -> u32 {
        self.0 + (bin & (BINS - 1)) * 4
    }

    #[inline(always)]
    pub fn clear(self, bin: u32) {
        // SAFETY: `at` keeps the address inside the warp's histogram.
        unsafe { asm!("st.shared.u32 [{}], 0;", in(reg32) self.at(bin), options(nostack)) };
    }

    /// Adds one to a count; other lanes may do so at the same time.
    #[inline(always)]
    pub fn increment(self, bin: u32) {
        // SAFETY: `at` keeps the address inside the warp's histogram.
        unsafe {
            asm!("red.relaxed.cta.shared.add.u32 [{}], 1;", in(reg32) self.at(bin), options(nostack))
        };
    }

    #[inline(always)]
    pub fn count(self, bin: u32) -> u32 {
        let value: u32;
        // SAFETY: `at` keeps the address inside the warp's histogram.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) self.at(bin), options(readonly, nostack))
        };
        value
    }
}

/// Returns the address of the histograms of a block's warps. Not inlined: each inlined copy would define
/// another array.
#[inline(never)]
fn bins() -> u32 {
    const _: () = assert!(BLOCK_WARPS * BINS * 4 == 8_192);
    let address: u32;
    // SAFETY: names a static shared array; takes its address only.
    unsafe {
        asm!("{{ .shared .align 16 .b8 nvme_bins[8192]; mov.u32 {}, nvme_bins; }}",
            out(reg32) address, options(nostack));
    }
    address
}
