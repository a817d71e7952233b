//! Memory of a GPU, as [`Device::map_peer`](super::Device::map_peer) gets it: this layer knows no GPU.

#[cfg(feature = "sim")]
use crate::error::Result;
#[cfg(feature = "sim")]
use std::{any::Any, sync::Arc};

/// Memory of a GPU that a controller is to reach.
pub struct PeerMemory {
    /// Address of the first byte on the bus.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Makes what moves the data of a simulated controller; a controller on the bus does so itself.
    #[cfg(feature = "sim")]
    pub copier: MakeCopier,
}

/// Makes what copies between a GPU's memory and a simulated controller. Its arguments: address and length
/// of each namespace that lies in memory, and what keeps them mapped as long as it lives.
#[cfg(feature = "sim")]
pub type MakeCopier = Box<
    dyn FnOnce(&[(usize, usize)], Arc<dyn Any + Send + Sync>) -> Result<Arc<dyn nvme_sim::Peer>>,
>;
