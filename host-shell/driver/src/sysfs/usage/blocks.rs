//! Uses of a block device: mounts, swap, RAID, LVM, loop devices, exports, programs that have it open. What cannot be
//! looked at counts as unknown and not as free: a disk that is taken from its user loses data.

use super::super::SysfsHost;
use super::calls::backing;
use super::census::UsageCensus;
use super::exports::ExportedPath;
use super::holder::{DeviceHolder, UnseenUse};
use super::node::{DeviceNode, Number, parse_number};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Mount points of the file system of a block device.
#[derive(Default)]
pub(super) struct MountPoints {
    at: Vec<String>,
    /// Device numbers of its files: that of the block device, or another one that its mounts use, as with
    /// btrfs.
    systems: Vec<Number>,
}

/// A traversal of block devices, from disks to the devices and mounts on top of them.
pub(super) struct BlockWalk<'a> {
    pub host: &'a SysfsHost,
    pub census: &'a UsageCensus,
    pub exports: &'a [ExportedPath],
    /// True if the traversal tests which devices are open exclusively; false while this program itself holds
    /// them so.
    pub tries_claims: bool,
    pub seen: BTreeSet<String>,
    pub found: BTreeSet<DeviceHolder>,
    pub unseen: BTreeSet<UnseenUse>,
}

impl BlockWalk<'_> {
    /// Finds the users of a block device, of its partitions and of everything on top of them.
    pub fn device(&mut self, device: &str) {
        if !self.seen.insert(device.to_owned()) {
            return;
        }
        let before = self.lasting();
        self.alone(device);
        self.stacked(device);
        let folder = format!("sys/class/block/{device}");
        let mut parts = self.host.names(&folder);
        parts.retain(|name| self.host.exists(format!("{folder}/{name}/partition")));
        for part in &parts {
            self.device(part);
        }
        if self.tries_claims && self.lasting() == before {
            self.claims(device);
        }
    }

    /// Returns the number of uses, without those by programs that merely have a node open.
    fn lasting(&self) -> usize {
        self.found.iter().filter(|one| !one.is_program()).count()
    }

    /// Finds the users of a block device itself: not of its partitions, and not of RAID or LVM on it.
    pub fn alone(&mut self, device: &str) {
        let node = DeviceNode::of_disk(self.host, device);
        let places = self.mounts(device, &node);
        self.swap(device, &node, &places);
        self.root(device);
        self.loops(&node, &places);
        self.exported(device, &node, &places);
        self.open(&node);
        if let Some(generic) = generic(device) {
            let number = format!("sys/class/nvme-generic/{generic}/dev");
            let node = DeviceNode::of_char(self.host, format!("dev/{generic}"), &number);
            self.open(&node);
        }
    }

    /// Finds the users of a device that is part of one in use, without a test whether it is open exclusively.
    fn upper(&mut self, device: &str) {
        let tries = std::mem::replace(&mut self.tries_claims, false);
        self.device(device);
        self.tries_claims = tries;
    }

    /// Finds programs that have `node` open.
    pub fn open(&mut self, node: &DeviceNode) {
        for process in self.census.openers(self.host, node) {
            let node = node.name();
            self.found.insert(DeviceHolder::Open { node, process });
        }
    }

    fn mounts(&mut self, device: &str, node: &DeviceNode) -> MountPoints {
        let number = self.host.text(format!("sys/class/block/{device}/dev"));
        let mut places = MountPoints::default();
        places.systems.extend(node.number());
        for (mount, of) in &self.census.mounts {
            // The mount has btrfs's device number, not the block device's, but its source names the device.
            let source = mount.source.as_deref();
            let is_named = source.and_then(|source| source.strip_prefix("/dev/")) == Some(device);
            if is_named || number.as_ref() == Some(&mount.number) {
                self.found.insert(DeviceHolder::Mounted {
                    device: device.to_owned(),
                    at: mount.at.clone(),
                    of: of.clone(),
                });
                places.at.push(mount.at.clone());
                places.systems.extend(parse_number(&mount.number));
            }
        }
        places
    }

    fn swap(&mut self, device: &str, node: &DeviceNode, places: &MountPoints) {
        for name in &self.census.swaps {
            let is_device = name.strip_prefix("/dev/") == Some(device);
            let is_device = is_device || node.leads(self.host, name, &[]) == Some(true);
            if is_device || self.lies_on(name, node, places) == Some(true) {
                self.found.insert(DeviceHolder::Swap {
                    device: device.to_owned(),
                    file: (!is_device).then(|| name.clone()),
                });
            }
        }
    }

    fn root(&mut self, device: &str) {
        let line = self.host.text("proc/cmdline").unwrap_or_default();
        let mut roots = line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("root=/dev/"));
        if roots.any(|root| root == device) {
            let device = device.to_owned();
            self.found.insert(DeviceHolder::Root { device });
        }
    }

    /// Finds RAID, LVM and other devices that the kernel lists, and the mounts on top of them,
    /// which say best what would be lost.
    fn stacked(&mut self, device: &str) {
        let folder = format!("sys/class/block/{device}");
        for holder in self.host.names(format!("{folder}/holders")) {
            let by = self.host.layer(&holder);
            let device = device.to_owned();
            self.found.insert(DeviceHolder::Stacked { device, by });
            self.upper(&holder);
        }
        let mut others = Vec::new();
        if self.host.exists(format!("{folder}/bcache")) {
            others.push("a bcache".to_owned());
        }
        for volume in self.host.names("sys/fs/btrfs") {
            if self
                .host
                .exists(format!("sys/fs/btrfs/{volume}/devices/{device}"))
            {
                others.push(format!("the btrfs file system {volume}"));
            }
        }
        for by in others {
            let device = device.to_owned();
            self.found.insert(DeviceHolder::Stacked { device, by });
        }
    }

    /// Finds loop devices and compressed memory on the device, or on a file of a file system that
    /// is mounted from it.
    fn loops(&mut self, node: &DeviceNode, places: &MountPoints) {
        for name in self.host.names("sys/class/block") {
            let folder = format!("sys/class/block/{name}");
            let file = match name.starts_with("zram") {
                true => self.host.text(format!("{folder}/backing_dev")),
                false => self.host.text(format!("{folder}/loop/backing_file")),
            };
            // zram without a device says "none".
            let Some(file) = file.filter(|file| file.starts_with('/')) else {
                continue;
            };
            // The kernel reports the identity of the file, also if its path means nothing, or another file, to this
            // process.
            let lies = match backing(self.host, &name) {
                Some(of) if of.disk.is_some() => Some(of.disk == node.number()),
                Some(of) => {
                    Some(places.systems.contains(&of.device) || self.lies_at(&file, places))
                }
                None => self.lies_on(&file, node, places),
            };
            match lies {
                Some(true) => {
                    let name = name.clone();
                    self.found.insert(DeviceHolder::Loop { name, file });
                }
                Some(false) => continue,
                None => {
                    let of = name.clone();
                    self.unseen.insert(UnseenUse::Path { of, path: file });
                    continue;
                }
            }
            self.upper(&name);
        }
    }

    fn exported(&mut self, device: &str, node: &DeviceNode, places: &MountPoints) {
        for export in self.exports {
            // The kernel keeps the path as the exporting program wrote it, which may belong to another mount namespace.
            let lies = match self.lies_on(&export.path, node, places) {
                lies @ (Some(false) | None) => {
                    match self.leads_elsewhere(&export.path, node, places) {
                        true => Some(true),
                        false => lies,
                    }
                }
                lies => lies,
            };
            match lies {
                Some(true) => {
                    self.found.insert(export.holder(device));
                }
                Some(false) => {}
                None => {
                    self.unseen.insert(export.unseen());
                }
            }
        }
    }

    /// True if the file `path` is the device, or lies in its file system. `None` where the path does not exist
    /// as seen from here: it may belong to another mount namespace.
    fn lies_on(&self, path: &str, node: &DeviceNode, places: &MountPoints) -> Option<bool> {
        match self.lies_at(path, places) {
            true => Some(true),
            false => node.leads(self.host, path, &places.systems),
        }
    }

    /// True if `path` leads to the device, or to a file of its file system, for a program with another root or in
    /// another mount namespace.
    fn leads_elsewhere(&self, path: &str, node: &DeviceNode, places: &MountPoints) -> bool {
        self.census.views.iter().any(|process| {
            let path = format!("/proc/{process}/root{path}");
            node.leads(self.host, &path, &places.systems) == Some(true)
        })
    }

    /// True if the name of the file `path` shows that it lies in a file system that is mounted at one of `places`.
    fn lies_at(&self, path: &str, places: &MountPoints) -> bool {
        let path = Path::new(path);
        let mounts = self.census.mounts.keys().map(|mount| &mount.at);
        // A mount point further down hides the files that the file system above has there.
        let nearest = mounts
            .filter(|at| path.starts_with(at))
            .max_by_key(|at| at.len());
        nearest.is_some_and(|at| places.at.contains(at))
    }

    /// Records a use if something holds the block device exclusively.
    fn claims(&mut self, device: &str) {
        match claim(self.host, device) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                self.found.insert(DeviceHolder::Claimed {
                    device: device.to_owned(),
                    content: content(self.host, device),
                });
            }
            // A drive without a medium, or one that has just left.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENOMEDIUM)) => {}
            Err(error) => {
                self.unseen.insert(UnseenUse::Exclusive {
                    device: device.to_owned(),
                    cause: error.to_string(),
                });
            }
        }
    }
}

