//! Memory inside the controller (the controller memory buffer), where rings can lie.
//!
//! Invariant: a stretch belongs to one [`Piece`] at a time, and to no other before that is dropped.
// UNSAFETY: the buffer arrives as a mapped BAR, a raw pointer.
#![allow(unsafe_code)]

use crate::dma::addresses::Allocator;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::spec::Iova;
use nvme_core::spec::register::Cmbsz;
use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Stretches start at a multiple of this.
const GRANULE: u64 = 4096;

/// A mapped controller memory buffer.
///
/// NVMe Base 2.0c, "Controller Memory Buffer".
pub struct ControllerMemory {
    start: NonNull<u8>,
    /// Where the controller finds the first byte.
    address: u64,
    size: Cmbsz,
    free: Mutex<Allocator>,
    /// The mapping, for as long as there are pieces.
    _keep: Box<dyn Any + Send + Sync>,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for ControllerMemory {}
// SAFETY: the pointer is only handed on; the list of free stretches is locked.
unsafe impl Sync for ControllerMemory {}

impl ControllerMemory {
    /// A buffer of `bytes` bytes that is mapped at `start` while `keep` lives, and that the controller
    /// finds at `address`, a multiple of 4 KiB. `size` says what may lie in it.
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
        let mut free = Allocator::empty(GRANULE);
        free.give(address..address.saturating_add(bytes));
        Self {
            start,
            address,
            size,
            free: Mutex::new(free),
            _keep: keep,
        }
    }

    /// Whether submission queues may lie in it.
    pub fn takes_submission_queues(&self) -> bool {
        self.size.sqs()
    }

    /// Whether completion queues may lie in it.
    pub fn takes_completion_queues(&self) -> bool {
        self.size.cqs()
    }

    /// Takes `bytes` bytes, on pages of their own.
    ///
    /// # Errors
    /// [`Error::Device`] when there is not so much left in one stretch.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Piece> {
        let taken = lock(&self.free).take(bytes as u64).ok_or_else(|| {
            Error::device(
                format!("the controller memory buffer has no {bytes} bytes left in one stretch"),
                "use fewer or smaller queues, or --rings host",
            )
        })?;
        Ok(Piece {
            memory: Arc::clone(self),
            taken,
        })
    }
}

/// A stretch of the buffer. Given back on drop.
pub struct Piece {
    memory: Arc<ControllerMemory>,
    taken: Range<u64>,
}

impl Piece {
    /// Address of the first byte in this process.
    pub fn start(&self) -> *mut u8 {
        let offset = (self.taken.start - self.memory.address) as usize;
        self.memory.start.as_ptr().wrapping_add(offset)
    }

    /// Where the controller finds the first byte.
    pub fn iova(&self) -> Iova {
        Iova(self.taken.start)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        lock(&self.memory.free).give(self.taken.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::pages::Pages;

    #[test]
    fn stretches_are_handed_out_once_and_come_back() {
        let pages = Pages::new(64 << 10).unwrap();
        let start = NonNull::new(pages.start()).unwrap();
        let mut size = Cmbsz(0);
        size.set_sqs(true);
        // SAFETY: 64 KiB of pages that the buffer keeps.
        let memory =
            unsafe { ControllerMemory::new(start, 60 << 10, 0x7000, size, Box::new(pages)) };
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
