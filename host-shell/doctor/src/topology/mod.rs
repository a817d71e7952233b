//! Connections of controllers and GPUs: root ports, switches, links, ACS, IOMMU groups, NUMA nodes; and the
//! tiers that each pair of them allows.
//!
//! Everything is read from files of the system and nothing is opened for use. Files that only root may read are
//! reported as unknown to others. [`MachineTopology::here`] also asks CUDA's driver which GPUs share memory.

mod link;
mod path;
mod shape;
#[cfg(test)]
mod tests;
mod text;

pub use crate::sharing::{MemorySharing, SharedMemoryGpus};
pub use crate::tiers::{DriverVerdicts, FeatureVerdict, ReasonedVerdict, TierVerdicts, meaning};
pub use link::{LinkRate, LinkState};
pub use path::{PathRelation, SlowestLink, TurningPoint};

use crate::nvidia;
use crate::tiers::{PairPosition, tiers, ways};
use nvme_driver::pci::{ACS_REDIRECTS, PortRole};
use nvme_driver::sysfs::{PciAddress, SysfsFunction, SysfsHost, UsageCensus};
use path::PathRoute;
use serde::Serialize;
use shape::{FunctionTree, is_bridge};
use std::collections::{BTreeMap, BTreeSet};

/// Topology of a machine's controllers and GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineTopology {
    /// True if the IOMMU is on: there are IOMMU groups.
    pub iommu: bool,
    /// Root complexes that have a controller or a GPU below them.
    pub complexes: Vec<RootComplex>,
    /// Controllers, GPUs and the bridges above them, by address.
    pub devices: Vec<TopologyDevice>,
    /// Verdicts on driving each controller, by each driver.
    pub controllers: Vec<ControllerTiers>,
    /// A path for each GPU and each controller.
    pub paths: Vec<PeerPath>,
}

/// A root complex.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RootComplex {
    /// Linux's name of the root complex: pci0000:00.
    pub name: String,
    /// Number of functions right below the root complex that are left out.
    pub others: usize,
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A port of the root complex.
    RootPort,
    /// The port of a switch that leads up.
    SwitchUpstream,
    /// A port of a switch that leads down.
    SwitchDownstream,
    /// A bridge of another kind.
    Bridge,
    /// An NVMe controller.
    Nvme,
    /// A GPU of NVIDIA's.
    Gpu,
}

/// Setting of a port's ACS redirection: whether transfers between the peers below it go through the root
/// complex.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AcsState {
    /// The port redirects transfers to the root complex.
    Redirects,
    /// The port has the capability, and does not redirect.
    Off,
    /// The port does not have the capability.
    Absent,
    /// Only root may read that.
    Unknown,
}

/// A controller, a GPU or a bridge above one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopologyDevice {
    /// PCI address of the device.
    pub address: String,
    /// Address of the next bridge above the device.
    pub parent: Option<String>,
    /// The root complex above the device.
    pub complex: Option<String>,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Vendor and device: 144d:a80a.
    pub id: String,
    /// The name that the driver gives the device.
    pub model: Option<String>,
    /// Driver of the device.
    pub driver: Option<String>,
    /// The NUMA node to which the device is attached.
    pub node: Option<u32>,
    /// IOMMU group of the device.
    pub group: Option<IommuGroup>,
    /// ACS setting of a port.
    pub acs: Option<AcsState>,
    /// The link above it.
    pub link: Option<LinkState>,
    /// Number of functions below the device that are left out.
    pub others: usize,
}

/// An IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IommuGroup {
    /// Number of the group.
    pub number: u32,
    /// IOMMU domain type of the kernel's own drivers: DMA (strict), DMA-FQ (lazy), identity (not translated).
    pub kind: Option<String>,
}

/// A controller, regardless of GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ControllerTiers {
    /// PCI address of the controller.
    pub controller: String,
    /// Verdicts on driving the controller by CPU threads.
    #[serde(flatten)]
    pub ways: DriverVerdicts,
}

/// A GPU, a controller and the path between them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerPath {
    /// The GPU's PCI address.
    pub gpu: String,
    /// The controller's.
    pub controller: String,
    /// The nearest thing above both.
    pub relation: PathRelation,
    /// The bridge that is it.
    pub through: Option<String>,
    /// Turning point of transfers between them.
    pub route: TurningPoint,
    /// Reason for that turning point.
    pub why: String,
    /// The slowest link on that path.
    pub slowest: Option<SlowestLink>,
    /// Tiers 0 to 3.
    pub tiers: Vec<TierVerdicts>,
}

impl MachineTopology {
    /// Looks at this machine.
    pub fn here() -> Self {
        Self::with(&SysfsHost::here(), &SharedMemoryGpus::here())
    }

    /// Looks at a machine of whose GPUs none is known to share memory with the processor.
    pub fn of(host: &SysfsHost) -> Self {
        Self::with(host, &SharedMemoryGpus::default())
    }

