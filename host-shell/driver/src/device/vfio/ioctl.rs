//! The ioctls of VFIO, one function each, with the types that they take.
// UNSAFETY: ioctl takes raw pointers; each call here passes memory that it owns and that is long enough.
#![allow(unsafe_code)]

use super::info::HotReset;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_FEATURE_GET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_TYPE,
    vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_device_info, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_irq_info,
};

/// Limit of an answer of variable length, in bytes: more than any kernel's capabilities take.
const LONGEST: usize = 64 << 10;

const fn number(n: u32) -> libc::c_ulong {
    (((VFIO_TYPE as u32) << 8) | (VFIO_BASE + n)) as libc::c_ulong
}

const GET_API_VERSION: libc::c_ulong = number(0);
const CHECK_EXTENSION: libc::c_ulong = number(1);
const SET_IOMMU: libc::c_ulong = number(2);
const GROUP_GET_STATUS: libc::c_ulong = number(3);
const GROUP_SET_CONTAINER: libc::c_ulong = number(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = number(6);
const DEVICE_GET_INFO: libc::c_ulong = number(7);
const DEVICE_GET_REGION_INFO: libc::c_ulong = number(8);
const DEVICE_GET_IRQ_INFO: libc::c_ulong = number(9);
const DEVICE_SET_IRQS: libc::c_ulong = number(10);
const DEVICE_RESET: libc::c_ulong = number(11);
const DEVICE_GET_PCI_HOT_RESET_INFO: libc::c_ulong = number(12);
const DEVICE_PCI_HOT_RESET: libc::c_ulong = number(13);
const DEVICE_FEATURE: libc::c_ulong = number(17);
const DEVICE_BIND_IOMMUFD: libc::c_ulong = number(18);
const DEVICE_ATTACH_IOMMUFD_PT: libc::c_ulong = number(19);
const IOMMU_GET_INFO: libc::c_ulong = number(12);
const IOMMU_MAP_DMA: libc::c_ulong = number(13);
const IOMMU_UNMAP_DMA: libc::c_ulong = number(14);

fn result(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(returned)
    }
}

fn with_value(file: &File, number: libc::c_ulong, value: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: these calls take an integer and touch no memory of ours.
    result(unsafe { libc::ioctl(file.as_raw_fd(), number as _, value) })
}

fn with_struct<T>(file: &File, number: libc::c_ulong, argument: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads and writes the structure that belongs to the number, which is T, and
    // not past the argsz that it holds.
    result(unsafe { libc::ioctl(file.as_raw_fd(), number as _, std::ptr::from_mut(argument)) })
}

/// Calls with an argument that begins with its length; calls again if the kernel reports a longer answer.
fn with_bytes(file: &File, number: libc::c_ulong, argument: &mut [u8]) -> io::Result<libc::c_int> {
    debug_assert!(argument.len() >= 8);
    let argsz = argument.len() as u32;
    argument[..4].copy_from_slice(&argsz.to_ne_bytes());
    // SAFETY: the kernel does not read or write past argsz, which is the length of the slice.
    result(unsafe { libc::ioctl(file.as_raw_fd(), number as _, argument.as_mut_ptr()) })
}

/// Asks with `head` bytes first, then again with as many as the kernel wanted.
fn growing(
    file: &File,
    number: libc::c_ulong,
    head: usize,
    prepare: impl Fn(&mut [u8]),
) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; head];
    for _ in 0..4 {
        prepare(&mut bytes);
        with_bytes(file, number, &mut bytes)?;
        let wanted = bytes.first_chunk().map_or(0, |n| u32::from_ne_bytes(*n)) as usize;
        if wanted <= bytes.len() {
            return Ok(bytes);
        }
        bytes = vec![0; wanted.min(LONGEST)];
    }
    Err(io::ErrorKind::InvalidData.into())
}

pub fn api_version(container: &File) -> io::Result<i32> {
    with_value(container, GET_API_VERSION, 0)
}

pub fn has_extension(container: &File, extension: u32) -> io::Result<bool> {
    Ok(with_value(container, CHECK_EXTENSION, extension.into())? > 0)
}

pub fn set_iommu(container: &File, kind: u32) -> io::Result<()> {
    with_value(container, SET_IOMMU, kind.into()).map(drop)
}

