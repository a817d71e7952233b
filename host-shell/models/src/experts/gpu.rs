//! Experts that a GPU selects, reads from a drive into a cache in its memory, and computes. The order of calls is
//! `GpuExperts::new`, then a `step` for each layer on one stream, which may be captured, then `check` of the pending
//! rows.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{ExpertCounts, ExpertLayers, ReplacementPolicy, shape_of};
use nvme_compute::extents::{optional, product};
use nvme_compute_kernel::experts::cache::{CacheCounter, ExpertCache, words};
use nvme_compute_kernel::experts::{
    ActivateParameters, AdmitParameters, ChosenExpert, ExpertLocations, JoinParameters, MATRICES,
    MOST_SLOTS, ProductParameters, RouteParameters, SettleParameters,
};
use nvme_compute_kernel::{BLOCK_THREADS, EXPERTS_PTX, GemvParameters, kernel};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use nvme_host::cuda::{
    DeviceMemory, GatherOutcome, Gpu, KernelArgument, KernelFunction, LaunchSequence, LaunchSize,
    Module, PendingRows, ReadList, ReadRange, Stream,
};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

/// Blocks of a launch at most.
const MOST_BLOCKS: u64 = 2048;
/// Blocks of the kernel that checks the outcome of the reads.
const SETTLING: u32 = 64;

/// The cache of a [`GpuExperts`].
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Bytes of GPU memory for experts: whole slots, each as large as the largest expert.
    pub bytes: u64,
    /// Eviction policy of the cache.
    pub policy: ReplacementPolicy,
    /// Experts that are read at the start and stay in the cache: layer and number.
    pub pinned: Vec<(u32, u32)>,
    /// Tokens of a step at most.
    pub tokens: u32,
    /// Deadline of reading the pinned experts.
    pub limit: Duration,
}

/// Arguments of a step: addresses of the store's GPU, multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertStep {
    /// Number of the layer.
    pub layer: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Router output: for each token a logit for each expert.
    pub logits: u64,
    /// Address of a vector for each token.
    pub x: u64,
    /// Address of a vector for each token, which receives the result.
    pub y: u64,
    /// True if the result is added to the contents of `y`.
    pub adds: bool,
    /// Addresses of the biases of gate, up and down: a vector for each expert of the layer, or 0 for none.
    pub biases: [u64; MATRICES],
    /// Address that receives for each token the softmax over all experts, for [`balance`](super::balance); 0 if it is
    /// not wanted.
    pub probabilities: u64,
}

