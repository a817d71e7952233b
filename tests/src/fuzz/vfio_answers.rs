//! Answers of the kernel and of a device are not trusted: configuration space, regions, the IOMMU.

use super::Input;
use nvme_driver::pci::PciConfig;
use nvme_driver::vfio::info::{HotReset, IommuInfo, VfioRegion};
use std::ops::Range;

const PAGE: u64 = 4096;

/// Configuration space, region and IOMMU answers over any bytes; the first eight choose a hole.
pub fn vfio_answers(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (start, len) = (input.word(), input.word());
    let rest = input.take(usize::MAX);
    config(rest);
    region(rest, u64::from(start)..u64::from(start) + u64::from(len));
    if let Some(iommu) = IommuInfo::parse(rest) {
        let ranges = iommu.ranges.unwrap_or_default();
        assert!(ranges.iter().all(|range| range.start() <= range.end()));
        assert!(ranges.len() <= rest.len() / 16, "ranges from nowhere");
    }
    if HotReset::parse(rest).is_some() {
        assert!(HotReset::wanted(rest).is_some_and(|bytes| bytes <= rest.len()));
    }
}

fn config(bytes: &[u8]) {
    let Some(config) = PciConfig::parse(bytes) else {
        return;
    };
    assert!(config.bytes >= 64 && config.bytes <= 4096 && config.class < 1 << 24);
    if let Some(msix) = config.msix {
        assert!(msix.bar < 6 && (1..=2048).contains(&msix.vectors));
        assert!(msix.offset.is_multiple_of(8) && msix.bytes() <= 32 << 10);
    }
    if let Some(express) = config.express {
        let links = [express.capable, express.trained].into_iter().flatten();
        links.for_each(|link| assert!(link.generation > 0 && link.lanes > 0));
    }
    for bar in &config.resizable {
        assert!(bar.largest.is_power_of_two() && bar.current.is_power_of_two() && bar.bar < 8);
    }
    assert!(config.bytes >= 256 || config.resizable.is_empty() && config.acs.is_none());
}

fn region(bytes: &[u8], hole: Range<u64>) {
    let Some(mut info) = VfioRegion::parse(bytes, PAGE) else {
        return;
    };
    check(&info);
    for area in &info.mappable {
        assert_eq!(info.mappable_from(area.start), Some(area.clone()));
        assert!(
            info.mappable_from(area.end)
                .is_none_or(|next| next.start == area.end)
        );
    }
    info.punch(hole.clone(), PAGE);
    check(&info);
    if !hole.is_empty() {
        let overlaps = |area: &Range<u64>| area.start < hole.end && hole.start < area.end;
        assert!(!info.mappable.iter().any(overlaps), "the hole is mapped");
    }
}

/// Whole pages inside the region, or up to its end, ascending and apart.
fn check(info: &VfioRegion) {
    let mut before = 0;
    for area in &info.mappable {
        assert!(area.start >= before && area.start < area.end && area.end <= info.size);
        assert!(area.start.is_multiple_of(PAGE));
        assert!(area.end.is_multiple_of(PAGE) || area.end == info.size);
        before = area.end;
    }
}
