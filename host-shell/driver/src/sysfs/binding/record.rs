//! Record of a function that was bound, kept until it is returned or the machine restarts.
//!
//! The record proves that a binding is ours: sysfs creates a new link to the driver at each binding, and the
//! record has the link's inode. A function that somebody else has bound since then has another one.

use crate::error::{Error, Result};
use crate::sysfs::{LendingDriver, PciAddress, SysfsFunction, SysfsHost};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// State of a function before it was bound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindingRecord {
    /// The driver before; empty when it had none.
    pub before: Option<String>,
    /// The driver_override before: the name of the only driver that might bind the function, or empty.
    pub wish: String,
    /// The inode of the link to the driver that it was bound to.
    pub binding: Option<u64>,
}

impl BindingRecord {
    /// Parses a record, whose first line is the previous driver.
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let mut record = Self {
            before: Some(lines.next().unwrap_or_default().to_owned()),
            ..Self::default()
        };
        for (key, value) in lines.filter_map(|line| line.split_once('=')) {
            match key {
                "wish" => record.wish = value.to_owned(),
                "binding" => record.binding = value.parse().ok(),
                _ => {}
            }
        }
        record
    }

    fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.before.as_deref().unwrap_or_default());
        if !self.wish.is_empty() {
            text.push_str(&format!("wish={}\n", self.wish));
        }
        if let Some(binding) = self.binding {
            text.push_str(&format!("binding={binding}\n"));
        }
        text
    }
}

impl SysfsHost {
    /// Returns the record to write before `function` is bound; for one that moves between vfio-pci and
    /// nvme_gpu, the existing record.
    pub(super) fn record_before(&self, function: &SysfsFunction) -> BindingRecord {
        let address = function.address;
        let is_lent = function
            .driver
            .as_deref()
            .and_then(LendingDriver::of)
            .is_some();
        if let Some(record) = self.recorded(address).filter(|_| is_lent) {
            return record;
        }
        let folder = format!("sys/bus/pci/devices/{address}");
        let wish = self.text(format!("{folder}/driver_override"));
        let wish = wish.filter(|wish| !matches!(wish.as_str(), "" | "(null)"));
        BindingRecord {
            before: Some(function.driver.clone().unwrap_or_default()),
            wish: wish.unwrap_or_default(),
            binding: None,
        }
    }

    /// Returns the record of the function at `address`.
    pub(super) fn recorded(&self, address: PciAddress) -> Option<BindingRecord> {
        self.text(place(address))
            .map(|text| BindingRecord::parse(&text))
    }

    pub(super) fn remember(&self, address: PciAddress, record: &BindingRecord) -> Result<()> {
        let path = self.path(place(address));
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, record.to_text()))
            .map_err(|source| refused(&path, source))
    }

    pub(super) fn forget(&self, address: PciAddress) {
        let _ = fs::remove_file(self.path(place(address)));
    }

    /// Returns a number that differs between one binding of the function to a driver and the next.
    pub(super) fn binding(&self, address: PciAddress) -> Option<u64> {
        let link = self.path(format!("sys/bus/pci/devices/{address}/driver"));
        fs::symlink_metadata(link).ok().map(|data| data.ino())
    }
}

/// Translates the error of writing `path`.
pub fn refused(path: &Path, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::PermissionDenied => Error::environment(
            format!("no permission to write {}", path.display()),
            "run this command as root",
        ),
        _ => Error::file("write", path)(source),
    }
}

pub(super) fn place(address: PciAddress) -> String {
    format!("run/nvme-gpu/{address}.driver")
}

#[cfg(test)]
mod tests {
    use super::BindingRecord;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let full = BindingRecord {
            before: Some("nvme".to_owned()),
            wish: "nvme".to_owned(),
            binding: Some(1234567890123),
        };
        assert_eq!(BindingRecord::parse(&full.to_text()), full);
        let bare = BindingRecord {
            before: Some(String::new()),
            ..BindingRecord::default()
        };
        assert_eq!(BindingRecord::parse(&bare.to_text()), bare);
        assert_eq!(BindingRecord::parse("nvme").before.as_deref(), Some("nvme"));
    }
}
