//! Memory of a GPU as [`Device::map_peer`](super::Device::map_peer) receives it: a bus address, a function that exports
//! it as a dma-buf, and a copier for simulated controllers. This layer knows no GPU and calls no CUDA; the crates above
//! fill in the functions.

use crate::error::Result;
use std::os::fd::OwnedFd;
#[cfg(feature = "sim")]
use std::{any::Any, sync::Arc};

/// Memory of a GPU that a controller is to reach.
pub struct PeerMemory {
    /// Address of the first byte on the bus.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// True if the memory is host memory: the GPU has no memory, or shares the processor's.
    pub in_host: bool,
    /// Function that exports the memory as a dma-buf, which the driver of a controller on the bus imports.
    pub dma_buf: ExportMemory,
    /// Creates the copier that moves the data of a simulated controller; a controller on the bus does so
    /// itself.
    #[cfg(feature = "sim")]
    pub copier: MakeCopier,
}

/// Exports the memory as a dma-buf.
pub type ExportMemory = Box<dyn FnOnce() -> Result<OwnedFd>>;

/// Creates the copier between a GPU's memory and a simulated controller. Arguments: address and length of each
/// namespace that lies in memory, and an owner that keeps them mapped.
#[cfg(feature = "sim")]
pub type MakeCopier = Box<
    dyn FnOnce(
        &[(usize, usize)],
        Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn nvme_sim::PeerAccess>>,
>;
