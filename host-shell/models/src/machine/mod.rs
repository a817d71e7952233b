//! Back ends of a model: threads of the CPU, or kernels of a GPU. A back end keeps the activations, which are
//! vectors with a few fixed names, between the operations of a step; the model in `llama` calls the operations in
//! order and never touches the vectors itself.

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use crate::experts::ExpertCounts;
use crate::llama::ModelConfig;
use crate::llama::weights::{ModelWeights, WeightMatrix};
use nvme_compute_kernel::experts::MATRICES;
use nvme_host::Result;
use nvme_host::loader::{LayerLoader, LoadedLayer};

/// Vectors, one for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorBuffer {
    /// The residual stream: the vector that each layer reads and adds to.
    Hidden,
    Normed,
    Queries,
    Keys,
    Values,
    Attended,
    Gate,
    Up,
    /// A logit for each expert.
    Router,
    /// One vector alone.
    Logits,
}

impl VectorBuffer {
    /// Number of buffers.
    pub const COUNT: usize = Self::Logits as usize + 1;
    pub const ALL: [Self; Self::COUNT] = [
        Self::Hidden,
        Self::Normed,
        Self::Queries,
        Self::Keys,
        Self::Values,
        Self::Attended,
        Self::Gate,
        Self::Up,
        Self::Router,
        Self::Logits,
    ];
}

/// Sizes for which a back end allocates its buffers.
#[derive(Clone, Debug)]
pub struct BufferSizes {
    pub config: ModelConfig,
    /// Largest number of tokens of a step.
    pub tokens: u32,
    /// Largest number of positions of the text.
    pub positions: u32,
    /// Bytes of memory of a GPU for experts.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU keeps none")
    )]
    pub expert_bytes: u64,
}

impl BufferSizes {
    /// Returns the number of elements of a vector.
    pub fn elements(&self, buffer: VectorBuffer) -> u32 {
        let config = &self.config;
        match buffer {
            VectorBuffer::Hidden | VectorBuffer::Normed => config.width,
            VectorBuffer::Queries | VectorBuffer::Attended => config.heads * config.head_elements,
            VectorBuffer::Keys | VectorBuffer::Values => self.cached(),
            VectorBuffer::Gate | VectorBuffer::Up if config.experts.is_some() => 0,
            VectorBuffer::Gate | VectorBuffer::Up => config.hidden,
            VectorBuffer::Router => config.experts.map_or(0, |experts| experts.count),
            VectorBuffer::Logits => config.vocabulary,
        }
    }

    /// Returns the number of elements of all vectors of a name.
    pub fn all_elements(&self, buffer: VectorBuffer) -> usize {
        let vectors = if buffer == VectorBuffer::Logits {
            1
        } else {
            self.tokens
        };
        self.elements(buffer) as usize * vectors as usize
    }

    /// Returns the number of elements of the keys and values of all layers.
    fn cache_elements(&self) -> u64 {
        let of_layer = u64::from(self.positions).saturating_mul(self.cached().into());
        of_layer.saturating_mul(2 * u64::from(self.config.layers))
    }

    /// Returns the number of elements of the keys of a position.
    pub fn cached(&self) -> u32 {
        self.config.kv_heads * self.config.head_elements
    }

    /// Returns the scale of the products of queries and keys.
    pub fn scale(&self) -> f32 {
        1.0 / (self.config.head_elements as f32).sqrt()
    }
}

/// The vectors of a product.
#[derive(Clone, Copy, Debug)]
pub struct ProductVectors {
    pub x: VectorBuffer,
    pub y: VectorBuffer,
    /// The first element of each vector of `y` that is written.
    pub y_first: u32,
    pub tokens: u32,
    /// True if the result is added to the contents of `y`.
    pub adds: bool,
}

impl ProductVectors {
    /// Returns the first vector of `x`, into the first of `y`.
    pub fn one(x: VectorBuffer, y: VectorBuffer) -> Self {
        Self {
            x,
            y,
            y_first: 0,
            tokens: 1,
            adds: false,
        }
    }
}

/// Vectors that consist of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadVectors {
    Queries,
    Keys,
}

