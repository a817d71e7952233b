//! What a transport must offer: registers, doorbells and DMA memory.

use crate::bar::DoorbellMap;
use crate::dma::Pages;
use crate::error::Result;
use nvme_core::Registers;
use nvme_core::spec::Iova;
use std::sync::Arc;

/// A controller that can be reached. Object-safe: everything above works on `Arc<dyn Device>`.
pub trait Device: Send + Sync {
    /// How the user named it, for messages.
    fn name(&self) -> String;

    /// What carries out the commands, in words: "embedded simulator, 1 thread", "PCIe 0000:01:00.0".
    fn describe(&self) -> String;

    /// The controller's properties. Not on the I/O path.
    fn registers(&self) -> &(dyn Registers + Sync);

    /// The mapped doorbells, valid as long as this device.
    fn doorbells(&self) -> DoorbellMap;

    /// Page-aligned memory fit for DMA. The default is anonymous memory.
    fn alloc_dma(&self, bytes: usize) -> Result<Pages> {
        Pages::new(bytes)
    }

    /// Lets the controller reach `pages`; returns the address that it uses.
    ///
    /// The device keeps its share of `pages` until [`unmap_dma`](Self::unmap_dma).
    fn map_dma(&self, pages: &Arc<Pages>) -> Result<Iova>;

    /// Ends the controller's access to `bytes` bytes at `iova`; waits for accesses in progress.
    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()>;

    /// Resets the function. Every queue, the admin queue too, is gone afterwards.
    fn reset(&self) -> Result<()>;
}
