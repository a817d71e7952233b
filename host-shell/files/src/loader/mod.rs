//! Layers of a model that are read while others are used: reads ahead fill slots of GPU or host memory before
//! the program requests their layers.
//!
//! - [`ModelLayers`]: the bytes of each layer, from a [`Catalog`](crate::Catalog) or from ranges.
//! - [`LayerLoader`]: slots, and reads ahead in an order that the caller passes or that the loader learns.
//! - [`LoadedLayer`]: a loaded layer; its slot is reused after it is dropped.
//! - [`ModelLayers::verified_by`]: a [`Manifest`](crate::Manifest) by which layers are verified in the memory into
//!   which they were loaded.
//! - [`BatchSampler`]: the rows of each batch of a table, shuffled and divided among processes.
//!
//! ```
//! use nvme_files::loader::{LayerLoader, ModelLayers, LoaderOptions};
//! use nvme_store::{Store, StoreOptions};
//! use std::sync::Arc;
//!
//! # fn main() -> nvme_driver::Result<()> {
//! # #[cfg(feature = "sim")] {
//! let store = Arc::new(Store::open("sim:mem?size=16MiB", &StoreOptions::default())?);
//! for layer in 0..8u8 {
//!     store.write_at(u64::from(layer) * 10_000, &[layer; 10_000])?;
//! }
//! let ranges = (0..8u64).map(|layer| (format!("layer {layer}"), layer * 10_000..(layer + 1) * 10_000));
//! let loader = LayerLoader::new(&store, ModelLayers::of_ranges(ranges)?, &LoaderOptions::default())?;
//! for _pass in 0..2 {
//!     for layer in 0..8 {
//!         let loaded = loader.layer(layer)?;
//!         assert_eq!(loaded.bytes().unwrap(), [layer as u8; 10_000]);
//!     }
//! }
//! assert_eq!(loader.stats().ready, 15);
//! # }
//! # Ok(())
//! # }
//! ```

mod by_name;
mod checks;
mod chunk;
#[cfg(feature = "cuda")]
mod on_gpu;
mod on_host;
mod options;
mod order;
mod plan;
mod sampler;
mod state;
#[cfg(all(test, feature = "sim"))]
mod tests;
#[cfg(feature = "cuda")]
mod verifier;

pub use chunk::LayerChunk;
pub use options::{
    LayerMemory, LayerOrder, LoaderOptions, LoaderPath, LoaderStats, ResidentLayers,
};
pub use plan::{LayerPiece, LayerPlan, LayerTensor, ModelLayers};
pub use sampler::{BatchSampler, ShuffleOrder};

use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_store::Store;
use options::staying;
use order::ReadSchedule;
use state::{CellMemory, LayerCell, LayerRead, LoaderState, PATIENCE};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use on_gpu::LoaderGpu;
#[cfg(not(feature = "cuda"))]
enum LoaderGpu {}

/// Limit of the layers that one call examines for reads ahead, not counting resident ones. It bounds the time
/// of a call for models of very many small layers.
const MOST_LOOK: usize = 4096;

/// Reads layers into slots ahead of their use.
///
/// [`layer`](Self::layer) returns a layer and starts to read the next ones into slots that no [`LoadedLayer`] holds.
///
/// **On a GPU** no call waits for a read. Reads are enqueued in a stream that belongs to the loader; the
/// caller's stream waits by an event until the layer is loaded, and a slot is overwritten only after the
/// caller's stream has reached the point where its [`LoadedLayer`] was dropped. A failed read is known only when it
/// has ended: the layer is zero in the parts that were not read, and the next call of [`layer`](Self::layer) or
/// [`check`](Self::check) returns the error, which names the layer. Results that the caller's stream computed
/// from that layer on are wrong: call [`check`](Self::check) before a result is used, or [`LoadedLayer::wait`] before
/// a layer is. A layer that is known to have failed is never returned.
///
/// **In host memory** [`layer`](Self::layer) waits until the layer is loaded, and returns the errors of its
/// reads.
///
/// After an error the layer is read again at the next request. A file that changes while it is read yields
/// layers of old and new bytes: only a manifest detects that ([`ModelLayers::verified_by`]). A layer that differs
/// from the manifest is an [`Error::Mismatch`], reported like a failed read. Writes through the store are seen
/// by reads that begin after them: a layer that is in a slot, or resident, is not read again.
///
/// Any number of threads may use a loader.
pub struct LayerLoader {
    shared: Arc<LoaderShared>,
}

