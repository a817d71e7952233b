//! Device nodes, and whether a path leads to one.

use super::super::Host;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What a file is, as far as nodes are compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    /// A block device, by its number: a disk has one number and any number of names.
    Block(u32, u32),
    /// A character device.
    Char(u32, u32),
    /// A name in /dev of something that is no device: of a made-up machine.
    Name(PathBuf),
    /// A BAR in sysfs, by the folder of its function.
    Bar(String),
}

impl Identity {
    /// That of the file at `path`, whose name is `name`; none for a file that is no device.
    pub fn of(host: &Host, path: &Path, name: &Path) -> Option<Self> {
        if let Ok(data) = fs::metadata(path) {
            let (major, minor) = (libc::major(data.rdev()), libc::minor(data.rdev()));
            let kind = data.file_type();
            if kind.is_block_device() {
                return Some(Self::Block(major, minor));
            }
            if kind.is_char_device() {
                return Some(Self::Char(major, minor));
            }
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
pub(super) struct Node {
    /// Without the leading slash: dev/nvme0n1.
    path: String,
    is_block: bool,
    number: Option<(u32, u32)>,
}

impl Node {
    /// The block device called `name`.
    pub fn of_disk(host: &Host, name: &str) -> Self {
        let number = host.text(format!("sys/class/block/{name}/dev"));
        Self {
            path: format!("dev/{name}"),
            is_block: true,
            number: number.as_deref().and_then(parse_number),
        }
    }

    /// The character device `path`, whose number is in the file `number` of sysfs.
    pub fn of_char(host: &Host, path: String, number: &str) -> Self {
        let number = host.text(number);
        Self {
            path,
            is_block: false,
            number: number.as_deref().and_then(parse_number),
        }
    }

    /// As messages name it: /dev/nvme0n1.
    pub fn name(&self) -> String {
        format!("/{}", self.path)
    }

    /// What a file that is this node may be known as.
    pub fn identities(&self, host: &Host) -> Vec<Identity> {
        let path = host.path(&self.path);
        let by_number = self.number.map(|(major, minor)| match self.is_block {
            true => Identity::Block(major, minor),
            false => Identity::Char(major, minor),
        });
        let is_device = fs::metadata(&path).is_ok_and(|data| {
            data.file_type().is_block_device() || data.file_type().is_char_device()
        });
        let by_name = (!is_device).then_some(Identity::Name(path));
        by_number.into_iter().chain(by_name).collect()
    }

    /// Whether `path`, as the kernel or a configuration has it, leads to this node.
    pub fn is_at(&self, host: &Host, path: &str) -> bool {
        let path = Path::new(path);
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let found = Identity::of(host, path, &real);
        found.is_some_and(|found| self.identities(host).contains(&found))
    }
}

/// Parses `259:0`.
fn parse_number(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
