//! Experts that a GPU selects, reads from a drive into a cache in its memory, and computes. The order of calls is
//! `GpuExperts::new`, then a `step` for each layer on one stream, which may be captured, then `check` of the pending
//! rows.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

mod step;

pub use step::{ExpertStep, GivenChoices};

use super::staged::{StagedExperts, StagingSize};
use super::{ExpertCounts, ExpertLayers, ReplacementPolicy};
use nvme_compute_kernel::experts::cache::{CacheCounter, ExpertCache, words};
use nvme_compute_kernel::experts::{
    AdmitParameters, ChosenExpert, ExpertLocations, MATRICES, MOST_SLOTS, NO_SLOT,
};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use nvme_host::cuda::{DeviceMemory, GatherOutcome, Gpu, ReadRange, Stream};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use step::ExpertKernels;

/// Blocks of the kernel that checks the outcome of the reads.
const SETTLING: u32 = 64;

/// The cache of a [`GpuExperts`].
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Bytes of GPU memory for experts: whole slots, each as large as the largest expert. Published files take a staging
    /// area besides: the bytes of the largest expert in the files for each expert that a step may need.
    pub bytes: u64,
    /// Eviction policy of the cache.
    pub policy: ReplacementPolicy,
    /// Experts that are read at the start and stay in the cache: layer and number.
    pub pinned: Vec<(u32, u32)>,
    /// Tokens of a step at most.
    pub tokens: u32,
    /// Deadline of reading the pinned experts, of all together. Those of published files are read one after another, and
    /// the deadline holds for each read and for each arrangement: an expert may take twice as long.
    pub limit: Duration,
}

/// Experts whose cache and kernels lie on a GPU.
///
/// Steps must not overlap: they run in one stream, or the program orders them. The memory stays when this is dropped: a
/// launch in progress, or a graph, may still use it.
pub struct GpuExperts {
    experts: ExpertLayers,
    gpu: Arc<Gpu>,
    kernels: ManuallyDrop<ExpertKernels>,
    memory: ManuallyDrop<ExpertMemory>,
    words: AdmitParameters,
    tokens: u32,
    most_ranges: u32,
    most_pieces: u64,
    /// A step was enqueued in part: slots may be said to hold experts that nobody reads.
    is_broken: AtomicBool,
}

struct ExpertMemory {
    words: DeviceMemory,
    chosen: DeviceMemory,
    list: DeviceMemory,
    places: DeviceMemory,
    status: DeviceMemory,
    /// Gate, up and down of each pair.
    vectors: [DeviceMemory; MATRICES],
    data: DeviceMemory,
    /// A choice of each expert of a layer, if a step may choose all of them.
    whole: Option<DeviceMemory>,
    /// Memory for published files; none for experts that are read into their slots as they are.
    staged: Option<StagedExperts>,
}

