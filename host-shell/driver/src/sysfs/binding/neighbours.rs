//! The other functions of an IOMMU group: for `bind`, `doctor` and `topology`.

use crate::sysfs::{PciAddress, SysfsFunction, SysfsHost};
use std::fmt;

/// PCI class of bridges, without the kind of bridge.
const BRIDGES: u32 = 0x06;

/// Another function of an IOMMU group. Memory that one function of a group can access is accessible to all of
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupNeighbour {
    /// PCI address of the neighbour.
    pub address: PciAddress,
    /// Driver of the neighbour.
    pub driver: Option<String>,
}

impl fmt::Display for GroupNeighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let driver = self.driver.as_deref().unwrap_or("no driver");
        write!(f, "{} ({driver})", self.address)
    }
}

impl GroupNeighbour {
    /// True if VFIO refuses the group while the function has its driver.
    pub fn is_in_the_way(&self) -> bool {
        !matches!(self.driver.as_deref(), None | Some("vfio-pci" | "pci-stub"))
    }

    /// Formats several neighbours as a text.
    pub fn list(all: &[Self]) -> String {
        let all: Vec<String> = all.iter().map(ToString::to_string).collect();
        all.join(", ")
    }
}

impl SysfsHost {
    /// Returns the number of IOMMU groups; none without an IOMMU.
    pub fn iommu_groups(&self) -> usize {
        self.names("sys/kernel/iommu_groups").len()
    }

    /// Returns the functions that share the group of `function`. Bridges have no memory of programs within
    /// reach.
    pub fn neighbours(&self, function: &SysfsFunction) -> Vec<GroupNeighbour> {
        let Some(group) = function.group else {
            return Vec::new();
        };
        let others = self.group(group).into_iter().filter(|other| {
            let is_bridge = other.config.class >> 16 == BRIDGES
                && matches!(other.driver.as_deref(), None | Some("pcieport"));
            other.address != function.address && !is_bridge
        });
        let of = |other: SysfsFunction| GroupNeighbour {
            address: other.address,
            driver: other.driver,
        };
        others.map(of).collect()
    }

    /// Neighbours that keep VFIO from using the group, with their drivers.
    pub fn in_the_way(&self, function: &SysfsFunction) -> Vec<(PciAddress, String)> {
        let neighbours = self.neighbours(function).into_iter();
        let in_the_way = neighbours.filter(GroupNeighbour::is_in_the_way);
        in_the_way
            .filter_map(|one| Some((one.address, one.driver?)))
            .collect()
    }
}
