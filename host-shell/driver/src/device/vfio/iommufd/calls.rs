//! The ioctls of iommufd, one function each, with the structures that they take (include/uapi/linux/iommufd.h).
// UNSAFETY: ioctl takes raw pointers; each call here passes a structure that lives on its stack.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns `_IO(';', n)`.
const fn number(n: u32) -> libc::c_ulong {
    (((b';' as u32) << 8) | n) as libc::c_ulong
}

const IOAS_ALLOC: libc::c_ulong = number(0x81);
const IOAS_IOVA_RANGES: libc::c_ulong = number(0x84);
const IOAS_MAP: libc::c_ulong = number(0x85);
const IOAS_UNMAP: libc::c_ulong = number(0x86);
const IOAS_MAP_FILE: libc::c_ulong = number(0x8F);

const FIXED_IOVA: u32 = 1 << 0;
const WRITEABLE: u32 = 1 << 1;
const READABLE: u32 = 1 << 2;

#[repr(C)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    ioas: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IovaRange {
    start: u64,
    last: u64,
}

#[repr(C)]
struct IovaRanges {
    size: u32,
    ioas: u32,
    count: u32,
    reserved: u32,
    list: u64,
    alignment: u64,
}

#[repr(C)]
struct IoasMap {
    size: u32,
    flags: u32,
    ioas: u32,
    reserved: u32,
    address: u64,
    bytes: u64,
    iova: u64,
}

#[repr(C)]
struct MapFile {
    size: u32,
    flags: u32,
    ioas: u32,
    fd: i32,
    start: u64,
    bytes: u64,
    iova: u64,
}

#[repr(C)]
struct IoasUnmap {
    size: u32,
    ioas: u32,
    iova: u64,
    bytes: u64,
}

const _: () = assert!(size_of::<IoasAlloc>() == 12);
const _: () = assert!(size_of::<IovaRange>() == 16);
const _: () = assert!(size_of::<IovaRanges>() == 32);
const _: () = assert!(size_of::<IoasMap>() == 40);
const _: () = assert!(size_of::<MapFile>() == 40);
const _: () = assert!(size_of::<IoasUnmap>() == 24);

fn call<T>(iommufd: &File, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the kernel reads and writes the structure that belongs to the number, which is T, and not past the size
    // that it holds.
    match unsafe {
        libc::ioctl(
            iommufd.as_raw_fd(),
            number as _,
            std::ptr::from_mut(argument),
        )
    } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Allocates an address space and returns its number.
pub fn alloc(iommufd: &File) -> io::Result<u32> {
    let mut alloc = IoasAlloc {
        size: size_of::<IoasAlloc>() as u32,
        flags: 0,
        ioas: 0,
    };
    call(iommufd, IOAS_ALLOC, &mut alloc)?;
    Ok(alloc.ioas)
}

/// Returns the addresses that may be mapped in `ioas`: the ranges that its devices' IOMMU translates, without
/// reserved ones.
pub fn ranges(iommufd: &File, ioas: u32) -> io::Result<Vec<RangeInclusive<u64>>> {
    /// Limit of the ranges that are requested: more than any machine has. The count comes from the kernel's
    /// answer and sizes an allocation.
    const MOST: u32 = 4096;
    let mut list = vec![IovaRange::default(); 16];
    for _ in 0..4 {
        let mut ask = IovaRanges {
            size: size_of::<IovaRanges>() as u32,
            ioas,
            count: list.len() as u32,
            reserved: 0,
            list: list.as_mut_ptr().expose_provenance() as u64,
            alignment: 0,
        };
        match call(iommufd, IOAS_IOVA_RANGES, &mut ask) {
            Ok(()) => return Ok(usable(&list, ask.count)),
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
                list = vec![IovaRange::default(); ask.count.min(MOST) as usize];
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Returns the usable ranges of the kernel's answer: the first `count`, limited to the list, without those
/// that end before they start.
fn usable(told: &[IovaRange], count: u32) -> Vec<RangeInclusive<u64>> {
    let told = told.iter().take(count as usize);
    let ranges = told.map(|range| range.start..=range.last);
    ranges.filter(|range| !range.is_empty()).collect()
}

/// Lets the devices of `ioas` reach `bytes` bytes at `address` of this process, at `iova`.
///
/// The caller is responsible for the devices' accesses to that memory: it keeps it mapped, and looks at it
/// through atomics or not at all while a command may touch it.
pub fn map(iommufd: &File, ioas: u32, address: u64, iova: u64, bytes: u64) -> io::Result<()> {
    let mut map = IoasMap {
        size: size_of::<IoasMap>() as u32,
        flags: FIXED_IOVA | WRITEABLE | READABLE,
        ioas,
        reserved: 0,
        address,
        bytes,
        iova,
    };
    call(iommufd, IOAS_MAP, &mut map)
}

/// Does the same as [`map`], for the first `bytes` bytes of a memory file (Linux 6.13), or of a dma-buf that VFIO
/// exported (6.19).
pub fn map_file(
    iommufd: &File,
    ioas: u32,
    file: BorrowedFd<'_>,
    iova: u64,
    bytes: u64,
) -> io::Result<()> {
    let mut map = MapFile {
        size: size_of::<MapFile>() as u32,
        flags: FIXED_IOVA | WRITEABLE | READABLE,
        ioas,
        fd: file.as_raw_fd(),
        start: 0,
        bytes,
        iova,
    };
    call(iommufd, IOAS_MAP_FILE, &mut map)
}

/// Unmaps the range, and returns the number of bytes that were mapped.
pub fn unmap(iommufd: &File, ioas: u32, iova: u64, bytes: u64) -> io::Result<u64> {
    let mut unmap = IoasUnmap {
        size: size_of::<IoasUnmap>() as u32,
        ioas,
        iova,
        bytes,
    };
    call(iommufd, IOAS_UNMAP, &mut unmap)?;
    Ok(unmap.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!(IOAS_ALLOC, 0x3B81);
        assert_eq!(IOAS_MAP_FILE, 0x3B8F);
        assert_eq!(std::mem::offset_of!(IovaRanges, list), 16);
        assert_eq!(std::mem::offset_of!(IoasMap, address), 16);
        assert_eq!(std::mem::offset_of!(MapFile, fd), 12);
        assert_eq!(std::mem::offset_of!(IoasUnmap, iova), 8);
    }

    #[test]
    fn ranges_that_cannot_be_are_left_out() {
        let range = |start, last| IovaRange { start, last };
        let told = [range(0, 0xFEDF_FFFF), range(5, 4), range(1 << 32, u64::MAX)];
        let all = [0..=0xFEDF_FFFF, 1 << 32..=u64::MAX];
        assert_eq!(usable(&told, 3), all);
        assert_eq!(usable(&told, u32::MAX), all, "more than were written");
        assert_eq!(usable(&told, 1), all[..1]);
        assert!(usable(&told, 0).is_empty());
    }

    #[test]
    fn what_is_no_iommufd_refuses_every_call() {
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .unwrap();
        let refused = [
            alloc(&null).map(drop),
            ranges(&null, 1).map(drop),
            map(&null, 1, 0, 0, 4096),
            map_file(&null, 1, null.as_fd(), 0, 4096),
            unmap(&null, 1, 0, 4096).map(drop),
        ];
        for result in refused {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        }
    }
}
