//! Memory that an embedded simulator can access: pages of this process, mapped at their own addresses, so that no
//! translation is needed and an unmapped page is found by the simulator itself.
// UNSAFETY: the simulator gets raw memory to read and write.
#![allow(unsafe_code)]

use super::pages::DmaPages;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::spec::Iova;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Memory that an embedded simulator can access: pages of this process, at their own addresses.
pub(crate) struct SharedPages {
    memory: nvme_sim::HostMemory,
    /// The mappings by address.
    mapped: Mutex<BTreeMap<u64, SharedMapping>>,
}

struct SharedMapping {
    bytes: usize,
    /// The pages, if the memory belongs to this process.
    _pages: Option<Arc<DmaPages>>,
}

impl SharedPages {
    pub(crate) fn new() -> Self {
        Self {
            memory: nvme_sim::HostMemory::new(),
            mapped: Mutex::default(),
        }
    }

    /// Returns the table to give to the simulator.
    pub(crate) fn memory(&self) -> nvme_sim::HostMemory {
        self.memory.clone()
    }

    pub(crate) fn map(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        let iova = pages.start().addr() as u64;
        // SAFETY: the pages stay readable and writable while `mapped` holds them, which is until they
        // are unmapped; buffers in them are viewed as plain bytes only while no command holds them.
        unsafe { self.memory.map(iova, pages.start(), pages.len() as u64) }.map_err(|error| {
            Error::environment(format!("memory at {iova:#x}: {error}"), "unmap it first")
        })?;
        lock(&self.mapped).insert(
            iova,
            SharedMapping {
                bytes: pages.len(),
                _pages: Some(Arc::clone(pages)),
            },
        );
        Ok(Iova(iova))
    }

    /// Lets the simulator reach `bytes` bytes of `peer` at `address`, by copies of the peer's own.
    pub(crate) fn map_peer(
        &self,
        address: u64,
        bytes: usize,
        peer: Arc<dyn nvme_sim::PeerAccess>,
    ) -> Result<Iova> {
        self.memory
            .map_peer(address, address, bytes as u64, peer)
            .map_err(|error| {
                Error::environment(
                    format!("GPU memory at {address:#x}: {error}"),
                    "unmap it first",
                )
            })?;
        lock(&self.mapped).insert(
            address,
            SharedMapping {
                bytes,
                _pages: None,
            },
        );
        Ok(Iova(address))
    }

    pub(crate) fn unmap(&self, iova: Iova, bytes: usize) -> Result<()> {
        let mut mapped = lock(&self.mapped);
        if mapped.get(&iova.0).is_none_or(|whole| whole.bytes != bytes) {
            return Err(Error::internal(format!(
                "{bytes} bytes at {:#x} are no mapping",
                iova.0
            )));
        }
        self.memory.unmap(iova.0, bytes as u64);
        mapped.remove(&iova.0);
        Ok(())
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        self.memory.unmap(0, u64::MAX);
    }
}