struct LoaderShared {
    layers: ModelLayers,
    path: LoaderPath,
    ahead: usize,
    state: Mutex<LoaderState>,
    /// After the state, so that it is dropped later: events and loads in the state use its streams and memory.
    gpu: Option<LoaderGpu>,
}

impl std::fmt::Debug for LayerLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerLoader")
            .field("layers", &self.shared.layers.len())
            .field("path", &self.shared.path)
            .finish()
    }
}

impl LayerLoader {
    /// Creates a loader of `layers` from `store`. Memory is allocated now; nothing is read yet.
    ///
    /// # Errors
    /// [`Error::Usage`] for layers past the end of the store, for no slots, for an order that names layers
    /// which do not exist, and for GPU memory with a store that has no GPU; [`Error::Environment`] without
    /// memory.
    pub fn new(store: &Arc<Store>, layers: ModelLayers, options: &LoaderOptions) -> Result<Self> {
        check(store, &layers, options)?;
        let course = ReadSchedule::new(&options.order, layers.len())?;
        let stays = staying(&options.resident, &layers);
        let (resident, others): (Vec<usize>, Vec<usize>) =
            (0..layers.len()).partition(|layer| stays[*layer]);
        let bytes_of = |layer: usize| layers.get(layer).map_or(0, LayerPlan::bytes);
        let slot_bytes = others.iter().map(|layer| bytes_of(*layer)).max();
        let slot_bytes = slot_bytes.unwrap_or(0);
        // More slots than layers are of no use.
        let slots = options.slots.min(others.len());
        let rooms: Vec<u64> = resident
            .iter()
            .map(|layer| bytes_of(*layer))
            .chain(std::iter::repeat_n(slot_bytes, slots))
            .collect();
        let is_on_gpu = options.is_on_gpu(store)?;
        let (gpu, rooms) = memory(store, is_on_gpu, &rooms, &layers)?;
        let cells = rooms.into_iter().enumerate().map(|(cell, room)| LayerCell {
            layer: resident.get(cell).copied(),
            is_resident: cell < resident.len(),
            is_lost: false,
            users: 0,
            room,
            load: None,
        });
        let is_verified = layers.iter().any(|layer| !layer.chunks().is_empty());
        let mut path = LoaderPath::new(
            store,
            is_on_gpu,
            (slots, slot_bytes),
            (
                resident.len(),
                resident.iter().map(|layer| bytes_of(*layer)).sum(),
            ),
        );
        path.verified_by = is_verified.then_some(path.memory);
        let state = LoaderState::new(store, cells.collect(), course);
        Ok(Self {
            shared: Arc::new(LoaderShared {
                layers,
                path,
                ahead: options.ahead.unwrap_or(slots),
                state: Mutex::new(state),
                gpu,
            }),
        })
    }

    /// Returns the layers.
    pub fn layers(&self) -> &ModelLayers {
        &self.shared.layers
    }

    /// Returns the memory of the layers, and the mover of their data.
    pub fn path(&self) -> &LoaderPath {
        &self.shared.path
    }

    /// Counts since it was made.
    pub fn stats(&self) -> LoaderStats {
        lock(&self.shared.state).stats
    }

    /// True if the order of the layers is known: the caller passed it, or a pass has ended.
    pub fn knows_order(&self) -> bool {
        lock(&self.shared.state).course.is_known()
    }

