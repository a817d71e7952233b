//! Users of a controller: the one judgement behind `bind`, `unbind`, every command that changes a drive, and
//! `list`, `doctor` and `topology`.
//!
//! A use is anything that a change of driver would end, or that a write past the kernel would corrupt. A place
//! that cannot be examined is reported along with the uses, and is never assumed to be free.

mod asking;
mod blocks;
mod calls;
mod census;
mod exports;
mod holder;
mod node;
mod subsystem;
#[cfg(test)]
mod tests;

pub use census::UsageCensus;
pub use holder::{DeviceHolder, RunningProcess, UnseenUse};
pub use subsystem::CommandScope;

use super::{SysfsFunction, SysfsHost};
use crate::error::{Error, Result};
use blocks::BlockWalk;
use node::DeviceNode;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;

/// Uses that a message names; the others are counted.
const NAMED: usize = 8;

/// The uses that were found of a controller or a disk, and the parts of the system that could not be examined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Uses of the controller.
    pub holders: Vec<DeviceHolder>,
    /// Parts of the system that could not be examined.
    pub unseen: Vec<UnseenUse>,
}

impl DeviceUsage {
    fn of(walk: BlockWalk<'_>) -> Self {
        Self {
            holders: walk.found.into_iter().collect(),
            unseen: walk.unseen.into_iter().collect(),
        }
    }

    /// Returns the uses in words; empty when there are none.
    pub fn list(&self) -> String {
        joined(self.holders.iter().map(ToString::to_string))
    }

    /// Lists the places that could not be examined; empty when all were.
    pub fn list_unseen(&self) -> String {
        joined(self.unseen.iter().map(ToString::to_string))
    }

    /// Lists the actions that would end the uses, as clauses.
    pub fn remedies(&self) -> String {
        let all: BTreeSet<String> = self.holders.iter().map(DeviceHolder::remedy).collect();
        joined(all.into_iter())
    }

    /// Returns the damage if the uses are ignored, as clauses.
    pub fn damages(&self) -> Vec<String> {
        let all: BTreeSet<String> = self.holders.iter().map(DeviceHolder::damage).collect();
        all.into_iter().collect()
    }

    /// Refuses `subject` while something uses it, or may use it without being seen. `or` is a clause at the end of the
    /// remedy that names the option to ignore the use.
    ///
    /// # Errors
    /// [`Error::Usage`] that names every use and its remedy; [`Error::Environment`] if a part of the system could not
    /// be examined.
    pub fn refuse(&self, subject: &str, or: &str) -> Result<()> {
        if !self.holders.is_empty() {
            return Err(Error::usage(
                format!("{subject} is in use: {}", self.list()),
                format!("{}{or}", self.remedies()),
            ));
        }
        if !self.unseen.is_empty() {
            let remedies: BTreeSet<&str> = self.unseen.iter().map(UnseenUse::remedy).collect();
            return Err(Error::environment(
                format!(
                    "whether {subject} is in use cannot be told without seeing {}",
                    self.list_unseen()
                ),
                format!(
                    "{}{or}",
                    remedies.into_iter().collect::<Vec<_>>().join("; ")
                ),
            ));
        }
        Ok(())
    }
}

fn joined(mut all: impl ExactSizeIterator<Item = String>) -> String {
    let mut text = all.by_ref().take(NAMED).collect::<Vec<_>>().join("; ");
    match all.len() {
        0 => {}
        more => text.push_str(&format!("; and {more} more")),
    }
    text
}

impl SysfsHost {
    /// Returns everything that uses the controller `function`.
    pub fn usage(&self, function: &SysfsFunction) -> DeviceUsage {
        self.usage_seen(function, &UsageCensus::take(self))
    }

    /// Does the same as [`usage`](Self::usage), by a census that was read before: for several controllers.
    pub fn usage_seen(&self, function: &SysfsFunction, census: &UsageCensus) -> DeviceUsage {
        self.judge(function, census, true)
    }

    /// Returns the processes that have a node open through which `function` is driven: of VFIO, of the module
    /// nvme_gpu, or of Linux's driver.
    pub fn openers(&self, function: &SysfsFunction) -> Vec<RunningProcess> {
        let census = UsageCensus::take(self);
        let nodes = self.nodes(function);
        let all = nodes.iter().map(|node| census.openers(self, node));
        let found: BTreeSet<RunningProcess> = all.flatten().collect();
        found.into_iter().collect()
    }

    /// Returns the processes that have VFIO's node of IOMMU group `number` open.
    pub fn openers_of_group(&self, number: u32) -> Vec<RunningProcess> {
        let file = format!("sys/class/vfio/{number}/dev");
        let node = DeviceNode::of_char(self, format!("dev/vfio/{number}"), &file);
        let found = UsageCensus::take(self).openers(self, &node);
        found.into_iter().collect()
    }

    /// Returns everything that uses a block device, such as nvme0n1 or one of its partitions, also as a part of
    /// a disk in use.
    pub fn usage_of_disk(&self, device: &str) -> DeviceUsage {
        let census = UsageCensus::take(self);
        let mut unseen = census.unseen.clone();
        let exports = exports::exports(self, &mut unseen);
        let mut walk = self.walk(&census, &exports, unseen, true);
        walk.device(device);
        let is_whole =
            |name: &String| self.exists(format!("sys/class/block/{name}/{device}/partition"));
        let whole = self.names("sys/class/block").into_iter().find(is_whole);
        if let Some(whole) = &whole {
            walk.alone(whole);
        }
        let aliases = self.aliases(whole.as_deref().unwrap_or(device));
        self.shared(&mut walk, &aliases);
        DeviceUsage::of(walk)
    }

