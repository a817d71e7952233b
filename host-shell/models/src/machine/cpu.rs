//! Threads of the CPU.

use super::{BufferSizes, HeadVectors, LayerAttention, ModelBackend, ProductVectors, VectorBuffer};
use crate::experts::{ExpertBiases, ExpertCounts, ExpertLayers};
use crate::llama::embedding::EmbeddingTable;
use crate::llama::weights::{EMBEDDINGS, ModelWeights, WeightMatrix};
use nvme_compute::steps::by_cpu::{self, AttentionRule, TokenHeads};
use nvme_compute_kernel::experts::MATRICES;
use nvme_compute_kernel::reference;
use nvme_host::loader::{LayerLoader, LoadedLayer};
use nvme_host::{Error, Result};

pub struct CpuMachine {
    sizes: BufferSizes,
    buffers: [Vec<f32>; VectorBuffer::COUNT],
    /// Keys and values of each layer, by position.
    cache: Vec<(Vec<f32>, Vec<f32>)>,
    angles: Vec<f32>,
    last_norm: Vec<f32>,
    embedding: EmbeddingTable,
    experts: Option<ExpertLayers>,
    name: String,
}

impl CpuMachine {
    /// # Errors
    /// [`Error::Environment`] without memory for the vectors and for the keys and values of all positions.
    pub fn new(sizes: BufferSizes, weights: &ModelWeights) -> Result<Self> {
        check_memory(&sizes)?;
        let cached = sizes.positions as usize * sizes.cached() as usize;
        let config = &sizes.config;
        let layers = 0..config.layers;
        Ok(Self {
            buffers: VectorBuffer::ALL.map(|buffer| vec![0.0; sizes.all_elements(buffer)]),
            cache: layers
                .map(|_| (vec![0.0; cached], vec![0.0; cached]))
                .collect(),
            angles: config.angles(sizes.positions),
            last_norm: weights.last_norm.clone(),
            embedding: weights.embedding.clone(),
            experts: weights.experts.clone(),
            name: format!("{} threads of the CPU", rayon::current_num_threads()),
            sizes,
        })
    }

    fn take(&mut self, buffer: VectorBuffer) -> Vec<f32> {
        std::mem::take(&mut self.buffers[buffer as usize])
    }

    fn put(&mut self, buffer: VectorBuffer, vectors: Vec<f32>) {
        self.buffers[buffer as usize] = vectors;
    }

    fn vectors(&self, buffer: VectorBuffer, first: u32, tokens: u32) -> &[f32] {
        let elements = self.sizes.elements(buffer) as usize;
        &self.buffers[buffer as usize][first as usize * elements..][..tokens as usize * elements]
    }

    fn norm_by(&mut self, weight: &[f32], first: u32, tokens: u32) {
        let (width, epsilon) = (self.sizes.config.width as usize, self.sizes.config.epsilon);
        let mut normed = self.take(VectorBuffer::Normed);
        let hidden = self
            .vectors(VectorBuffer::Hidden, first, tokens)
            .chunks(width);
        for (x, y) in hidden.zip(normed.chunks_mut(width)) {
            reference::rms_norm(x, weight, epsilon, y);
        }
        self.put(VectorBuffer::Normed, normed);
    }
}

/// Checks that there is memory for everything that a machine of these sizes allocates: a vector for which there is none
/// would end the process.
fn check_memory(sizes: &BufferSizes) -> Result<()> {
    let angles = u64::from(sizes.positions) * u64::from(sizes.config.head_elements);
    let vectors = VectorBuffer::ALL.map(|buffer| sizes.all_elements(buffer) as u64);
    let cached = sizes.cache_elements();
    let all = vectors
        .into_iter()
        .fold(cached, u64::saturating_add)
        .saturating_add(angles);
    let elements = usize::try_from(all).unwrap_or(usize::MAX);
    if Vec::<f32>::new().try_reserve_exact(elements).is_ok() {
        return Ok(());
    }
    Err(Error::environment(
        format!(
            "there is no memory for {} bytes of keys, values and vectors of {} positions",
            all.saturating_mul(4),
            sizes.positions
        ),
        "use fewer tokens",
    ))
}