    /// Returns layer `index`, and starts reads ahead. On a GPU for use in its default stream:
    /// [`layer_for`](Self::layer_for).
    ///
    /// # Errors
    /// As [`layer_for`](Self::layer_for).
    pub fn layer(&self, index: usize) -> Result<LoadedLayer> {
        self.layer_for(index, 0)
    }

    /// Returns layer `index` for use in `stream`, a `CUstream` of the store's GPU that must exist for as long
    /// as the layer; in host memory the stream has no meaning.
    ///
    /// Work that is enqueued in the stream from now on, until the layer is dropped, may read the layer. Other
    /// streams have to be ordered with this one.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer that does not exist, when all slots are held, for a stream that is being captured
    /// and after [`close`](Self::close). The errors of the store, with the name of the layer: of this layer, and on a
    /// GPU of any that was returned before. The call may be repeated.
    pub fn layer_for(&self, index: usize, stream: u64) -> Result<LoadedLayer> {
        let shared = &self.shared;
        if shared.layers.get(index).is_none() {
            return Err(Error::usage(
                format!(
                    "there is no layer {index}: there are {}",
                    shared.layers.len()
                ),
                "use numbers from 0 on",
            ));
        }
        shared.check_stream(stream)?;
        let mut state = self.with_room()?;
        let store = state.store()?;
        if let Some(failed) = state.take_failure(index) {
            return Err(shared.name(failed.layer, &failed.error()));
        }
        state.course.asked(index);
        state.stats.asked += 1;
        let known = state.find(index);
        let cell = match known {
            Some(cell) => cell,
            None => {
                let victim = state.victim(&HashSet::from([index]));
                victim.ok_or_else(|| state.no_room())?
            }
        };
        match &state.cells[cell].load {
            Some(_) if known.is_some() => state.stats.ready += 1,
            _ => shared.start(&mut state, &store, cell, index)?,
        }
        let Some(load) = state.give(cell) else {
            return Err(Error::internal("a layer that was started has no read"));
        };
        let mut layer = LoadedLayer {
            shared: Arc::clone(shared),
            index,
            cell,
            load,
            stream,
            is_ordered: false,
        };
        shared.read_ahead(&mut state, &store, index);
        drop(state);
        layer.come()?;
        Ok(layer)
    }

    /// Waits until all layers that callers hold are loaded, `limit` at most. In host memory they always are.
    ///
    /// # Errors
    /// The first error of a read, with the name of its layer; [`Error::Unfinished`] past the limit.
    pub fn check(&self, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            let load = {
                let mut state = lock(&self.shared.state);
                state.look();
                if let Some(failed) = state.take_given_failure() {
                    return Err(self.shared.name(failed.layer, &failed.error()));
                }
                match state.first_given() {
                    Some(load) => load,
                    None => return Ok(()),
                }
            };
            load.wait(limit.saturating_sub(begin.elapsed()))?;
        }
    }

    /// Waits until a call for a layer finds room for its read, without the loader's lock.
    ///
    /// # Errors
    /// [`Error::Unfinished`] for a read that takes too long.
    pub fn wait_for_room(&self) -> Result<()> {
        self.with_room().map(drop)
    }

    /// Returns the state once one more read may start. The lock is not held during the wait:
    /// [`stats`](Self::stats) needs it.
    fn with_room(&self) -> Result<MutexGuard<'_, LoaderState>> {
        loop {
            let mut state = lock(&self.shared.state);
            let Some(oldest) = state.oldest_of_full() else {
                return Ok(state);
            };
            drop(state);
            oldest.wait(PATIENCE)?;
        }
    }

    /// Waits for the reads under way, `limit` at most, and drops the store. Layers that callers hold stay
    /// valid; later calls for layers are errors.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit: nothing has changed.
    pub fn close(&self, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        // From here on no read begins. Others may need the lock during the wait.
        let (store, loads) = {
            let mut state = lock(&self.shared.state);
            (state.store.take(), state.loads())
        };
        for load in loads {
            if let Err(error) = load.wait(limit.saturating_sub(begin.elapsed())) {
                let mut state = lock(&self.shared.state);
                state.store = state.store.take().or(store);
                return Err(error);
            }
        }
        // The loader may be the store's last user, so that this closes the device.
        drop(store);
        Ok(())
    }
}

