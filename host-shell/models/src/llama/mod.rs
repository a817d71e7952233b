//! Models of the shape of Llama: SmolLM2, Llama 2 and 3, Mistral, Mixtral, Qwen3 and gpt-oss.
//!
//! `Llama::open` checks the hyperparameters and tensors of the file and allocates everything; `feed` then takes tokens
//! and returns the next one, layer by layer. The operations are implemented by the back ends in `machine`.

mod config;
pub(crate) mod embedding;
mod family;
pub(crate) mod weights;
mod yarn;

pub use config::{ExpertMixture, ModelConfig};
pub use family::ModelFamily;
pub use yarn::YarnScaling;

use crate::experts::ExpertCounts;
use crate::machine::{
    BufferSizes, HeadVectors, LayerAttention, ModelBackend, ProductVectors, VectorBuffer,
};
use nvme_host::loader::{LayerLoader, LoaderOptions, LoaderPath, LoaderStats, ResidentLayers};
use nvme_host::{Catalog, Error, Manifest, Result, Store};
use std::ops::Range;
use std::sync::Arc;
use weights::{FeedForward, LayerBlock, ModelWeights};

/// Largest number of tokens that pass through the layers together.
pub const MOST_TOKENS: u32 = 64;

/// Options of running a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelOptions<'a> {
    /// Bytes of memory for weights, of the GPU or of the host; weights that do not fit are streamed. At least the size
    /// of two layers; for a mixture of experts the size of two layers without experts, and on a GPU that of a token's
    /// experts, too.
    pub budget: u64,
    /// Largest number of tokens of a text, including the prompt.
    pub positions: u32,
    /// Manifest by which layers, the last matrix and the last norm are verified when they are loaded. Rows of
    /// embeddings, which are read token by token, are not verified.
    pub manifest: Option<&'a Manifest>,
}

/// A model, and one text that it continues.
///
/// The embedding of a token is read from the store; the layers and the parts of the last matrix stream through
/// slots.
pub struct Llama {
    config: ModelConfig,
    weights: ModelWeights,
    loader: LayerLoader,
    machine: Box<dyn ModelBackend>,
    position: u32,
    positions: u32,
}

impl Llama {
    /// Opens the model that `catalog` describes. `places` maps a byte range of the catalog, by offset and
    /// length, to the ranges of `store` that hold it, in order.
    ///
    /// # Errors
    /// [`Error::Usage`] for another kind of model, for a budget that is too small, for more positions than the model
    /// has, and for a manifest of another file; [`Error::Mismatch`] where the bytes that are read now differ from the
    /// manifest; the errors of the store; [`Error::Environment`] without memory.
    pub fn open(
        store: &Arc<Store>,
        catalog: &Catalog,
        places: &dyn Fn(u64, u64) -> Result<Vec<Range<u64>>>,
        options: ModelOptions<'_>,
    ) -> Result<Self> {
        let config = ModelConfig::of(catalog)?;
        if options.positions == 0 || options.positions > config.context {
            return Err(Error::usage(
                format!(
                    "{} positions do not fit the model, which has {}",
                    options.positions, config.context
                ),
                "use a shorter prompt, or fewer tokens",
            ));
        }
        let (weights, layers) =
            ModelWeights::of(&config, catalog, store, places, options.manifest)?;
        let slot = layers.iter().map(|layer| layer.bytes()).max().unwrap_or(0);
        let all: u64 = layers.iter().map(|layer| layer.bytes()).sum();
        let for_experts = weights.least_for_experts();
        let budget = options.budget.saturating_sub(for_experts);
        if budget < 2 * slot {
            return Err(Error::usage(
                format!(
                    "a budget of {} bytes does not hold two layers of {slot} bytes",
                    options.budget
                ),
                format!(
                    "allow {} bytes or more: two layers, and the experts of a token",
                    2 * slot + for_experts
                ),
            ));
        }
        // A third slot hides a layer that takes longer to read. The remaining budget keeps layers resident, and
        // then experts.
        let slots = match budget {
            budget if budget >= all => 1,
            budget => (budget / slot).min(3),
        };
        let loader = LayerLoader::new(
            store,
            layers,
            &LoaderOptions {
                slots: slots as usize,
                resident: ResidentLayers::Bytes(if budget >= all {
                    all
                } else {
                    budget - slots * slot
                }),
                ..LoaderOptions::default()
            },
        )?;
        let sizes = BufferSizes {
            config: config.clone(),
            tokens: MOST_TOKENS,
            positions: options.positions,
            expert_bytes: for_experts + budget.saturating_sub(all),
        };
        let machine = crate::machine::of(sizes, &weights)?;
        Ok(Self {
            config,
            weights,
            loader,
            machine,
            position: 0,
            positions: options.positions,
        })
    }

