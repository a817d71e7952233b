//! Values that the lanes of a warp exchange.
//!
//! On a GPU each look at another lane's value is an instruction. On the host it is a switch of every lane: there the lanes
//! exchange all values at once.

#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;
#[cfg(target_arch = "nvptx64")]
pub use ptx::*;

#[cfg(target_arch = "nvptx64")]
mod ptx {
    use crate::arch;

    /// A value of each lane of the warp, as one lane has it.
    #[cfg(feature = "scatter")]
    pub type OfLanes32 = u32;
    /// The same of 64 bits.
    pub type OfLanes64 = u64;

    /// Makes the lane's value known to the others. Every lane of the warp calls it.
    #[cfg(feature = "scatter")]
    #[inline(always)]
    pub fn exchanged32(mine: u32) -> OfLanes32 {
        mine
    }

    /// The same of 64 bits.
    #[inline(always)]
    pub fn exchanged64(mine: u64) -> OfLanes64 {
        mine
    }

    /// The value of `lane`. Every lane of the warp calls it, each for the lane that it wants.
    #[cfg(feature = "scatter")]
    #[inline(always)]
    pub fn of_lane32(all: &OfLanes32, lane: u32) -> u32 {
        arch::shuffle(arch::FULL, *all, lane)
    }

    /// The same of 64 bits.
    #[inline(always)]
    pub fn of_lane64(all: &OfLanes64, lane: u32) -> u64 {
        shuffle64(*all, lane)
    }

    /// The value of lane `from`. Every lane of the warp calls it.
    #[inline(always)]
    pub fn shuffle64(value: u64, from: u32) -> u64 {
        let low = arch::shuffle(arch::FULL, value as u32, from);
        let high = arch::shuffle(arch::FULL, (value >> 32) as u32, from);
        u64::from(high) << 32 | u64::from(low)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use crate::arch;

    /// A value of each lane of the warp.
    pub type OfLanes32 = [u32; 32];
    /// The same of 64 bits.
    pub type OfLanes64 = [u64; 32];

    /// Makes the lane's value known to the others. Every lane of the warp calls it.
    #[track_caller]
    pub fn exchanged32(mine: u32) -> OfLanes32 {
        arch::exchange(mine.into()).map(|value| value as u32)
    }

    /// The same of 64 bits.
    #[track_caller]
    pub fn exchanged64(mine: u64) -> OfLanes64 {
        arch::exchange(mine)
    }

    /// The value of `lane`. On a GPU every lane of the warp calls it, each for the lane that it wants.
    pub fn of_lane32(all: &OfLanes32, lane: u32) -> u32 {
        all[lane as usize % 32]
    }

    /// The same of 64 bits.
    pub fn of_lane64(all: &OfLanes64, lane: u32) -> u64 {
        all[lane as usize % 32]
    }

    /// The value of lane `from`. Every lane of the warp calls it.
    #[track_caller]
    pub fn shuffle64(value: u64, from: u32) -> u64 {
        arch::shuffle64(value, from)
    }
}
