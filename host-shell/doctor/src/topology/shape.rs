//! The functions of a machine and the bridges above each.

use super::link::LinkState;
use nvme_driver::pci::PortRole;
use nvme_driver::sysfs::{PciAddress, SysfsFunction, SysfsHost};
use std::collections::BTreeMap;

/// Base class and subclass of a bridge between two PCI buses.
const CLASS_BRIDGE: u32 = 0x06_04;

/// All functions by address.
pub(super) struct FunctionTree(BTreeMap<PciAddress, SysfsFunction>);

impl FunctionTree {
    pub fn of(host: &SysfsHost) -> Self {
        let all = host.functions().into_iter();
        Self(all.map(|one| (one.address, one)).collect())
    }

    pub fn all(&self) -> impl Iterator<Item = &SysfsFunction> {
        self.0.values()
    }

    pub fn get(&self, address: PciAddress) -> Option<&SysfsFunction> {
        self.0.get(&address)
    }

    /// Returns the nearest bridge above that answers.
    pub fn parent(&self, function: &SysfsFunction) -> Option<PciAddress> {
        let mut bridges = function.bridges.iter();
        bridges.find(|bridge| self.0.contains_key(bridge)).copied()
    }

    /// Returns the role of the function: from its capability, else by its class and by the device above it.
    pub fn port(&self, address: PciAddress) -> PortRole {
        let Some(function) = self.get(address) else {
            return PortRole::Other;
        };
        if let Some(express) = function.config.express {
            return express.port;
        }
        if !is_bridge(function) {
            return PortRole::Endpoint;
        }
        // Below a root port comes the upstream port of a switch, and below that its downstream ports.
        match function.bridges.len() {
            0 => PortRole::Root,
            above if above % 2 == 1 => PortRole::Upstream,
            _ => PortRole::Downstream,
        }
    }

    /// Returns the link above the device at `address`, if one leads up from it.
    pub fn link_above(&self, address: PciAddress) -> Option<LinkState> {
        let function = self.get(address)?;
        if !has_link_above(self.port(address)) {
            return None;
        }
        let parent = self.parent(function).and_then(|parent| self.get(parent));
        LinkState::above(function, parent)
    }
}

pub(super) fn is_bridge(function: &SysfsFunction) -> bool {
    function.config.class >> 8 == CLASS_BRIDGE
}

/// True if the port is part of a switch.
pub(super) fn is_switch_port(port: PortRole) -> bool {
    matches!(port, PortRole::Upstream | PortRole::Downstream)
}

/// True if a link leads up from a device of this kind: ports that lead down show the link below them.
fn has_link_above(port: PortRole) -> bool {
    matches!(
        port,
        PortRole::Endpoint | PortRole::Upstream | PortRole::Other
    )
}