    /// Returns the hyperparameters of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the memory of the layers, and the path of their data.
    pub fn path(&self) -> &LoaderPath {
        self.loader.path()
    }

    /// Returns the counts of layers and bytes since the model was opened.
    pub fn stats(&self) -> LoaderStats {
        self.loader.stats()
    }

    /// Returns the counters of the cache of experts, for a mixture of experts on a GPU.
    ///
    /// # Errors
    /// The errors of the GPU.
    pub fn expert_counts(&self) -> Result<Option<ExpertCounts>> {
        self.machine.expert_counts()
    }

    /// Returns the name of the back end: the GPU's name, or the CPU.
    pub fn machine(&self) -> &str {
        self.machine.name()
    }

    /// Returns the number of tokens of the text so far.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Forgets the text.
    pub fn clear(&mut self) {
        self.position = 0;
    }

    /// Appends `tokens` to the text and returns the most likely next one. After an error the text is as before, and the
    /// call may be repeated.
    ///
    /// # Errors
    /// [`Error::Usage`] for no tokens, for one that is not in the vocabulary, for too many, and for weights that lead to
    /// numbers that are not finite; the errors of the store, with the name of the layer.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<u32> {
        self.feed_until(tokens, &mut || Ok(()))
    }

    /// Does the same as [`feed`](Self::feed); calls `check` before each layer and ends with its error.
    ///
    /// # Errors
    /// The errors of [`Self::feed`] and of `check`.
    pub fn feed_until(
        &mut self,
        tokens: &[u32],
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<u32> {
        self.check(tokens)?;
        let before = self.position;
        let mut next = 0;
        for part in tokens.chunks(MOST_TOKENS as usize) {
            match self.forward(part, check) {
                Ok(token) => {
                    next = token;
                    self.position += part.len() as u32;
                }
                Err(error) => {
                    self.position = before;
                    return Err(error);
                }
            }
        }
        Ok(next)
    }

    /// Returns the numbers from which the last next token was taken, one for each token of the vocabulary.
    ///
    /// # Errors
    /// The errors of the GPU.
    pub fn logits(&mut self) -> Result<Vec<f32>> {
        self.machine.logits()
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let remedy = "use the tokens of this model's tokenizer";
        if let Some(token) = tokens.iter().find(|id| **id >= self.config.vocabulary) {
            let cause = format!(
                "token {token} is not in the vocabulary, which has {}",
                self.config.vocabulary
            );
            return Err(Error::usage(cause, remedy));
        }
        if tokens.is_empty() {
            return Err(Error::usage("the list of tokens is empty", remedy));
        }
        if tokens.len() as u64 > u64::from(self.positions - self.position) {
            return Err(Error::usage(
                format!(
                    "{} tokens after position {} do not fit into {} positions",
                    tokens.len(),
                    self.position,
                    self.positions
                ),
                "open the model with more positions, or clear the text",
            ));
        }
        Ok(())
    }

    /// Runs `tokens` through the model and returns the next token.
    fn forward(&mut self, tokens: &[u32], check: &mut dyn FnMut() -> Result<()>) -> Result<u32> {
        let count = tokens.len() as u32;
        let machine = &mut *self.machine;
        machine.embed(tokens)?;
        for (index, block) in self.weights.blocks.iter().enumerate() {
            check()?;
            let layer = self.loader.layer_for(index, machine.stream())?;
            let step = LayerAttention {
                block: index,
                position: self.position,
                tokens: count,
                window: self.config.window_of(index),
                sinks: block.biases.map(|biases| biases.sinks),
            };
            block_forward(machine, &layer, block, step)?;
        }
        machine.last_norm(count - 1)?;
        for piece in &self.weights.head {
            check()?;
            let layer = self.loader.layer_for(piece.layer, machine.stream())?;
            let last = ProductVectors {
                y_first: piece.first_row,
                ..ProductVectors::one(VectorBuffer::Normed, VectorBuffer::Logits)
            };
            machine.product(&layer, &piece.matrix, last)?;
        }
        let (token, logit) = machine.next_token(&self.loader)?;
        match logit.is_finite() {
            true => Ok(token),
            false => Err(not_finite(logit)),
        }
    }
}

