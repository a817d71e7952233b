//! VFIO's type 1 IOMMU: a group in a container that nothing else shares, which maps memory at its address in
//! this process.

use super::info::IommuInfo;
use super::ioctl;
use super::node::{in_use, not_isolated, open_node};
use crate::error::{Error, Result};
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_GROUP_FLAGS_VIABLE, VFIO_TYPE1v2_IOMMU,
};

/// A group and its container.
pub struct Type1Group {
    number: u32,
    container: File,
    file: File,
    limits: IommuInfo,
}

impl Type1Group {
    /// Opens group `number`.
    ///
    /// # Errors
    /// [`Error::Environment`], with the remedy.
    pub fn open(number: u32) -> Result<Self> {
        let container = open_node(Path::new("/dev/vfio/vfio"), number)?;
        let version =
            ioctl::api_version(&container).map_err(Error::system("VFIO_GET_API_VERSION"))?;
        if version != VFIO_API_VERSION as i32 {
            return Err(Error::environment(
                format!("this kernel speaks version {version} of VFIO, not {VFIO_API_VERSION}"),
                "use another kernel",
            ));
        }
        let type1 = ioctl::has_extension(&container, VFIO_TYPE1v2_IOMMU);
        if !type1.map_err(Error::system("VFIO_CHECK_EXTENSION"))? {
            return Err(Error::environment(
                "VFIO has no type 1 IOMMU here",
                "load the module vfio_iommu_type1 and switch the IOMMU on (`nvme-gpu doctor`)",
            ));
        }
        let file = open_node(Path::new(&format!("/dev/vfio/{number}")), number)?;
        let flags = ioctl::group_status(&file).map_err(Error::system("VFIO_GROUP_GET_STATUS"))?;
        if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(Error::environment(
                format!("IOMMU group {number} is not viable: another of its devices has a driver"),
                "bind every device of the group to vfio-pci (`nvme-gpu doctor` lists them)",
            ));
        }
        ioctl::set_container(&file, &container)
            .map_err(Error::system("VFIO_GROUP_SET_CONTAINER"))?;
        ioctl::set_iommu(&container, VFIO_TYPE1v2_IOMMU).map_err(no_iommu)?;
        let answer = ioctl::iommu_info(&container).map_err(Error::system("VFIO_IOMMU_GET_INFO"))?;
        Ok(Self {
            number,
            container,
            file,
            limits: IommuInfo::parse(&answer).unwrap_or_default(),
        })
    }

    /// Returns the group's own file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the addresses that the IOMMU translates, if the kernel reports them.
    pub fn ranges(&self) -> Option<&[RangeInclusive<u64>]> {
        self.limits.ranges.as_deref()
    }

    /// Returns the limit on the number of mappings, if the kernel reports it. The kernel reports how many are left;
    /// this was read before the first mapping.
    pub fn most_mappings(&self) -> Option<u32> {
        self.limits.mappings_left
    }

    /// Opens the device at PCI address `name`.
    pub fn device(&self, name: &str) -> Result<File> {
        ioctl::device(&self.file, name).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => Error::environment(
                format!("{name} is not bound to vfio-pci"),
                format!("run `nvme-gpu bind {name}`"),
            ),
            Some(libc::EBUSY) => in_use(self.number),
            _ => Error::system("VFIO_GROUP_GET_DEVICE_FD")(source),
        })
    }

    /// Maps `bytes` bytes at `address` of this process.
    pub fn map(&self, address: u64, iova: u64, bytes: u64) -> io::Result<()> {
        ioctl::map_dma(&self.container, address, iova, bytes)
    }

    /// Unmaps the range, and returns the number of bytes that were mapped.
    pub fn unmap(&self, iova: u64, bytes: u64) -> io::Result<u64> {
        ioctl::unmap_dma(&self.container, iova, bytes)
    }
}

fn no_iommu(source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EPERM) => not_isolated("vfio_iommu_type1"),
        _ => Error::system("VFIO_SET_IOMMU")(source),
    }
}