/// Returns the flags of a group.
pub fn group_status(group: &File) -> io::Result<u32> {
    let mut status = vfio_group_status {
        argsz: size_of::<vfio_group_status>() as u32,
        flags: 0,
    };
    with_struct(group, GROUP_GET_STATUS, &mut status)?;
    Ok(status.flags)
}

pub fn set_container(group: &File, container: &File) -> io::Result<()> {
    let mut fd = container.as_raw_fd();
    with_struct(group, GROUP_SET_CONTAINER, &mut fd).map(drop)
}

/// Opens the device `name` (its PCI address) of a group.
pub fn device(group: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the kernel reads a string that ends with a zero byte.
    let fd =
        result(unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD as _, name.as_ptr()) })?;
    // SAFETY: the call has just created the descriptor, which nothing else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

pub fn device_info(device: &File) -> io::Result<vfio_device_info> {
    // SAFETY: the structure has only integers, for which zero is a valid value.
    let mut info: vfio_device_info = unsafe { std::mem::zeroed() };
    info.argsz = size_of::<vfio_device_info>() as u32;
    with_struct(device, DEVICE_GET_INFO, &mut info)?;
    Ok(info)
}

/// Returns the answer about region `index`, for [`VfioRegion::parse`](super::info::VfioRegion::parse).
pub fn region_info(device: &File, index: u32) -> io::Result<Vec<u8>> {
    growing(
        device,
        DEVICE_GET_REGION_INFO,
        super::info::REGION_HEAD,
        |bytes| {
            bytes[8..12].copy_from_slice(&index.to_ne_bytes());
        },
    )
}

/// Returns the answer about the IOMMU, for [`IommuInfo::parse`](super::info::IommuInfo::parse).
pub fn iommu_info(container: &File) -> io::Result<Vec<u8>> {
    growing(container, IOMMU_GET_INFO, super::info::IOMMU_HEAD, |_| ())
}

/// Returns the vectors of interrupt `index`.
pub fn irq_count(device: &File, index: u32) -> io::Result<u32> {
    let mut info = vfio_irq_info {
        argsz: size_of::<vfio_irq_info>() as u32,
        flags: 0,
        index,
        count: 0,
    };
    with_struct(device, DEVICE_GET_IRQ_INFO, &mut info)?;
    Ok(info.count)
}