/// Returns the error of a step whose largest logit is not finite. A token would be returned all the same, and none of the
/// following ones would mean anything.
fn not_finite(logit: f32) -> Error {
    Error::usage(
        format!(
            "the weights of the model do not lead to finite numbers: the largest logit is {logit}"
        ),
        "get the file again, or convert it from weights that are finite",
    )
}

/// Runs one layer of the model over the tokens in [`VectorBuffer::Hidden`].
fn block_forward(
    machine: &mut dyn ModelBackend,
    layer: &nvme_host::loader::LoadedLayer,
    block: &LayerBlock,
    step: LayerAttention,
) -> Result<()> {
    use VectorBuffer::{Gate, Normed, Router, Up};
    let tokens = step.tokens;
    let each = |x, y| ProductVectors {
        tokens,
        ..ProductVectors::one(x, y)
    };
    attention_forward(machine, layer, block, step)?;
    machine.norm(layer, block.hidden_norm, tokens)?;
    match &block.second {
        FeedForward::Dense { gate, up, down } => {
            machine.product(layer, gate, each(Normed, Gate))?;
            machine.product(layer, up, each(Normed, Up))?;
            machine.activate(tokens)?;
            let added = ProductVectors {
                adds: true,
                ..each(Gate, VectorBuffer::Hidden)
            };
            machine.product(layer, down, added)
        }
        FeedForward::Experts { router, biases } => {
            machine.product(layer, router, each(Normed, Router))?;
            if let Some(biases) = biases {
                machine.add_bias(layer, biases.router, Router, tokens)?;
            }
            let biases = biases.map(|biases| biases.experts);
            machine.experts(layer, step.block, tokens, biases)
        }
    }
}

/// Adds the attention of a layer to [`VectorBuffer::Hidden`].
fn attention_forward(
    machine: &mut dyn ModelBackend,
    layer: &nvme_host::loader::LoadedLayer,
    block: &LayerBlock,
    step: LayerAttention,
) -> Result<()> {
    use VectorBuffer::{Attended, Hidden, Keys, Normed, Queries, Values};
    let tokens = step.tokens;
    machine.norm(layer, block.attention_norm, tokens)?;
    for (matrix, buffer) in [
        (&block.query, Queries),
        (&block.key, Keys),
        (&block.value, Values),
    ] {
        let vectors = ProductVectors {
            tokens,
            ..ProductVectors::one(Normed, buffer)
        };
        machine.product(layer, matrix, vectors)?;
    }
    if let Some(biases) = block.biases {
        machine.add_bias(layer, biases.query, Queries, tokens)?;
        machine.add_bias(layer, biases.key, Keys, tokens)?;
        machine.add_bias(layer, biases.value, Values, tokens)?;
    }
    if let Some(norms) = block.head_norms {
        machine.norm_heads(layer, norms.query, HeadVectors::Queries, tokens)?;
        machine.norm_heads(layer, norms.key, HeadVectors::Keys, tokens)?;
    }
    machine.attend(layer, step)?;
    let added = ProductVectors {
        adds: true,
        tokens,
        ..ProductVectors::one(Attended, Hidden)
    };
    machine.product(layer, &block.output, added)?;
    match block.biases {
        Some(biases) => machine.add_bias(layer, biases.output, Hidden, tokens),
        None => Ok(()),
    }
}
