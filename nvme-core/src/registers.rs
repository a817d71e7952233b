//! Access to the controller's properties, for bring-up, shutdown and recovery; the I/O path uses doorbells
//! alone.
// UNSAFETY: BAR0 arrives as a raw pointer, and volatile-register writes are unsafe.
#![allow(unsafe_code)]

use crate::quiesced::ControllerIdentity;
use volatile_register::RW;

/// Access to the controller's properties by byte offset (see [`offset`](crate::spec::register::offset)).
///
/// A device that is gone reads as all ones; writes to it are lost.
///
/// Accesses are not ordered against memory by this trait: bring-up only relies on the order of register
/// accesses among themselves, and every doorbell has its own fence.
pub trait RegisterAccess {
    /// Returns the controller's identity, always the same one. Queues and proofs are bound to it.
    fn identity(&self) -> &ControllerIdentity;
    /// Reads 32 bits at a multiple of 4.
    fn read32(&self, offset: u32) -> u32;
    /// Reads 64 bits at a multiple of 8.
    fn read64(&self, offset: u32) -> u64;
    /// Writes 32 bits at a multiple of 4.
    fn write32(&self, offset: u32, value: u32);
    /// Writes 64 bits at a multiple of 8.
    fn write64(&self, offset: u32, value: u64);
}

/// The properties of a mapped BAR0, as volatile registers.
///
/// 64-bit accesses are made as two 32-bit ones, low half first, as every controller must accept.
///
/// NVMe over PCIe 1.0c, "Controller Property Access".
pub struct RegisterBlock<'a> {
    words: &'a [RW<u32>],
    identity: ControllerIdentity,
}

// SAFETY: the block holds a shared reference to words that are only accessed by volatile loads and stores of
// one width. Threads may interleave such accesses; no Rust value is behind them that could be torn.
unsafe impl Send for RegisterBlock<'_> {}
// SAFETY: as for `Send`: every access is one volatile operation on a register.
unsafe impl Sync for RegisterBlock<'_> {}

impl<'a> RegisterBlock<'a> {
    /// Makes a block over the registers from `bar0` on.
    ///
    /// # Safety
    /// `bar0` is 8-byte aligned and valid for volatile reads and writes of `bytes` bytes for `'a`. A
    /// controller is brought up and shut down through one block alone, which is its identity.
    pub unsafe fn from_raw(bar0: *mut u8, bytes: usize) -> Self {
        // SAFETY: the caller vouches for the range for `'a`; RW<u32> is an UnsafeCell of u32, so a
        // device may change it. References to plain words would let the compiler keep an old value.
        let words = unsafe { core::slice::from_raw_parts(bar0.cast::<RW<u32>>(), bytes / 4) };
        Self {
            words,
            identity: ControllerIdentity::new(),
        }
    }
}

impl RegisterAccess for RegisterBlock<'_> {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn read32(&self, offset: u32) -> u32 {
        self.words
            .get(offset as usize / 4)
            .map_or(u32::MAX, RW::read)
    }

    fn read64(&self, offset: u32) -> u64 {
        let low = self.read32(offset);
        u64::from(low) | u64::from(self.read32(offset + 4)) << 32
    }

    fn write32(&self, offset: u32, value: u32) {
        if let Some(word) = self.words.get(offset as usize / 4) {
            // SAFETY: the caller of `from_raw` vouched that writes of this range are allowed; a
            // register write changes no memory that Rust knows of. What the controller does with it
            // reaches only memory that is seen as atomics.
            unsafe { word.write(value) };
        }
    }

    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn registers_are_bounds_checked_words() {
        let mut memory = [0u64; 4];
        // SAFETY: the array is aligned, 32 bytes long and used through the block alone.
        let block = unsafe { RegisterBlock::from_raw(memory.as_mut_ptr().cast(), 32) };
        block.write64(8, 0x1122_3344_5566_7788);
        block.write32(28, 9);
        assert_eq!(block.read32(8), 0x5566_7788);
        assert_eq!(block.read64(8), 0x1122_3344_5566_7788);
        assert_eq!(block.read64(24), 9 << 32);
        block.write32(32, 1);
        assert_eq!(block.read32(32), u32::MAX);
    }
}
