//! Exchange of values between the lanes of a warp.
//!
//! On a GPU each access to another lane's value is one instruction. On the host it would switch to every
//! lane, so there the lanes exchange all values at once.

#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;
#[cfg(target_arch = "nvptx64")]
pub use ptx::*;

#[cfg(target_arch = "nvptx64")]
mod ptx {
    use crate::arch;

    /// A 32-bit value of each lane of the warp, as one lane holds it.
    #[cfg(feature = "scatter")]
    pub type OfLanes32 = u32;
    /// A 64-bit value of each lane of the warp, as one lane holds it.
    pub type OfLanes64 = u64;

    /// Makes the lane's value available to the others. Every lane of the warp calls it.
    #[cfg(feature = "scatter")]
    #[inline(always)]
    pub fn exchanged32(mine: u32) -> OfLanes32 {
        mine
    }

    /// Makes the lane's 64-bit value available to the others. Every lane of the warp calls it.
    #[inline(always)]
    pub fn exchanged64(mine: u64) -> OfLanes64 {
        mine
    }

    /// Returns the value of `lane`. Every lane of the warp calls it, each with the lane that it
    /// wants. A lane that stays away makes the others wait for ever.
    #[cfg(feature = "scatter")]
    #[inline(always)]
    pub fn of_lane32(all: &OfLanes32, lane: u32) -> u32 {
        arch::shuffle(arch::FULL, *all, lane)
    }

    /// Returns the 64-bit value of `lane`. Every lane of the warp calls it.
    #[inline(always)]
    pub fn of_lane64(all: &OfLanes64, lane: u32) -> u64 {
        shuffle64(*all, lane)
    }

    /// Returns the value of lane `from`. Every lane of the warp calls it.
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

    /// A 32-bit value of each lane of the warp.
    pub type OfLanes32 = [u32; 32];
    /// A 64-bit value of each lane of the warp.
    pub type OfLanes64 = [u64; 32];

    /// Makes the lane's value available to the others. Every lane of the warp calls it.
    #[track_caller]
    pub fn exchanged32(mine: u32) -> OfLanes32 {
        arch::exchange(mine.into()).map(|value| value as u32)
    }

    /// Makes the lane's 64-bit value available to the others. Every lane of the warp calls it.
    #[track_caller]
    pub fn exchanged64(mine: u64) -> OfLanes64 {
        arch::exchange(mine)
    }

    /// Returns the value of `lane`. On a GPU every lane of the warp calls it, each with the lane that it
    /// wants.
    pub fn of_lane32(all: &OfLanes32, lane: u32) -> u32 {
        all[lane as usize % 32]
    }

    /// Returns the 64-bit value of `lane`.
    pub fn of_lane64(all: &OfLanes64, lane: u32) -> u64 {
        all[lane as usize % 32]
    }

    /// Returns the value of lane `from`. Every lane of the warp calls it.
    #[track_caller]
    pub fn shuffle64(value: u64, from: u32) -> u64 {
        arch::shuffle64(value, from)
    }
}