/// # Errors
/// As [`LayerLoader::new`].
fn check(store: &Store, layers: &ModelLayers, options: &LoaderOptions) -> Result<()> {
    for (index, layer) in layers.iter().enumerate() {
        for piece in layer.pieces() {
            let end = piece.offset.checked_add(piece.bytes);
            if end.is_none_or(|end| end > store.len()) {
                return Err(Error::usage(
                    format!(
                        "layer {index} ({}): {} bytes from byte {} on end past the store, which has {} bytes",
                        layer.name(),
                        piece.bytes,
                        piece.offset,
                        store.len()
                    ),
                    "use a catalog of this store",
                ));
            }
        }
    }
    if options.slots == 0 {
        return Err(Error::usage(
            "the number of slots for layers is 0",
            "use 2 or more",
        ));
    }
    Ok(())
}

/// Allocates memory of the given sizes.
fn memory(
    store: &Store,
    is_on_gpu: bool,
    rooms: &[u64],
    layers: &ModelLayers,
) -> Result<(Option<LoaderGpu>, Vec<CellMemory>)> {
    #[cfg(feature = "cuda")]
    if is_on_gpu {
        let (gpu, rooms) = LoaderGpu::new(store, rooms, layers)?;
        return Ok((Some(gpu), rooms.into_iter().map(CellMemory::Gpu).collect()));
    }
    let _ = (store, is_on_gpu, layers);
    let rooms = on_host::rooms(rooms)?;
    Ok((None, rooms.into_iter().map(CellMemory::Host).collect()))
}

impl Drop for LoaderShared {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            gpu.finish();
        }
    }
}

impl LoaderShared {
    /// Starts to read `layer` into a cell that is not in use.
    fn start(
        &self,
        state: &mut LoaderState,
        store: &Arc<Store>,
        cell: usize,
        layer: usize,
    ) -> Result<()> {
        let plan = self
            .layers
            .get(layer)
            .ok_or_else(|| Error::internal("no such layer"))?;
        // Until the read has started, the cell is empty.
        state.forget(cell);
        let room = &mut state.cells[cell].room;
        let load = match (&self.gpu, room) {
            (_, CellMemory::Host(place)) => LayerRead::Host(on_host::start(store, plan, place)?),
            #[cfg(feature = "cuda")]
            (Some(gpu), CellMemory::Gpu(room)) => {
                LayerRead::Gpu(gpu.start(store, (layer, plan), room)?)
            }
            #[cfg(feature = "cuda")]
            (None, CellMemory::Gpu(_)) => return Err(Error::internal("memory of no GPU")),
        };
        state.stats.reads += 1;
        state.stats.bytes += plan.read_bytes();
        state.stats.verified += plan.verified_bytes();
        state.started(cell, layer, Arc::new(load));
        Ok(())
    }

    /// Starts the reads of layers that come after `index`, as far as there are slots.
    fn read_ahead(&self, state: &mut LoaderState, store: &Arc<Store>, index: usize) {
        let mut wanted = HashSet::from([index]);
        let mut ahead = 0;
        for step in 0..MOST_LOOK {
            let Some(layer) = state.course.ahead(step).filter(|_| ahead < self.ahead) else {
                return;
            };
            if !wanted.insert(layer) {
                continue;
            }
            let known = state.find(layer);
            if known.is_some_and(|cell| state.cells[cell].is_there_for_good()) {
                continue;
            }
            ahead += 1;
            let cell = match known {
                Some(cell) if state.cells[cell].load.is_some() => continue,
                Some(cell) => Some(cell),
                None => state.victim(&wanted),
            };
            let may_start = !state.has_failed(layer) && !state.is_full();
            let Some(cell) = cell.filter(|_| may_start) else {
                return;
            };
            // A read ahead that fails to start is reported by the call that requests the layer.
            if self.start(state, store, cell, layer).is_err() {
                return;
            }
        }
    }

