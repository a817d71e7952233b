//! GPU memory that this process allocates, and copies between it and slices of the host. Freeing it calls the
//! driver, which a thread that a kernel waits for must not do: see `leftovers`.
// UNSAFETY: copies take raw addresses.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::stream::Stream;
use cudarc::driver::sys;
use nvme_driver::error::{Error, Result};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// Memory of the GPU, zeroed. Freed on drop.
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` zeroed bytes, aligned to 256 at least.
    ///
    /// # Errors
    /// [`Error::Device`] when there is not as much.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let _guest = gpu.enter()?;
        let mut address = 0;
        // SAFETY: the call writes one address.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, bytes.max(1))
        })?;
        let memory = Self {
            gpu: Arc::clone(gpu),
            address,
            bytes,
        };
        memory.zero()?;
        Ok(memory)
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the GPU's address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Sets every byte to zero.
    pub fn zero(&self) -> Result<()> {
        self.fill(0)
    }

    /// Sets every byte to `value`.
    pub fn fill(&self, value: u8) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        let stream = Stream::new(&self.gpu)?;
        // SAFETY: the fill covers exactly our own allocation.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(self.address, value, self.bytes, stream.raw())
        })?;
        stream.finish()
    }

    /// Returns the memory as a dma-buf, which drivers of other devices import. Address and length must be whole
    /// pages of the host, which allocations of multiples of 2 MiB are.
    ///
    /// # Errors
    /// [`Error::Environment`] where the driver exports none.
    pub fn dma_buf(&self) -> Result<OwnedFd> {
        let _guest = self.gpu.enter()?;
        if !self.gpu.exports_dma_bufs()? {
            return Err(Error::environment(
                "the NVIDIA driver exports no GPU memory as a dma-buf",
                "install the open kernel modules (Turing and later; `nvme-gpu doctor`)",
            ));
        }
        let mut fd = -1;
        // SAFETY: the range is exactly our own allocation; the call writes one descriptor.
        check("cuMemGetHandleForAddressRange", unsafe {
            sys::cuMemGetHandleForAddressRange(
                (&raw mut fd).cast(),
                self.address,
                self.bytes,
                sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            )
        })?;
        // SAFETY: the call has just created the descriptor, which nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// [`Error::Usage`] when it does not fit.
    pub fn upload(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.within(offset, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let stream = Stream::new(&self.gpu)?;
        // SAFETY: the access stays inside our own allocation; `from` outlives the copy, which ends below.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                self.address + offset as u64,
                from.as_ptr().cast(),
                from.len(),
                stream.raw(),
            )
        })?;
        stream.finish()
    }

    /// Copies from `offset` into `into`.
    ///
    /// # Errors
    /// [`Error::Usage`] past the end.
    pub fn download(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.within(offset, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        let stream = Stream::new(&self.gpu)?;
        // SAFETY: the access stays inside our own allocation; `into` outlives the copy, which ends below.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                into.as_mut_ptr().cast(),
                self.address + offset as u64,
                into.len(),
                stream.raw(),
            )
        })?;
        stream.finish()
    }

    fn within(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::internal(format!(
                "{len} bytes at {offset} of {} bytes of GPU memory",
                self.bytes
            ))),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was allocated in `new`, and freed once. The driver waits for kernels that use it, which is why
            // threads that a kernel waits for never get here. A refusal means that the context is gone, and with it the
            // memory.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
