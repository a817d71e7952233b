//! Back end of a GPU: kernels in a stream that it owns. The host waits once for each token: it takes the token, checks
//! the reads of the step, and only then starts the next one.
// UNSAFETY: launches kernels over addresses of memory that the machine owns, or that a layer holds.
#![allow(unsafe_code)]

use super::{BufferSizes, HeadVectors, LayerAttention, ModelBackend, ProductVectors, VectorBuffer};
use crate::experts::{
    self, CacheOptions, ExpertCounts, ExpertLayers, ExpertStep, GpuExperts, ReplacementPolicy,
};
use crate::llama::embedding::EmbeddingTable;
use crate::llama::weights::{ModelWeights, WeightMatrix};
use nvme_compute::steps::StepKernels;
use nvme_compute_kernel::experts::MATRICES;
use nvme_compute_kernel::{
    AddBias, ArgmaxParameters, AttentionParameters, GemvParameters, RmsNorm, RopeParameters,
    SiluMul, UnpackParameters,
};
use nvme_host::cuda::{DeviceMemory, Gpu, PendingRows, ReadRange, Stream};
use nvme_host::loader::{LayerLoader, LoadedLayer};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of a step, besides the reads of its layers, which have their own deadlines. Kernels take
/// milliseconds; a step that takes this long will not end, and waiting longer would hang the program.
const LIMIT: Duration = Duration::from_secs(60);
pub struct GpuMachine {
    steps: StepKernels,
    stream: Stream,
    sizes: BufferSizes,
    buffers: Vec<DeviceMemory>,
    /// Keys and values of each layer, by position.
    cache: Vec<(DeviceMemory, DeviceMemory)>,
    angles: DeviceMemory,
    last_norm: DeviceMemory,
    /// The number of the token that was computed last, an `i64`.
    index: DeviceMemory,
    /// Running maximum of `nvme_argmax`.
    best: DeviceMemory,
    /// Rows of embeddings in their stored format.
    rows: DeviceMemory,
    embedding: EmbeddingTable,
    /// The read of the step's embeddings.
    pending: Option<PendingRows>,
    experts: Option<GpuExperts>,
    /// The reads of the step's experts.
    expert_reads: Vec<PendingRows>,
    name: String,
}

impl GpuMachine {
    pub fn new(gpu: &Arc<Gpu>, sizes: BufferSizes, weights: &ModelWeights) -> Result<Self> {
        let floats = |count: usize| DeviceMemory::new(gpu, count.max(1) * 4);
        let config = &sizes.config;
        let cached = sizes.positions as usize * sizes.cached() as usize;
        let angles = config.angles(sizes.positions);
        let buffers = VectorBuffer::ALL.map(|buffer| floats(sizes.all_elements(buffer)));
        let cache = (0..config.layers).map(|_| Ok((floats(cached)?, floats(cached)?)));
        let tokens = sizes.tokens as usize;
        let row_bytes = weights.embedding.row_bytes as usize;
        let experts = weights.experts.as_ref();
        let experts = experts
            .map(|experts| expert_cache(experts, &sizes))
            .transpose()?;
        Ok(Self {
            steps: StepKernels::load(gpu)?,
            stream: Stream::new(gpu)?,
            buffers: buffers.into_iter().collect::<Result<_>>()?,
            cache: cache.collect::<Result<_>>()?,
            angles: uploaded(gpu, &angles)?,
            last_norm: uploaded(gpu, &weights.last_norm)?,
            index: DeviceMemory::new(gpu, 8)?,
            best: DeviceMemory::new(gpu, 8)?,
            rows: DeviceMemory::new(gpu, tokens * row_bytes.next_multiple_of(16))?,
            embedding: weights.embedding.clone(),
            pending: None,
            experts,
            expert_reads: Vec::new(),
            name: gpu.describe(),
            sizes,
        })
    }

    fn address(&self, buffer: VectorBuffer) -> u64 {
        self.buffers[buffer as usize].address()
    }

    fn norm_by(&self, weight: u64, first: u32, tokens: u32) -> Result<()> {
        let width = self.sizes.config.width;
        let norm = RmsNorm {
            x: self.address(VectorBuffer::Hidden) + u64::from(first) * u64::from(width) * 4,
            weight,
            y: self.address(VectorBuffer::Normed),
            elements: width,
            tokens,
            epsilon: self.sizes.config.epsilon,
            reserved: 0,
        };
        // SAFETY: as for `product`.
        unsafe { self.steps.rms_norm(&norm, self.stream.handle()) }
    }

    /// Returns the number of bytes from one row of embeddings to the next where they are read.
    fn row_stride(&self) -> u64 {
        self.embedding.row_bytes.next_multiple_of(16)
    }
}

