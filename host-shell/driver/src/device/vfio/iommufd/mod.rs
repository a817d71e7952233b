//! iommufd: devices by their own nodes, /dev/vfio/devices/vfioN, in an address space of /dev/iommu.
//!
//! It maps memory files without a mapping of this process (Linux 6.13), memory of this process by its address, and
//! dma-bufs that VFIO itself exported (6.19): BARs of other functions, see [`bar`](super::bar). It maps no dma-buf of a
//! GPU, and no BAR that is mapped into this process.

mod calls;

use super::ioctl;
use super::node::{forbidden, not_isolated};
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use crate::sysfs::{RunningProcess, SysfsFunction, SysfsHost};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;

const NODE: &str = "dev/iommu";
/// The remedy if the kernel lacks a feature of iommufd.
const TYPE1: &str = "leave iommu=iommufd out: VFIO's type 1 IOMMU is used then";

/// State of the node of iommufd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommufdState {
    /// The kernel was built without it, or its module is not loaded.
    Absent,
    /// A node exists, but this process may not open it.
    Forbidden,
    /// The device node can be opened.
    Present,
}

/// Looks at the node `path`, which is /dev/iommu but in tests.
pub fn probe(path: &Path) -> IommufdState {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => IommufdState::Present,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => IommufdState::Forbidden,
        Err(_) => IommufdState::Absent,
    }
}

/// True if `function` can be opened by iommufd: both nodes exist and may be opened.
pub(super) fn can_open(host: &SysfsHost, function: &SysfsFunction) -> bool {
    let own = host
        .vfio_node(function.address)
        .is_some_and(|path| probe(&path) == IommufdState::Present);
    own && probe(&host.path(NODE)) == IommufdState::Present
}

/// Opens /dev/iommu.
fn open_iommufd(host: &SysfsHost) -> Result<File> {
    let path = host.path(NODE);
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => Error::environment(
            forbidden(&path),
            format!(
                "as root: `chown NAME {}` with the name of the user",
                path.display()
            ),
        ),
        io::ErrorKind::NotFound => Error::environment(
            format!(
                "this kernel offers no iommufd: there is no {}",
                path.display()
            ),
            format!("{TYPE1}; or boot a kernel with CONFIG_IOMMUFD and load the module iommufd"),
        ),
        _ => Error::file("open", &path)(source),
    })
}

/// Opens the node of `function` and gives the device to `iommufd`. It reaches no memory yet.
fn open_device(host: &SysfsHost, function: &SysfsFunction, iommufd: &File) -> Result<File> {
    let address = function.address;
    let absent = |what: String| {
        let remedy = format!("{TYPE1}; or boot a kernel with CONFIG_VFIO_DEVICE_CDEV");
        Error::environment(
            format!("VFIO offers no node for {address} alone: {what}"),
            remedy,
        )
    };
    let path = host
        .vfio_node(address)
        .ok_or_else(|| absent("sysfs names none".to_owned()))?;
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    let device = opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => absent(format!("there is no {}", path.display())),
        io::ErrorKind::PermissionDenied => Error::environment(
            forbidden(&path),
            format!(
                "as root: `nvme-gpu bind {address} --user NAME`, or `chown NAME {}`",
                path.display()
            ),
        ),
        _ => Error::file("open", &path)(source),
    })?;
    ioctl::bind_iommufd(&device, iommufd).map_err(|source| match source.raw_os_error() {
        // EINVAL: the device is open by its own node, also in this process.
        Some(libc::EBUSY | libc::EINVAL) => {
            let by = RunningProcess::list(&host.openers(function));
            Error::environment(
                format!("{address}, or another device of its IOMMU group, is in use by {by}"),
                format!(
                    "end {by} first (as root `fuser -v {}` names it), and bind every device of the group to vfio-pci \
                     (`nvme-gpu doctor` lists them)",
                    path.display()
                ),
            )
        }
        Some(libc::EPERM) => not_isolated("iommufd"),
        _ => Error::system("VFIO_DEVICE_BIND_IOMMUFD")(source),
    })?;
    Ok(device)
}

/// Opens `function` for its BARs alone, in a separate iommufd: it can access no memory.
pub(super) fn open_apart(host: &SysfsHost, function: &SysfsFunction) -> Result<File> {
    // The device keeps the iommufd open, so that its descriptor may be closed here.
    open_device(host, function, &open_iommufd(host)?)
}

/// An address space, for the devices of one group.
pub(super) struct IoasHandle {
    file: File,
    number: u32,
}

impl IoasHandle {
    pub fn open(host: &SysfsHost) -> Result<Self> {
        let file = open_iommufd(host)?;
        let number = calls::alloc(&file).map_err(|source| match source.raw_os_error() {
            Some(libc::ENOTTY) => Error::environment(
                format!("/{NODE} is no iommufd that this program knows"),
                TYPE1,
            ),
            _ => Error::system("IOMMU_IOAS_ALLOC")(source),
        })?;
        Ok(Self { file, number })
    }

