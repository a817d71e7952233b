//! Allocator of I/O virtual addresses.
//!
//! Invariant: an address has at most one holder, and an address that was never added to the allocator (the
//! IOMMU's interrupt window, ranges that firmware claims) is never allocated.

use std::collections::BTreeMap;
use std::ops::Range;
#[cfg(feature = "vfio")]
use std::ops::RangeInclusive;

#[cfg(feature = "vfio")]
/// Lowest address that is used: a PRP of 0 is easily mistaken for no PRP.
const LOWEST: u64 = 64 << 10;
/// Long mappings start at a multiple of this, so that the IOMMU can use its huge pages.
const HUGE: u64 = 2 << 20;
/// Alignment that the largest memory page size which bring-up may select requires.
#[cfg(feature = "vfio")]
const SMALL: u64 = 64 << 10;

#[cfg(feature = "vfio")]
/// Ranges that an IOMMU surely translates, for kernels that do not report theirs: 39 bits, without the
/// interrupt window.
const USUAL: [RangeInclusive<u64>; 2] = [0..=0xFEDF_FFFF, 0xFEF0_0000..=(1 << 39) - 1];

/// The free addresses.
#[derive(Debug)]
pub struct IovaAllocator {
    /// Start and end of each free stretch; they never touch.
    free: BTreeMap<u64, u64>,
    /// Allocation unit in bytes: every allocation is a multiple of it.
    granule: u64,
    /// Stretches of [`HUGE`] bytes and more start at a multiple of this.
    long: u64,
}

impl IovaAllocator {
    /// Creates an allocator without free addresses; allocations will be whole multiples of
    /// `granule`, a power of two.
    pub fn empty(granule: u64) -> Self {
        Self {
            free: BTreeMap::new(),
            granule,
            long: granule,
        }
    }

    /// Creates an allocator in which all of `ranges` that an IOMMU translates is free, or the usual ranges when
    /// the kernel reports none.
    #[cfg(feature = "vfio")]
    pub fn of_iommu(ranges: Option<&[RangeInclusive<u64>]>) -> Self {
        let mut free = Self {
            long: HUGE,
            ..Self::empty(SMALL)
        };
        for range in ranges.unwrap_or(&USUAL) {
            // The very last byte of 64-bit space is given up for half-open ranges.
            let end = range.end().saturating_add(1);
            let start = (*range.start()).max(LOWEST);
            if start < end {
                free.give(start..end);
            }
        }
        free
    }

    /// Takes `bytes` bytes (rounded up to the granule) in one stretch, the lowest that is free.
    pub fn take(&mut self, bytes: u64) -> Option<Range<u64>> {
        let bytes = bytes.max(1).checked_next_multiple_of(self.granule)?;
        let align = if bytes >= HUGE {
            self.long
        } else {
            self.granule
        };
        let fits = |(&start, &end): (&u64, &u64)| {
            let at = start.checked_next_multiple_of(align)?;
            let until = at.checked_add(bytes)?;
            (until <= end).then_some((start..end, at..until))
        };
        let (free, taken) = self.free.iter().find_map(fits)?;
        self.cut(free, &taken);
        Some(taken)
    }

    /// Withdraws the free part of a range from allocation.
    #[cfg(feature = "vfio")]
    pub fn reserve(&mut self, range: Range<u64>) {
        while let Some((start, end)) = self
            .free
            .range(..range.end)
            .next_back()
            .map(|(start, end)| (*start, *end))
            .filter(|(_, end)| *end > range.start)
        {
            self.cut(start..end, &range);
        }
    }

    fn cut(&mut self, free: Range<u64>, taken: &Range<u64>) {
        self.free.remove(&free.start);
        if free.start < taken.start {
            self.free.insert(free.start, taken.start);
        }
        if taken.end < free.end {
            self.free.insert(taken.end, free.end);
        }
    }

    /// Returns a range to the allocator; adjacent free ranges are joined with it.
    pub fn give(&mut self, mut range: Range<u64>) {
        let before = self.free.range(..=range.start).next_back();
        if let Some((&start, &end)) = before.filter(|(_, end)| **end >= range.start) {
            self.free.remove(&start);
            range = start..range.end.max(end);
        }
        while let Some((&start, &end)) = self.free.range(range.start..=range.end).next() {
            self.free.remove(&start);
            range.end = range.end.max(end);
        }
        self.free.insert(range.start, range.end);
    }

    #[cfg(all(test, feature = "vfio"))]
    fn bytes_free(&self) -> u64 {
        self.free.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(all(test, feature = "vfio"))]
mod tests {
    use super::*;

    #[test]
    fn reserved_addresses_are_never_handed_out() {
        let mut free = IovaAllocator::of_iommu(Some(&[0..=0x3F_FFFF, 0x50_0000..=0x7F_FFFF]));
        let all = free.bytes_free();
        assert_eq!(all, 0x3F_0000 + 0x30_0000);
        let mut taken = Vec::new();
        while let Some(range) = free.take(1) {
            assert!(range.start >= LOWEST && range.start.is_multiple_of(SMALL));
            assert!(range.end <= 0x40_0000 || range.start >= 0x50_0000);
            taken.push(range);
        }
        assert_eq!(taken.len() as u64, all / SMALL);
        let mut sorted = taken.clone();
        sorted.sort_by_key(|range| range.start);
        sorted.dedup();
        assert_eq!(sorted.len(), taken.len(), "handed out twice");
        taken.into_iter().rev().for_each(|range| free.give(range));
        assert_eq!(free.free.len(), 2, "joined again");
        assert_eq!(free.bytes_free(), all);
    }

    #[test]
    fn long_mappings_lie_on_huge_pages() {
        let mut free = IovaAllocator::of_iommu(None);
        assert_eq!(free.take(1), Some(LOWEST..2 * LOWEST));
        let long = free.take(HUGE + 1).unwrap();
        assert!(long.start.is_multiple_of(HUGE) && long.end - long.start == HUGE + SMALL);
        let window = free.take(0xFF00_0000).unwrap();
        assert!(
            window.start >= 0xFEF0_0000,
            "not across the interrupt window"
        );
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut free = IovaAllocator::of_iommu(Some(&[0..=0x1F_FFFF]));
        assert_eq!(free.take(u64::MAX), None);
        assert_eq!(free.take(0x20_0000), None);
        assert!(free.take(0x1F_0000).is_some());
        assert_eq!(free.take(1), None);
        assert_eq!(IovaAllocator::of_iommu(Some(&[])).take(1), None);
        let top = u64::MAX - 0xFFFF..=u64::MAX;
        assert_eq!(IovaAllocator::of_iommu(Some(&[top])).take(1), None);
    }

    #[test]
    fn reserving_touches_many_stretches() {
        let mut free = IovaAllocator::of_iommu(Some(&[0..=0xF_FFFF, 0x20_0000..=0x2F_FFFF]));
        free.reserve(0x8_0000..0x28_0000);
        assert_eq!(free.bytes_free(), 0x7_0000 + 0x8_0000);
        free.reserve(0..u64::MAX);
        assert_eq!(free.bytes_free(), 0);
    }
}
