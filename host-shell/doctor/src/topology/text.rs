//! The topology as text: a tree, then a paragraph for each path.

use super::{
    Acs, Allowed, Answer, Controller, Device, Kind, Path, Relation, Route, Topology, meaning,
};
use std::fmt::{Display, Formatter, Result};

impl Display for Topology {
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
            let of_complex = |one: &&Device| one.complex.as_deref() == Some(&complex.name);
            self.below(f, None, &of_complex, "")?;
        }
        // Devices that sysfs lists below no root complex.
        self.below(f, None, &|one: &&Device| one.complex.is_none(), "")?;
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

impl Topology {
    /// Prints the devices right below `parent`, and the devices below them.
    fn below(
        &self,
        f: &mut Formatter<'_>,
        parent: Option<&str>,
        belongs: &dyn Fn(&&Device) -> bool,
        indent: &str,
    ) -> Result {
        let children = self
            .devices
            .iter()
            .filter(|one| one.parent.as_deref() == parent);
        let children: Vec<&Device> = children.filter(belongs).collect();
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

    fn path(&self, f: &mut Formatter<'_>, path: &Path) -> Result {
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
            Relation::SameSwitch => "below one switch",
            Relation::SameRootPort => "below one root port",
            Relation::SameRootComplex => "below one root complex, at different root ports",
            Relation::SameNode => "below two root complexes of one NUMA node",
            Relation::OtherRootComplex => {
                "below two root complexes; their NUMA nodes are not known"
            }
            Relation::AcrossNodes => "across sockets: on two NUMA nodes",
        };
        let through = path.through.as_deref();
        let through = through.map_or(String::new(), |bridge| format!(" ({bridge})"));
        writeln!(f, "  {relation}{through}")?;
        let route = match path.route {
            Route::Switch => "by the switch",
            Route::RootComplex => "by the root complex",
            Route::Unknown => "by the switch or the root complex",
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

fn alone(f: &mut Formatter<'_>, one: &Controller) -> Result {
    writeln!(f, "\nSSD {}: by CPU threads", one.controller)?;
    answers(f, &one.ways.vfio, &one.ways.kmod)
}

fn answers(f: &mut Formatter<'_>, vfio: &Answer, kmod: &Answer) -> Result {
    let word = |answer: &Answer| match answer.allowed {
        Allowed::Yes => "yes",
        Allowed::Unknown => "?",
        Allowed::No => "no",
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

fn line(one: &Device) -> String {
    let kind = match one.kind {
        Kind::RootPort => "root port",
        Kind::SwitchUpstream => "switch, upstream port",
        Kind::SwitchDownstream => "switch, downstream port",
        Kind::Bridge => "bridge",
        Kind::Nvme => "NVMe",
        Kind::Gpu => "GPU",
    };
    let mut text = format!("{} {kind}", one.address);
    let is_end = matches!(one.kind, Kind::Nvme | Kind::Gpu);
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
                Acs::Redirects => "ACS redirects to the root complex",
                Acs::Off => "ACS does not redirect",
                Acs::Absent => "no ACS",
                Acs::Unknown => "ACS unknown: needs root",
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
