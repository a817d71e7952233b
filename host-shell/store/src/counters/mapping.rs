//! The words of a page: in a mapped file that other processes read, or in memory of this process alone.
// UNSAFETY: maps a file, whose words are used as atomics.
#![allow(unsafe_code)]

use super::layout::{PAGE_BYTES, WORDS};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The words of a page, zeroed at the start.
pub(super) enum PageWords {
    /// Words that no other process sees.
    Own(Box<[AtomicU64; WORDS]>),
    /// Words of a file.
    Shared(FileWords),
}

impl PageWords {
    /// Returns words that no other process sees.
    pub fn own() -> Self {
        Self::Own(Box::new([const { AtomicU64::new(0) }; WORDS]))
    }

    pub fn get(&self) -> &[AtomicU64; WORDS] {
        match self {
            Self::Own(words) => words,
            Self::Shared(words) => words.get(),
        }
    }
}

/// The words of a file of [`PAGE_BYTES`] bytes, mapped for as long as this lives.
pub(super) struct FileWords(NonNull<[AtomicU64; WORDS]>);

// SAFETY: the mapping belongs to no thread, and its words are only used as atomics.
unsafe impl Send for FileWords {}
// SAFETY: as above.
unsafe impl Sync for FileWords {}

impl FileWords {
    /// Maps `file`, whose blocks are allocated: a store to a page without one would end the process.
    pub fn map(file: &File) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the system chooses the address, so that nothing else lies there.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, access, flags, file, 0) }?;
        let words = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self(words))
    }

    fn get(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the mapping is that long, aligned to a page, and lives as long as the borrow. Other processes only
        // read the file.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for FileWords {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and no borrow of it is left.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}
