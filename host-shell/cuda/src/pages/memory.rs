//! Memory of one operation over pages: words and staged pages in GPU memory, and what the host and the GPU exchange in
//! memory of the host. It is reused and not freed: freeing GPU memory waits for all kernels.
// UNSAFETY: reads and writes memory of the host that kernels use, by address.
#![allow(unsafe_code)]

use crate::driver::{Gpu, check};
use crate::memory::DeviceMemory;
use crate::registered::RegisteredMemory;
use crate::stream::{Stream, handle};
use cudarc::driver::sys;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::{Arc, Mutex};

/// Allocations are multiples of it, so that an operation finds that of an earlier one of about its size.
const UNIT: usize = 1 << 20;
/// Streams of an operation beside the caller's.
pub(super) const OWN_STREAMS: usize = 2;
/// Allocations that are kept for later operations.
const MOST_FREE: usize = 8;

/// Memory that no operation uses.
#[derive(Default)]
pub(super) struct StagingPool {
    free: Mutex<Vec<PageAllocation>>,
}

struct PageAllocation {
    device: DeviceMemory,
    pages: Arc<DmaPages>,
    host: RegisteredMemory,
    /// For launches that do not wait for the caller's stream, and begin before work that fills the GPU. Were they those of
    /// all operations, one operation could wait in them for what another caller's stream does first.
    own: [Stream; OWN_STREAMS],
}

/// Memory of one operation, for as long as a kernel may use it.
pub(super) struct PageMemory {
    allocation: Option<PageAllocation>,
    pool: Arc<StagingPool>,
}

/// Places of an operation's words, one after the other.
#[derive(Clone, Copy, Default)]
pub(super) struct WordPlaces {
    bytes: usize,
}

impl WordPlaces {
    /// Returns the place of `count` elements of `bytes` bytes each, a multiple of `unit`.
    ///
    /// # Errors
    /// [`Error::Usage`] for more than memory has.
    pub fn take(&mut self, count: usize, bytes: usize, unit: usize) -> Result<usize> {
        let at = self.bytes.next_multiple_of(unit);
        let end = count.checked_mul(bytes).and_then(|all| all.checked_add(at));
        let end = end.filter(|end| *end <= 1 << 46).ok_or_else(|| {
            Error::usage(
                format!("{count} parts of {bytes} bytes are more than memory has"),
                "pass fewer pages at a time",
            )
        })?;
        self.bytes = end;
        Ok(at)
    }

    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl StagingPool {
    /// Takes `device` bytes of the GPU and `host` bytes of the host at least, with any content.
    ///
    /// # Errors
    /// Without memory.
    pub fn take(
        self: &Arc<Self>,
        gpu: &Arc<Gpu>,
        device: usize,
        host: usize,
    ) -> Result<PageMemory> {
        let found = {
            let mut free = lock(&self.free);
            let fits = |one: &PageAllocation| one.device.len() >= device && one.pages.len() >= host;
            let least = free.iter().enumerate().filter(|(_, one)| fits(one));
            let at = least
                .min_by_key(|(_, one)| one.device.len() + one.pages.len())
                .map(|(at, _)| at);
            at.map(|at| free.swap_remove(at))
        };
        let allocation = match found {
            Some(found) => found,
            None => {
                let device = DeviceMemory::new(gpu, device.max(1).next_multiple_of(UNIT))?;
                let bytes = host.max(1).next_multiple_of(UNIT);
                let (pages, host) = RegisteredMemory::pinned(gpu, bytes)?;
                PageAllocation {
                    device,
                    pages,
                    host,
                    own: [Stream::urgent(gpu)?, Stream::urgent(gpu)?],
                }
            }
        };
        Ok(PageMemory {
            allocation: Some(allocation),
            pool: Arc::clone(self),
        })
    }
}

impl PageMemory {
    fn parts(&self) -> Result<&PageAllocation> {
        let parts = self.allocation.as_ref();
        parts.ok_or_else(|| Error::internal("memory of pages was given back"))
    }