/// Returns the cache of the experts, for as many tokens at a time as it has room.
fn expert_cache(experts: &ExpertLayers, sizes: &BufferSizes) -> Result<GpuExperts> {
    let shape = experts.shape();
    let slots = sizes.expert_bytes / experts.slot_bytes();
    let tokens = match slots >= u64::from(shape.experts) {
        true => sizes.tokens,
        false => (slots / u64::from(shape.choices)).clamp(1, sizes.tokens.into()) as u32,
    };
    let options = CacheOptions {
        bytes: sizes.expert_bytes,
        policy: ReplacementPolicy::Lru,
        pinned: Vec::new(),
        tokens,
        limit: LIMIT,
    };
    GpuExperts::new(experts, &options)
}

fn uploaded(gpu: &Arc<Gpu>, numbers: &[f32]) -> Result<DeviceMemory> {
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let memory = DeviceMemory::new(gpu, bytes.len())?;
    memory.upload(0, &bytes)?;
    Ok(memory)
}

impl ModelBackend for GpuMachine {
    fn name(&self) -> &str {
        &self.name
    }

    fn stream(&self) -> u64 {
        self.stream.handle()
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<()> {
        let stride = self.row_stride();
        let parts = self.embedding.parts(tokens, stride);
        let ranges = parts.iter().map(|part| ReadRange {
            offset: part.offset,
            bytes: part.bytes,
            to: self.rows.address() + part.at,
        });
        let ranges: Vec<ReadRange> = ranges.collect();
        let store = &self.embedding.store;
        // SAFETY: the rows lie in memory of this machine, which waits for its stream before it is dropped.
        let pending = unsafe { store.read_ranges_on_gpu(&ranges, self.stream.handle())? };
        self.pending = Some(pending);
        self.expert_reads.clear();
        let unpack = UnpackParameters {
            rows: self.rows.address(),
            y: self.address(VectorBuffer::Hidden),
            row_stride: stride,
            columns: self.sizes.config.width,
            tokens: tokens.len() as u32,
            stored: self.embedding.stored as u32,
            reserved: 0,
        };
        // SAFETY: as for `product`.
        unsafe { self.steps.unpack(&unpack, self.stream.handle()) }
    }

    fn norm(&mut self, layer: &LoadedLayer, weight: u64, tokens: u32) -> Result<()> {
        self.norm_by(layer.address() + weight, 0, tokens)
    }

    fn last_norm(&mut self, token: u32) -> Result<()> {
        self.norm_by(self.last_norm.address(), token, 1)
    }

    fn product(
        &mut self,
        layer: &LoadedLayer,
        matrix: &WeightMatrix,
        vectors: ProductVectors,
    ) -> Result<()> {
        let gemv = GemvParameters {
            weights: layer.address() + matrix.at,
            x: self.address(vectors.x),
            y: self.address(vectors.y) + u64::from(vectors.y_first) * 4,
            row_bytes: matrix.row_bytes,
            rows: matrix.rows,
            columns: matrix.columns,
            stride: self.sizes.elements(vectors.y),
            tokens: vectors.tokens,
            stored: matrix.stored as u32,
            adds: vectors.adds.into(),
        };
        // SAFETY: the memory belongs to this back end, which waits for its stream before it is dropped, or to a
        // layer whose slot is not overwritten before the stream has passed the kernels that use it.
        unsafe { self.steps.gemv(&gemv, self.stream.handle()) }
    }

    fn add_bias(
        &mut self,
        layer: &LoadedLayer,
        bias: u64,
        buffer: VectorBuffer,
        tokens: u32,
    ) -> Result<()> {
        let add = AddBias {
            bias: layer.address() + bias,
            y: self.address(buffer),
            elements: self.sizes.elements(buffer),
            tokens,
        };
        // SAFETY: as for `product`.
        unsafe { self.steps.add_bias(&add, self.stream.handle()) }
    }

    fn norm_heads(
        &mut self,
        layer: &LoadedLayer,
        weight: u64,
        vectors: HeadVectors,
        tokens: u32,
    ) -> Result<()> {
        let config = &self.sizes.config;
        let heads = self.address(vectors.buffer());
        let norm = RmsNorm {
            x: heads,
            weight: layer.address() + weight,
            y: heads,
            elements: config.head_elements,
            tokens: tokens * vectors.heads(config),
            epsilon: config.epsilon,
            reserved: 0,
        };
        // SAFETY: as for `product`; each lane reads its elements before it writes them.
        unsafe { self.steps.rms_norm(&norm, self.stream.handle()) }
    }

    fn attend(&mut self, layer: &LoadedLayer, step: LayerAttention) -> Result<()> {
        let config = &self.sizes.config;
        let (keys, values) = &self.cache[step.block];
        let (key_cache, value_cache) = (keys.address(), values.address());
        let (position, tokens) = (step.position, step.tokens);
        let rope = RopeParameters {
            queries: self.address(VectorBuffer::Queries),
            keys: self.address(VectorBuffer::Keys),
            values: self.address(VectorBuffer::Values),
            angles: self.angles.address(),
            key_cache,
            value_cache,
            position,
            tokens,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_elements: config.head_elements,
            halves: config.family.rotates_halves().into(),
        };
        let attention = AttentionParameters {
            queries: rope.queries,
            key_cache,
            value_cache,
            y: self.address(VectorBuffer::Attended),
            sinks: step.sinks.map_or(0, |sinks| layer.address() + sinks),
            position,
            tokens,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_elements: config.head_elements,
            scale: self.sizes.scale(),
            window: step.window,
            reserved: 0,
        };
        // SAFETY: as for `product`.
        unsafe {
            self.steps.rope(&rope, self.stream.handle())?;
            self.steps.attention(&attention, self.stream.handle())
        }
    }

    fn activate(&mut self, tokens: u32) -> Result<()> {
        let gate = self.address(VectorBuffer::Gate);
        let silu = SiluMul {
            x: gate,
            factor: self.address(VectorBuffer::Up),
            y: gate,
            elements: u64::from(self.sizes.config.hidden) * u64::from(tokens),
        };
        // SAFETY: as for `product`.
        unsafe { self.steps.silu_mul(&silu, self.stream.handle()) }
    }

    fn experts(
        &mut self,
        layer: &LoadedLayer,
        block: usize,
        tokens: u32,
        biases: Option<[u64; MATRICES]>,
    ) -> Result<()> {
        let Some(experts) = &self.experts else {
            return Err(Error::internal("a model without experts"));
        };
        let most = experts.tokens() as usize;
        for first in (0..tokens).step_by(most) {
            let at = |buffer| {
                let before = u64::from(first) * u64::from(self.sizes.elements(buffer));
                self.address(buffer) + before * 4
            };
            let step = ExpertStep {
                layer: block as u32,
                tokens: (tokens - first).min(most as u32),
                logits: at(VectorBuffer::Router),
                given: None,
                x: at(VectorBuffer::Normed),
                y: at(VectorBuffer::Hidden),
                adds: true,
                biases: biases.map_or([0; MATRICES], |biases| {
                    biases.map(|at| layer.address() + at)
                }),
                probabilities: 0,
            };
            // SAFETY: as for `product`: the vectors belong to this machine, and the biases to the layer.
            let pending = unsafe { experts.step(&step, self.stream.handle())? };
            self.expert_reads.push(pending);
        }
        Ok(())
    }

    fn expert_counts(&self) -> Result<Option<ExpertCounts>> {
        self.experts.as_ref().map(GpuExperts::counts).transpose()
    }

    fn next_token(&mut self, loader: &LayerLoader) -> Result<(u32, f32)> {
        let argmax = ArgmaxParameters {
            x: self.address(VectorBuffer::Logits),
            best: self.best.address(),
            index: self.index.address(),
            elements: self.sizes.config.vocabulary.into(),
        };
        // SAFETY: as for `product`; `best` is 0 before the first and after each.
        unsafe { self.steps.argmax(&argmax, self.stream.handle())? };
        let begin = Instant::now();
        self.stream.wait(LIMIT, || Ok(()))?;
        loader.check(LIMIT.saturating_sub(begin.elapsed()))?;
        if let Some(pending) = self.pending.take()
            && let left = LIMIT.saturating_sub(begin.elapsed())
            && let Some((row, code)) = pending.wait(left)?.failures.first
        {
            let (what, remedy) = status::describe(code);
            let cause = format!("part {row} of the embeddings of the step: {what}");
            return Err(Error::device(cause, remedy));
        }
        for pending in self.expert_reads.drain(..) {
            let left = LIMIT.saturating_sub(begin.elapsed());
            experts::check(pending.wait(left)?)?;
        }
        let mut token = [0; 8];
        self.index.download(0, &mut token)?;
        let token = u32::try_from(i64::from_le_bytes(token));
        let token = token.map_err(|_| Error::internal("a token below 0"))?;
        let mut logit = [0; 4];
        self.buffers[VectorBuffer::Logits as usize].download(token as usize * 4, &mut logit)?;
        Ok((token, f32::from_le_bytes(logit)))
    }

    fn logits(&mut self) -> Result<Vec<f32>> {
        self.stream.wait(LIMIT, || Ok(()))?;
        let memory = &self.buffers[VectorBuffer::Logits as usize];
        let mut bytes = vec![0; memory.len()];
        memory.download(0, &mut bytes)?;
        let numbers = bytes.as_chunks::<4>().0.iter();
        Ok(numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

impl Drop for GpuMachine {
    fn drop(&mut self) {
        // The memory of work that does not end is kept: the store's watch thread ends reads, and kernels end on their
        // own.
        let _ = self.stream.wait(LIMIT, || Ok(()));
    }
}
