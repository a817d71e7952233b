//! Memory that another process maps too: doorbells.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io::Result as IoResult;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A mapped memfd whose size cannot change.
pub(crate) struct SharedMemory {
    start: *mut u8,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to the process; it is reached through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` zeroed bytes, a multiple of the page size.
    pub fn new(name: &str, len: usize) -> IoResult<Self> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        // A peer that shrinks it would make our next access fatal.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
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

    /// The descriptor to send to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, whose owner is going away.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