impl GpuExperts {
    /// Creates the cache, and reads the pinned experts into it.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store whose reads the GPU does not submit itself, for a cache with fewer
    /// evictable slots than one step may need, and for pinned experts that do not exist; [`Error::Environment`]
    /// without memory; those of the reads.
    pub fn new(experts: &ExpertLayers, options: &CacheOptions) -> Result<Self> {
        let store = &experts.store;
        let gpu = store.gpu().ok_or_else(|| {
            Error::usage("the store was opened without a GPU", "open it with one")
        })?;
        let piece_bytes = u64::from(store.listed_piece_bytes()?);
        let shape = experts.shape;
        let slot_bytes = experts.slot_bytes();
        let slots = (options.bytes / slot_bytes).min(MOST_SLOTS.into()) as u32;
        let pairs = options.tokens.saturating_mul(shape.choices);
        let needed = pairs.min(shape.experts);
        let pinned = check_pinned(experts, &options.pinned)?;
        if pairs == 0 || slots.saturating_sub(pinned) < needed {
            return Err(Error::usage(
                format!(
                    "a cache of {slots} experts, {pinned} of them pinned, does not hold the experts of a step of {} tokens",
                    options.tokens
                ),
                format!(
                    "use a token at least, and {} bytes or more: {needed} experts of {slot_bytes} bytes beside the pinned ones",
                    u64::from(pinned + needed) * slot_bytes
                ),
            ));
        }
        let memory = |bytes: u64| DeviceMemory::new(gpu, bytes.max(16) as usize);
        let size = StagingSize::of(experts, needed, piece_bytes);
        let ranges = match &size {
            Some(size) => size.list_ranges(),
            None => needed * MATRICES as u32,
        };
        let pieces_of = |places: &ExpertLocations| -> u64 {
            places
                .bytes
                .iter()
                .map(|bytes| bytes / piece_bytes + 2)
                .sum()
        };
        let most_pieces = match &size {
            Some(size) => size.pieces,
            None => experts.places.iter().map(pieces_of).max().unwrap_or(0) * u64::from(needed),
        };
        let all_experts = shape.experts * experts.layers();
        let vectors = |elements: u32| memory(u64::from(pairs) * u64::from(elements) * 4);
        let memory = ExpertMemory {
            words: memory(words(slots, all_experts) as u64 * 4)?,
            chosen: memory(u64::from(pairs) * size_of::<ChosenExpert>() as u64)?,
            list: memory(
                (size_of::<ListHead>() + ranges as usize * size_of::<RangeTarget>()) as u64,
            )?,
            places: memory((experts.places.len() * size_of::<ExpertLocations>()) as u64)?,
            status: memory(most_pieces * 4)?,
            vectors: [
                vectors(shape.hidden)?,
                vectors(shape.hidden)?,
                vectors(shape.width)?,
            ],
            data: memory(u64::from(slots) * slot_bytes)?,
            whole: (needed == shape.experts)
                .then(|| all_of_layer(gpu, shape.experts))
                .transpose()?,
            staged: size
                .map(|size| StagedExperts::new(gpu, experts, &size))
                .transpose()?,
        };
        let words = AdmitParameters {
            words: memory.words.address(),
            chosen: memory.chosen.address(),
            list: memory.list.address(),
            places: memory.places.address(),
            data: memory.data.address(),
            slot_bytes,
            slots,
            pinned,
            experts: shape.experts,
            layers: experts.layers(),
            layer: 0,
            policy: options.policy as u32,
            pairs: 0,
            piece_shift: piece_bytes.trailing_zeros(),
        };
        let made = Self {
            experts: experts.clone(),
            gpu: Arc::clone(gpu),
            kernels: ManuallyDrop::new(ExpertKernels::load(gpu)?),
            memory: ManuallyDrop::new(memory),
            words,
            tokens: options.tokens,
            most_ranges: ranges,
            most_pieces,
            is_broken: AtomicBool::new(false),
        };
        made.fill(options)?;
        Ok(made)
    }

    /// Puts the places of all layers, and the pinned experts, into memory of the GPU.
    fn fill(&self, options: &CacheOptions) -> Result<()> {
        let places = self.experts.places.iter();
        let places = places.flat_map(|places| places.first.into_iter().chain(places.bytes));
        let places: Vec<u8> = places.flat_map(u64::to_le_bytes).collect();
        self.memory.places.upload(0, &places)?;
        let words = self.cache_words(|cache| {
            for (slot, (layer, expert)) in (0..).zip(&options.pinned) {
                cache.pin(slot, layer * self.words.experts + expert);
            }
        });
        self.memory.words.upload(0, &words)?;
        let stream = Stream::new(&self.gpu)?;
        if let Some(staged) = &self.memory.staged {
            for (slot, (layer, expert)) in (0..).zip(&options.pinned) {
                // SAFETY: the areas and slots are memory of the cache, which stays.
                let pending = unsafe {
                    staged.read(&self.experts, (*layer, *expert, slot), stream.handle())?
                };
                check(pending.wait(options.limit)?)?;
                self.arrange(staged, *layer, &stream)?;
                stream.wait(options.limit, || Ok(()))?;
            }
            return Ok(());
        }
        let ranges = (0u64..)
            .zip(&options.pinned)
            .flat_map(|(slot, (layer, expert))| {
                let places = &self.experts.places[*layer as usize];
                (0..MATRICES).map(move |matrix| ReadRange {
                    offset: places.byte(matrix, *expert),
                    bytes: places.bytes[matrix],
                    to: self.words.data + slot * self.words.slot_bytes + places.at(matrix, *expert),
                })
            });
        let ranges: Vec<ReadRange> = ranges.collect();
        let store = &self.experts.store;
        // SAFETY: the slots are memory of the cache, which stays.
        let pending = unsafe { store.read_ranges_on_gpu(&ranges, stream.handle())? };
        check(pending.wait(options.limit)?)
    }

    /// Enqueues the arrangement of the experts that lie in the staging area.
    fn arrange(&self, staged: &StagedExperts, layer: u32, stream: &Stream) -> Result<()> {
        let arrange = staged.arrangement(&self.experts, &self.admit(layer, 0));
        let threads = staged.threads(&self.experts);
        // SAFETY: the kernel takes one `ArrangeParameters`, and all memory belongs to the cache.
        unsafe { self.launch(self.kernels.arrange, threads, &arrange, stream.handle()) }
    }

