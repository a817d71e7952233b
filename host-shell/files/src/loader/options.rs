//! Options of loading layers, and the data path that results from them.

use super::plan::ModelLayers;
use nvme_driver::error::{Error, Result};
use nvme_store::Store;

/// Largest number of reads in progress: a program may run this far ahead of its GPU. Each one keeps an event and a
/// launch number.
pub(super) const MOST_UNDER_WAY: usize = 64;

/// Options of loading layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Layers that memory holds at a time besides the resident ones. One less is read ahead of one that is in use.
    pub slots: usize,
    /// Largest number of layers that are read ahead; without it, the number of slots.
    pub ahead: Option<usize>,
    /// Layers that stay once they are loaded.
    pub resident: ResidentLayers,
    /// The order in which layers are asked for, pass after pass.
    pub order: LayerOrder,
    /// Memory for the layers.
    pub memory: LayerMemory,
}

impl Default for LoaderOptions {
    /// Returns the defaults: two slots, none resident, layers in sequence, memory of the store's
    /// GPU if it has one.
    fn default() -> Self {
        Self {
            slots: 2,
            ahead: None,
            resident: ResidentLayers::Bytes(0),
            order: LayerOrder::Sequential,
            memory: LayerMemory::Auto,
        }
    }
}

/// Layers that stay once they are loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResidentLayers {
    /// The first layers, as many as fit into this many bytes.
    Bytes(u64),
    /// The listed layers.
    Layers(Vec<usize>),
}

/// The order in which layers are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerOrder {
    /// Layers are used from the first to the last, repeatedly.
    Sequential,
    /// The listed layers in this order, repeatedly. A layer may occur several times.
    Given(Vec<usize>),
    /// The order of the first pass, which ends when its first layer is requested again.
    Learned,
}

/// Memory for the layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerMemory {
    /// Memory of the store's GPU if it has one, else of the host.
    #[default]
    Auto,
    /// Memory of the host.
    Host,
    /// Memory of the store's GPU.
    Gpu,
}

impl LoaderOptions {
    /// # Errors
    /// [`Error::Usage`] for memory of a GPU with a store that has none.
    pub(super) fn is_on_gpu(&self, store: &Store) -> Result<bool> {
        let has_gpu = has_gpu(store);
        match self.memory {
            LayerMemory::Host => Ok(false),
            LayerMemory::Auto => Ok(has_gpu),
            LayerMemory::Gpu if has_gpu => Ok(true),
            LayerMemory::Gpu => Err(Error::usage(
                "layers are to lie in GPU memory, and their store was opened without a GPU",
                "open the store with a GPU, or use memory of the host",
            )),
        }
    }
}

#[cfg(feature = "cuda")]
fn has_gpu(store: &Store) -> bool {
    store.gpu().is_some()
}

#[cfg(not(feature = "cuda"))]
fn has_gpu(_: &Store) -> bool {
    false
}

/// Returns for each layer whether it stays in memory.
pub(super) fn staying(resident: &ResidentLayers, layers: &ModelLayers) -> Vec<bool> {
    match resident {
        ResidentLayers::Layers(these) => {
            let mut stays = vec![false; layers.len()];
            for layer in these {
                if let Some(stays) = stays.get_mut(*layer) {
                    *stays = true;
                }
            }
            stays
        }
        ResidentLayers::Bytes(most) => {
            let mut bytes = 0u64;
            let fits = layers.iter().map(|layer| {
                bytes = bytes.saturating_add(layer.bytes());
                bytes <= *most
            });
            fits.collect()
        }
    }
}

/// Memory of a loader's layers, and the path of their data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LoaderPath {
    /// Name of the device, as the user wrote it.
    pub device: String,
    /// `gpu` or `host`.
    pub memory: &'static str,
    /// Mover of the data, in words.
    pub mover: String,
    /// Slots, and bytes of each.
    pub slots: usize,
    /// Bytes of a slot: the length of the longest layer that does not stay.
    pub slot_bytes: u64,
    /// Layers that stay.
    pub resident: usize,
    /// Bytes of the layers that stay.
    pub resident_bytes: u64,
    /// Processor that compares layers with a manifest: `gpu` or `host`; none without one.
    pub verified_by: Option<&'static str>,
}

impl LoaderPath {
    pub(super) fn new(
        store: &Store,
        is_on_gpu: bool,
        (slots, slot_bytes): (usize, u64),
        (resident, resident_bytes): (usize, u64),
    ) -> Self {
        let path = store.path();
        let tier = path
            .tier
            .map_or(String::new(), |tier| format!(", tier {tier}"));
        let mover = match (is_on_gpu, path.data) {
            (true, "gpu") => format!(
                "warps of the GPU in a stream of their own ({}{tier})",
                path.path
            ),
            (true, _) => format!("a host thread in the order of a stream ({})", path.path),
            (false, _) => format!("threads of the store ({})", path.path),
        };
        Self {
            device: path.device,
            memory: if is_on_gpu { "gpu" } else { "host" },
            mover,
            slots,
            slot_bytes,
            resident,
            resident_bytes,
            verified_by: None,
        }
    }

    /// Returns the number of bytes of memory that the loader has taken.
    pub fn memory_bytes(&self) -> u64 {
        self.slots as u64 * self.slot_bytes + self.resident_bytes
    }
}

/// Counts since a loader was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LoaderStats {
    /// Layers that were asked for.
    pub asked: u64,
    /// Requested layers that were loaded, or being read, at the time of the request.
    pub ready: u64,
    /// Layers whose reads were started.
    pub reads: u64,
    /// Bytes that were asked of the store for them.
    pub bytes: u64,
    /// Number of these bytes that are compared with a manifest.
    pub verified: u64,
}