/// Opens the block device for this program alone: nothing mounts it, or makes it part of something, until the file is
/// closed.
pub(super) fn claim(host: &SysfsHost, device: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let flags = libc::O_EXCL | libc::O_NONBLOCK;
    let options = options.read(true).custom_flags(flags);
    options.open(host.path(format!("dev/{device}")))
}

/// Returns the content that udev found on the device.
pub(super) fn content(host: &SysfsHost, device: &str) -> Option<String> {
    let number = host.text(format!("sys/class/block/{device}/dev"))?;
    let known = fs::read_to_string(host.path(format!("run/udev/data/b{number}"))).ok()?;
    let of = |key: &str| {
        let mut lines = known.lines();
        lines.find_map(|line| {
            line.strip_prefix("E:")?
                .strip_prefix(key)?
                .strip_prefix('=')
        })
    };
    let kind = of("ID_FS_TYPE")?;
    Some(match of("ID_FS_LABEL") {
        Some(label) => format!("{kind}, {label}"),
        None => kind.to_owned(),
    })
}

/// Returns the node for commands beside the block device nvme0n1: ng0n1.
fn generic(device: &str) -> Option<String> {
    let numbers = device.strip_prefix("nvme")?;
    let is_disk = numbers
        .split_once('n')
        .is_some_and(|(_, namespace)| namespace.bytes().all(|byte| byte.is_ascii_digit()));
    is_disk.then(|| format!("ng{numbers}"))
}
