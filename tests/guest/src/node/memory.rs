//! Memory of the shapes that MAP meets.
// UNSAFETY: memfd, udmabuf and madvise by numbers and addresses of this module's own memory.
#![allow(unsafe_code)]

use super::node::{self, PAGE};
use guest_tests::Outcome;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

/// linux/udmabuf.h
const UDMABUF_CREATE: u64 = 0x4018_7542;
const HUGE: usize = 2 << 20;
const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Returns a file of zeros in memory, which cannot shrink.
pub fn memfd(bytes: usize) -> Result<File, String> {
    // SAFETY: the call takes a name and flags, and returns a descriptor that this process owns.
    let fd = unsafe {
        libc::memfd_create(
            c"node-tests".as_ptr(),
            libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(format!("memfd_create: errno {}", node::errno()));
    }
    // SAFETY: the call has just created the descriptor, which nothing else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes as u64)
        .map_err(|error| format!("ftruncate: {error}"))?;
    // SAFETY: the call takes numbers.
    match unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } {
        0 => Ok(file),
        _ => Err(format!("F_ADD_SEALS: errno {}", node::errno())),
    }
}

/// Returns a dma-buf over the whole of a file in memory.
pub fn udmabuf(memory: &File) -> Result<File, String> {
    let path = "/dev/udmabuf";
    let device = File::options().read(true).write(true).open(path);
    let device = device.map_err(|error| format!("{path}: {error}"))?;
    let bytes = memory.metadata().map_err(|error| error.to_string())?.len();
    let ask = [memory.as_raw_fd() as u64 | 1 << 32, 0, bytes];
    // SAFETY: the kernel reads the structure, and returns a descriptor that this process owns.
    unsafe {
        match libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE as _, ask.as_ptr()) {
            fd @ 0.. => Ok(File::from_raw_fd(fd)),
            _ => Err(format!("{path}: errno {}", node::errno())),
        }
    }
}

/// Maps the file into this process and its children. Neighbouring pages are not adjacent in physical memory: every
/// other page is allocated first, then the pages between them.
pub fn scattered(file: &File, bytes: usize) -> Result<*mut u8, String> {
    let start = node::mapped(bytes, BOTH, libc::MAP_SHARED, file.as_raw_fd())
        .map_err(|errno| format!("mmap: errno {errno}"))?;
    let pages = bytes / PAGE;
    for page in (0..pages).step_by(2).chain((1..pages).step_by(2)) {
        // SAFETY: the access stays inside the mapping.
        unsafe { start.add(page * PAGE).write_volatile(1) };
    }
    Ok(start)
}

/// Returns `bytes` bytes in huge pages, from the second page of the first one on, so that they are not aligned to huge
/// pages.
pub fn in_huge_pages(bytes: usize) -> Result<*mut u8, String> {
    let whole = (bytes + PAGE).next_multiple_of(HUGE);
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
    let start = node::mapped(whole, BOTH, flags, -1)
        .map_err(|errno| format!("mmap of {whole} bytes in huge pages: errno {errno}"))?;
    Ok(start.wrapping_add(PAGE))
}

/// Has this process own page tables of memory that its parent has filled.
pub fn touch(start: *mut u8, bytes: usize) -> Outcome {
    // SAFETY: the call changes no content.
    match unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) } {
        0 => Ok(()),
        _ => Err(format!("MADV_POPULATE_WRITE: errno {}", node::errno())),
    }
}
