//! Words of memory, and the candidate lists of the warps in shared memory.
// UNSAFETY: inline PTX, and loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::list::LIST_BYTES;
use core::arch::asm;
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// 32-bit words in memory.
#[derive(Clone, Copy)]
pub struct WordArray(*mut u32);

impl WordArray {
    /// Makes an array of words.
    ///
    /// # Safety
    /// Every index that is loaded or stored through it is inside memory that the kernel may use in that way;
    /// the address is a multiple of 4.
    #[inline(always)]
    pub unsafe fn at(address: u64) -> Self {
        Self(address as usize as *mut u32)
    }

    /// Loads word `index`.
    #[inline(always)]
    pub fn load(self, index: u64) -> u32 {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { *self.0.add(index as usize) }
    }

    /// Stores word `index`.
    #[inline(always)]
    pub fn store(self, index: u64, value: u32) {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { *self.0.add(index as usize) = value };
    }
}

/// Returns the wrapping sum of `value` over the lanes of the warp. Every lane calls it.
#[inline(always)]
pub fn total_of_warp(value: u32) -> u32 {
    let (mut sum, mut bits) = (value, 16);
    while bits != 0 {
        sum = sum.wrapping_add(arch::butterfly(arch::FULL, sum, bits));
        bits /= 2;
    }
    sum
}

/// Returns the value of lane `from`. Every lane calls it.
#[inline(always)]
pub fn shuffle64(value: u64, from: u32) -> u64 {
    let half = |value: u64| u64::from(arch::shuffle(arch::FULL, value as u32, from));
    half(value >> 32) << 32 | half(value)
}

/// The shared memory of a warp, addressed by bytes.
#[derive(Clone, Copy)]
pub struct WarpShared(u32);

impl WarpShared {
    /// Returns the memory of the calling warp, `bytes` bytes for each.
    #[inline(always)]
    pub fn of_warp(bytes: u32) -> Self {
        let warp = arch::thread() / 32 % BLOCK_WARPS;
        Self(lists() + warp * bytes)
    }

    #[inline(always)]
    pub fn load64(self, at: u32) -> u64 {
        let value: u64;
        // SAFETY: the list's offsets are inside the warp's memory and multiples of 8.
        unsafe {
            asm!("ld.shared.u64 {}, [{}];", out(reg64) value, in(reg32) self.0 + at, options(pure, readonly, nostack))
        };
        value
    }

    #[inline(always)]
    pub fn store64(self, at: u32, value: u64) {
        // SAFETY: as above.
        unsafe {
            asm!("st.shared.u64 [{}], {};", in(reg32) self.0 + at, in(reg64) value, options(nostack))
        };
    }

    #[inline(always)]
    pub fn load32(self, at: u32) -> u32 {
        let value: u32;
        // SAFETY: as above, for multiples of 4.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) self.0 + at, options(pure, readonly, nostack))
        };
        value
    }

    #[inline(always)]
    pub fn store32(self, at: u32, value: u32) {
        // SAFETY: as above.
        unsafe {
            asm!("st.shared.u32 [{}], {};", in(reg32) self.0 + at, in(reg32) value, options(nostack))
        };
    }
}

/// Returns the address of the lists of a block's warps. Not inlined: each inlined copy would define another
/// array.
#[inline(never)]
fn lists() -> u32 {
    const _: () = assert!(BLOCK_WARPS * LIST_BYTES == 35_840);
    let address: u32;
    // SAFETY: names a static shared array; takes its address only.
    unsafe {
        asm!("{{ .shared .align 16 .b8 nvme_lists[35840]; mov.u32 {}, nvme_lists; }}",
            out(reg32) address, options(nostack));
    }
    address
}
