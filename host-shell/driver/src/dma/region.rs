//! Regions mapped at the device, and buffers that are parts of them.
//!
//! Invariant: memory stays mapped, here and at the device, until nothing can touch it any more. A
//! [`DmaBuffer`] that is lent to a command is inside its queue pair, so no one else can read or free it.
// UNSAFETY: buffers view raw memory as bytes, and the page for Identify as words.
#![allow(unsafe_code)]

use super::pages::{DmaPages, GRANULE};
use crate::device::Device;
use crate::device::ring_memory::RingMemory;
use crate::error::{Error, Result};
use nvme_core::mem::DmaWords;
use nvme_core::spec::Iova;
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory that the controller can reach. Unmapped at the device, then freed, on drop.
pub struct MappedRegion {
    pub(super) pages: Arc<DmaPages>,
    pub(super) iova: Iova,
    device: Arc<dyn Device>,
}

impl MappedRegion {
    /// Allocates at least `bytes` bytes and maps them at the device.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        Self::over(device, Arc::new(device.alloc_dma(bytes)?))
    }

    /// Maps memory that exists already.
    fn over(device: &Arc<dyn Device>, pages: Arc<DmaPages>) -> Result<Self> {
        let iova = device.map_dma(&pages)?;
        Ok(Self {
            pages,
            iova,
            device: Arc::clone(device),
        })
    }

    /// Returns the I/O virtual address of the first byte.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns the memory, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub fn pages(&self) -> &Arc<DmaPages> {
        &self.pages
    }
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        // A device that cannot unmap may still write there: then the memory is leaked.
        if self.device.unmap_dma(self.iova, self.pages.len()).is_err() {
            std::mem::forget(Arc::clone(&self.pages));
        }
    }
}

/// A stretch of DMA memory with one owner: the caller, or the command that it is lent to.
pub struct DmaBuffer {
    region: Arc<MappedRegion>,
    offset: usize,
    len: usize,
    capacity: usize,
}

impl std::fmt::Debug for DmaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DmaBuffer")
            .field("iova", &self.iova())
            .field("len", &self.len)
            .finish()
    }
}

impl DmaBuffer {
    /// Allocates a buffer of `bytes` bytes in a new region.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let region = Arc::new(MappedRegion::new(device, bytes)?);
        Ok(Self {
            region,
            offset: 0,
            len: bytes,
            capacity: bytes,
        })
    }

    /// Wraps memory that exists already, such as a peer device's ([`DmaPages::of_file`](crate::DmaPages::of_file)),
    /// mapped at `device`.
    pub fn over(device: &Arc<dyn Device>, pages: Arc<DmaPages>) -> Result<Self> {
        let len = pages.len();
        let region = Arc::new(MappedRegion::over(device, pages)?);
        Ok(Self {
            region,
            offset: 0,
            len,
            capacity: len,
        })
    }

    /// Converts the memory into room for rings of I/O queues ([`RingLocation::Peer`](crate::RingLocation::Peer)), which
    /// then lie nowhere else.
    ///
    /// # Errors
    /// [`Error::Usage`] for a buffer that does not begin with a page, or is shorter than one.
    pub fn into_rings(self) -> Result<RingMemory> {
        const PAGE: usize = 4096;
        let start = self.region.pages.start().wrapping_add(self.offset);
        let start = NonNull::new(start).filter(|start| start.as_ptr().addr().is_multiple_of(PAGE));
        let (Some(start), 1.., true) = (
            start,
            self.len / PAGE,
            self.iova().0.is_multiple_of(PAGE as u64),
        ) else {
            return Err(Error::usage(
                format!(
                    "rings in a buffer of {} bytes that are not whole pages",
                    self.len
                ),
                "use whole pages of 4096 bytes",
            ));
        };
        let (bytes, iova) = ((self.len / PAGE * PAGE) as u64, self.iova().0);
        // SAFETY: `bytes` bytes of the buffer, which `keep` owns from now on. Neither a slice of it nor a
        // command with its address exists any more, since both borrow or own the buffer.
        Ok(unsafe { RingMemory::of_peer(start, bytes, iova, Box::new(self)) })
    }

    /// Returns `count` buffers of `bytes` bytes (a multiple of 4) in one region, in address order.
    pub fn several(device: &Arc<dyn Device>, bytes: usize, count: usize) -> Result<Vec<Self>> {
        let too_long = || {
            Error::usage(
                "the buffers do not fit into memory",
                "use fewer or smaller ones",
            )
        };
        let total = bytes.checked_mul(count).ok_or_else(too_long)?;
        let region = Arc::new(MappedRegion::new(device, total)?);
        let piece = |index| Self {
            region: Arc::clone(&region),
            offset: index * bytes,
            len: bytes,
            capacity: bytes,
        };
        Ok((0..count).map(piece).collect())
    }

    /// Returns the memory of the whole region, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub fn pages(&self) -> &Arc<DmaPages> {
        self.region.pages()
    }

    /// Returns the I/O virtual address of the first byte.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.region.iova.offset(self.offset as u64)
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Shortens or lengthens the buffer, up to the `capacity` that it was made with.
    pub fn resize(&mut self, bytes: usize) {
        self.len = bytes.min(self.capacity);
    }

    /// Returns the index of this buffer among the [`several`](Self::several) that were allocated together.
    #[inline]
    pub fn index(&self) -> usize {
        self.offset / self.capacity.max(1)
    }

    /// Returns the bytes. The controller does not use the buffer: it never had its address, or has completed the
    /// command.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: offset + len lie inside the region, which the Arc keeps mapped. The range has one owner,
        // and a controller that had its address has completed that command, so nothing writes to the bytes
        // while the slice lives.
        unsafe { std::slice::from_raw_parts(self.region.pages.start().add(self.offset), self.len) }
    }

    /// Returns the bytes, to be filled before they are lent.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; in addition `&mut self` is the only owner of the range, so no other slice
        // of it exists while this one does.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.pages.start().add(self.offset), self.len)
        }
    }
}

/// A page for Identify data during bring-up.
pub(crate) struct ScratchPage(MappedRegion);

impl ScratchPage {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        MappedRegion::new(device, GRANULE).map(Self)
    }

    /// Returns the page as words, through which the core reads it.
    pub(crate) fn words(&self) -> DmaWords<'_> {
        // SAFETY: the region is page aligned and lives as long as the borrow. Only atomics access it, since the
        // controller may write to the page while the core reads it.
        unsafe { DmaWords::from_raw(self.0.pages.start(), GRANULE / 8, self.0.iova) }
    }
}
