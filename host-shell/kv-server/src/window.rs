//! Memory that a client and the owner share: pages pass through it, not through the socket.
//!
//! Both sides copy with `pread` and `pwrite`. Neither maps it: bytes that the other process changes meanwhile are
//! data that a checksum refuses, and no memory of Rust that changes behind its back.

use nvme_driver::error::Error;
use nvme_kv::KvError;
use nvme_kv::format::UNIT;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Bytes of a window, if one page is not longer.
const WINDOW_BYTES: u64 = 32 << 20;

/// A window of pages of one size.
pub(crate) struct PageWindow {
    file: File,
    page_bytes: u32,
    pages: usize,
}

/// Returns the number of pages of a window.
pub(crate) fn window_pages(page_bytes: u32) -> usize {
    let fit = (WINDOW_BYTES / stride(page_bytes)) as usize;
    fit.clamp(1, crate::message::MOST_PAGES)
}

fn stride(page_bytes: u32) -> u64 {
    u64::from(page_bytes).next_multiple_of(UNIT)
}

impl PageWindow {
    /// Makes a window whose size no one can change.
    pub fn new(page_bytes: u32) -> nvme_kv::Result<Self> {
        let pages = window_pages(page_bytes);
        let made = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("nvme-kv", flags)?;
            rustix::fs::ftruncate(&file, pages as u64 * stride(page_bytes))?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&file, seals)?;
            Ok(file)
        };
        let file = made().map_err(|errno: rustix::io::Errno| failed("making", errno.into()))?;
        Ok(Self {
            file: File::from(file),
            page_bytes,
            pages,
        })
    }

    /// Takes the window that the owner sent.
    ///
    /// # Errors
    /// [`KvError::Owner`] if it is smaller than the owner says.
    pub fn received(file: OwnedFd, page_bytes: u32, pages: u32) -> nvme_kv::Result<Self> {
        let file = File::from(file);
        let bytes = file.metadata().map_err(|error| failed("taking", error))?;
        let pages = pages as usize;
        if pages == 0 || pages as u64 * stride(page_bytes) > bytes.len() {
            return Err(KvError::Owner {
                code: "internal",
                cause: format!(
                    "the owner sent a window of {} bytes for {pages} pages",
                    bytes.len()
                ),
                remedy: "use one version of this package in all processes".to_owned(),
            });
        }
        Ok(Self {
            file,
            page_bytes,
            pages,
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the number of pages that it holds.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Copies `page` to place `number`.
    pub fn write(&self, number: usize, page: &[u8]) -> nvme_kv::Result<()> {
        let at = number as u64 * stride(self.page_bytes);
        let written = self.file.write_all_at(page, at);
        written.map_err(|error| failed("writing", error))
    }

    /// Fills `page` from place `number`.
    pub fn read(&self, number: usize, page: &mut [u8]) -> nvme_kv::Result<()> {
        let at = number as u64 * stride(self.page_bytes);
        let read = self.file.read_exact_at(page, at);
        read.map_err(|error| failed("reading", error))
    }
}

fn failed(what: &str, source: std::io::Error) -> KvError {
    KvError::Drive {
        action: format!("{what} shared memory"),
        source: Error::system("memfd")(source),
    }
}
