//! DMA memory that owns its bytes, for tests and for fuzzing: one range, without unmapping and
//! without raw pointers.

use super::dma::{Dma, DmaFault, DmaGuard, DmaMemory, DmaRegion};
use super::span::MemorySpan;
use alloc::boxed::Box;
use core::sync::atomic::AtomicU64;
use zerocopy::FromZeros;

/// One range of zeroed memory from address `base` on.
#[derive(Debug)]
pub struct VecMemory {
    base: u64,
    words: Box<[AtomicU64]>,
}

impl VecMemory {
    /// Allocates `bytes` (rounded up to 8) from address 0 on.
    ///
    /// # Panics
    /// If the allocation fails.
    pub fn new(bytes: usize) -> Self {
        Self::at(0, bytes)
    }

    /// Allocates `bytes` (rounded up to 8) from address `base` (a multiple of 8) on.
    ///
    /// # Panics
    /// If the allocation fails, or if `base` is not a multiple of 8.
    pub fn at(base: u64, bytes: usize) -> Self {
        assert!(base.is_multiple_of(8), "base must be a multiple of 8");
        let words = <[AtomicU64]>::new_box_zeroed_with_elems(bytes.div_ceil(8));
        Self {
            base,
            words: words.expect("out of memory"),
        }
    }

    /// Returns the memory as words, for a driver in the same process.
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Copies bytes from the memory.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        Dma::new(&self.guard()).read(iova, into)
    }

    /// Copies bytes to the memory.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), DmaFault> {
        Dma::new(&self.guard()).write(iova, from)
    }
}

/// Guard of [`VecMemory`], which never unmaps: a reference is enough.
pub struct VecGuard<'a>(&'a VecMemory);

impl DmaGuard for VecGuard<'_> {
    fn lookup(&self, iova: u64) -> Option<DmaRegion<'_>> {
        let span = MemorySpan::of_words(&self.0.words);
        let offset = iova.checked_sub(self.0.base)?;
        (offset < span.len() as u64).then_some(DmaRegion {
            start: self.0.base,
            span,
        })
    }
}

impl DmaMemory for VecMemory {
    type Guard<'a> = VecGuard<'a>;

    fn guard(&self) -> VecGuard<'_> {
        VecGuard(self)
    }
}

impl DmaMemory for alloc::sync::Arc<VecMemory> {
    type Guard<'a> = VecGuard<'a>;

    fn guard(&self) -> VecGuard<'_> {
        VecGuard(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_and_faults_outside() {
        let memory = VecMemory::at(0x1000, 4096);
        memory.write(0x1FF0, &[9; 16]).unwrap();
        let mut bytes = [0; 16];
        memory.read(0x1FF0, &mut bytes).unwrap();
        assert_eq!(bytes, [9; 16]);
        assert_eq!(memory.write(0xFF8, &[0; 16]), Err(DmaFault(0xFF8)));
        assert_eq!(memory.read(0x1FF8, &mut bytes), Err(DmaFault(0x2000)));
        assert!(memory.read(u64::MAX, &mut bytes).is_err());
    }
}
