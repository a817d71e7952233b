//! The memory of the litmus tests: locations in GPU memory or in registered host memory.
// UNSAFETY: the CPU's roles reach the words of registered memory by raw addresses.
#![allow(unsafe_code)]

use super::cases::Memory;
use nvme_host::cuda::{DeviceMemory, Gpu, RegisteredMemory};
use nvme_host::{DmaPages, Result};
use std::sync::Arc;

/// Bytes of each location.
pub const BYTES: usize = 2 << 20;

/// One location: its address for the GPU and, in host memory, for the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    /// The GPU's address.
    pub gpu: u64,
    /// The host's address; 0 if the location is not in host memory.
    pub host: usize,
}

/// The locations x, y and z in both kinds of memory.
pub struct Ground {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
    device: DeviceMemory,
}

impl Ground {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let pages = Arc::new(DmaPages::new(3 * BYTES)?);
        Ok(Self {
            registered: RegisteredMemory::pages(gpu, &pages)?,
            device: DeviceMemory::new(gpu, 3 * BYTES)?,
            pages,
        })
    }

    /// Zeroes all locations. Only between launches.
    pub fn clear(&self) -> Result<()> {
        // SAFETY: the pages are our own, and are not used between two launches.
        unsafe { self.pages.start().write_bytes(0, 3 * BYTES) };
        self.device.zero()
    }

    /// Returns the address of location `index` (x, y or z) in `memory`, from `offset` on.
    pub fn place(&self, memory: Memory, index: usize, offset: usize) -> Place {
        let at = index * BYTES + offset;
        match memory {
            Memory::Device => Place {
                gpu: self.device.address() + at as u64,
                host: 0,
            },
            Memory::Pinned => Place {
                gpu: self.registered.address() + at as u64,
                host: self.pages.start().addr() + at,
            },
        }
    }
}