/// The kernels by name.
struct ExpertKernels {
    module: Module,
    route: KernelFunction,
    admit: KernelFunction,
    settle: KernelFunction,
    product: KernelFunction,
    product_wide: KernelFunction,
    product_quantised: KernelFunction,
    activate: KernelFunction,
    join: KernelFunction,
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
    most_pieces: u64,
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
        let ranges = needed as usize * MATRICES;
        let pieces_of = |places: &ExpertLocations| -> u64 {
            places
                .bytes
                .iter()
                .map(|bytes| bytes / piece_bytes + 2)
                .sum()
        };
        let most_pieces =
            experts.places.iter().map(pieces_of).max().unwrap_or(0) * u64::from(needed);
        let all_experts = shape.experts * experts.layers();
        let vectors = |elements: u32| memory(u64::from(pairs) * u64::from(elements) * 4);
        let memory = ExpertMemory {
            words: memory(words(slots, all_experts) as u64 * 4)?,
            chosen: memory(u64::from(pairs) * size_of::<ChosenExpert>() as u64)?,
            list: memory((size_of::<ListHead>() + ranges * size_of::<RangeTarget>()) as u64)?,
            places: memory((experts.places.len() * size_of::<ExpertLocations>()) as u64)?,
            status: memory(most_pieces * 4)?,
            vectors: [
                vectors(shape.hidden)?,
                vectors(shape.hidden)?,
                vectors(shape.width)?,
            ],
            data: memory(u64::from(slots) * slot_bytes)?,
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
            most_pieces,
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
        let stream = Stream::new(&self.gpu)?;
        let store = &self.experts.store;
        // SAFETY: the slots are memory of the cache, which stays.
        let pending = unsafe { store.read_ranges_on_gpu(&ranges, stream.handle())? };
        check(pending.wait(options.limit)?)
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
        } = &*self.memory;
        let others = [words, chosen, list, places, status, data];
        let all = others.into_iter().chain(vectors);
        all.map(|memory| memory.len() as u64).sum()
    }

    /// Enqueues a layer's step in `stream`, a `CUstream` of the store's GPU, and returns before it runs: the router's
    /// choice, reads of experts that are not in the cache, and their products. The stream may be captured, and the
    /// graph launched again with other logits and vectors.
    ///
    /// The [`PendingRows`] ends when the results are stored: the step does not use the memory of `step` then. Its rows
    /// are pieces that were read. A token with an expert whose read failed has NaN as result: [`check`] makes an error
    /// of it, and the next step that chooses the expert reads it again.
    ///
    /// # Safety
    /// The addresses are valid on the GPU until the stream has done it, and for as long as a graph that captured it may be
    /// launched; nothing else writes them meanwhile. Steps of this cache do not run at the same time.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer that is not there, too many tokens, and addresses that are no multiple of 4;
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn step(&self, step: &ExpertStep, stream: u64) -> Result<PendingRows> {
        self.check_step(step)?;
        if step.tokens == 0 {
            return Ok(PendingRows::nothing());
        }
        let shape = self.experts.shape;
        let logits = product(&[step.tokens, shape.experts]);
        let vectors = product(&[step.tokens, shape.width]);
        let probabilities = optional(step.probabilities, logits);
        let bias = |name, matrix: usize, rows| {
            let address = step.biases[matrix];
            let numbers = optional(address, product(&[shape.experts, rows]));
            KernelArgument::read(name, address, numbers, 4)
        };
        self.gpu.judge_list(
            stream,
            [
                KernelArgument::read("logits", step.logits, logits, 4),
                KernelArgument::read("x", step.x, vectors, 4),
                KernelArgument::written("y", step.y, vectors, 4),
                KernelArgument::written("probabilities", step.probabilities, probabilities, 4),
                bias("the bias of gate", 0, shape.hidden),
                bias("the bias of up", 1, shape.hidden),
                bias("the bias of down", 2, shape.width),
            ],
        )?;
        let pairs = step.tokens * shape.choices;
        let (kernels, memory) = (&*self.kernels, &*self.memory);
        let admit = AdmitParameters {
            layer: step.layer,
            places: self.words.places + u64::from(step.layer) * size_of::<ExpertLocations>() as u64,
            pairs,
            ..self.words
        };
        let route = RouteParameters {
            logits: step.logits,
            chosen: admit.chosen,
            probabilities: step.probabilities,
            tokens: step.tokens,
            experts: shape.experts,
            choices: shape.choices,
            over_all: shape.over_all.into(),
        };
        let list = ReadList {
            list: admit.list,
            ranges: MATRICES as u32 * pairs.min(shape.experts),
            pieces: self.most_pieces,
            status: memory.status.address(),
        };
        let settle = SettleParameters {
            admit,
            status: list.status,
            most_pieces: self.most_pieces,
        };
        let [gate, up, down] = memory.vectors.each_ref().map(DeviceMemory::address);
        let (activation, limit, alpha) = shape.activation.numbers();
        let [gate_bias, up_bias, bias] = step.biases;
        let activate = ActivateParameters {
            chosen: admit.chosen,
            gate,
            up,
            gate_bias,
            up_bias,
            elements: shape.hidden,
            pairs,
            activation,
            limit,
            alpha,
            reserved: 0,
        };
        let join = JoinParameters {
            chosen: admit.chosen,
            x: down,
            y: step.y,
            bias,
            tokens: step.tokens,
            choices: shape.choices,
            elements: shape.width,
            adds: step.adds.into(),
        };
        let routing = u64::from(step.tokens) * 32;
        let settling = u64::from(SETTLING * BLOCK_THREADS);
        let activated = u64::from(pairs) * u64::from(shape.hidden);
        let elements = u64::from(step.tokens) * u64::from(shape.width);
        LaunchSequence::run(&self.gpu, stream, |sequence| {
            // SAFETY: each kernel takes the argument that it is launched with; the memory belongs to the cache,
            // or the caller vouches for it.
            unsafe {
                sequence.kernel(|| self.launch(kernels.route, routing, &route, stream))?;
                sequence.kernel(|| self.launch(kernels.admit, 32, &admit, stream))?;
                let reads = self.experts.store.read_listed_on_gpu(&list, stream)?;
                sequence.add(reads, 0);
                sequence.kernel(|| self.launch(kernels.settle, settling, &settle, stream))?;
                sequence.kernel(|| self.product(&admit, step, (0, step.x, gate), stream))?;
                sequence.kernel(|| self.product(&admit, step, (1, step.x, up), stream))?;
                sequence.kernel(|| self.launch(kernels.activate, activated, &activate, stream))?;
                sequence.kernel(|| self.product(&admit, step, (2, gate, down), stream))?;
                sequence.kernel(|| self.launch(kernels.join, elements, &join, stream))
            }
        })
    }

    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn product(
        &self,
        admit: &AdmitParameters,
        step: &ExpertStep,
        (matrix, x, y): (usize, u64, u64),
        stream: u64,
    ) -> Result<()> {
        let shape = self.experts.shape;
        let (rows, columns) = shape_of(shape, matrix);
        let product = ProductParameters {
            admit: *admit,
            x,
            y,
            rows,
            columns,
            stored: self.experts.layers[step.layer as usize][matrix].stored as u32,
            matrix: matrix as u32,
            shared: if matrix == 2 { 1 } else { shape.choices },
            reserved: 0,
        };
        let like = self.like(step.layer, matrix, admit.pairs);
        let kernels = &self.kernels;
        let (function, count, shared_bytes) = if like.is_quantised() {
            let function = kernels.product_quantised;
            (function, like.items(), GemvParameters::QUANTISED_SHARED)
        } else if like.is_wide() {
            (kernels.product_wide, like.tiles(), 0)
        } else {
            let threads = u64::from(admit.pairs) * u64::from(rows) * 32;
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { self.launch(kernels.product, threads, &product, stream) };
        };
        let blocks = LaunchSize {
            // No memory could hold the results of 2^32 blocks, so the conversion cannot fail.
            count: u32::try_from(count).map_err(|_| Error::internal("2^32 blocks"))?,
            threads: BLOCK_THREADS,
            shared_bytes,
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            kernels
                .module
                .launch_blocks(stream, function, blocks, &product)
        }
    }

    /// Returns the parameters of the products of a matrix with `pairs` vectors: addresses modulo 16 are the same for
    /// all experts.
    fn like(&self, layer: u32, matrix: usize, pairs: u32) -> GemvParameters {
        let shape = self.experts.shape;
        let placed = self.experts.layers[layer as usize][matrix];
        let (rows, columns) = shape_of(shape, matrix);
        let row_bytes = placed.stored.row_bytes(columns).unwrap_or(1);
        GemvParameters {
            weights: placed.offset | (row_bytes * u64::from(rows)),
            row_bytes,
            rows,
            columns,
            tokens: pairs,
            stored: placed.stored as u32,
            ..GemvParameters::default()
        }
    }

    /// # Safety
    /// `function` takes one `T`, and the memory that its argument names is valid.
    unsafe fn launch<T: Copy>(
        &self,
        function: KernelFunction,
        threads: u64,
        argument: &T,
        stream: u64,
    ) -> Result<()> {
        let blocks = threads.div_ceil(BLOCK_THREADS.into()).clamp(1, MOST_BLOCKS);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            self.kernels
                .module
                .launch_in(stream, function, blocks as u32, BLOCK_THREADS, argument)
        }
    }

    fn check_step(&self, step: &ExpertStep) -> Result<()> {
        let is_there = step.layer < self.words.layers && step.tokens <= self.tokens;
        if !is_there {
            return Err(Error::usage(
                format!(
                    "the step of layer {} with {} tokens names a layer or tokens that the cache was not made for",
                    step.layer, step.tokens
                ),
                format!(
                    "use a layer below {}, and {} tokens at most",
                    self.words.layers, self.tokens
                ),
            ));
        }
        Ok(())
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

impl ExpertKernels {
    fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, EXPERTS_PTX.as_bytes())?;
        Ok(Self {
            route: module.function(kernel::MOE_ROUTE)?,
            admit: module.function(kernel::MOE_ADMIT)?,
            settle: module.function(kernel::MOE_SETTLE)?,
            product: module.function(kernel::MOE_PRODUCT)?,
            product_wide: module.function(kernel::MOE_PRODUCT_WIDE)?,
            product_quantised: module.function_with_shared(
                kernel::MOE_PRODUCT_QUANTISED,
                GemvParameters::QUANTISED_SHARED,
            )?,
            activate: module.function(kernel::MOE_ACTIVATE)?,
            join: module.function(kernel::MOE_JOIN)?,
            module,
        })
    }
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
