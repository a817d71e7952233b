//! Parsers of VFIO's answers about a region and the IOMMU: a fixed head and a chain of capabilities.
//!
//! Nothing in the bytes is trusted: offsets are checked, and a circular chain ends.

use std::ops::{Range, RangeInclusive};
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, VFIO_REGION_INFO_CAP_MSIX_MAPPABLE,
    VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP,
};

/// Bytes of `struct vfio_region_info` without capabilities.
pub const REGION_HEAD: usize = 32;
/// Bytes of `struct vfio_iommu_type1_info` without capabilities.
pub const IOMMU_HEAD: usize = 24;

/// A region of the device: a BAR or configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VfioRegion {
    /// Size in bytes; 0 when there is no such region.
    pub size: u64,
    /// Offset of the region in the device's file.
    pub offset: u64,
    /// Areas that can be mapped: whole pages or up to the end of the region, ascending, disjoint; empty when the region
    /// cannot be mapped.
    pub mappable: Vec<Range<u64>>,
    /// True if the page of the MSI-X table may be mapped with the other pages.
    pub msix_mappable: bool,
}

impl VfioRegion {
    /// Parses the answer to VFIO_DEVICE_GET_REGION_INFO on a machine with pages of `page` bytes. None when the head is
    /// not whole.
    pub fn parse(bytes: &[u8], page: u64) -> Option<Self> {
        let flags = word(bytes, 4)?;
        let (size, offset) = (long(bytes, 16)?, long(bytes, 24)?);
        let mut msix_mappable = false;
        let mut areas = None;
        if flags & VFIO_REGION_INFO_FLAG_CAPS != 0 {
            for (id, at) in CapabilityChain::new(bytes, word(bytes, 12)?, REGION_HEAD) {
                match id {
                    VFIO_REGION_INFO_CAP_SPARSE_MMAP => areas = sparse(bytes, at),
                    VFIO_REGION_INFO_CAP_MSIX_MAPPABLE => msix_mappable = true,
                    _ => {}
                }
            }
        }
        let mut mappable = Vec::new();
        if flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
            let whole = 0..size;
            mappable = tidy(areas.unwrap_or_else(|| vec![whole]), size, page);
        }
        Some(Self {
            size,
            offset,
            mappable,
            msix_mappable,
        })
    }

    /// Returns the mappable range from `start` to the end of its area, or `None` if `start` is in no area.
    pub fn mappable_from(&self, start: u64) -> Option<Range<u64>> {
        let area = self.mappable.iter().find(|area| area.contains(&start))?;
        Some(start..area.end)
    }

    /// Removes the pages of the `hole`, of `page` bytes each, from the mappable areas.
    pub fn punch(&mut self, hole: Range<u64>, page: u64) {
        let start = hole.start / page * page;
        let end = hole.end.checked_next_multiple_of(page);
        let end = end.unwrap_or(u64::MAX);
        let parts = self.mappable.iter().flat_map(|area| {
            let before = area.start..area.end.min(start);
            let after = area.start.max(end)..area.end;
            [before, after]
        });
        self.mappable = parts.filter(|area| !area.is_empty()).collect();
    }
}

/// Reduces areas to whole pages inside the region, or up to its end, ascending, joined where they touch.
fn tidy(mut areas: Vec<Range<u64>>, size: u64, page: u64) -> Vec<Range<u64>> {
    areas.sort_by_key(|area| area.start);
    let mut tidy: Vec<Range<u64>> = Vec::new();
    for area in areas {
        let start = area.start.checked_next_multiple_of(page);
        // A BAR of less than a page is mapped with the rest of its page, which the kernel keeps free.
        let end = match area.end >= size {
            true => size,
            false => area.end / page * page,
        };
        let Some(start) = start.filter(|start| *start < end) else {
            continue;
        };
        match tidy.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => tidy.push(start..end),
        }
    }
    tidy
}

fn sparse(bytes: &[u8], at: usize) -> Option<Vec<Range<u64>>> {
    let count = word(bytes, at + 8)? as usize;
    let area = |index: usize| {
        let at = at.checked_add(16)?.checked_add(index.checked_mul(16)?)?;
        let (start, len) = (long(bytes, at)?, long(bytes, at + 8)?);
        Some(start..start.saturating_add(len))
    };
    // Areas past the end of the answer are ignored.
    Some((0..count).map_while(area).collect())
}

/// Page sizes and addresses that the IOMMU translates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IommuInfo {
    /// Bits of the page sizes that it supports.
    pub page_sizes: u64,
    /// Addresses that the IOMMU translates, without reserved ones; `None` if the kernel does not report them.
    pub ranges: Option<Vec<RangeInclusive<u64>>>,
    /// Number of mappings that may still be made; `None` if the kernel does not report it.
    pub mappings_left: Option<u32>,
}