    /// Returns everything that uses namespaces of the subsystem `name` through controllers that Linux's drivers
    /// have.
    pub fn usage_of_subsystem(&self, name: &str, scope: CommandScope) -> DeviceUsage {
        let disks = self.disks_of_subsystem(name, scope);
        if disks.is_empty() {
            return DeviceUsage::default();
        }
        let census = UsageCensus::take(self);
        let mut unseen = census.unseen.clone();
        let exports = exports::exports(self, &mut unseen);
        let mut walk = self.walk(&census, &exports, unseen, true);
        self.shared(&mut walk, &disks);
        DeviceUsage::of(walk)
    }

    /// Refuses a physical function that is about to be reset, with the controllers of its virtual functions.
    ///
    /// # Errors
    /// [`Error::Usage`] with the remedy.
    pub fn refuse_virtual_functions(&self, function: &SysfsFunction) -> Result<()> {
        let address = function.address;
        let count = self.virtual_functions(function);
        let holders = (count > 0).then_some(DeviceHolder::VirtualFunctions { address, count });
        let usage = DeviceUsage {
            holders: holders.into_iter().collect(),
            unseen: Vec::new(),
        };
        usage.refuse(&address.to_string(), "")
    }

    /// Returns the number of virtual functions of a physical function.
    pub fn virtual_functions(&self, function: &SysfsFunction) -> u32 {
        let file = format!("sys/bus/pci/devices/{}/sriov_numvfs", function.address);
        self.text(file)
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Finds the uses of a function. Without `tries_claims` it does not test for exclusive opens, because it would find
    /// those of this program.
    pub(super) fn judge(
        &self,
        function: &SysfsFunction,
        census: &UsageCensus,
        tries_claims: bool,
    ) -> DeviceUsage {
        let mut unseen = census.unseen.clone();
        let exports = exports::exports(self, &mut unseen);
        let mut walk = self.walk(census, &exports, unseen, tries_claims);
        for disk in self.disks(function) {
            walk.device(&disk);
        }
        self.shared(&mut walk, &self.siblings(function));
        for node in self.nodes(function) {
            walk.open(&node);
            for export in &exports {
                match node.leads(self, &export.path, &[]) {
                    Some(true) => {
                        let name = node.name();
                        let holder = export.holder(name.trim_start_matches("/dev/"));
                        walk.found.insert(holder);
                    }
                    Some(false) => {}
                    None => {
                        walk.unseen.insert(export.unseen());
                    }
                }
            }
        }
        let address = function.address;
        for process in census.bar_openers(&address.to_string()) {
            let node = format!("a BAR of {address}");
            walk.found.insert(DeviceHolder::Open { node, process });
        }
        let count = self.virtual_functions(function);
        if count > 0 {
            walk.found
                .insert(DeviceHolder::VirtualFunctions { address, count });
        }
        DeviceUsage::of(walk)
    }

    fn walk<'a>(
        &'a self,
        census: &'a UsageCensus,
        exports: &'a [exports::ExportedPath],
        unseen: BTreeSet<UnseenUse>,
        tries_claims: bool,
    ) -> BlockWalk<'a> {
        BlockWalk {
            host: self,
            census,
            exports,
            tries_claims,
            seen: BTreeSet::new(),
            found: BTreeSet::new(),
            unseen,
        }
    }

    /// Adds the uses of disks that are the same namespaces through other controllers.
    fn shared(&self, walk: &mut BlockWalk<'_>, disks: &[subsystem::NamespaceDisk]) {
        for disk in disks {
            let before = std::mem::take(&mut walk.found);
            walk.device(&disk.name);
            let found = std::mem::replace(&mut walk.found, before);
            walk.found
                .extend(found.into_iter().map(|holder| DeviceHolder::Shared {
                    disk: disk.name.clone(),
                    controller: disk.controller.clone(),
                    holder: Box::new(holder),
                }));
        }
    }

    /// Returns the nodes through which programs reach a function itself.
    fn nodes(&self, function: &SysfsFunction) -> Vec<DeviceNode> {
        let address = function.address;
        let folder = format!("sys/bus/pci/devices/{address}");
        let mut nodes = Vec::new();
        let mut add =
            |path: String, number: String| nodes.push(DeviceNode::of_char(self, path, &number));
        if let Some(name) = &function.controller {
            add(format!("dev/{name}"), format!("{folder}/nvme/{name}/dev"));
        }
        if let Some(group) = function.group {
            for name in [group.to_string(), format!("noiommu-{group}")] {
                add(
                    format!("dev/vfio/{name}"),
                    format!("sys/class/vfio/{name}/dev"),
                );
            }
        }
        for name in self.names(format!("{folder}/vfio-dev")) {
            let number = format!("{folder}/vfio-dev/{name}/dev");
            add(format!("dev/vfio/devices/{name}"), number);
        }
        let name = format!("nvme-gpu-{address}");
        add(
            format!("dev/{name}"),
            format!("sys/class/nvme_gpu/{name}/dev"),
        );
        for name in self.names(format!("{folder}/uio")) {
            add(format!("dev/{name}"), format!("{folder}/uio/{name}/dev"));
        }
        nodes
    }

    /// Opens the disks of `function`, and those that share a namespace with them, exclusively for this program: nothing
    /// mounts them until the files are closed. `None` if one of them is in use.
    pub(super) fn claim(&self, function: &SysfsFunction) -> Option<Vec<File>> {
        let shared = self.siblings(function).into_iter().map(|disk| disk.name);
        let disks: BTreeSet<String> = self.disks(function).into_iter().chain(shared).collect();
        let mut files = Vec::new();
        for disk in disks {
            match blocks::claim(self, &disk) {
                Ok(file) => files.push(file),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return None,
                // The judgement of uses has already reported a disk whose node cannot be opened.
                Err(_) => {}
            }
        }
        Some(files)
    }
}
