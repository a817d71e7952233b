//! The path between a GPU and a controller.

use super::link::LinkState;
use super::shape::{FunctionTree, is_switch_port};
use nvme_driver::pci::ACS_REDIRECTS;
use nvme_driver::sysfs::{PciAddress, SysfsFunction};
use serde::Serialize;

/// The nearest thing that is above both, from near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathRelation {
    /// A switch.
    SameSwitch,
    /// Both are below one root port, without a common switch.
    SameRootPort,
    /// A root complex.
    SameRootComplex,
    /// Their root complexes belong to one NUMA node.
    SameNode,
    /// The NUMA nodes of their root complexes are unknown, so they may or may not share one.
    OtherRootComplex,
    /// Two NUMA nodes.
    AcrossNodes,
}

/// Turning point of transfers between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TurningPoint {
    /// The path turns in the switch.
    Switch,
    /// The path turns in the root complex.
    RootComplex,
    /// The turning point is the switch or the root complex: ACS of the switch cannot be read.
    Unknown,
}

/// The slowest link of a path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowestLink {
    /// The device below the link.
    pub address: String,
    /// The link.
    #[serde(flatten)]
    pub link: LinkState,
}

/// Path between a GPU and a controller.
pub(super) struct PathRoute {
    pub relation: PathRelation,
    pub through: Option<PciAddress>,
    pub route: TurningPoint,
    pub why: String,
    pub slowest: Option<SlowestLink>,
}

impl PathRoute {
    pub fn between(shape: &FunctionTree, gpu: &SysfsFunction, drive: &SysfsFunction) -> Self {
        let shared = |bridge: &&PciAddress| drive.bridges.contains(bridge);
        let through = gpu.bridges.iter().find(shared).copied();
        let relation = relation(shape, gpu, drive, through);
        let below = |one: &SysfsFunction| -> Vec<PciAddress> {
            let bridges = one.bridges.iter();
            let below = bridges.take_while(|bridge| Some(**bridge) != through);
            below.copied().collect()
        };
        let (route, why) = match (relation, through) {
            (PathRelation::SameSwitch, Some(switch)) => {
                route(shape, drive, switch, &[below(gpu), below(drive)].concat())
            }
            _ => (
                TurningPoint::RootComplex,
                "nothing below the root complex is above both".to_owned(),
            ),
        };
        let slowest = [gpu, drive].into_iter().flat_map(|end| {
            let bridges = match route {
                TurningPoint::Switch => below(end),
                _ => end.bridges.clone(),
            };
            std::iter::once(end.address).chain(bridges)
        });
        Self {
            relation,
            through,
            route,
            why,
            slowest: slowest_of(shape, slowest),
        }
    }
}

fn relation(
    shape: &FunctionTree,
    gpu: &SysfsFunction,
    drive: &SysfsFunction,
    through: Option<PciAddress>,
) -> PathRelation {
    if let Some(bridge) = through {
        return match is_switch_port(shape.port(bridge)) {
            true => PathRelation::SameSwitch,
            false => PathRelation::SameRootPort,
        };
    }
    if gpu.complex.is_some() && gpu.complex == drive.complex {
        return PathRelation::SameRootComplex;
    }
    match (gpu.node, drive.node) {
        (Some(one), Some(other)) if one == other => PathRelation::SameNode,
        (Some(_), Some(_)) => PathRelation::AcrossNodes,
        _ => PathRelation::OtherRootComplex,
    }
}

/// Returns the turning point of transfers of `drive` to a peer below `switch`, and its reason; `below` are the bridges
/// between the switch and the two.
fn route(
    shape: &FunctionTree,
    drive: &SysfsFunction,
    switch: PciAddress,
    below: &[PciAddress],
) -> (TurningPoint, String) {
    if let Some(group) = drive.group {
        let why = format!(
            "the IOMMU translates the addresses of group {group}, which switch {switch} does not know"
        );
        return (TurningPoint::RootComplex, why);
    }
    let ports = || below.iter().filter_map(|bridge| shape.get(*bridge));
    let redirects =
        |port: &&SysfsFunction| port.config.acs.is_some_and(|acs| acs & ACS_REDIRECTS != 0);
    if let Some(port) = ports().find(redirects) {
        let why = format!("ACS of {} sends peers' transfers up", port.address);
        return (TurningPoint::RootComplex, why);
    }
    let is_hidden = |port: &&SysfsFunction| port.config.acs.is_none() && port.config.bytes < 4096;
    match ports().find(is_hidden) {
        Some(port) => (
            TurningPoint::Unknown,
            format!("ACS of {} is unknown: needs root", port.address),
        ),
        None => (
            TurningPoint::Switch,
            format!("switch {switch} passes peers' transfers on"),
        ),
    }
}

/// Returns the slowest of the links above `devices`, by their trained rates.
fn slowest_of(
    shape: &FunctionTree,
    devices: impl Iterator<Item = PciAddress>,
) -> Option<SlowestLink> {
    let links = devices.filter_map(|address| {
        let link = shape.link_above(address)?;
        let rate = link.trained?.gb_per_s?;
        Some((rate, address, link))
    });
    let (_, address, link) = links.min_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(SlowestLink {
        address: address.to_string(),
        link,
    })
}