impl IommuInfo {
    /// Parses the answer to VFIO_IOMMU_GET_INFO. None when the head is not whole.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let flags = word(bytes, 4)?;
        let sizes = long(bytes, 8)?;
        let mut info = Self::default();
        if flags & VFIO_IOMMU_INFO_PGSIZES != 0 {
            info.page_sizes = sizes;
        }
        if flags & VFIO_IOMMU_INFO_CAPS == 0 {
            return Some(info);
        }
        for (id, at) in CapabilityChain::new(bytes, word(bytes, 16)?, IOMMU_HEAD) {
            match id {
                VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => info.ranges = iova_ranges(bytes, at),
                VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => info.mappings_left = word(bytes, at + 8),
                _ => {}
            }
        }
        Some(info)
    }
}

fn iova_ranges(bytes: &[u8], at: usize) -> Option<Vec<RangeInclusive<u64>>> {
    let count = word(bytes, at + 8)? as usize;
    let range = |index: usize| {
        let at = at.checked_add(16)?.checked_add(index.checked_mul(16)?)?;
        Some(long(bytes, at)?..=long(bytes, at + 8)?)
    };
    let ranges = (0..count).map_while(range);
    Some(ranges.filter(|range| !range.is_empty()).collect())
}

/// Devices that a hot reset of one device resets too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotReset {
    /// Groups of the functions; `None` if the kernel reports the devices of an iommufd instead.
    groups: Option<Vec<u32>>,
    /// True if this program has all of these devices open.
    is_owned: bool,
}

impl HotReset {
    /// Bytes of `struct vfio_pci_hot_reset_info` without its entries.
    pub const HEAD: usize = 12;
    /// Bytes of an entry.
    const ENTRY: usize = 8;
    /// The flags.
    const DEV_ID: u32 = 1 << 0;
    const DEV_ID_OWNED: u32 = 1 << 1;

    /// Returns the bytes of the whole answer.
    pub fn wanted(bytes: &[u8]) -> Option<usize> {
        let entries = (word(bytes, 8)? as usize).checked_mul(Self::ENTRY)?;
        entries.checked_add(Self::HEAD)
    }

    /// Parses the answer to VFIO_DEVICE_GET_PCI_HOT_RESET_INFO. None when the head or an entry is not whole.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let flags = word(bytes, 4)?;
        let entries = bytes.get(Self::HEAD..Self::wanted(bytes)?)?;
        let entries = entries.chunks_exact(Self::ENTRY);
        let groups = entries.filter_map(|entry| word(entry, 0)).collect();
        Some(Self {
            groups: (flags & Self::DEV_ID == 0).then_some(groups),
            is_owned: flags & Self::DEV_ID != 0 && flags & Self::DEV_ID_OWNED != 0,
        })
    }

    /// True if only devices of group `number`, or of this program's iommufd, are reset.
    pub fn is_of(&self, number: u32) -> bool {
        match &self.groups {
            Some(groups) => groups.iter().all(|group| *group == number),
            None => self.is_owned,
        }
    }
}

/// The capabilities of an answer. Each begins with 8 bytes: identifier, version, and offset of the next one.
struct CapabilityChain<'a> {
    bytes: &'a [u8],
    next: u32,
    head: usize,
    left: usize,
}

impl<'a> CapabilityChain<'a> {
    fn new(bytes: &'a [u8], first: u32, head: usize) -> Self {
        Self {
            bytes,
            next: first,
            head,
            // More capabilities than fit into the answer mean that the chain is circular.
            left: bytes.len() / 8,
        }
    }
}

