//! Page-aligned memory that a device can use: of this process alone, or a file that another process can map too.
//!
//! Invariant: memory that is made here is whole granules, at a multiple of the granule; a part of
//! a file of another process is whole pages.
// UNSAFETY: mmap and munmap take raw addresses.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use std::fmt::Debug;
#[cfg(feature = "vfio")]
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Every mapping is a multiple of this, the largest page size that bring-up may choose.
pub const GRANULE: usize = 64 << 10;

/// Returns the size of a page of this machine: 4 KiB, or on aarch64 also 16 or 64 KiB. Mappings, and registrations with
/// a GPU, consist of them; pages of a controller are others.
pub fn host_page() -> usize {
    rustix::param::page_size()
}

/// Size of the huge pages that shared memory consists of, if the system has some.
const HUGE: usize = 2 << 20;

/// Zeroed memory of this process, aligned to 64 KiB at least.
#[derive(Debug)]
pub struct DmaPages {
    start: NonNull<u8>,
    len: usize,
    file: Option<OwnedFd>,
    /// A dma-buf of the same bytes, where there is one.
    #[cfg(feature = "vfio")]
    dma_buf: Option<OwnedFd>,
    /// Keep-alive of the exporter: it must outlive the mapping.
    #[cfg(feature = "vfio")]
    _owner: Option<Keep>,
    /// The mapping that contains this allocation, and the owner that takes it back on drop.
    part: Option<(Arc<DmaPages>, Keep)>,
    /// Keep-alive of memory that was not mapped here; its drop releases that memory.
    foreign: Option<Keep>,
}

/// Held for its drop.
type Keep = Box<dyn Debug + Send + Sync>;

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for DmaPages {}
// SAFETY: shared references give the address, the length and the file only.
unsafe impl Sync for DmaPages {}

impl DmaPages {
    /// Maps at least `bytes` bytes of anonymous memory, rounded up to 64 KiB.
    pub fn new(bytes: usize) -> Result<Self> {
        Self::aligned(rounded(bytes, GRANULE)?, GRANULE)
    }

    /// Maps at least `bytes` bytes of a memory file that another process can map as well.
    ///
    /// 2 MiB and more are taken from huge pages if the system has some free, and are rounded up to 2 MiB then, else to
    /// 64 KiB. The file is sealed: its size cannot change.
    pub fn shared(bytes: usize) -> Result<Self> {
        if bytes >= HUGE {
            // Of this size by name: the usual one of a machine with pages of 64 KiB is 512 MiB.
            let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            let huge = Self::of_memory_file(rounded(bytes, HUGE)?, HUGE, flags);
            if huge.is_ok() {
                return huge;
            }
        }
        Self::of_memory_file(rounded(bytes, GRANULE)?, GRANULE, MemfdFlags::empty())
    }

    /// Maps `bytes` bytes of `file` from `offset` on, both whole pages of the machine: the BAR of another
    /// device (sysfs's `resourceN`, opened for reading and writing), a dma-buf, a memory file.
    ///
    /// Given to a controller, such memory is reached from device to device. A controller in another
    /// process cannot reach it.
    ///
    /// # Errors
    /// [`Error::Usage`] for lengths that are not whole pages, [`Error::System`] when the file cannot be
    /// mapped.
    pub fn of_file(file: OwnedFd, offset: u64, bytes: usize) -> Result<Self> {
        let page = host_page();
        let whole = bytes > 0 && bytes.is_multiple_of(page) && offset.is_multiple_of(page as u64);
        if !whole || i64::try_from(offset).is_err() {
            return Err(Error::usage(
                format!("{bytes} bytes from {offset} on are not whole pages"),
                format!("use multiples of {page}"),
            ));
        }
        let start = map_shared(file.as_fd(), offset, bytes).map_err(Error::system(NOT_MAPPED))?;
        Ok(Self {
            start,
            len: bytes,
            file: None,
            #[cfg(feature = "vfio")]
            dma_buf: (offset == 0 && is_dma_buf(&file)).then_some(file),
            #[cfg(feature = "vfio")]
            _owner: None,
            part: None,
            foreign: None,
        })
    }

    /// Returns `bytes` bytes at `start` that were mapped elsewhere: dropping `keep` unmaps them.
    #[cfg(feature = "cuda")]
    pub fn foreign(
        start: NonNull<u8>,
        bytes: usize,
        keep: impl Debug + Send + Sync + 'static,
    ) -> Self {
        Self {
            start,
            len: bytes,
            file: None,
            #[cfg(feature = "vfio")]
            dma_buf: None,
            #[cfg(feature = "vfio")]
            _owner: None,
            part: None,
            foreign: Some(Box::new(keep)),
        }
    }

