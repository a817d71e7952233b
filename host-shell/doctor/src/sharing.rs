//! GPUs that share memory with the processor: which way to take is different there.

use std::collections::BTreeMap;

/// Memory that a GPU shares with the processor, as CUDA's driver says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySharing {
    /// An integrated GPU (CU_DEVICE_ATTRIBUTE_INTEGRATED): its memory is the host's.
    Integrated,
    /// A GPU with memory that reads the host's by the processor's page tables, coherently
    /// (CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES).
    HostPageTables,
}

/// GPUs that share memory with the processor, by PCI address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedMemoryGpus(BTreeMap<String, MemorySharing>);

impl SharedMemoryGpus {
    /// Asks CUDA's driver, if this machine has one; without an answer no GPU is known to share memory.
    pub fn here() -> Self {
        #[cfg(feature = "cuda")]
        if let Ok(gpus) = nvme_cuda::GpuFacts::all() {
            return Self::of(&gpus);
        }
        Self::default()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn of(gpus: &[nvme_cuda::GpuFacts]) -> Self {
        let shared = gpus.iter().filter_map(|gpu| {
            let sharing = sharing_of(gpu.integrated, gpu.host_page_tables)?;
            Some((gpu.address.clone(), sharing))
        });
        Self(shared.collect())
    }

    /// Returns the way in which the GPU at `address` shares memory.
    pub fn get(&self, address: &str) -> Option<MemorySharing> {
        self.0.get(address).copied()
    }

    #[cfg(test)]
    pub(crate) fn one(address: &str, sharing: MemorySharing) -> Self {
        Self(BTreeMap::from([(address.to_owned(), sharing)]))
    }
}

/// Returns the sharing that both attributes of a GPU mean; a GPU without memory is integrated, whatever the other says.
#[cfg(feature = "cuda")]
pub(crate) fn sharing_of(integrated: bool, host_page_tables: bool) -> Option<MemorySharing> {
    match (integrated, host_page_tables) {
        (true, _) => Some(MemorySharing::Integrated),
        (false, true) => Some(MemorySharing::HostPageTables),
        (false, false) => None,
    }
}
