//! Host memory that commands in flight use: by owner, and whether the device writes it. Two
//! commands may read the same bytes, but bytes that the device writes must belong to one command
//! alone.
//!
//! Ranges are indexed by pages of 4 KiB, whatever the controller's page size, so that a look-up
//! compares only a few neighbours; within a page the exact bytes decide.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

const SHIFT: u32 = 12;

/// Bytes from `start` (included) to `end` (excluded).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// First byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
}

impl AddressRange {
    /// Makes the range of `bytes` bytes from `start` on, cut at the end of the address space.
    pub fn new(start: u64, bytes: u64) -> Self {
        Self {
            start,
            end: start.saturating_add(bytes),
        }
    }

    fn pages(self) -> core::ops::Range<u64> {
        let last = self.end.saturating_sub(1).max(self.start);
        self.start >> SHIFT..(last >> SHIFT) + 1
    }
}

#[derive(Clone, Copy, Debug)]
struct OwnedRange {
    span: AddressRange,
    writes: bool,
    owner: u64,
}

/// All memory in use.
#[derive(Debug, Default)]
pub struct BufferMap(BTreeMap<u64, Vec<OwnedRange>>);

impl BufferMap {
    /// Registers `span` for `owner`. Returns the first byte that another owner uses too, if the
    /// device writes one of the two ranges.
    pub fn claim(&mut self, owner: u64, span: AddressRange, writes: bool) -> Option<u64> {
        let mut conflict = None;
        for page in span.pages() {
            let uses = self.0.entry(page).or_default();
            let other = uses.iter().find(|one| {
                one.owner != owner
                    && (one.writes || writes)
                    && one.span.start < span.end
                    && span.start < one.span.end
            });
            conflict = conflict.or(other.map(|one| one.span.start.max(span.start)));
            uses.push(OwnedRange {
                span,
                writes,
                owner,
            });
        }
        conflict
    }

    /// Ends the use of `span` by `owner`.
    pub fn release(&mut self, owner: u64, span: AddressRange) {
        for page in span.pages() {
            if let Some(uses) = self.0.get_mut(&page) {
                uses.retain(|one| one.owner != owner);
                if uses.is_empty() {
                    self.0.remove(&page);
                }
            }
        }
    }

    /// Ends every use.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_writers_do_not() {
        let mut buffers = BufferMap::default();
        assert_eq!(
            buffers.claim(1, AddressRange::new(0x1800, 0x1000), false),
            None
        );
        assert_eq!(
            buffers.claim(2, AddressRange::new(0x1000, 0x3000), false),
            None
        );
        assert_eq!(
            buffers.claim(3, AddressRange::new(0x27FF, 1), true),
            Some(0x27FF)
        );
        buffers.release(2, AddressRange::new(0x1000, 0x3000));
        assert_eq!(
            buffers.claim(4, AddressRange::new(0x2800, 0x800), true),
            None,
            "beside it"
        );
        buffers.release(1, AddressRange::new(0x1800, 0x1000));
        buffers.release(3, AddressRange::new(0x27FF, 1));
        assert_eq!(
            buffers.claim(5, AddressRange::new(0x1000, 0x1800), true),
            None
        );
    }
}