    /// Opens the device and attaches it: it can access the memory that is mapped here, and nothing else.
    pub fn device(&self, host: &SysfsHost, function: &SysfsFunction) -> Result<File> {
        let device = open_device(host, function, &self.file)?;
        ioctl::attach(&device, self.number)
            .map_err(Error::system("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
        Ok(device)
    }

    /// Returns the addresses that the IOMMU of the attached devices translates, reserved ones left out.
    pub fn ranges(&self) -> Result<Vec<RangeInclusive<u64>>> {
        calls::ranges(&self.file, self.number).map_err(Error::system("IOMMU_IOAS_IOVA_RANGES"))
    }

    /// Maps all of `pages` at `iova`: a dma-buf as such, a memory file as a file where the kernel can, and other memory
    /// by its address in this process.
    pub fn map(&self, pages: &DmaPages, iova: u64) -> io::Result<()> {
        let bytes = pages.len() as u64;
        let map_file = |fd| calls::map_file(&self.file, self.number, fd, iova, bytes);
        if let Some(dma_buf) = pages.dma_buf() {
            return map_file(dma_buf);
        }
        if let Some(file) = pages.file() {
            match map_file(file) {
                // Linux before 6.13.
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {}
                done => return done,
            }
        }
        let address = pages.start().expose_provenance() as u64;
        calls::map(&self.file, self.number, address, iova, bytes)
    }

    /// Unmaps the range, and returns the number of bytes that were mapped.
    pub fn unmap(&self, iova: u64, bytes: u64) -> io::Result<u64> {
        calls::unmap(&self.file, self.number, iova, bytes)
    }
}

/// Returns the error for `pages` that could not be mapped, if the reason is specific to iommufd.
pub(super) fn not_mapped(source: &io::Error, pages: &DmaPages) -> Option<Error> {
    let (cause, remedy) = match (source.raw_os_error()?, pages.dma_buf().is_some()) {
        (libc::ENOTTY | libc::EINVAL, true) => (
            "this kernel's iommufd maps no dma-bufs: Linux 6.19 and newer does",
            "name the BAR by its file in sysfs, and leave iommu=iommufd out",
        ),
        (libc::EOPNOTSUPP, true) => (
            "iommufd maps dma-bufs that VFIO exported, and this one is of another driver",
            "leave iommu=iommufd out (docs/vfio.md), or use the module nvme_gpu (docs/kmod.md)",
        ),
        (libc::ENODEV, true) => (
            "the memory behind the dma-buf was taken away",
            "open the other device again",
        ),
        (libc::EFAULT, false) => (
            "iommufd cannot pin this memory: it maps no BAR by its address",
            "name the BAR as vfio:BDF?bar=N, or leave iommu=iommufd out",
        ),
        _ => return None,
    };
    Some(Error::environment(cause, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::testing::Tree;

    fn machine() -> (Tree, SysfsFunction) {
        let tree = Tree::new();
        tree.controller("0000:01:00.0", "vfio-pci", 7);
        let address = "0000:01:00.0".parse().unwrap();
        let function = tree.host().function(address).unwrap();
        (tree, function)
    }

    #[test]
    fn a_node_is_there_or_not() {
        assert_eq!(probe(Path::new("/nonexistent/iommu")), IommufdState::Absent);
        assert_eq!(probe(Path::new("/dev/null")), IommufdState::Present);
    }

    #[test]
    fn each_part_that_is_missing_is_named_with_a_remedy() {
        let (tree, function) = machine();
        let host = tree.host();
        let open = || IoasHandle::open(&host).map(drop).unwrap_err();
        assert!(open().to_string().contains("offers no iommufd"));
        assert!(open().remedy().contains("CONFIG_IOMMUFD"));
        tree.file("dev/iommu", "");
        assert!(open().to_string().contains("is no iommufd"));
        assert!(open().remedy().contains("type 1"));

        let null = File::open("/dev/null").unwrap();
        let device = || open_device(&host, &function, &null).map(drop).unwrap_err();
        assert!(device().to_string().contains("sysfs names none"));
        assert!(device().remedy().contains("CONFIG_VFIO_DEVICE_CDEV"));
        assert!(!can_open(&host, &function));
        tree.file("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev", "");
        assert!(device().to_string().contains("dev/vfio/devices/vfio3"));
        assert!(!can_open(&host, &function));
        tree.file("dev/vfio/devices/vfio3", "");
        assert!(can_open(&host, &function));
        assert!(device().to_string().contains("VFIO_DEVICE_BIND_IOMMUFD"));
    }

    #[test]
    fn memory_that_it_cannot_map_has_a_reason_of_its_own() {
        let pages = DmaPages::new(1).unwrap();
        let error = |errno| not_mapped(&io::Error::from_raw_os_error(errno), &pages);
        assert!(error(libc::EFAULT).unwrap().remedy().contains("bar=N"));
        assert!(error(libc::ENOMEM).is_none() && error(libc::EINVAL).is_none());
    }
}
