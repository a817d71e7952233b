//! The memory of a queue's entries: contiguous, or in pages of a PRP list.
//!
//! Every index is below the number of entries: the callers check the indices of a driver before
//! they reach this module.

use crate::memory::{Dma, MemorySpan};
use alloc::vec::Vec;

/// Location of a ring.
#[derive(Clone, Debug)]
pub(crate) enum RingBase {
    /// Physically contiguous, from this address on.
    Contiguous(u64),
    /// The ring lies in pages of 1 << shift bytes, at any addresses (PC = 0).
    Pages { shift: u32, pages: Vec<u64> },
}

/// A ring of `entries` entries.
#[derive(Clone, Debug)]
pub(crate) struct QueueRing {
    pub base: RingBase,
    pub entries: u32,
    pub entry_bytes: usize,
}

impl QueueRing {
    /// Returns the address of entry `index` (below `entries`), and the number of entries, at most
    /// `count`, that are contiguous from it on.
    #[inline]
    pub fn run(&self, index: u32, count: u32) -> (u64, u32) {
        let count = count.min(self.entries - index);
        let offset = u64::from(index) * self.entry_bytes as u64;
        match &self.base {
            RingBase::Contiguous(base) => (base.wrapping_add(offset), count),
            RingBase::Pages { shift, pages } => {
                let inside = offset & ((1 << shift) - 1);
                let room = ((1u64 << shift) - inside) / self.entry_bytes as u64;
                // The Create command has checked that the list covers the ring, so the look-up
                // cannot fail. If it did, address 0 would end in a DMA fault, which stops the
                // controller, and not in a panic.
                let page = pages.get((offset >> shift) as usize).copied().unwrap_or(0);
                (page.wrapping_add(inside), count.min(room as u32))
            }
        }
    }

    /// Returns the ring as one span, if it is contiguous and mapped in one range.
    #[inline]
    pub fn whole<'g>(&self, dma: &Dma<'g>) -> Option<MemorySpan<'g>> {
        match self.base {
            RingBase::Contiguous(base) => dma.span(base, self.entries as usize * self.entry_bytes),
            RingBase::Pages { .. } => None,
        }
    }

    /// Makes writes to the ring reach the driver after all others of the batch.
    pub fn write_back_last(&self, dma: &Dma<'_>) {
        let bytes = self.entries as usize * self.entry_bytes;
        match &self.base {
            RingBase::Contiguous(base) => dma.write_back_last(*base, bytes as u64),
            RingBase::Pages { shift, pages } => {
                pages
                    .iter()
                    .for_each(|page| dma.write_back_last(*page, 1 << shift));
            }
        }
    }

    /// Returns the index after `index`.
    #[inline]
    pub fn next(&self, index: u32) -> u32 {
        if index + 1 == self.entries {
            0
        } else {
            index + 1
        }
    }

    /// Returns the number of entries from `from` to `to`, modulo the ring.
    #[inline]
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from {
            to - from
        } else {
            to + self.entries - from
        }
    }
}