    /// Looks at a machine.
    pub fn with(host: &SysfsHost, shared: &SharedMemoryGpus) -> Self {
        let shape = FunctionTree::of(host);
        let controllers: Vec<&SysfsFunction> = shape.all().filter(|one| one.is_nvme()).collect();
        let gpus: Vec<&SysfsFunction> = shape.all().filter(|one| nvidia::is_gpu(one)).collect();
        let (complexes, devices) = devices(host, &shape);
        let census = UsageCensus::take(host);
        let ways: Vec<DriverVerdicts> = controllers
            .iter()
            .map(|one| ways(host, one, &census))
            .collect();
        let drives = || controllers.iter().zip(&ways);
        let pairs = gpus
            .iter()
            .flat_map(|gpu| drives().map(move |(drive, ways)| (*gpu, *drive, ways)));
        Self {
            iommu: host.iommu_groups() > 0,
            complexes,
            devices,
            paths: pairs
                .map(|(gpu, drive, ways)| {
                    let sharing = shared.get(&gpu.address.to_string());
                    path_of(host, &shape, (gpu, sharing), drive, ways)
                })
                .collect(),
            controllers: drives()
                .map(|(one, ways)| ControllerTiers {
                    controller: one.address.to_string(),
                    ways: ways.clone(),
                })
                .collect(),
        }
    }

    /// Returns the device at `address`.
    pub fn device(&self, address: &str) -> Option<&TopologyDevice> {
        self.devices.iter().find(|one| one.address == address)
    }
}

fn path_of(
    host: &SysfsHost,
    shape: &FunctionTree,
    (gpu, sharing): (&SysfsFunction, Option<MemorySharing>),
    drive: &SysfsFunction,
    ways: &DriverVerdicts,
) -> PeerPath {
    let way = PathRoute::between(shape, gpu, drive);
    let between = PairPosition {
        relation: way.relation,
        route: way.route,
        sharing,
    };
    PeerPath {
        gpu: gpu.address.to_string(),
        controller: drive.address.to_string(),
        relation: way.relation,
        through: way.through.map(|bridge| bridge.to_string()),
        route: way.route,
        why: way.why,
        slowest: way.slowest,
        tiers: tiers(host, ways, gpu, between),
    }
}

/// Returns controllers, GPUs and the bridges above them; other devices are only counted at the bridge above them.
fn devices(host: &SysfsHost, shape: &FunctionTree) -> (Vec<RootComplex>, Vec<TopologyDevice>) {
    let matters = |one: &&SysfsFunction| one.is_nvme() || nvidia::is_gpu(one);
    let mut kept: BTreeSet<PciAddress> = BTreeSet::new();
    for one in shape.all().filter(matters) {
        kept.insert(one.address);
        kept.extend(
            one.bridges
                .iter()
                .filter(|bridge| shape.get(**bridge).is_some()),
        );
    }
    let (mut below, mut right_below): (BTreeMap<PciAddress, usize>, BTreeMap<String, usize>) =
        Default::default();
    for one in shape.all() {
        if kept.contains(&one.address) {
            if let Some(complex) = &one.complex {
                right_below.entry(complex.clone()).or_default();
            }
            continue;
        }
        let nearest = one.bridges.iter().find(|bridge| kept.contains(bridge));
        match (nearest, &one.complex) {
            (Some(bridge), _) => *below.entry(*bridge).or_default() += 1,
            (None, Some(complex)) => *right_below.entry(complex.clone()).or_default() += 1,
            (None, None) => {}
        }
    }
    let devices: Vec<TopologyDevice> = kept
        .iter()
        .filter_map(|address| shape.get(*address))
        .map(|one| {
            device(
                host,
                shape,
                one,
                below.get(&one.address).copied().unwrap_or(0),
            )
        })
        .collect();
    let used = |name: &str| {
        devices
            .iter()
            .any(|one| one.complex.as_deref() == Some(name))
    };
    let complexes = right_below
        .into_iter()
        .filter(|(name, _)| used(name))
        .map(|(name, others)| RootComplex { name, others })
        .collect();
    (complexes, devices)
}

fn device(
    host: &SysfsHost,
    shape: &FunctionTree,
    one: &SysfsFunction,
    others: usize,
) -> TopologyDevice {
    let kind = match shape.port(one.address) {
        _ if one.is_nvme() => DeviceKind::Nvme,
        _ if nvidia::is_gpu(one) => DeviceKind::Gpu,
        PortRole::Root => DeviceKind::RootPort,
        PortRole::Upstream => DeviceKind::SwitchUpstream,
        PortRole::Downstream => DeviceKind::SwitchDownstream,
        PortRole::Endpoint | PortRole::Other => DeviceKind::Bridge,
    };
    let is_port =
        matches!(kind, DeviceKind::RootPort | DeviceKind::SwitchDownstream) && is_bridge(one);
    let model = match kind {
        DeviceKind::Nvme => one.model.clone(),
        DeviceKind::Gpu => nvidia::model(host, one),
        _ => None,
    };
    TopologyDevice {
        address: one.address.to_string(),
        parent: shape.parent(one).map(|parent| parent.to_string()),
        complex: one.complex.clone(),
        kind,
        id: format!("{:04x}:{:04x}", one.config.vendor, one.config.device),
        model,
        driver: one.driver.clone(),
        node: one.node,
        group: one.group.map(|number| group(host, number)),
        acs: is_port.then(|| acs(one)),
        link: shape.link_above(one.address),
        others,
    }
}

fn group(host: &SysfsHost, number: u32) -> IommuGroup {
    let kind = host.text(format!("sys/kernel/iommu_groups/{number}/type"));
    IommuGroup {
        number,
        kind: kind.map(|kind| kind.trim().to_owned()),
    }
}

fn acs(port: &SysfsFunction) -> AcsState {
    match port.config.acs {
        Some(control) if control & ACS_REDIRECTS != 0 => AcsState::Redirects,
        Some(_) => AcsState::Off,
        None if port.config.bytes < 4096 => AcsState::Unknown,
        None => AcsState::Absent,
    }
}
