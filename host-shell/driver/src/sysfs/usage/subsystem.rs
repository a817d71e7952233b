//! The disks of a controller under Linux's driver, and those of other controllers with the same namespaces.

use super::super::{SysfsFunction, SysfsHost};

/// A namespace as a block device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NamespaceDisk {
    /// Name of the disk, such as nvme0n1, also if several paths are joined in it.
    pub name: String,
    /// The controller's name: nvme0.
    pub controller: String,
    nsid: Option<u32>,
    /// Linux's identifier of the namespace, the same through every path.
    wwid: Option<String>,
}

impl NamespaceDisk {
    /// True if both may be the same namespace of one subsystem.
    fn may_be(&self, other: &Self) -> bool {
        let differ = |one: Option<&String>, other: Option<&String>| match (one, other) {
            (Some(one), Some(other)) => one != other,
            _ => false,
        };
        self.nsid == other.nsid && !differ(self.wwid.as_ref(), other.wwid.as_ref())
    }
}

/// Namespaces of a subsystem that a command concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandScope {
    /// The command affects one namespace.
    Namespace(u32),
    /// The command affects all namespaces of the subsystem.
    Subsystem,
}

impl SysfsHost {
    /// Returns the block devices of a controller that Linux's driver has: nvme0n1, nvme0n2.
    pub fn disks(&self, function: &SysfsFunction) -> Vec<String> {
        let mut names: Vec<String> = self
            .disks_of(function)
            .into_iter()
            .map(|disk| disk.name)
            .collect();
        names.dedup();
        names
    }

    pub(super) fn disks_of(&self, function: &SysfsFunction) -> Vec<NamespaceDisk> {
        let Some(controller) = &function.controller else {
            return Vec::new();
        };
        let folder = format!("sys/bus/pci/devices/{}/nvme/{controller}", function.address);
        self.disks_in(&folder, controller)
    }

    /// Returns the disks of other controllers that are namespaces of this one, too.
    pub(super) fn siblings(&self, function: &SysfsFunction) -> Vec<NamespaceDisk> {
        let Some(controller) = &function.controller else {
            return Vec::new();
        };
        let folder = format!("sys/bus/pci/devices/{}/nvme/{controller}", function.address);
        let Some(subsystem) = self.text(format!("{folder}/subsysnqn")) else {
            return Vec::new();
        };
        let own = self.disks_in(&folder, controller);
        let others = self.controllers_of(&subsystem);
        let disks = others
            .iter()
            .filter(|name| *name != controller)
            .flat_map(|name| self.disks_in(&format!("sys/class/nvme/{name}"), name));
        disks
            .filter(|disk| own.iter().any(|one| one.may_be(disk)))
            .filter(|disk| own.iter().all(|one| one.name != disk.name))
            .collect()
    }

    /// Returns the disks of every controller that Linux's drivers have of a subsystem.
    pub(super) fn disks_of_subsystem(&self, name: &str, scope: CommandScope) -> Vec<NamespaceDisk> {
        let controllers = self.controllers_of(name);
        let disks = controllers
            .iter()
            .flat_map(|name| self.disks_in(&format!("sys/class/nvme/{name}"), name));
        let is_meant = |disk: &NamespaceDisk| match (scope, disk.nsid) {
            (CommandScope::Namespace(nsid), Some(known)) => nsid == known,
            _ => true,
        };
        disks.filter(is_meant).collect()
    }

    /// Returns the other block devices of the namespace that the block device `name` belongs to.
    pub(super) fn aliases(&self, name: &str) -> Vec<NamespaceDisk> {
        for controller in self.names("sys/class/nvme") {
            let folder = format!("sys/class/nvme/{controller}");
            let own = self.disks_in(&folder, &controller);
            let (Some(own), Some(subsystem)) = (
                own.iter().find(|disk| disk.name == name),
                self.text(format!("{folder}/subsysnqn")),
            ) else {
                continue;
            };
            let mut all = self.disks_of_subsystem(&subsystem, CommandScope::Subsystem);
            all.retain(|disk| disk.name != name && disk.may_be(own));
            return all;
        }
        Vec::new()
    }

    /// Returns the controllers of a subsystem, over PCI and over fabrics.
    fn controllers_of(&self, subsystem: &str) -> Vec<String> {
        let mut names = self.names("sys/class/nvme");
        names.retain(|name| {
            let of = self.text(format!("sys/class/nvme/{name}/subsysnqn"));
            of.as_deref() == Some(subsystem)
        });
        names
    }

    fn disks_in(&self, folder: &str, controller: &str) -> Vec<NamespaceDisk> {
        let names = self.names(folder);
        let disks = names.iter().filter_map(|entry| {
            let name = disk(entry)?;
            let about = |what: &str| self.text(format!("{folder}/{entry}/{what}"));
            Some(NamespaceDisk {
                name,
                controller: controller.to_owned(),
                nsid: about("nsid").and_then(|text| text.trim().parse().ok()),
                wwid: about("wwid"),
            })
        });
        disks.collect()
    }
}

/// Returns the disk behind an entry of a controller's folder: itself, or the head that joins several paths.
fn disk(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (numbers, namespace) = rest.split_once('n')?;
    let subsystem = numbers.split('c').next()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(subsystem) && is_number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

#[cfg(test)]
mod tests {
    use super::disk;

    #[test]
    fn paths_of_one_namespace_are_one_disk() {
        assert_eq!(disk("nvme0n1"), Some("nvme0n1".to_owned()));
        assert_eq!(disk("nvme3c12n4"), Some("nvme3n4".to_owned()));
        for name in [
            "nvme0",
            "ng0n1",
            "nvme0n",
            "nvme0n1p1",
            "model",
            "nvmexn1",
            "power",
        ] {
            assert_eq!(disk(name), None, "{name}");
        }
    }
}
