//! The ioctls that describe a file of a mounted ext4, with the structures that they take.
//!
//! Linux, include/uapi/linux/fiemap.h, fs.h and fs/ext4/ext4.h (`EXT4_IOC_GETFSUUID`).
// UNSAFETY: ioctl takes raw pointers; each call here passes memory that it owns and that is long enough.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Extents of one answer.
pub const MOST: usize = 128;

const FIEMAP: u64 = 0xC020_660B;
const GET_VERSION: u64 = 0x8008_7601;
const EXT4_GET_UUID: u64 = 0x8008_662C;
/// Flag: write dirty pages back first.
const SYNC: u32 = 1;
const UUID_BYTES: u32 = 16;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RawExtent {
    pub logical: u64,
    pub physical: u64,
    pub length: u64,
    pub reserved64: [u64; 2],
    pub flags: u32,
    pub reserved: [u32; 3],
}

/// `struct fiemap`, with room for extents.
#[repr(C)]
struct FiemapRequest {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [RawExtent; MOST],
}

/// `struct fsuuid`, with room for one.
#[repr(C)]
struct FilesystemUuid {
    length: u32,
    flags: u32,
    bytes: [u8; UUID_BYTES as usize],
}

const _: () = assert!(size_of::<RawExtent>() == 56);
const _: () = assert!(size_of::<FiemapRequest>() == 32 + MOST * 56);
const _: () = assert!(size_of::<FilesystemUuid>() == 24);

/// Returns the extents of `file` from byte `start` on, as many as an answer has room for; dirty pages are
/// written back first.
pub fn fiemap(file: &File, start: u64) -> io::Result<Vec<RawExtent>> {
    let mut asked = FiemapRequest {
        start,
        length: u64::MAX - start,
        flags: SYNC,
        mapped_extents: 0,
        extent_count: MOST as u32,
        reserved: 0,
        extents: [RawExtent::default(); MOST],
    };
    // SAFETY: the structure has room for the number of extents that it states, and outlives the call.
    unsafe { call(file, FIEMAP, (&raw mut asked).cast())? };
    let found = (asked.mapped_extents as usize).min(MOST);
    Ok(asked.extents[..found].to_vec())
}

/// Returns the generation of the inode of `file`.
pub fn generation(file: &File) -> io::Result<u32> {
    // The number of the call says 8 bytes; ext4 writes 4.
    let mut found = [0u32; 2];
    // SAFETY: 8 bytes that outlive the call.
    unsafe { call(file, GET_VERSION, found.as_mut_ptr().cast())? };
    Ok(found[0])
}

/// Returns the UUID of the ext4 of `file`. From Linux 6.0 on.
pub fn uuid(file: &File) -> io::Result<[u8; UUID_BYTES as usize]> {
    let mut asked = FilesystemUuid {
        length: UUID_BYTES,
        flags: 0,
        bytes: [0; UUID_BYTES as usize],
    };
    // SAFETY: the structure has room for the number of bytes that it states, and outlives the call.
    unsafe { call(file, EXT4_GET_UUID, (&raw mut asked).cast())? };
    Ok(asked.bytes)
}

/// # Safety
/// `argument` has the type that the call `number` expects, and may be written by it.
unsafe fn call(file: &File, number: u64, argument: *mut c_void) -> io::Result<()> {
    // SAFETY: the caller's; the descriptor is open.
    match unsafe { libc::ioctl(file.as_raw_fd(), number as _, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