    fn name(&self, layer: usize, error: &Error) -> Error {
        let name = self.layers.get(layer).map_or("", LayerPlan::name);
        error.with_context(&format!("layer {layer} ({name})"))
    }

    /// # Errors
    /// [`Error::Usage`] for a stream that is being captured.
    fn check_stream(&self, stream: u64) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.check_stream(stream);
        }
        let _ = stream;
        Ok(())
    }
}

/// A layer that the caller uses: its slot holds it until this is dropped.
///
/// On a GPU the layer is valid for work of its stream from [`LayerLoader::layer_for`] on; work that is in the stream
/// when this is dropped may still read it.
#[must_use = "its slot is read into again when it is dropped"]
pub struct LoadedLayer {
    shared: Arc<LoaderShared>,
    index: usize,
    cell: usize,
    load: Arc<LayerRead>,
    stream: u64,
    /// The stream waits for it, and the slot for the stream.
    is_ordered: bool,
}

impl std::fmt::Debug for LoadedLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("LoadedLayer");
        text.field("index", &self.index)
            .field("name", &self.plan().name())
            .finish()
    }
}

impl LoadedLayer {
    /// Returns its number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns its name, its tensors and its reads.
    pub fn plan(&self) -> &LayerPlan {
        // Checked when it was asked for.
        &self.shared.layers.all()[self.index]
    }

    /// Returns its bytes, where they lie in memory of the host.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.load.bytes()
    }

    /// Returns the bytes of the tensor with this name, whole or without the layer's, where they lie in memory
    /// of the host.
    pub fn tensor_bytes(&self, name: &str) -> Option<&[u8]> {
        let tensor = self.plan().tensor(name)?;
        self.bytes()?
            .get(tensor.at as usize..(tensor.at + tensor.bytes) as usize)
    }

    /// Returns the address of its first byte, of the host or of the GPU: a multiple of 64.
    pub fn address(&self) -> u64 {
        self.load.address()
    }

    /// True if the layer lies in GPU memory.
    pub fn is_on_gpu(&self) -> bool {
        self.shared.gpu.is_some()
    }

    /// Returns the stream that it is for.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Waits until it is loaded, `limit` at most. In host memory it always is.
    ///
    /// # Errors
    /// The reason why the layer could not be read, with its name: results that its stream computed from it are wrong.
    /// [`Error::Unfinished`] past the limit.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        self.load.wait(limit)?;
        let mut state = lock(&self.shared.state);
        state.look();
        // This call reports the failure; no later one repeats it.
        state.drop_failure(&self.load);
        match self.load.failure() {
            Some(error) => Err(self.shared.name(self.index, &error)),
            None => Ok(()),
        }
    }

    /// Waits for a layer in memory of the host; for one on a GPU, makes its stream wait.
    fn come(&mut self) -> Result<()> {
        match &*self.load {
            LayerRead::Host(load) => {
                if let Some(error) = load.finish() {
                    lock(&self.shared.state).failed(self.cell, &self.load);
                    return Err(self.shared.name(self.index, error));
                }
            }
            #[cfg(feature = "cuda")]
            LayerRead::Gpu(load) => load.before(self.stream)?,
        }
        self.is_ordered = true;
        Ok(())
    }
}

impl Drop for LoadedLayer {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        let cell = &mut state.cells[self.cell];
        cell.users -= 1;
        #[cfg(feature = "cuda")]
        if let (Some(gpu), CellMemory::Gpu(room)) = (&self.shared.gpu, &mut cell.room)
            && self.is_ordered
            && gpu.used_until_now(room, self.stream).is_err()
        {
            // The stream was destroyed: no event tracks its last use of the slot.
            cell.is_lost = true;
        }
    }
}
