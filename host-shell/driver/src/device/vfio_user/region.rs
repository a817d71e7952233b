//! Parser of a server's answer about a region: its size, and the parts of it that can be mapped.

use nvme_vfio_user::{
    CAP_SPARSE_MMAP, InfoCapability, REGION_CAPS, REGION_MMAP, RegionInfo, SparseArea, SparseMmap,
};
use zerocopy::FromBytes;

/// A region with a consistent description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerRegion {
    /// Bytes; 0 when there is no such region.
    pub size: u64,
    /// Offset of the region in the file that came with its description.
    pub file_offset: u64,
    /// Parts that can be mapped: offset in the region and bytes.
    pub areas: Vec<(u64, u64)>,
}

/// Reads the reply to DEVICE_GET_REGION_INFO about region `index`. The error is the cause in words.
pub(super) fn parse(index: u32, reply: &[u8]) -> Result<ServerRegion, String> {
    let (info, _) =
        RegionInfo::read_from_prefix(reply).map_err(|_| "a description that is too short")?;
    if info.index != index {
        return Err(format!("a description of region {}", info.index));
    }
    let mut areas = None;
    if info.flags & REGION_CAPS != 0 {
        areas = sparse_areas(info.cap_offset, reply)?;
    }
    let areas = match areas {
        _ if info.flags & REGION_MMAP == 0 => Vec::new(),
        Some(areas) => areas,
        None => vec![(0, info.size)],
    };
    for (offset, size) in &areas {
        let inside = offset
            .checked_add(*size)
            .is_some_and(|end| end <= info.size);
        if !inside || info.offset.checked_add(info.size).is_none() {
            return Err(format!(
                "an area of {size:#x} bytes at {offset:#x} that lies outside its {:#x} bytes",
                info.size
            ));
        }
    }
    Ok(ServerRegion {
        size: info.size,
        file_offset: info.offset,
        areas,
    })
}

/// Returns the areas of the first sparse-mmap capability, if there is one.
fn sparse_areas(first: u32, reply: &[u8]) -> Result<Option<Vec<(u64, u64)>>, String> {
    let mut at = first as usize;
    let mut least = size_of::<RegionInfo>();
    while at != 0 {
        // Each capability lies after the one before it, so that the chain cannot be circular.
        let bytes = reply.get(at..).filter(|_| at >= least);
        let bytes = bytes.ok_or_else(|| format!("a capability at {at:#x}"))?;
        let short = || format!("a capability at {at:#x} that is cut off");
        let (header, rest) = InfoCapability::read_from_prefix(bytes).map_err(|_| short())?;
        if header.id == CAP_SPARSE_MMAP {
            let (sparse, rest) = SparseMmap::read_from_prefix(rest).map_err(|_| short())?;
            let areas = rest.chunks_exact(size_of::<SparseArea>());
            if areas.len() < sparse.areas as usize {
                return Err(short());
            }
            let area = |bytes| SparseArea::read_from_bytes(bytes).ok();
            let areas = areas.take(sparse.areas as usize).filter_map(area);
            return Ok(Some(areas.map(|area| (area.offset, area.size)).collect()));
        }
        least = at + size_of::<InfoCapability>();
        at = header.next as usize;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    const SIZE: u64 = 0x4000;

    fn info(flags: u32, argsz: usize, cap_offset: u32) -> RegionInfo {
        RegionInfo {
            argsz: argsz as u32,
            flags,
            index: 0,
            cap_offset,
            size: SIZE,
            offset: 0x10_0000,
        }
    }

    /// Returns a description with an unknown capability before the one that counts.
    fn sparse(areas: &[(u64, u64)], count: u32) -> Vec<u8> {
        let capability = |id, next| InfoCapability {
            id,
            version: 1,
            next,
        };
        let count = SparseMmap {
            areas: count,
            reserved: 0,
        };
        let mut bytes = Vec::new();
        bytes.extend_from_slice(capability(77, 40).as_bytes());
        bytes.extend_from_slice(capability(CAP_SPARSE_MMAP, 0).as_bytes());
        bytes.extend_from_slice(count.as_bytes());
        for (offset, size) in areas.iter().copied() {
            bytes.extend_from_slice(SparseArea { offset, size }.as_bytes());
        }
        let head = info(REGION_MMAP | REGION_CAPS, 32 + bytes.len(), 32);
        [head.as_bytes(), &bytes].concat()
    }

    #[test]
    fn areas_are_those_of_the_capability_or_the_whole_region() {
        let areas = |bytes: &[u8]| parse(0, bytes).unwrap().areas;
        assert_eq!(areas(info(0, 32, 0).as_bytes()), []);
        assert_eq!(areas(info(REGION_MMAP, 32, 0).as_bytes()), [(0, SIZE)]);
        let two = [(0x1000, 0x1000), (0x3000, 0x1000)];
        assert_eq!(areas(&sparse(&two, 2)), two);
        assert_eq!(areas(&sparse(&two, 1)), two[..1]);
        assert_eq!(areas(&sparse(&[], 0)), []);
    }

    #[test]
    fn nonsense_is_refused() {
        let whole = sparse(&[(0x1000, 0x1000)], 1);
        for len in 0..32 {
            assert!(parse(0, &whole[..len]).is_err(), "{len} bytes");
        }
        assert!(parse(1, &whole).is_err(), "another region");
        assert!(parse(0, &sparse(&[(0x1000, 0x1000)], 2)).is_err());
        assert!(parse(0, &sparse(&[], u32::MAX)).is_err());
        assert!(parse(0, &sparse(&[(0x1000, SIZE)], 1)).is_err());
        assert!(parse(0, &sparse(&[(u64::MAX, 2)], 1)).is_err());
        for offset in [1, 31, 4096, u32::MAX] {
            let bytes = info(REGION_MMAP | REGION_CAPS, 32, offset);
            assert!(parse(0, bytes.as_bytes()).is_err(), "at {offset}");
        }
        // A capability that is its own successor.
        let mut circle = whole;
        circle[36..40].copy_from_slice(&32u32.to_ne_bytes());
        assert!(parse(0, &circle).is_err());
    }
}