    /// Maps `bytes` bytes of a BAR, which lies at `offset` in the file of its device, both whole pages; `dma_buf` is of
    /// the same bytes.
    #[cfg(feature = "vfio")]
    pub(crate) fn of_bar(
        device: Arc<File>,
        offset: u64,
        bytes: usize,
        dma_buf: OwnedFd,
    ) -> Result<Self> {
        let start = map_shared(device.as_fd(), offset, bytes).map_err(Error::system(NOT_MAPPED))?;
        Ok(Self {
            start,
            len: bytes,
            file: None,
            dma_buf: Some(dma_buf),
            _owner: Some(Box::new(device)),
            part: None,
            foreign: None,
        })
    }

    /// Returns the dma-buf that has exactly these bytes. The kernel cannot lock its pages, but a driver can
    /// import it.
    #[cfg(feature = "vfio")]
    pub(crate) fn dma_buf(&self) -> Option<BorrowedFd<'_>> {
        self.dma_buf.as_ref().map(AsFd::as_fd)
    }

    /// Returns the bytes `range` of `whole` (whole granules) as a separate piece of memory; `keep` is dropped
    /// when it is freed. `None` when the range does not lie in `whole`.
    #[cfg(feature = "vfio-user")]
    pub(crate) fn part(
        whole: &Arc<Self>,
        range: std::ops::Range<usize>,
        keep: Keep,
    ) -> Option<Self> {
        let inside = range.start < range.end && range.end <= whole.len;
        let aligned = range.start.is_multiple_of(GRANULE) && range.end.is_multiple_of(GRANULE);
        let start = NonNull::new(whole.start().wrapping_add(range.start));
        let start = start.filter(|_| inside && aligned)?;
        Some(Self {
            start,
            len: range.len(),
            file: None,
            #[cfg(feature = "vfio")]
            dma_buf: None,
            #[cfg(feature = "vfio")]
            _owner: None,
            part: Some((Arc::clone(whole), keep)),
            foreign: None,
        })
    }

    /// Sets the first `bytes` bytes to zero. Nothing else has their address yet.
    #[cfg(feature = "vfio-user")]
    pub(crate) fn clear(&mut self, bytes: usize) {
        // SAFETY: the range lies inside our mapping. `&mut self` makes it exclusive, and no device has its
        // address yet, so neither a thread nor a transfer can access the bytes while they are cleared.
        unsafe { self.start.as_ptr().write_bytes(0, bytes.min(self.len)) };
    }

    /// Returns the mapping that contains this memory (possibly itself): the range that is announced to a
    /// device.
    #[cfg(feature = "vfio-user")]
    pub(crate) fn whole(self: &Arc<Self>) -> &Arc<Self> {
        self.part.as_ref().map_or(self, |(whole, _)| whole)
    }

    fn of_memory_file(len: usize, align: usize, more: MemfdFlags) -> Result<Self> {
        let failed = |call| move |errno: rustix::io::Errno| system(call, errno.into());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | more;
        let file =
            rustix::fs::memfd_create("nvme-gpu-dma", flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&file, len as u64).map_err(failed("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed("sealing a memfd"))?;
        let mut pages = Self::aligned(len, align)?;
        // SAFETY: replaces exactly our own mapping, which was made just now: no reference into it and no device
        // mapping of it exists, so nobody can notice that its pages change.
        let raw = unsafe {
            libc::mmap(
                pages.start().cast(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(system("mmap", io::Error::last_os_error()));
        }
        pages.file = Some(file);
        Ok(pages)
    }

    /// Returns `len` bytes of anonymous memory at a multiple of `align`, a power of two; `len` is one of it.
    fn aligned(len: usize, align: usize) -> Result<Self> {
        let padded = len.checked_add(align).ok_or_else(too_much)?;
        // SAFETY: an anonymous mapping at an address that the kernel chooses cannot overlap memory of ours. The
        // alignment is reached by cutting off both ends, which are unmapped below.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                padded,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(system("mmap", io::Error::last_os_error()));
        }
        let before = raw.addr().wrapping_neg() % align;
        let start = raw.cast::<u8>().wrapping_add(before);
        if before > 0 {
            // SAFETY: the head of our own mapping, which nothing refers to.
            unsafe { libc::munmap(raw, before) };
        }
        // SAFETY: the tail of our own mapping, which nothing refers to; it is at least a page.
        unsafe { libc::munmap(start.wrapping_add(len).cast(), align - before) };
        let start = NonNull::new(start).ok_or_else(too_much)?;
        Ok(Self {
            start,
            len,
            file: None,
            #[cfg(feature = "vfio")]
            dma_buf: None,
            #[cfg(feature = "vfio")]
            _owner: None,
            part: None,
            foreign: None,
        })
    }

    /// Address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: a mapping has at least one granule.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the file that has exactly these bytes, of [`shared`](Self::shared) memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for DmaPages {
    fn drop(&mut self) {
        if self.part.is_some() || self.foreign.is_some() {
            return;
        }
        // SAFETY: this is our own mapping and its owner is going away. A device that could still access it
        // would hold a reference to these pages, so dropping them means that no device does.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Maps `bytes` bytes of `file` from `offset` on, whole pages, with MAP_SHARED, to read and write. Whoever calls it unmaps
/// them.
pub(crate) fn map_shared(
    file: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
) -> io::Result<NonNull<u8>> {
    let at = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: a mapping at an address of the kernel's choice touches nothing of ours.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            at,
        )
    };
    let start = NonNull::new(raw.cast::<u8>()).filter(|_| raw != libc::MAP_FAILED);
    start.ok_or_else(io::Error::last_os_error)
}

/// Operation named in the error for a BAR that cannot be mapped.
const NOT_MAPPED: &str = "mapping the memory of another device";

fn rounded(bytes: usize, granule: usize) -> Result<usize> {
    bytes
        .max(1)
        .checked_next_multiple_of(granule)
        .ok_or_else(too_much)
}

fn too_much() -> Error {
    system("mmap", io::Error::from_raw_os_error(libc::ENOMEM))
}

/// True if the file is a dma-buf: each lies in the kernel's own file system for them.
#[cfg(feature = "vfio")]
fn is_dma_buf(file: &OwnedFd) -> bool {
    const DMA_BUF_MAGIC: u64 = 0x444D_4142;
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type as u64 == DMA_BUF_MAGIC)
}

fn system(call: &'static str, source: io::Error) -> Error {
    Error::System { call, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(feature = "vfio"))]
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    #[test]
    fn shared_pages_are_a_file_of_fixed_size() {
        for bytes in [1, GRANULE + 1, HUGE + 1] {
            let pages = DmaPages::shared(bytes).unwrap();
            assert!(pages.len() >= bytes && pages.len().is_multiple_of(GRANULE));
            assert!(pages.start().addr().is_multiple_of(GRANULE));
            // SAFETY: this is our own mapping, which nothing else uses.
            unsafe { pages.start().add(bytes - 1).write(7) };
            let file = File::from(pages.file().unwrap().try_clone_to_owned().unwrap());
            assert_eq!(file.metadata().unwrap().len(), pages.len() as u64);
            let mut byte = [0];
            file.read_exact_at(&mut byte, bytes as u64 - 1).unwrap();
            assert_eq!(byte, [7]);
            assert!(file.set_len(0).is_err(), "sealed");
        }
        assert!(DmaPages::new(1).unwrap().file().is_none());
    }

    #[test]
    fn part_of_a_file_is_mapped_as_it_is() {
        let fd = rustix::fs::memfd_create("peer", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd.try_clone().unwrap());
        let page = host_page();
        let end = u64::MAX - (page as u64 - 1);
        file.set_len(4 * page as u64).unwrap();
        file.write_all_at(b"peer", 2 * page as u64).unwrap();
        let pages = DmaPages::of_file(fd.try_clone().unwrap(), 2 * page as u64, page).unwrap();
        assert_eq!(pages.len(), page);
        // SAFETY: this is our own mapping, which nothing else uses.
        let first = unsafe { pages.start().cast::<[u8; 4]>().read() };
        assert_eq!(&first, b"peer");
        assert!(pages.file().is_none(), "not a file from its start on");
        for (offset, bytes) in [(0, 0), (0, 100), (100, page), (end, page)] {
            let refused = DmaPages::of_file(fd.try_clone().unwrap(), offset, bytes);
            assert!(refused.is_err(), "{bytes} bytes from {offset}");
        }
        let null = File::open("/dev/null").unwrap();
        assert!(DmaPages::of_file(null.into(), 0, page).is_err());
    }

    #[test]
    fn what_no_address_space_holds_is_refused() {
        assert!(DmaPages::new(usize::MAX).is_err());
        assert!(DmaPages::shared(usize::MAX - (1 << 20)).is_err());
        assert!(DmaPages::shared(1 << 60).is_err());
    }
}