    /// Returns the operation's own streams, `CUstream`s.
    ///
    /// # Errors
    /// [`Error::Device`] when the memory is in the pool again.
    pub fn streams(&self) -> Result<[u64; OWN_STREAMS]> {
        Ok(self.parts()?.own.each_ref().map(Stream::handle))
    }

    /// Returns the GPU's address of byte `at` of its memory.
    pub fn device(&self, at: usize) -> u64 {
        let start = self.allocation.as_ref().map_or(0, |of| of.device.address());
        start + at as u64
    }

    /// Returns the GPU's address of byte `at` of the host's memory.
    pub fn host(&self, at: usize) -> u64 {
        let start = self.allocation.as_ref().map_or(0, |of| of.host.address());
        start + at as u64
    }

    /// Returns the host's address of byte `at` of its memory, with `bytes` bytes behind it.
    ///
    /// # Errors
    /// [`Error::Device`] past the end.
    pub fn place(&self, at: usize, bytes: usize) -> Result<*mut u8> {
        let pages = &self.parts()?.pages;
        match at.checked_add(bytes) {
            Some(end) if end <= pages.len() => Ok(pages.start().wrapping_add(at)),
            _ => Err(Error::internal(format!(
                "{bytes} bytes at {at} of {} bytes of pages in the host's memory",
                pages.len()
            ))),
        }
    }

    /// Writes `words` at byte `at` of the host's memory.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn put<T: Copy>(&self, at: usize, words: &[T]) -> Result<()> {
        let bytes = size_of_val(words);
        let to = self.place(at, bytes)?;
        // SAFETY: the bytes lie in the host's memory, and no kernel uses them: these words belong to a later launch of
        // the operation.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), to, bytes) };
        Ok(())
    }

    /// Returns `bytes` bytes at byte `at` of the host's memory, which kernels have written.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn bytes(&self, at: usize, bytes: usize) -> Result<Vec<u8>> {
        let from = self.place(at, bytes)?;
        let mut found = vec![0; bytes];
        // SAFETY: the bytes lie in the host's memory; the end of the kernel that wrote them was seen.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), found.as_mut_ptr(), bytes) };
        Ok(found)
    }

    /// Returns `count` words at byte `at` of the host's memory, which kernels have written.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn words(&self, at: usize, count: usize) -> Result<Vec<u64>> {
        let bytes = self.bytes(at, count * 8)?;
        let words = bytes.as_chunks::<8>().0.iter();
        Ok(words.map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Enqueues in `stream`, a `CUstream`, the copy of `bytes` bytes from byte `from` of the host's memory to byte `to`
    /// of the GPU's.
    ///
    /// # Errors
    /// As [`place`](Self::place), and the driver's answer.
    pub fn upload(&self, stream: u64, (to, from): (usize, usize), bytes: usize) -> Result<()> {
        let source = self.place(from, bytes)?;
        let device = &self.parts()?.device;
        if to.checked_add(bytes).is_none_or(|end| end > device.len()) {
            return Err(Error::internal(
                "words of pages do not fit into their memory",
            ));
        }
        let _guest = device.gpu().enter()?;
        // SAFETY: both ranges lie in memory of this operation, which stays until the stream has passed the copy.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.device(to), source.cast(), bytes, handle(stream))
        })
    }
}

impl Drop for PageMemory {
    fn drop(&mut self) {
        let Some(allocation) = self.allocation.take() else {
            return;
        };
        let over = {
            let mut free = lock(&self.pool.free);
            free.push(allocation);
            // The smallest goes: a larger one serves its operations, too.
            let least = (0..free.len()).min_by_key(|at| free[*at].device.len());
            match free.len() > MOST_FREE {
                true => least.map(|at| free.swap_remove(at)),
                false => None,
            }
        };
        // Outside the lock: it calls the driver.
        drop(over);
    }
}
