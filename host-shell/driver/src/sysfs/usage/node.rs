//! Device nodes, and whether a path leads to one.

use super::super::SysfsHost;
use super::asking::ask;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The number of a device, major and minor.
pub(super) type Number = (u32, u32);

/// Target of a path.
pub(super) enum PathTarget {
    /// A device, by its identity.
    Device(NodeIdentity),
    /// Another file, with the number of its file system.
    File(Number),
    /// There is no file.
    Missing,
    /// A file system that does not answer.
    Silent,
}

/// Examines the file at `path`, which may be on any file system.
pub(super) fn look(path: &Path) -> PathTarget {
    let path = path.to_owned();
    let question = move || statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
    let Some(answer) = ask(question) else {
        return PathTarget::Silent;
    };
    let Ok(data) = answer else {
        return PathTarget::Missing;
    };
    let number = (data.stx_rdev_major, data.stx_rdev_minor);
    match FileType::from_raw_mode(data.stx_mode.into()) {
        FileType::BlockDevice => PathTarget::Device(NodeIdentity::Block(number.0, number.1)),
        FileType::CharacterDevice => PathTarget::Device(NodeIdentity::Char(number.0, number.1)),
        _ => PathTarget::File((data.stx_dev_major, data.stx_dev_minor)),
    }
}

/// Identity by which nodes are compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeIdentity {
    /// A block device, by its number: a disk has one number and any number of names.
    Block(u32, u32),
    /// A character device.
    Char(u32, u32),
    /// A regular file in /dev, by its name: test fixtures have such files instead of devices.
    Name(PathBuf),
    /// A BAR in sysfs, by the folder of its function.
    Bar(String),
}

impl NodeIdentity {
    /// Returns the identity of a file that was found at a path, and is called `name`; `None` for a
    /// file that is no device.
    pub fn of(host: &SysfsHost, found: PathTarget, name: &Path) -> Option<Self> {
        if let PathTarget::Device(identity) = found {
            return Some(identity);
        }
        if name.starts_with(host.path("dev")) {
            return Some(Self::Name(name.to_owned()));
        }
        let is_bar = name.starts_with(host.path("sys")) && {
            let file = name.file_name()?.to_str()?;
            file.starts_with("resource")
        };
        let folder = is_bar
            .then(|| name.parent()?.file_name()?.to_str())
            .flatten();
        folder.map(|folder| Self::Bar(folder.to_owned()))
    }
}

/// A node that belongs to a controller or to a disk.
#[derive(Clone, Debug)]
pub(super) struct DeviceNode {
    /// Path without the leading slash: dev/nvme0n1.
    path: String,
    is_block: bool,
    number: Option<Number>,
}

impl DeviceNode {
    /// Returns the block device called `name`.
    pub fn of_disk(host: &SysfsHost, name: &str) -> Self {
        let number = host.text(format!("sys/class/block/{name}/dev"));
        Self {
            path: format!("dev/{name}"),
            is_block: true,
            number: number.as_deref().and_then(parse_number),
        }
    }

    /// Returns the character device `path`, whose number is in the file `number` of sysfs.
    pub fn of_char(host: &SysfsHost, path: String, number: &str) -> Self {
        let number = host.text(number);
        Self {
            path,
            is_block: false,
            number: number.as_deref().and_then(parse_number),
        }
    }

    /// Returns the path of the device node for messages, such as /dev/nvme0n1.
    pub fn name(&self) -> String {
        format!("/{}", self.path)
    }

    /// Returns the identities that a file may have if it is this node.
    pub fn identities(&self, host: &SysfsHost) -> Vec<NodeIdentity> {
        let path = host.path(&self.path);
        let by_number = self.number.map(|(major, minor)| match self.is_block {
            true => NodeIdentity::Block(major, minor),
            false => NodeIdentity::Char(major, minor),
        });
        let is_device = fs::metadata(&path).is_ok_and(|data| {
            data.file_type().is_block_device() || data.file_type().is_char_device()
        });
        let by_name = (!is_device).then_some(NodeIdentity::Name(path));
        by_number.into_iter().chain(by_name).collect()
    }

    pub fn number(&self) -> Option<Number> {
        self.number
    }

    /// True if `path`, as the kernel or a configuration spells it, leads to this node, or to a file of a file system
    /// whose number is in `systems`. `None` if the path does not exist for this process.
    pub fn leads(&self, host: &SysfsHost, path: &str, systems: &[Number]) -> Option<bool> {
        let path = host.reached(path);
        let found = match look(&path) {
            PathTarget::Missing | PathTarget::Silent => return None,
            PathTarget::File(system) if systems.contains(&system) => return Some(true),
            found => NodeIdentity::of(host, found, &path),
        };
        Some(found.is_some_and(|found| self.identities(host).contains(&found)))
    }
}

/// Parses `259:0`.
pub(super) fn parse_number(text: &str) -> Option<Number> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
