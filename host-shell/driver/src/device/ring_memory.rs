//! Memory outside of this process's own in which rings can lie: the controller memory buffer, or memory of a peer.
//!
//! Invariant: a byte belongs to at most one [`RingPiece`] at a time, and to no other before that one is dropped.
// UNSAFETY: the memory arrives as a mapped BAR, a raw pointer.
#![allow(unsafe_code)]

use crate::dma::addresses::IovaAllocator;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::spec::Iova;
use nvme_core::spec::register::Cmbsz;
use std::any::Any;
use std::fmt::{Debug, Formatter};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Stretches start at a multiple of this.
const GRANULE: u64 = 4096;

/// Mapped memory for rings: the controller memory buffer (NVMe Base 2.0c, "Controller Memory Buffer"), or memory of
/// another device that is mapped at the controller.
pub struct RingMemory {
    start: NonNull<u8>,
    /// Bus address of the first byte.
    address: u64,
    bytes: u64,
    size: Cmbsz,
    free: Mutex<IovaAllocator>,
    /// The mapping, for as long as there are pieces.
    _keep: Box<dyn Any + Send + Sync>,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for RingMemory {}
// SAFETY: the pointer is only passed on, never dereferenced through a shared reference except by volatile
// accesses inside a piece, which has one owner; the list of free ranges is behind a lock.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Describes memory of `bytes` bytes that is mapped at `start` while `keep` lives, and that the controller
    /// addresses as `address`, a multiple of 4 KiB. `size` says what may lie in it, as CMBSZ does.
    ///
    /// # Safety
    /// `start` is page aligned and valid for volatile and atomic accesses to `bytes` bytes while `keep`
    /// lives; nothing else uses that memory.
    pub unsafe fn new(
        start: NonNull<u8>,
        bytes: u64,
        address: u64,
        size: Cmbsz,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let mut free = IovaAllocator::empty(GRANULE);
        free.give(address..address.saturating_add(bytes));
        Self {
            start,
            address,
            bytes,
            size,
            free: Mutex::new(free),
            _keep: keep,
        }
    }

    /// Returns `bytes` bytes of mapped memory that takes both kinds of rings; the other parameters are those of
    /// [`new`](Self::new).
    ///
    /// # Safety
    /// As of [`new`](Self::new).
    pub unsafe fn of_peer(
        start: NonNull<u8>,
        bytes: u64,
        address: u64,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let mut size = Cmbsz(0);
        size.set_sqs(true);
        size.set_cqs(true);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { Self::new(start, bytes, address, size, keep) }
    }

    /// True if data of reads and writes may lie in it (CMBSZ.RDS and CMBSZ.WDS).
    pub fn takes_data(&self) -> bool {
        self.size.rds() && self.size.wds()
    }

    /// Returns the start and the length in bytes of the mapping in this process.
    #[cfg(feature = "cuda")]
    pub fn mapping(&self) -> (*mut u8, usize) {
        (self.start.as_ptr(), self.bytes as usize)
    }

    /// True if submission queues may lie in this memory.
    pub fn takes_submission_queues(&self) -> bool {
        self.size.sqs()
    }

    /// True if completion queues may lie in this memory.
    pub fn takes_completion_queues(&self) -> bool {
        self.size.cqs()
    }

    /// Allocates `bytes` bytes in whole pages.
    ///
    /// # Errors
    /// [`Error::Device`] when no contiguous range of that size is free.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<RingPiece> {
        let taken = lock(&self.free).take(bytes as u64).ok_or_else(|| {
            Error::device(
                format!("the memory for rings has no {bytes} bytes left in one stretch"),
                "use fewer or smaller queues, or --rings host",
            )
        })?;
        Ok(RingPiece {
            memory: Arc::clone(self),
            taken,
        })
    }
}

impl Debug for RingMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "RingMemory({} bytes at {:#x})", self.bytes, self.address)
    }
}

/// A range of the memory, freed on drop.
pub struct RingPiece {
    memory: Arc<RingMemory>,
    taken: Range<u64>,
}

impl RingPiece {
    /// Address of the first byte in this process.
    pub fn start(&self) -> *mut u8 {
        let offset = (self.taken.start - self.memory.address) as usize;
        self.memory.start.as_ptr().wrapping_add(offset)
    }

    /// Returns the I/O virtual address of the first byte.
    pub fn iova(&self) -> Iova {
        Iova(self.taken.start)
    }

    /// Returns the length in bytes: whole pages.
    pub fn len(&self) -> usize {
        (self.taken.end - self.taken.start) as usize
    }

    /// Returns false: a piece has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on into `into`; returns false if there are not enough. No command may be in
    /// flight for them.
    #[cfg(feature = "cuda")]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let is_inside = offset
            .checked_add(into.len())
            .is_some_and(|end| end <= self.len());
        for (at, byte) in into.iter_mut().enumerate().filter(|_| is_inside) {
            // SAFETY: inside the piece, which is mapped while this lives. Volatile, because the controller may
            // change the memory at any time and the compiler must not merge or invent reads of it.
            *byte = unsafe { self.start().wrapping_add(offset + at).read_volatile() };
        }
        is_inside
    }

    /// Copies `from` to the bytes from `offset` on; returns false if there are not enough. No command may be in
    /// flight for them.
    #[cfg(feature = "cuda")]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        let is_inside = offset
            .checked_add(from.len())
            .is_some_and(|end| end <= self.len());
        for (at, byte) in from.iter().enumerate().filter(|_| is_inside) {
            // SAFETY: the bytes lie inside the piece, which is mapped while this lives and has one owner, so no other
            // thread writes to it. Volatile, because every byte must reach the controller's memory exactly once.
            unsafe { self.start().wrapping_add(offset + at).write_volatile(*byte) };
        }
        is_inside
    }
}

impl Drop for RingPiece {
    fn drop(&mut self) {
        lock(&self.memory.free).give(self.taken.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::pages::DmaPages;

    #[test]
    fn stretches_are_handed_out_once_and_come_back() {
        let pages = DmaPages::new(64 << 10).unwrap();
        let start = NonNull::new(pages.start()).unwrap();
        let mut size = Cmbsz(0);
        size.set_sqs(true);
        // SAFETY: 64 KiB of pages that the buffer keeps.
        let memory = unsafe { RingMemory::new(start, 60 << 10, 0x7000, size, Box::new(pages)) };
        let memory = Arc::new(memory);
        assert!(memory.takes_submission_queues() && !memory.takes_completion_queues());
        let one = memory.take(1).unwrap();
        let other = memory.take(8192).unwrap();
        assert_eq!((one.iova(), other.iova()), (Iova(0x7000), Iova(0x8000)));
        assert_eq!(other.start().addr() - one.start().addr(), 0x1000);
        assert!(memory.take(60 << 10).is_err());
        drop((one, other));
        assert_eq!(memory.take(60 << 10).unwrap().iova(), Iova(0x7000));
    }
}
