//! The topology as text: a tree, then a paragraph for each path.

use super::{
    AcsState, ControllerTiers, DeviceKind, FeatureVerdict, MachineTopology, PathRelation, PeerPath,
    ReasonedVerdict, TopologyDevice, TurningPoint, meaning,
};
use std::fmt::{Display, Formatter, Result};

impl Display for MachineTopology {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if self.devices.is_empty() {
            return writeln!(f, "no NVMe controller and no NVIDIA GPU on PCIe");
        }
        let iommu = if self.iommu {
            "on"
        } else {
            "off: there are no IOMMU groups"
        };
        writeln!(f, "IOMMU {iommu}")?;
        for complex in &self.complexes {
            writeln!(f, "{}{}", complex.name, folded(complex.others))?;
            let of_complex = |one: &&TopologyDevice| one.complex.as_deref() == Some(&complex.name);
            self.below(f, None, &of_complex, "")?;
        }
        // Devices that sysfs lists below no root complex.
        self.below(f, None, &|one: &&TopologyDevice| one.complex.is_none(), "")?;
        for one in &self.controllers {
            let has_gpu = self
                .paths
                .iter()
                .any(|path| path.controller == one.controller);
            if !has_gpu {
                alone(f, one)?;
            }
        }
        self.paths.iter().try_for_each(|path| self.path(f, path))
    }
}

impl MachineTopology {
    /// Prints the devices right below `parent`, and the devices below them.
    fn below(
        &self,
        f: &mut Formatter<'_>,
        parent: Option<&str>,
        belongs: &dyn Fn(&&TopologyDevice) -> bool,
        indent: &str,
    ) -> Result {
        let children = self
            .devices
            .iter()
            .filter(|one| one.parent.as_deref() == parent);
        let children: Vec<&TopologyDevice> = children.filter(belongs).collect();
        for (index, one) in children.iter().enumerate() {
            let (branch, stem) = match index + 1 == children.len() {
                true => ("`- ", "   "),
                false => ("|- ", "|  "),
            };
            writeln!(f, "{indent}{branch}{}", line(one))?;
            // A device is never its own ancestor: bridges are the folders above it.
            self.below(f, Some(&one.address), belongs, &format!("{indent}{stem}"))?;
        }
        Ok(())
    }

    fn path(&self, f: &mut Formatter<'_>, path: &PeerPath) -> Result {
        let name = |address: &str| {
            let model = self.device(address).and_then(|one| one.model.as_deref());
            model.map_or(address.to_owned(), |model| format!("{address} ({model})"))
        };
        writeln!(
            f,
            "\nGPU {} and SSD {}",
            name(&path.gpu),
            name(&path.controller)
        )?;
        let relation = match path.relation {
            PathRelation::SameSwitch => "below one switch",
            PathRelation::SameRootPort => "below one root port",
            PathRelation::SameRootComplex => "below one root complex, at different root ports",
            PathRelation::SameNode => "below two root complexes of one NUMA node",
            PathRelation::OtherRootComplex => {
                "below two root complexes; their NUMA nodes are not known"
            }
            PathRelation::AcrossNodes => "across sockets: on two NUMA nodes",
        };
        let through = path.through.as_deref();
        let through = through.map_or(String::new(), |bridge| format!(" ({bridge})"));
        writeln!(f, "  {relation}{through}")?;
        let route = match path.route {
            TurningPoint::Switch => "by the switch",
            TurningPoint::RootComplex => "by the root complex",
            TurningPoint::Unknown => "by the switch or the root complex",
        };
        writeln!(f, "  peers' transfers go {route}: {}", path.why)?;
        match &path.slowest {
            Some(slowest) => writeln!(f, "  slowest link: {}: {}", slowest.address, slowest.link)?,
            None => writeln!(f, "  slowest link: not known")?,
        }
        for tier in &path.tiers {
            writeln!(f, "  tier {}: {}", tier.tier, meaning(tier.tier))?;
            answers(f, &tier.vfio, &tier.kmod)?;
        }
        Ok(())
    }
}

fn alone(f: &mut Formatter<'_>, one: &ControllerTiers) -> Result {
    writeln!(f, "\nSSD {}: by CPU threads", one.controller)?;
    answers(f, &one.ways.vfio, &one.ways.kmod)
}

fn answers(f: &mut Formatter<'_>, vfio: &ReasonedVerdict, kmod: &ReasonedVerdict) -> Result {
    let word = |answer: &ReasonedVerdict| match answer.allowed {
        FeatureVerdict::Yes => "yes",
        FeatureVerdict::Unknown => "?",
        FeatureVerdict::No => "no",
    };
    if vfio == kmod {
        return writeln!(f, "    vfio, kmod {:<4} {}", word(vfio), vfio.why);
    }
    writeln!(f, "    vfio       {:<4} {}", word(vfio), vfio.why)?;
    writeln!(f, "    kmod       {:<4} {}", word(kmod), kmod.why)
}

fn folded(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (+ 1 other)".to_owned(),
        others => format!(" (+ {others} others)"),
    }
}

fn line(one: &TopologyDevice) -> String {
    let kind = match one.kind {
        DeviceKind::RootPort => "root port",
        DeviceKind::SwitchUpstream => "switch, upstream port",
        DeviceKind::SwitchDownstream => "switch, downstream port",
        DeviceKind::Bridge => "bridge",
        DeviceKind::Nvme => "NVMe",
        DeviceKind::Gpu => "GPU",
    };
    let mut text = format!("{} {kind}", one.address);
    let is_end = matches!(one.kind, DeviceKind::Nvme | DeviceKind::Gpu);
    if is_end {
        text.push(' ');
        text.push_str(one.model.as_deref().unwrap_or(&one.id));
    }
    let mut more = Vec::new();
    if let Some(link) = &one.link {
        more.push(link.to_string());
    }
    if let Some(acs) = one.acs {
        more.push(
            match acs {
                AcsState::Redirects => "ACS redirects to the root complex",
                AcsState::Off => "ACS does not redirect",
                AcsState::Absent => "no ACS",
                AcsState::Unknown => "ACS unknown: needs root",
            }
            .to_owned(),
        );
    }
    if is_end {
        match &one.group {
            None => more.push("no IOMMU group".to_owned()),
            Some(group) => {
                let kind = group.kind.as_deref().unwrap_or("not known");
                more.push(format!("group {} (type {kind})", group.number));
            }
        }
        if let Some(node) = one.node {
            more.push(format!("node {node}"));
        }
        more.push(format!(
            "driver {}",
            one.driver.as_deref().unwrap_or("none")
        ));
    }
    for part in more {
        text.push_str(", ");
        text.push_str(&part);
    }
    text + &folded(one.others)
}