/// Lets interrupt `index` signal these event descriptors, vector 0 first; an empty list switches the interrupt off.
pub fn set_irqs(device: &File, index: u32, events: &[BorrowedFd<'_>]) -> io::Result<()> {
    use vfio_bindings::bindings::vfio::{
        VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    };
    let data = if events.is_empty() {
        VFIO_IRQ_SET_DATA_NONE
    } else {
        VFIO_IRQ_SET_DATA_EVENTFD
    };
    let head = [
        0,
        data | VFIO_IRQ_SET_ACTION_TRIGGER,
        index,
        0,
        events.len() as u32,
    ];
    let fds = events.iter().map(|fd| fd.as_raw_fd() as u32);
    let mut bytes: Vec<u8> = head
        .into_iter()
        .chain(fds)
        .flat_map(u32::to_ne_bytes)
        .collect();
    with_bytes(device, DEVICE_SET_IRQS, &mut bytes).map(drop)
}

pub fn reset(device: &File) -> io::Result<()> {
    with_value(device, DEVICE_RESET, 0).map(drop)
}

/// Returns the devices that a hot reset of `device` resets too.
pub fn hot_reset_info(device: &File) -> io::Result<HotReset> {
    let mut bytes = vec![0; HotReset::HEAD];
    for _ in 0..4 {
        match with_bytes(device, DEVICE_GET_PCI_HOT_RESET_INFO, &mut bytes) {
            Ok(_) => return HotReset::parse(&bytes).ok_or(io::ErrorKind::InvalidData.into()),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                let wanted = HotReset::wanted(&bytes).unwrap_or(LONGEST);
                bytes = vec![0; wanted.min(LONGEST)];
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Resets the bus (or slot) of the device; `group` is the group of everything on it, `None` with iommufd.
pub fn hot_reset(device: &File, group: Option<&File>) -> io::Result<()> {
    let head = [0, 0, u32::from(group.is_some())];
    let fds = group.map(|group| group.as_raw_fd() as u32);
    let words = head.into_iter().chain(fds);
    let mut bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
    with_bytes(device, DEVICE_PCI_HOT_RESET, &mut bytes).map(drop)
}

/// Gives the device, which was opened by its own node, to `iommufd`. It can be used from then on.
pub fn bind_iommufd(device: &File, iommufd: &File) -> io::Result<()> {
    let mut bind = vfio_device_bind_iommufd {
        argsz: size_of::<vfio_device_bind_iommufd>() as u32,
        flags: 0,
        iommufd: iommufd.as_raw_fd(),
        out_devid: 0,
        token_uuid_ptr: 0,
    };
    with_struct(device, DEVICE_BIND_IOMMUFD, &mut bind).map(drop)
}

/// Attaches the device to the address space `ioas` of its iommufd, so that it can access the memory mapped
/// there.
pub fn attach(device: &File, ioas: u32) -> io::Result<()> {
    let mut attach = vfio_device_attach_iommufd_pt {
        argsz: size_of::<vfio_device_attach_iommufd_pt>() as u32,
        flags: 0,
        pt_id: ioas,
        pasid: 0,
    };
    with_struct(device, DEVICE_ATTACH_IOMMUFD_PT, &mut attach).map(drop)
}

/// Returns the bytes `stretch` of region `index`, whole pages, as a dma-buf.
pub fn dma_buf(device: &File, index: u32, stretch: Range<u64>) -> io::Result<OwnedFd> {
    let mut bytes = dma_buf_request(index, stretch);
    let fd = with_bytes(device, DEVICE_FEATURE, &mut bytes)?;
    // SAFETY: the call has just created the descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Builds a `struct vfio_device_feature` with a `struct vfio_device_feature_dma_buf` of one range
/// in it.
fn dma_buf_request(index: u32, stretch: Range<u64>) -> Vec<u8> {
    const GET_DMA_BUF: u32 = VFIO_DEVICE_FEATURE_GET | 11;
    let open_flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    let words = [0, GET_DMA_BUF, index, open_flags, 0, 1];
    let range = [stretch.start, stretch.end - stretch.start];
    let words = words.into_iter().flat_map(u32::to_ne_bytes);
    words
        .chain(range.into_iter().flat_map(u64::to_ne_bytes))
        .collect()
}

/// Lets the devices of the container reach `bytes` bytes at `address` of this process, at `iova`.
///
/// The caller is responsible for the devices' accesses to that memory: it keeps it mapped, and looks at it
/// through atomics or not at all while a command may touch it.
pub fn map_dma(container: &File, address: u64, iova: u64, bytes: u64) -> io::Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: address,
        iova,
        size: bytes,
    };
    with_struct(container, IOMMU_MAP_DMA, &mut map).map(drop)
}

/// Unmaps the range, and returns the number of bytes that were mapped.
pub fn unmap_dma(container: &File, iova: u64, bytes: u64) -> io::Result<u64> {
    // SAFETY: the structure has only integers and an empty array, for which zero is a valid value.
    let mut unmap: vfio_iommu_type1_dma_unmap = unsafe { std::mem::zeroed() };
    unmap.argsz = size_of::<vfio_iommu_type1_dma_unmap>() as u32;
    unmap.iova = iova;
    unmap.size = bytes;
    with_struct(container, IOMMU_UNMAP_DMA, &mut unmap)?;
    Ok(unmap.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_a_dma_buf_is_laid_out_as_in_the_header() {
        let bytes = dma_buf_request(2, 0x1000..0x5000);
        assert_eq!(bytes.len(), 8 + 16 + 16);
        assert_eq!(bytes[4..8], (1u32 << 16 | 11).to_ne_bytes());
        assert_eq!(bytes[8..12], 2u32.to_ne_bytes());
        assert_eq!(bytes[20..24], 1u32.to_ne_bytes(), "one range");
        assert_eq!(bytes[24..32], 0x1000u64.to_ne_bytes());
        assert_eq!(bytes[32..40], 0x4000u64.to_ne_bytes());
    }
}
