//! Memory of gathers of several launches, which the last launch leaves in the state that the next gather needs. It is reused
//! and not freed: freeing GPU memory waits for all kernels, also for those that wait for the drive.

use super::super::driver::Gpu;
use super::super::memory::DeviceMemory;
use nvme_driver::error::Result;
use nvme_driver::lock::lock;
use std::sync::{Arc, Mutex};

/// Bytes of an allocation at least.
const LEAST_BYTES: usize = 16 << 10;

/// Memory that no gather uses. Its records are zero.
#[derive(Default)]
pub(super) struct RecordPool {
    free: Mutex<Vec<DeviceMemory>>,
}

/// Memory of one gather, for as long as a launch or a graph may use it.
pub(super) struct RecordMemory {
    memory: Option<DeviceMemory>,
    pool: Arc<RecordPool>,
}

impl RecordPool {
    /// Takes memory of `bytes` bytes at least, for records of the same number of blocks each time.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`].
    pub fn take(self: &Arc<Self>, gpu: &Arc<Gpu>, bytes: usize) -> Result<RecordMemory> {
        let found = {
            let mut free = lock(&self.free);
            let at = free.iter().position(|memory| memory.len() >= bytes);
            at.map(|at| free.swap_remove(at))
        };
        let memory = match found {
            Some(memory) => memory,
            None => DeviceMemory::new(gpu, bytes.next_power_of_two().max(LEAST_BYTES))?,
        };
        Ok(self.taken(memory))
    }

    /// Takes memory of exactly `bytes` bytes, which was used before as memory of this length, or never.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`].
    pub fn take_exact(self: &Arc<Self>, gpu: &Arc<Gpu>, bytes: usize) -> Result<RecordMemory> {
        let found = {
            let mut free = lock(&self.free);
            let at = free.iter().position(|memory| memory.len() == bytes);
            at.map(|at| free.swap_remove(at))
        };
        let memory = match found {
            Some(memory) => memory,
            None => DeviceMemory::new(gpu, bytes)?,
        };
        Ok(self.taken(memory))
    }

    fn taken(self: &Arc<Self>, memory: DeviceMemory) -> RecordMemory {
        RecordMemory {
            memory: Some(memory),
            pool: Arc::clone(self),
        }
    }
}

impl RecordMemory {
    /// Returns the GPU's address of the first byte.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMemory::address)
    }
}

impl Drop for RecordMemory {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            lock(&self.pool.free).push(memory);
        }
    }
}