impl HeadVectors {
    pub fn buffer(self) -> VectorBuffer {
        match self {
            Self::Queries => VectorBuffer::Queries,
            Self::Keys => VectorBuffer::Keys,
        }
    }

    /// Returns the number of heads of a token.
    pub fn heads(self, config: &ModelConfig) -> u32 {
        match self {
            Self::Queries => config.heads,
            Self::Keys => config.kv_heads,
        }
    }
}

/// The attention of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerAttention {
    /// Number of the layer of the model.
    pub block: usize,
    /// Position of the first token.
    pub position: u32,
    pub tokens: u32,
    /// Positions that a query sees; 0 for all.
    pub window: u32,
    /// First byte of the heads' sinks in the layer.
    pub sinks: Option<u64>,
}

/// The steps of a model.
pub trait ModelBackend: Send {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Returns the stream for which layers are asked.
    fn stream(&self) -> u64;

    /// Loads the embeddings of `tokens` into [`VectorBuffer::Hidden`].
    fn embed(&mut self, tokens: &[u32]) -> Result<()>;

    /// Normalises [`VectorBuffer::Hidden`] into [`VectorBuffer::Normed`], by the factors at byte `weight` of
    /// the layer.
    fn norm(&mut self, layer: &LoadedLayer, weight: u64, tokens: u32) -> Result<()>;

    /// Normalises vector `token` of [`VectorBuffer::Hidden`] into the first of [`VectorBuffer::Normed`], by the
    /// factors of the last norm.
    fn last_norm(&mut self, token: u32) -> Result<()>;

    /// Computes a product.
    fn product(
        &mut self,
        layer: &LoadedLayer,
        matrix: &WeightMatrix,
        vectors: ProductVectors,
    ) -> Result<()>;

    /// Adds the numbers at byte `bias` of the layer to each vector of `buffer`.
    fn add_bias(
        &mut self,
        layer: &LoadedLayer,
        bias: u64,
        buffer: VectorBuffer,
        tokens: u32,
    ) -> Result<()>;

    /// Normalises each head of `vectors` in place, by the factors at byte `weight` of the layer.
    fn norm_heads(
        &mut self,
        layer: &LoadedLayer,
        weight: u64,
        vectors: HeadVectors,
        tokens: u32,
    ) -> Result<()>;

    /// Computes the attention of a layer into [`VectorBuffer::Attended`].
    fn attend(&mut self, layer: &LoadedLayer, step: LayerAttention) -> Result<()>;

    /// Applies the activation to [`VectorBuffer::Gate`], times [`VectorBuffer::Up`], into the first.
    fn activate(&mut self, tokens: u32) -> Result<()>;

    /// Adds to [`VectorBuffer::Hidden`] the results of the experts of layer `block` for
    /// [`VectorBuffer::Normed`], as the logits in [`VectorBuffer::Router`] select them. `biases` are the first bytes of
    /// those of gate, up and down in `layer`.
    fn experts(
        &mut self,
        layer: &LoadedLayer,
        block: usize,
        tokens: u32,
        biases: Option<[u64; MATRICES]>,
    ) -> Result<()>;

    /// Returns the counters of the cache of experts, if there is one.
    fn expert_counts(&self) -> Result<Option<ExpertCounts>>;

    /// Returns the token with the largest number in [`VectorBuffer::Logits`], and that number, when all before it has
    /// ended and was right. The number is NaN only if no logit is a number.
    fn next_token(&mut self, loader: &LayerLoader) -> Result<(u32, f32)>;

    /// Returns the numbers in [`VectorBuffer::Logits`].
    fn logits(&mut self) -> Result<Vec<f32>>;
}

/// Returns the machine of a store: its GPU, or the CPU.
pub fn of(sizes: BufferSizes, weights: &ModelWeights) -> Result<Box<dyn ModelBackend>> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = weights.embedding.store.gpu() {
        return Ok(Box::new(gpu::GpuMachine::new(gpu, sizes, weights)?));
    }
    Ok(Box::new(cpu::CpuMachine::new(sizes, weights)?))
}
