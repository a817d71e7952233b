//! The registers of a simulated controller, as the core wants them.

use nvme_core::Registers;
use nvme_sim::{Controller, DmaMemory};

/// BAR0 of a controller in this process.
pub struct Bar<'a, M>(pub &'a Controller<M>);

impl<M: DmaMemory> Registers for Bar<'_, M> {
    fn read32(&self, offset: u32) -> u32 {
        self.0.read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        self.0.read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.0.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.0.write64(offset, value);
    }
}