impl Iterator for CapabilityChain<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.next as usize;
        if at < self.head || self.left == 0 {
            return None;
        }
        self.left -= 1;
        let id = word(self.bytes, at)? & 0xFFFF;
        self.next = word(self.bytes, at + 4)?;
        Some((id, at))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Returns an answer with the fields argsz, flags, index, cap offset, size, offset.
    fn region(flags: u32, capability: u32, size: u32, rest: &[u32]) -> Vec<u8> {
        let mut all = vec![0, flags, 0, capability, size, 0, 0, 0x10];
        all.extend(rest);
        words(&all)
    }

    #[test]
    fn a_region_without_capabilities_is_mapped_whole_or_not_at_all() {
        let info = VfioRegion::parse(&region(7, 0, 0x4000, &[]), 4096).unwrap();
        assert_eq!(info.offset, 0x10_0000_0000);
        assert_eq!(info.mappable_from(0), Some(0..0x4000));
        let info = VfioRegion::parse(&region(3, 0, 0x4000, &[]), 4096).unwrap();
        assert!(info.mappable.is_empty());
        assert_eq!(VfioRegion::parse(&region(7, 0, 0, &[])[..31], 4096), None);
    }

    #[test]
    fn sparse_areas_are_whole_pages_inside_the_region() {
        let areas = [
            1 | 1 << 16,
            48 + 32,
            3,
            0, // head, next, areas
            0x3000,
            0,
            0x9000,
            0, // past the end: cut
            0x0800,
            0,
            0x0F00,
            0, // page 1 only in part
            0x1000,
            0,
            0x1000,
            0,
            3 | 1 << 16,
            0,
        ];
        let info = VfioRegion::parse(&region(15, 32, 0x8000, &areas), 4096).unwrap();
        assert_eq!(info.mappable, [0x1000..0x2000, 0x3000..0x8000]);
        assert!(
            !info.msix_mappable,
            "the second capability's place is wrong"
        );
        assert_eq!(info.mappable_from(0x4000), Some(0x4000..0x8000));
        assert_eq!(info.mappable_from(0), None);
    }

    #[test]
    fn pages_of_64_kib_are_left_out_whole_and_small_regions_are_mapped() {
        const PAGE: u64 = 64 << 10;
        let small = VfioRegion::parse(&region(7, 0, 0x4000, &[]), PAGE).unwrap();
        assert_eq!(small.mappable_from(0), Some(0..0x4000));
        let mut large = VfioRegion::parse(&region(7, 0, 0x4_0000, &[]), PAGE).unwrap();
        large.punch(0x1_2000..0x1_2400, PAGE);
        assert_eq!(large.mappable, [0..PAGE, 2 * PAGE..4 * PAGE]);
        let areas = [1 | 1 << 16, 0, 1, 0, 0x1000, 0, 0x2_8000, 0];
        let sparse = VfioRegion::parse(&region(15, 32, 0x4_0000, &areas), PAGE).unwrap();
        assert_eq!(sparse.mappable, [PAGE..2 * PAGE]);
    }

    #[test]
    fn the_page_of_the_msix_table_is_left_out() {
        let mut info = VfioRegion::parse(&region(7, 0, 0x4000, &[]), 4096).unwrap();
        info.punch(0x2010..0x2420, 4096);
        assert_eq!(info.mappable, [0..0x2000, 0x3000..0x4000]);
        info.punch(0..u64::MAX, 4096);
        assert!(info.mappable.is_empty());
    }

    #[test]
    fn reserved_addresses_are_not_in_the_ranges() {
        let info = words(&[
            0,
            3,
            0x1000,
            0x4020,
            24,
            0, // head
            3,
            40,
            65535,
            0, // mappings left
            1,
            0,
            2,
            0, // ranges
            0,
            0,
            0xFEDF_FFFF,
            0,
            0xFEF0_0000,
            0,
            0xFFFF_FFFF,
            0x7F,
        ]);
        let info = IommuInfo::parse(&info).unwrap();
        assert_eq!(info.page_sizes, 0x4020_0000_1000);
        assert_eq!(info.mappings_left, Some(65535));
        let ranges = [0..=0xFEDF_FFFF, 0xFEF0_0000..=0x7F_FFFF_FFFF];
        assert_eq!(info.ranges.unwrap(), ranges);
    }

    #[test]
    fn circles_and_loose_ends_end() {
        let circle = words(&[0, 2, 0, 0, 24, 0, 9, 24, 0, 0]);
        assert_eq!(IommuInfo::parse(&circle), Some(IommuInfo::default()));
        let loose = words(&[0, 2, 0, 0, u32::MAX, 0]);
        assert_eq!(IommuInfo::parse(&loose), Some(IommuInfo::default()));
        let many = words(&[0, 2, 0, 0, 24, 0, 1, 0, u32::MAX, 0, 5, 0, 6, 0]);
        assert_eq!(IommuInfo::parse(&many).unwrap().ranges.unwrap(), [5..=6]);
    }

    #[test]
    fn a_bus_is_reset_with_what_is_ours_alone() {
        let of = |flags, entries: &[u32]| {
            let mut all = vec![0, flags, entries.len() as u32];
            all.extend(entries.iter().flat_map(|group| [*group, 0x0100_0000]));
            words(&all)
        };
        let is_of = |bytes: &[u8]| HotReset::parse(bytes).unwrap().is_of(7);
        assert!(is_of(&of(0, &[7, 7])));
        assert!(!is_of(&of(0, &[7, 8])));
        // With iommufd each entry is the number of a device, in place of a group.
        assert!(is_of(&of(3, &[1, 2])));
        assert!(!is_of(&of(1, &[7, 7])));
        assert!(!is_of(&of(2, &[8])), "owned, and groups all the same");
        let whole = of(0, &[7, 7]);
        assert_eq!(HotReset::wanted(&whole), Some(whole.len()));
        assert_eq!(HotReset::parse(&whole[..whole.len() - 1]), None);
        assert_eq!(HotReset::parse(&words(&[0, 0, u32::MAX])), None);
        assert_eq!(HotReset::parse(&[]), None);
    }
}