    /// Returns the parameters of the lookup of `pairs` choices of a layer.
    fn admit(&self, layer: u32, pairs: u32) -> AdmitParameters {
        AdmitParameters {
            layer,
            places: self.words.places + u64::from(layer) * size_of::<ExpertLocations>() as u64,
            pairs,
            ..self.words
        }
    }

    /// Returns the words of an empty cache after `set` was applied to them.
    fn cache_words(&self, set: impl FnOnce(&ExpertCache<'_>)) -> Vec<u8> {
        let count = self.memory.words.len() / 4;
        let words: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
        if let Some(cache) = self.cache(&words) {
            set(&cache);
        }
        let bytes = words
            .iter()
            .map(|word| word.load(Order::Relaxed, Scope::Gpu).to_le_bytes());
        bytes.flatten().collect()
    }

    fn cache<'w>(&self, words: &'w [AtomicU32]) -> Option<ExpertCache<'w>> {
        let policy = ReplacementPolicy::of_number(self.words.policy)?;
        ExpertCache::new(words, self.words.slots, self.words.pinned, policy)
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the number of tokens of a step at most.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns the largest number of experts that the cache holds.
    pub fn slots(&self) -> u32 {
        self.words.slots
    }

    /// Returns the number of bytes of GPU memory that the cache holds.
    pub fn memory_bytes(&self) -> u64 {
        let ExpertMemory {
            words,
            chosen,
            list,
            places,
            status,
            vectors,
            data,
            whole,
            staged,
        } = &*self.memory;
        let others = [words, chosen, list, places, status, data];
        let all = others.into_iter().chain(vectors).chain(whole);
        let bytes: u64 = all.map(|memory| memory.len() as u64).sum();
        bytes + staged.as_ref().map_or(0, StagedExperts::memory_bytes)
    }

    /// Returns the cache's counters. Waits for all work of the GPU's default stream: call it when no step is in
    /// progress.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn counts(&self) -> Result<ExpertCounts> {
        let mut bytes = vec![0; self.memory.words.len()];
        self.memory.words.download(0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let words: Vec<AtomicU32> = words
            .map(|word| AtomicU32::new(u32::from_le_bytes(*word)))
            .collect();
        let Some(cache) = self.cache(&words) else {
            return Ok(ExpertCounts::default());
        };
        let layer = |layer: u32| {
            let experts = (0..self.words.experts).map(|one| layer * self.words.experts + one);
            experts.map(|one| cache.chosen(one).into()).collect()
        };
        Ok(ExpertCounts {
            hits: cache.counted(CacheCounter::Hits),
            misses: cache.counted(CacheCounter::Misses),
            evictions: cache.counted(CacheCounter::Evictions),
            chosen: (0..self.words.layers).map(layer).collect(),
        })
    }
}

/// Returns a choice of each expert in memory of the GPU.
fn all_of_layer(gpu: &Arc<Gpu>, experts: u32) -> Result<DeviceMemory> {
    let memory = DeviceMemory::new(gpu, experts as usize * size_of::<ChosenExpert>())?;
    let words = (0..experts).flat_map(|expert| [expert, NO_SLOT, 0, 0]);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    memory.upload(0, &bytes)?;
    Ok(memory)
}

/// Checks the pinned experts and returns their number.
fn check_pinned(experts: &ExpertLayers, pinned: &[(u32, u32)]) -> Result<u32> {
    let is_there =
        |(layer, expert): &(u32, u32)| *layer < experts.layers() && *expert < experts.shape.experts;
    let mut sorted = pinned.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if !pinned.iter().all(is_there) || sorted.len() != pinned.len() {
        return Err(Error::usage(
            "pinned experts that are not there, or twice",
            format!(
                "use layers below {} and experts below {}, each once",
                experts.layers(),
                experts.shape.experts
            ),
        ));
    }
    Ok(pinned.len() as u32)
}

/// Checks that a step read all of its experts.
///
/// # Errors
/// [`Error::Device`] with the outcome of the first read that failed.
pub fn check(ended: GatherOutcome) -> Result<()> {
    let Some((piece, code)) = ended.failures.first else {
        return Ok(());
    };
    let (what, remedy) = status::describe(code);
    let pieces = ended.failures.rows;
    Err(Error::device(
        format!(
            "part {piece} of the experts that were read: {what}; {pieces} parts failed, and tokens that need them are NaN"
        ),
        remedy,
    ))
}
