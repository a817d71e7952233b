//! iommufd: whether this kernel has it. Devices are opened by VFIO's groups and its type 1 IOMMU all the same.
//!
//! It would map memory files without a mapping of this process (Linux 6.13), and dma-bufs that VFIO itself exported
//! (6.19), but no dma-buf of a GPU. Debian's kernels up to 7.3 are built without it.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The kernel was built without it, or its module is not loaded.
    Absent,
    /// There is a node that may not be opened.
    Forbidden,
    /// It can be opened.
    Present,
}

/// Looks at the node `path`, which is /dev/iommu but in tests.
pub fn probe(path: &Path) -> Found {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Found::Present,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Found::Forbidden,
        Err(_) => Found::Absent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_there_or_not() {
        assert_eq!(probe(Path::new("/nonexistent/iommu")), Found::Absent);
        assert_eq!(probe(Path::new("/dev/null")), Found::Present);
    }
}
