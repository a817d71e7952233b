//! GPU memory that can be exported as a dma-buf: memory files, which udmabuf exports where the kernel has it.

use crate::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, lock};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::null_mut;
use std::sync::Mutex;

/// CUDA_ERROR_NOT_SUPPORTED.
const NOT_SUPPORTED: Status = 801;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
const DMA_BUF: c_uint = 1;
/// The driver puts allocations of as much at whole pages of the host.
const UNIT: usize = 2 << 20;

/// Address to memory file.
static FILES: Mutex<BTreeMap<u64, File>> = Mutex::new(BTreeMap::new());

/// Whether this machine makes dma-bufs of memory files.
pub fn is_supported() -> bool {
    std::path::Path::new("/dev/udmabuf").exists()
}

/// Memory of `bytes` bytes that can be exported; none where it is not whole units, or there is no such memory.
pub fn allocate(bytes: usize) -> Option<u64> {
    if bytes == 0 || !bytes.is_multiple_of(UNIT) || !is_supported() {
        return None;
    }
    // SAFETY: a name that ends with a zero byte.
    let fd = unsafe {
        libc::memfd_create(
            c"fake-cuda".as_ptr(),
            libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC,
        )
    };
    if fd < 0 {
        return None;
    }
    // SAFETY: a new descriptor, ours alone.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes as u64).ok()?;
    // SAFETY: integers alone; udmabuf asks for this seal. Then a mapping at an address of the kernel's choice.
    let start = unsafe {
        if libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) != 0 {
            return None;
        }
        let both = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), bytes, both, libc::MAP_SHARED, fd, 0)
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let start = start.expose_provenance() as u64;
    lock(&FILES).insert(start, file);
    Some(start)
}

/// Frees what [`allocate`] gave; whether it was that.
pub fn free(address: u64, bytes: usize) -> bool {
    let Some(file) = lock(&FILES).remove(&address) else {
        return false;
    };
    drop(file);
    // SAFETY: mapped with this length in `allocate`, and freed once.
    unsafe {
        libc::munmap(
            std::ptr::with_exposed_provenance_mut(address as usize),
            bytes,
        )
    };
    true
}

/// `struct udmabuf_create` of linux/udmabuf.h.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}
/// `UDMABUF_CREATE`.
const CREATE: libc::c_ulong = 0x4018_7542;
/// `UDMABUF_FLAGS_CLOEXEC`.
const CLOEXEC: u32 = 1;

/// A whole allocation as a dma-buf.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_int,
    address: u64,
    bytes: usize,
    kind: c_uint,
    flags: c_ulonglong,
) -> Status {
    if kind != DMA_BUF || flags != 0 {
        return INVALID_VALUE;
    }
    let files = lock(&FILES);
    let Some(file) = files.get(&address) else {
        return NOT_SUPPORTED;
    };
    let mut create = Create {
        memfd: file.as_raw_fd() as u32,
        flags: CLOEXEC,
        offset: 0,
        size: bytes as u64,
    };
    let Ok(device) = File::options().read(true).write(true).open("/dev/udmabuf") else {
        return NOT_SUPPORTED;
    };
    // SAFETY: the kernel reads the structure of that number.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), CREATE as _, &mut create) };
    if made < 0 {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the caller gives a place for one descriptor.
    unsafe { *handle = made };
    SUCCESS
}
