//! Words of pinned memory, which threads of the host write and kernels read.
// UNSAFETY: a slice over memory that is mapped for as long as its owner lives.
#![allow(unsafe_code)]

use nvme_cuda::Gpu;
use nvme_cuda::RegisteredMemory;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Array of `i64` in memory that the host and kernels share.
pub(super) struct SharedWords {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
    count: usize,
}

impl SharedWords {
    /// # Errors
    /// An error without memory that the GPU reaches.
    pub fn new(gpu: &Arc<Gpu>, count: usize) -> Result<Self> {
        let pages = Arc::new(DmaPages::new(count.max(1) * 8)?);
        Ok(Self {
            registered: RegisteredMemory::pages(gpu, &pages)?,
            pages,
            count,
        })
    }

    /// Returns the GPU's address of the first one.
    pub fn address(&self) -> u64 {
        self.registered.address()
    }

    /// Returns the host's address of the first one.
    pub fn start(&self) -> *mut u8 {
        self.pages.start()
    }

    fn all(&self) -> &[AtomicI64] {
        // SAFETY: the slice is `count` words of zeroed pages, mapped as long as `self`; the host uses them as atomics
        // alone.
        unsafe { std::slice::from_raw_parts(self.pages.start().cast::<AtomicI64>(), self.count) }
    }

    #[inline]
    pub fn get(&self, at: usize) -> i64 {
        self.all()[at].load(Ordering::Relaxed)
    }

    #[inline]
    pub fn set(&self, at: usize, value: i64) {
        self.all()[at].store(value, Ordering::Relaxed);
    }
}
