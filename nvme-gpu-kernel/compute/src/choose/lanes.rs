//! The counterpart of `arch.rs` on the host, for lanes.
// UNSAFETY: loads and stores at addresses that the host vouches for, and in the shared memory of a block.
#![allow(unsafe_code)]

use super::{BINS, MemoryAccess};
use nvme_formats::{f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// GPU memory by address.
#[derive(Clone, Copy)]
pub struct LaneMemory(());

/// As kernels name it.
pub type GlobalMemory = LaneMemory;

impl LaneMemory {
    /// Makes the accessor.
    ///
    /// # Safety
    /// Every address that is loaded or stored through it is inside memory that the kernel may use in that way.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

impl MemoryAccess for LaneMemory {
    fn word(self, address: u64) -> u32 {
        // SAFETY: the caller of `new` vouched for every address that is used.
        unsafe { arch::load_u32(address) }
    }

    fn put(self, address: u64, word: u32) {
        // SAFETY: as above.
        unsafe { arch::store_u32(address, word) };
    }

    fn four(self, address: u64) -> [u32; 4] {
        assert!(address.is_multiple_of(16), "four words at {address:#x}");
        [0, 4, 8, 12].map(|at| self.word(address + at))
    }

    fn two(self, address: u64) -> [u32; 2] {
        assert!(address.is_multiple_of(8), "two words at {address:#x}");
        [0, 4].map(|at| self.word(address + at))
    }

    fn pair(self, word: u32, is_bf16: bool) -> [f32; 2] {
        [word as u16, (word >> 16) as u16].map(|half| match is_bf16 {
            true => f32_of_bf16(half),
            false => f32_of_f16(half),
        })
    }
}

/// The histogram of a warp in shared memory: [`BINS`] counts.
#[derive(Clone, Copy)]
pub struct LaneHistogram(u64);

/// As kernels name it.
pub type WarpHistogram = LaneHistogram;

impl LaneHistogram {
    /// Returns the histogram of the calling warp.
    pub fn of_warp() -> Self {
        let warp = arch::thread() / 32 % BLOCK_WARPS;
        let bins = arch::shared("nvme_bins", BLOCK_WARPS * BINS * 4);
        Self(bins + u64::from(warp * BINS * 4))
    }

    fn at(self, bin: u32) -> u64 {
        self.0 + u64::from(bin & (BINS - 1)) * 4
    }

    pub fn clear(self, bin: u32) {
        // SAFETY: `at` keeps the address inside the warp's histogram.
        unsafe { arch::store_u32(self.at(bin), 0) };
    }

    /// Adds one to a count; other lanes may do so at the same time.
    pub fn increment(self, bin: u32) {
        let count = self.count(bin).wrapping_add(1);
        // SAFETY: as above. No other lane runs between load and store.
        unsafe { arch::store_u32(self.at(bin), count) };
    }

    pub fn count(self, bin: u32) -> u32 {
        // SAFETY: as above.
        unsafe { arch::load_u32(self.at(bin)) }
    }
}
