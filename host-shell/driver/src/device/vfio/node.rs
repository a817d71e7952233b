//! The nodes in /dev/vfio, and the error with its remedy where one cannot be opened: missing, without permission,
//! in use, or on a machine without an isolating IOMMU.

use crate::error::{Error, Result};
use crate::sysfs::{RunningProcess, SysfsHost};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens /dev/vfio/vfio or the node of a group; says which rights are missing.
pub fn open_node(path: &Path, number: u32) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound if path.ends_with("vfio") => Error::environment(
            "there is no /dev/vfio/vfio",
            "load the module: `modprobe vfio-pci` (`nvme-gpu doctor` shows what else is missing)",
        ),
        io::ErrorKind::NotFound => Error::environment(
            format!("there is no {}", path.display()),
            format!("no device of IOMMU group {number} is bound to vfio-pci: `nvme-gpu bind BDF`"),
        ),
        io::ErrorKind::PermissionDenied => Error::environment(
            forbidden(path),
            format!(
                "as root: `chown NAME /dev/vfio/{number}` with the name of the user, or `nvme-gpu bind BDF --user NAME`"
            ),
        ),
        io::ErrorKind::ResourceBusy => in_use(number),
        _ => Error::file("open", path)(source),
    })
}

/// Describes that a node may not be opened, and its owner.
pub fn forbidden(path: &Path) -> String {
    format!("no permission to open {}{}", path.display(), owner(path))
}

/// Returns the error of a group `number` that has another user.
pub fn in_use(number: u32) -> Error {
    let by = RunningProcess::list(&SysfsHost::here().openers_of_group(number));
    Error::environment(
        format!("IOMMU group {number} is in use by {by}"),
        format!("end {by} first (as root `fuser -v /dev/vfio/{number}` names it)"),
    )
}

/// Returns the error of a kernel that gives no device to programs, because the IOMMU cannot remap interrupts;
/// `module` has an option that permits it.
pub fn not_isolated(module: &str) -> Error {
    Error::environment(
        "the IOMMU cannot isolate this group: no interrupt remapping",
        format!(
            "switch it on in the firmware; only on a machine where you trust the device: load {module} with \
             allow_unsafe_interrupts=1"
        ),
    )
}

/// Names the owner of a node, for a message.
fn owner(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or_else(
        |_| String::new(),
        |data| {
            let (uid, gid, mode) = (data.uid(), data.gid(), data.mode() & 0o777);
            format!(", which belongs to user {uid}, group {gid}, mode {mode:o}")
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_missing_or_closed_says_what_to_do() {
        let missing = open_node(Path::new("/nonexistent/12"), 12).unwrap_err();
        assert!(missing.remedy().contains("nvme-gpu bind"), "{missing}");
        let missing = open_node(Path::new("/nonexistent/vfio"), 12).unwrap_err();
        assert!(missing.remedy().contains("modprobe"), "{missing}");
        let text = owner(Path::new("/dev/null"));
        assert_eq!(text, ", which belongs to user 0, group 0, mode 666");
    }
}
