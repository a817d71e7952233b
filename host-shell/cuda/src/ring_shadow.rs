//! Rings of queues in GPU memory (tier 3), with the host's shadow of their addresses.
//!
//! The host cannot map that memory. A shadow of the same layout gives each ring an address by which the host names
//! it; nothing reads the shadow. Completions are copied here when the host drains a queue.
// UNSAFETY: the shadow is handed on as the place of the rings, a raw pointer.
#![allow(unsafe_code)]

use super::data::GpuData;
use super::driver::Gpu;
use super::memory::DeviceMemory;
use nvme_core::handoff::QueueWords;
use nvme_core::sync::AtomicU64;
use nvme_driver::device::Device;
use nvme_driver::device::ring_memory::RingMemory;
use nvme_driver::dma::DmaPages;
use nvme_driver::error::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Bytes of an entry of a submission and of a completion queue.
const SQE: usize = 64;
const CQE: usize = 16;

/// GPU memory for rings, mapped at a device. It is unmapped and freed with the last ring in it.
pub(super) struct RingShadow {
    on_gpu: Arc<DeviceMemory>,
    /// Host address of the shadow.
    start: u64,
    memory: Arc<RingMemory>,
}

impl RingShadow {
    /// Allocates room for `queues` pairs of rings of `entries` entries, on pages of `page` bytes.
    ///
    /// # Errors
    /// [`Error::Environment`] without GPU memory; the errors of [`Device::map_peer`].
    pub fn new(
        gpu: &Arc<Gpu>,
        device: &Arc<dyn Device>,
        (queues, entries, page): (u32, u32, u64),
    ) -> Result<Self> {
        let ring = |entry: usize| (entries as usize * entry).next_multiple_of(page as usize);
        let bytes = (ring(SQE) + ring(CQE)) * queues as usize;
        let data = GpuData::on_gpu(gpu, device, bytes)?;
        let on_gpu = data.on_gpu_memory()?;
        let pages = DmaPages::new(bytes)?;
        let start = NonNull::new(pages.start()).ok_or_else(|| Error::internal("memory at 0"))?;
        let (iova, keep) = (data.iova(), Box::new((pages, data)));
        // SAFETY: the range is `bytes` bytes of the shadow, which `keep` owns and nothing else reaches.
        let memory = unsafe { RingMemory::of_peer(start, bytes as u64, iova.0, keep) };
        Ok(Self {
            on_gpu,
            start: start.as_ptr().addr() as u64,
            memory: Arc::new(memory),
        })
    }

    /// Returns the memory for the rings.
    pub fn memory(&self) -> &Arc<RingMemory> {
        &self.memory
    }

    /// Returns the GPU's address of the byte that the shadow has at `host`.
    pub fn translate(&self, host: u64) -> Option<u64> {
        let offset = host.wrapping_sub(self.start);
        (offset < self.on_gpu.len() as u64).then(|| self.on_gpu.address() + offset)
    }

    fn completions_at(&self, queue: &QueueWords) -> Result<usize> {
        let at = self.translate(queue.cq);
        let at = at.ok_or_else(|| Error::internal("a ring that is not in its memory"))?;
        Ok((at - self.on_gpu.address()) as usize)
    }

    /// Returns a copy of the completion ring of `queue`, which no kernel uses.
    ///
    /// # Errors
    /// [`Error::Environment`] when GPU memory cannot be read.
    pub fn completions(&self, queue: &QueueWords) -> Result<Vec<AtomicU64>> {
        let at = self.completions_at(queue)?;
        let copy = || -> Result<Vec<u64>> {
            let mut words = vec![0u64; queue.entries as usize * CQE / size_of::<u64>()];
            self.on_gpu.download(at, words.as_mut_bytes())?;
            Ok(words)
        };
        // A copy by the engine has no order within an entry. If the upper word of an entry, with the phase tag,
        // is new in the first copy, its lower word is new in the second.
        let (first, second) = (copy()?, copy()?);
        let words = second.iter().zip(&first).enumerate();
        Ok(words
            .map(|(index, (second, first))| match index % 2 {
                0 => AtomicU64::new(*second),
                _ => AtomicU64::new(*first),
            })
            .collect())
    }

    /// Zeroes the completion ring of `queue`, which neither the controller nor a kernel uses.
    ///
    /// # Errors
    /// [`Error::Environment`] when GPU memory cannot be written.
    pub fn clear(&self, queue: &QueueWords) -> Result<()> {
        let zeroes = vec![0; queue.entries as usize * CQE];
        self.on_gpu.upload(self.completions_at(queue)?, &zeroes)
    }
}
