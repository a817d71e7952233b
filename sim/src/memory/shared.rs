//! Memory that another process maps too, for doorbells. It is a memfd whose size is sealed, since a
//! client that truncates it would make the controller's next access fail with SIGBUS.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io::Result as IoResult;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A mapped memfd of fixed size.
pub(crate) struct SharedMemory {
    start: *mut u8,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread, and its bytes are reached through
// atomics only, so that other threads and processes may write them at the same time.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes `len` zeroed bytes, a multiple of the page size.
    pub fn new(name: &str, len: usize) -> IoResult<Self> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        // The file is shared with a client that is not trusted. Without the seals it could truncate
        // the file, and the controller's next access to a doorbell would end this process with
        // SIGBUS.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the address is null and the flags lack MAP_FIXED, so the kernel chooses a range
        // that nothing of this process uses: no existing memory is replaced.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                access,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(Self {
            start: start.cast(),
            len,
            file,
        })
    }

    pub fn start(&self) -> *mut u8 {
        self.start
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the descriptor to send to a client.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is our own, whose owner is going away.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
