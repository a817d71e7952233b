//! Data memory that both the controller and the GPU can access, wherever the tier places it: host memory, GPU
//! memory, or memory inside the controller. It is unmapped from the controller before it is freed.

#[cfg(feature = "sim")]
use super::copier::SimulatorCopier;
use super::driver::Gpu;
use super::memory::DeviceMemory;
use super::registered::RegisteredMemory;
use nvme_core::spec::Iova;
use nvme_driver::device::Device;
use nvme_driver::device::peer::PeerMemory;
use nvme_driver::device::ring_memory::{RingMemory, RingPiece};
use nvme_driver::dma::DmaBuffer;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;

/// Exported memory is a multiple of this size: the driver puts such allocations at whole pages.
const EXPORTED: usize = 2 << 20;

/// Data memory that the controller and the GPU reach.
pub enum GpuData {
    /// Host memory, registered with the GPU.
    Pinned {
        /// The GPU's view of it.
        registered: RegisteredMemory,
        /// The same memory as the CPU accesses it.
        buffer: DmaBuffer,
    },
    /// GPU memory, mapped at the device.
    OnGpu {
        /// The memory.
        memory: Arc<DeviceMemory>,
        /// I/O virtual address for the controller.
        iova: Iova,
        /// Device at which it is mapped.
        device: Arc<dyn Device>,
    },
    /// Memory of the controller, registered with the GPU.
    InController {
        /// Registration of the whole buffer with the GPU.
        registered: Arc<RegisteredMemory>,
        /// The stretch that data lies in.
        piece: RingPiece,
        /// The GPU's address of that.
        address: u64,
    },
}

impl GpuData {
    /// Allocates `bytes` bytes of host memory.
    pub fn pinned(gpu: &Arc<Gpu>, device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let buffer = DmaBuffer::new(device, bytes)?;
        let registered = RegisteredMemory::pages(gpu, buffer.pages())?;
        Ok(Self::Pinned { buffer, registered })
    }

    /// Takes `bytes` bytes of controller memory; `register` returns the GPU's view of it.
    ///
    /// # Errors
    /// [`Error::Usage`] and [`Error::Device`] if the controller has no memory, or none for data, or not enough of it.
    pub(super) fn in_controller(
        device: &Arc<dyn Device>,
        bytes: usize,
        register: impl FnOnce(&Arc<RingMemory>) -> Result<Arc<RegisteredMemory>>,
    ) -> Result<Self> {
        let memory = device.controller_memory()?;
        if !memory.takes_data() {
            return Err(Error::device(
                format!(
                    "the controller memory buffer of {} takes no data (CMBSZ.RDS, CMBSZ.WDS)",
                    device.name()
                ),
                "leave --data-in-cmb out",
            ));
        }
        let piece = memory.take(bytes)?;
        let registered = register(&memory)?;
        let address = registered.translate(piece.start().addr() as u64)?;
        Ok(Self::InController {
            registered,
            piece,
            address,
        })
    }

    /// Returns the memory, of data that lies on the GPU.
    pub(super) fn on_gpu_memory(&self) -> Result<Arc<DeviceMemory>> {
        match self {
            Self::OnGpu { memory, .. } => Ok(Arc::clone(memory)),
            _ => Err(Error::internal("data that is not in GPU memory")),
        }
    }

    /// Allocates GPU memory of `bytes` bytes, or more, since exported memory is rounded up.
    pub fn on_gpu(gpu: &Arc<Gpu>, device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let bytes = match device.reaches_peers() {
            true => bytes.next_multiple_of(EXPORTED),
            false => bytes,
        };
        let memory = Arc::new(DeviceMemory::new(gpu, bytes)?);
        let iova = device.map_peer(PeerMemory {
            address: memory.address(),
            bytes,
            in_host: gpu.shares_host_memory()?,
            dma_buf: {
                let memory = Arc::clone(&memory);
                Box::new(move || memory.dma_buf())
            },
            #[cfg(feature = "sim")]
            copier: {
                let memory = Arc::clone(&memory);
                Box::new(move |images, owner| {
                    Ok(Arc::new(SimulatorCopier::new(&memory, images, owner)?))
                })
            },
        })?;
        Ok(Self::OnGpu {
            memory,
            iova,
            device: Arc::clone(device),
        })
    }

    /// Returns the GPU's address of the first byte.
    pub fn address(&self) -> u64 {
        match self {
            Self::Pinned { registered, .. } => registered.address(),
            Self::OnGpu { memory, .. } => memory.address(),
            Self::InController { address, .. } => *address,
        }
    }

    /// Returns the controller's address of the first byte.
    pub fn iova(&self) -> Iova {
        match self {
            Self::Pinned { buffer, .. } => buffer.iova(),
            Self::OnGpu { iova, .. } => *iova,
            Self::InController { piece, .. } => piece.iova(),
        }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Pinned { buffer, .. } => buffer.len(),
            Self::OnGpu { memory, .. } => memory.len(),
            Self::InController { piece, .. } => piece.len(),
        }
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on into `into`. No command may be in flight for them.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        match self {
            Self::Pinned { buffer, .. } => {
                let from = buffer.as_slice().get(offset..offset + into.len());
                into.copy_from_slice(from.ok_or_else(past_end)?);
                Ok(())
            }
            Self::OnGpu { memory, .. } => memory.download(offset, into),
            Self::InController { piece, .. } => match piece.read(offset, into) {
                true => Ok(()),
                false => Err(past_end()),
            },
        }
    }

    /// Copies `from` to the bytes from `offset` on. No command may be in flight for them.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<()> {
        match self {
            Self::Pinned { buffer, .. } => {
                let into = buffer.as_mut_slice().get_mut(offset..offset + from.len());
                into.ok_or_else(past_end)?.copy_from_slice(from);
                Ok(())
            }
            Self::OnGpu { memory, .. } => memory.upload(offset, from),
            Self::InController { piece, .. } => match piece.write(offset, from) {
                true => Ok(()),
                false => Err(past_end()),
            },
        }
    }
}

impl Drop for GpuData {
    fn drop(&mut self) {
        if let Self::OnGpu {
            memory,
            iova,
            device,
        } = self
            && device.unmap_dma(*iova, memory.len()).is_err()
        {
            // The device may still write there: then the memory is leaked.
            std::mem::forget(Arc::clone(memory));
        }
    }
}

fn past_end() -> Error {
    Error::internal("past the end of the data memory")
}