/// Returns the bytes `at` on of a layer.
fn part(layer: &LoadedLayer, at: u64, bytes: u64) -> Result<&[u8]> {
    let (at, bytes) = (at as usize, bytes as usize);
    let part = layer.bytes().and_then(|all| all.get(at..)?.get(..bytes));
    part.ok_or_else(|| Error::internal("a matrix outside of its layer"))
}

/// Returns the `count` numbers from byte `at` of a layer on.
fn numbers(layer: &LoadedLayer, at: u64, count: u64) -> Result<Vec<f32>> {
    let bytes = part(layer, at, count * 4)?;
    let numbers = bytes.as_chunks::<4>().0.iter();
    Ok(numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

impl ModelBackend for CpuMachine {
    fn name(&self) -> &str {
        &self.name
    }

    fn stream(&self) -> u64 {
        0
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<()> {
        let row_bytes = self.embedding.row_bytes as usize;
        let mut rows = vec![0; row_bytes * tokens.len()];
        for part in self.embedding.parts(tokens, row_bytes as u64) {
            let rows = &mut rows[part.at as usize..][..part.bytes as usize];
            let read = self.embedding.store.read_at(part.offset, rows);
            read.map_err(|error| error.with_context(EMBEDDINGS))?;
        }
        let (width, stored) = (self.sizes.config.width as usize, self.embedding.stored);
        let hidden = self.buffers[VectorBuffer::Hidden as usize].chunks_mut(width);
        for (row, hidden) in rows.chunks(row_bytes).zip(hidden) {
            reference::unpack(stored, row, hidden);
        }
        Ok(())
    }

    fn norm(&mut self, layer: &LoadedLayer, weight: u64, tokens: u32) -> Result<()> {
        let weight = numbers(layer, weight, self.sizes.config.width.into())?;
        self.norm_by(&weight, 0, tokens);
        Ok(())
    }

    fn last_norm(&mut self, token: u32) -> Result<()> {
        let weight = std::mem::take(&mut self.last_norm);
        self.norm_by(&weight, token, 1);
        self.last_norm = weight;
        Ok(())
    }

    fn product(
        &mut self,
        layer: &LoadedLayer,
        matrix: &WeightMatrix,
        vectors: ProductVectors,
    ) -> Result<()> {
        let row_bytes = matrix.row_bytes as usize;
        let weights = part(layer, matrix.at, matrix.row_bytes * u64::from(matrix.rows))?;
        let x = self.vectors(vectors.x, 0, vectors.tokens);
        let tokens = vectors.tokens as usize;
        let products = by_cpu::products(matrix.stored, weights, row_bytes, x, tokens);
        let stride = self.sizes.elements(vectors.y) as usize;
        let y = &mut self.buffers[vectors.y as usize];
        for (row, products) in products.chunks(tokens).enumerate() {
            for (token, product) in products.iter().enumerate() {
                let y = &mut y[token * stride + vectors.y_first as usize + row];
                *y = if vectors.adds { *y } else { 0.0 } + product;
            }
        }
        Ok(())
    }

    fn add_bias(
        &mut self,
        layer: &LoadedLayer,
        bias: u64,
        buffer: VectorBuffer,
        tokens: u32,
    ) -> Result<()> {
        let elements = self.sizes.elements(buffer);
        let bias = numbers(layer, bias, elements.into())?;
        let vectors = self.buffers[buffer as usize].chunks_mut(elements as usize);
        for vector in vectors.take(tokens as usize) {
            vector
                .iter_mut()
                .zip(&bias)
                .for_each(|(y, bias)| *y += bias);
        }
        Ok(())
    }

    fn norm_heads(
        &mut self,
        layer: &LoadedLayer,
        weight: u64,
        vectors: HeadVectors,
        tokens: u32,
    ) -> Result<()> {
        let config = &self.sizes.config;
        let (elements, epsilon) = (config.head_elements, config.epsilon);
        let weight = numbers(layer, weight, elements.into())?;
        let heads = (vectors.heads(config) * tokens) as usize;
        let all = self.buffers[vectors.buffer() as usize].chunks_mut(elements as usize);
        for head in all.take(heads) {
            let given = head.to_vec();
            reference::rms_norm(&given, &weight, epsilon, head);
        }
        Ok(())
    }

    fn attend(&mut self, layer: &LoadedLayer, step: LayerAttention) -> Result<()> {
        let config = &self.sizes.config;
        let shape = TokenHeads {
            position: step.position,
            tokens: step.tokens,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_elements: config.head_elements,
        };
        let halves = config.family.rotates_halves();
        let sinks = step.sinks.map(|at| numbers(layer, at, config.heads.into()));
        let sinks = sinks.transpose()?;
        let rule = AttentionRule {
            scale: self.sizes.scale(),
            window: step.window,
            sinks: sinks.as_deref(),
        };
        let tokens = step.tokens as usize;
        let taken = tokens * (config.heads * config.head_elements) as usize;
        let cached = tokens * self.sizes.cached() as usize;
        let (mut queries, keys, values) = (
            self.take(VectorBuffer::Queries),
            self.take(VectorBuffer::Keys),
            self.take(VectorBuffer::Values),
        );
        let mut attended = self.take(VectorBuffer::Attended);
        let (key_cache, value_cache) = &mut self.cache[step.block];
        let of_tokens = &mut queries[..taken];
        let given = (&keys[..cached], &values[..cached]);
        let angles = (&self.angles[..], halves);
        by_cpu::rope(shape, angles, of_tokens, given, (key_cache, value_cache))?;
        let y = &mut attended[..taken];
        by_cpu::attention(shape, of_tokens, (key_cache, value_cache), rule, y)?;
        self.put(VectorBuffer::Queries, queries);
        self.put(VectorBuffer::Keys, keys);
        self.put(VectorBuffer::Values, values);
        self.put(VectorBuffer::Attended, attended);
        Ok(())
    }

    fn activate(&mut self, tokens: u32) -> Result<()> {
        let mut gate = self.take(VectorBuffer::Gate);
        let up = self.vectors(VectorBuffer::Up, 0, tokens);
        reference::silu_mul(&mut gate[..up.len()], up);
        self.put(VectorBuffer::Gate, gate);
        Ok(())
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
        let logits = self.vectors(VectorBuffer::Router, 0, tokens);
        let x = self.vectors(VectorBuffer::Normed, 0, tokens);
        let shape = experts.shape();
        let of_experts = |at, rows: u32| {
            let count = u64::from(shape.experts) * u64::from(rows);
            numbers(layer, at, count)
        };
        let biases = match biases {
            None => None,
            Some([gate, up, down]) => Some([
                of_experts(gate, shape.hidden)?,
                of_experts(up, shape.hidden)?,
                of_experts(down, shape.width)?,
            ]),
        };
        let biases = biases
            .as_ref()
            .map(|[gate, up, down]| ExpertBiases { gate, up, down });
        let y = experts.compute(block as u32, logits, x, biases)?;
        let hidden = &mut self.buffers[VectorBuffer::Hidden as usize];
        hidden.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
        Ok(())
    }

    fn expert_counts(&self) -> Result<Option<ExpertCounts>> {
        Ok(None)
    }

    fn next_token(&mut self, _: &LayerLoader) -> Result<(u32, f32)> {
        let logits = &self.buffers[VectorBuffer::Logits as usize];
        let token = reference::argmax(logits);
        Ok((token, logits[token as usize]))
    }

    fn logits(&mut self) -> Result<Vec<f32>> {
        Ok(self.buffers[VectorBuffer::Logits as usize].clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::ModelConfig;

    #[test]
    fn more_positions_than_memory_holds_are_an_error() {
        let sizes = |layers| BufferSizes {
            config: ModelConfig {
                layers,
                width: 64,
                hidden: 64,
                heads: 2,
                kv_heads: 2,
                head_elements: 256,
                vocabulary: 16,
                ..ModelConfig::default()
            },
            tokens: 64,
            positions: (1 << 24) - 1,
            expert_bytes: 0,
        };
        let error = check_memory(&sizes(1 << 24)).unwrap_err();
        assert_eq!(error.code(), "environment");
        assert!(error.to_string().contains("16777215 positions"), "{error}");
        let few = BufferSizes {
            positions: 16,
            ..sizes(2)
        };
        check_memory(&few).unwrap();
    }
}
