//! PCI functions, IOMMU groups and the users of a disk, from Linux's /sys, /proc and /dev.
//!
//! Everything is read below one root folder, so that tests can use fixtures. Nothing is cached: a
//! [`SysfsHost`] reads the files again each time.

mod address;
mod binding;
mod function;
mod layers;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod usage;

pub use address::PciAddress;
pub use binding::{BindResult, GroupNeighbour, LendingDriver, UnbindResult};
pub use function::{BarResource, SysfsFunction};
pub use layers::{BlockLayers, LayeredDisk};
pub use usage::{CommandScope, DeviceHolder, DeviceUsage, RunningProcess, UnseenUse, UsageCensus};

use std::fs;
use std::path::{Path, PathBuf};

/// A machine, seen through its file systems.
#[derive(Clone, Debug)]
pub struct SysfsHost {
    root: PathBuf,
}

impl SysfsHost {
    /// Returns this machine.
    pub fn here() -> Self {
        Self::at("/")
    }

    /// Returns a machine whose /sys, /proc and /dev lie under `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns `path` (without a leading slash) under the root.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// Returns the path at which this program finds the file that the kernel calls `name`.
    fn reached(&self, name: &str) -> PathBuf {
        match Path::new(name).starts_with(&self.root) {
            true => PathBuf::from(name),
            false => self.path(name.trim_start_matches('/')),
        }
    }

    /// Returns the text of a file without its last line feed; `None` if the file cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    /// True if `path` exists.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Returns the names in a folder, sorted; nothing when there is none.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Returns the last part of where a symbolic link leads.
    pub fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }
}
