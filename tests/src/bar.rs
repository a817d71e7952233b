//! The registers of a simulated controller, through the core's interface.

use nvme_core::{ControllerIdentity, RegisterAccess};
use nvme_sim::{Controller, DmaMemory};

/// BAR0 of a controller in this process.
pub struct Bar<'a, M> {
    /// The controller.
    pub sim: &'a Controller<M>,
    /// Which one it is.
    pub identity: &'a ControllerIdentity,
}

impl<M> Clone for Bar<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Bar<'_, M> {}

impl<M: DmaMemory> RegisterAccess for Bar<'_, M> {
    fn identity(&self) -> &ControllerIdentity {
        self.identity
    }

    fn read32(&self, offset: u32) -> u32 {
        self.sim.read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        self.sim.read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.sim.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.sim.write64(offset, value);
    }
}
