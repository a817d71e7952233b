//! Where the entries of a queue lie.
//!
//! Every index is below the number of entries: indices from a driver are checked before they get here.

use crate::memory::{Dma, Span};
use alloc::vec::Vec;

/// Where a ring lies.
#[derive(Clone, Debug)]
pub(crate) enum Base {
    /// Physically contiguous from this address on.
    Contiguous(u64),
    /// In pages of 1 << shift bytes, anywhere (PC = 0).
    Pages { shift: u32, pages: Vec<u64> },
}

/// A ring of `entries` entries.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    pub base: Base,
    pub entries: u32,
    pub entry_bytes: usize,
}

impl Ring {
    /// The address of entry `index` (below `entries`), and how many of the `count` entries from it
    /// on lie in one piece.
    #[inline]
    pub fn run(&self, index: u32, count: u32) -> (u64, u32) {
        let count = count.min(self.entries - index);
        let offset = u64::from(index) * self.entry_bytes as u64;
        match &self.base {
            Base::Contiguous(base) => (base.wrapping_add(offset), count),
            Base::Pages { shift, pages } => {
                let inside = offset & ((1 << shift) - 1);
                let room = ((1u64 << shift) - inside) / self.entry_bytes as u64;
                // Create checked that the list covers the ring; address 0 would fault, not panic.
                let page = pages.get((offset >> shift) as usize).copied().unwrap_or(0);
                (page.wrapping_add(inside), count.min(room as u32))
            }
        }
    }

    /// The whole ring as one span, where it is that.
    #[inline]
    pub fn whole<'g>(&self, dma: &Dma<'g>) -> Option<Span<'g>> {
        match self.base {
            Base::Contiguous(base) => dma.span(base, self.entries as usize * self.entry_bytes),
            Base::Pages { .. } => None,
        }
    }

    /// What is written to the ring arrives after everything else.
    pub fn settle_last(&self, dma: &Dma<'_>) {
        let bytes = self.entries as usize * self.entry_bytes;
        match &self.base {
            Base::Contiguous(base) => dma.settle_last(*base, bytes as u64),
            Base::Pages { shift, pages } => {
                pages
                    .iter()
                    .for_each(|page| dma.settle_last(*page, 1 << shift));
            }
        }
    }

    /// The index after `index`.
    #[inline]
    pub fn next(&self, index: u32) -> u32 {
        if index + 1 == self.entries {
            0
        } else {
            index + 1
        }
    }

    /// Entries from `from` to `to`, going round.
    #[inline]
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from {
            to - from
        } else {
            to + self.entries - from
        }
    }
}
