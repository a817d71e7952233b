//! The counterpart of `arch.rs` on the host, for lanes.
// UNSAFETY: loads and stores at addresses that the host vouches for, and in the shared memory of a block.
#![allow(unsafe_code)]

use super::list::LIST_BYTES;
use nvme_gpu_kernel::arch;
pub use nvme_gpu_kernel::arch::shuffle64;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// 32-bit words in memory.
#[derive(Clone, Copy)]
pub struct LaneWords(u64);

/// As kernels name it.
pub type WordArray = LaneWords;

impl LaneWords {
    /// Makes an array of words.
    ///
    /// # Safety
    /// Every index that is loaded or stored through it is inside memory that the kernel may use in that way;
    /// the address is a multiple of 4.
    pub unsafe fn at(address: u64) -> Self {
        Self(address)
    }

    /// Loads word `index`.
    pub fn load(self, index: u64) -> u32 {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { arch::load_u32(self.0 + index * 4) }
    }

    /// Stores word `index`.
    pub fn store(self, index: u64, value: u32) {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { arch::store_u32(self.0 + index * 4, value) };
    }
}

/// Returns the wrapping sum of `value` over the lanes of the warp. Every lane calls it.
#[track_caller]
pub fn total_of_warp(value: u32) -> u32 {
    let all = arch::exchange(value.into());
    all.iter()
        .fold(0, |sum, value| sum.wrapping_add(*value as u32))
}

/// The shared memory of a warp, addressed by bytes.
#[derive(Clone, Copy)]
pub struct LaneShared(u64);

/// As kernels name it.
pub type WarpShared = LaneShared;

impl LaneShared {
    /// Returns the memory of the calling warp, `bytes` bytes for each.
    pub fn of_warp(bytes: u32) -> Self {
        let warp = arch::thread() / 32 % BLOCK_WARPS;
        let lists = arch::shared("nvme_lists", BLOCK_WARPS * LIST_BYTES);
        Self(lists + u64::from(warp * bytes))
    }

    fn at(self, at: u32) -> u64 {
        assert!(at < LIST_BYTES, "outside the warp's memory");
        self.0 + u64::from(at)
    }

    pub fn load64(self, at: u32) -> u64 {
        // SAFETY: inside the warp's memory, as asserted.
        unsafe { arch::load_u64(self.at(at)) }
    }

    pub fn store64(self, at: u32, value: u64) {
        // SAFETY: as above.
        unsafe { arch::store_u64(self.at(at), value) };
    }

    pub fn load32(self, at: u32) -> u32 {
        // SAFETY: as above.
        unsafe { arch::load_u32(self.at(at)) }
    }

    pub fn store32(self, at: u32, value: u32) {
        // SAFETY: as above.
        unsafe { arch::store_u32(self.at(at), value) };
    }
}
