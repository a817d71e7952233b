//! Locations of a model's weights, and the layers in which they are loaded. Layers are ranges of the file and the last
//! matrix comes in chunks as long as a layer, so that a budget of two layers is enough for any model.

use super::config::ModelConfig;
use super::embedding::{EmbeddingExtent, EmbeddingTable};
use crate::experts::{ExpertLayers, ExpertMatrices, ExpertShape, Layer};
use nvme_compute_kernel::experts::MATRICES;
use nvme_formats::StoredFormat;
use nvme_host::catalog::{Dtype, TensorEntry};
use nvme_host::loader::ModelLayers;
use nvme_host::words::shortened;
use nvme_host::{Catalog, Error, Manifest, Result, Store};
use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Tensor of the embeddings.
pub const EMBEDDINGS: &str = "token_embd.weight";
/// Tensor of the norm behind the last layer.
const LAST_NORM: &str = "output_norm.weight";
/// Tensors of a GGUF file begin at multiples of this number of bytes, unless the file says otherwise.
const ALIGNMENT: u64 = 32;

/// A matrix inside of a layer's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightMatrix {
    /// First byte.
    pub at: u64,
    pub stored: StoredFormat,
    pub rows: u32,
    pub columns: u32,
    pub row_bytes: u64,
}

/// The first bytes of the biases of a layer's attention, and of the sinks of its heads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBiases {
    pub query: u64,
    pub key: u64,
    pub value: u64,
    pub output: u64,
    pub sinks: u64,
}

/// The first bytes of the factors of the norms of heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    pub query: u64,
    pub key: u64,
}

/// The first bytes of the biases of a router, and of its experts' matrices: a vector for each expert.
#[derive(Clone, Copy, Debug)]
pub struct RouterBiases {
    pub router: u64,
    pub experts: [u64; MATRICES],
}

/// The matrices of a layer of the model, and the first bytes of its two norms.
#[derive(Clone, Copy, Debug)]
pub struct LayerBlock {
    pub attention_norm: u64,
    pub head_norms: Option<HeadNorms>,
    pub biases: Option<AttentionBiases>,
    pub query: WeightMatrix,
    pub key: WeightMatrix,
    pub value: WeightMatrix,
    pub output: WeightMatrix,
    pub hidden_norm: u64,
    pub second: FeedForward,
}

/// Feed-forward part of a layer, after the second norm.
#[derive(Clone, Copy, Debug)]
pub enum FeedForward {
    Dense {
        gate: WeightMatrix,
        up: WeightMatrix,
        down: WeightMatrix,
    },
    /// Experts, which are not loaded with the layer.
    Experts {
        router: WeightMatrix,
        biases: Option<RouterBiases>,
    },
}

/// Rows of the last matrix, which is as long as many layers.
#[derive(Clone, Copy, Debug)]
pub struct HeadPiece {
    /// The layer of the loader.
    pub layer: usize,
    /// First row of this piece in the matrix.
    pub first_row: u32,
    pub matrix: WeightMatrix,
}

/// All weights of a model.
pub struct ModelWeights {
    pub blocks: Vec<LayerBlock>,
    /// Factors of the norm behind the last layer.
    pub last_norm: Vec<f32>,
    pub head: Vec<HeadPiece>,
    pub embedding: EmbeddingTable,
    pub experts: Option<ExpertLayers>,
}

/// Maps a byte range of the file, by offset and length, to the ranges of the store that hold it, in order.
pub type Places<'a> = &'a dyn Fn(u64, u64) -> Result<Vec<Range<u64>>>;

impl ModelWeights {
    /// # Errors
    /// [`Error::Usage`] for tensors that are missing, or of another shape or type.
    pub fn of(
        config: &ModelConfig,
        catalog: &Catalog,
        store: &Arc<Store>,
        places: Places<'_>,
        manifest: Option<&Manifest>,
    ) -> Result<(Self, ModelLayers)> {
        let used = RefCell::default();
        let file = ModelFile {
            catalog,
            manifest,
            used: &used,
        };
        let (mut layers, mut blocks, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..config.layers {
            let prefix = format!("blk.{index}.");
            let runs = file.runs(&prefix)?;
            blocks.push(block(config, file, &prefix, &runs)?);
            lengths.push(runs.0.iter().map(|run| run.end - run.start).sum());
            layers.push((prefix, runs.0.clone()));
        }
        let embedding = file.alone(EMBEDDINGS, config)?;
        let last = match catalog.get("output.weight") {
            Some(_) => file.alone("output.weight", config)?,
            None => embedding,
        };
        let longest = lengths.into_iter().max();
        let mut head = pieces(&last, longest.unwrap_or(0), blocks.len());
        for piece in &mut head {
            let bytes = piece.matrix.row_bytes * u64::from(piece.matrix.rows);
            let begin = last.at + u64::from(piece.first_row) * last.row_bytes;
            let range = file.cover(begin..begin + bytes);
            piece.matrix.at = begin - range.start;
            layers.push((format!("output.{}", piece.first_row), vec![range]));
        }
        let bytes = embedding.row_bytes * u64::from(embedding.rows);
        let embeddings = places(embedding.at, bytes)?;
        let norm = file.entry(LAST_NORM)?.offset;
        let shape = [u64::from(config.width)];
        file.numbers(LAST_NORM, &shape, &ContiguousRuns::from(norm))?;
        let mut bytes = Vec::new();
        for place in places(norm, u64::from(config.width) * 4)? {
            let begin = bytes.len();
            bytes.resize(begin + (place.end - place.start) as usize, 0);
            let read = store.read_at(place.start, &mut bytes[begin..]);
            read.map_err(|error| error.with_context(LAST_NORM))?;
        }
        file.verify(norm, &bytes)?;
        let last_norm = bytes.as_chunks::<4>().0.iter();
        let weights = Self {
            blocks,
            last_norm: last_norm.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            head,
            embedding: EmbeddingTable {
                store: Arc::clone(store),
                places: EmbeddingExtent::all(embeddings),
                row_bytes: embedding.row_bytes,
                stored: embedding.stored,
            },
            experts: experts(config, file, store, places)?,
        };
        file.check_all_used()?;
        let layers = ModelLayers::of_parts(layers)?;
        let layers = match manifest {
            Some(manifest) => layers.verified_by(manifest, catalog.begin())?,
            None => layers,
        };
        Ok((weights, layers.placed(places)?))
    }

    /// Returns the number of bytes of memory without which the experts of a token do not fit on a GPU.
    pub fn least_for_experts(&self) -> u64 {
        #[cfg(feature = "cuda")]
        if let Some(experts) = &self.experts
            && experts.store.gpu().is_some()
        {
            return experts.slot_bytes() * u64::from(experts.shape().choices);
        }
        0
    }
}

/// Returns the experts of all layers, if the model has them.
fn experts(
    config: &ModelConfig,
    file: ModelFile<'_>,
    store: &Arc<Store>,
    places: Places<'_>,
) -> Result<Option<ExpertLayers>> {
    let Some(mixture) = config.experts else {
        return Ok(None);
    };
    let layer = |index: u32| -> Result<Layer> {
        let placed = |name: &str, rows, columns| {
            let name = format!("blk.{index}.ffn_{name}_exps.weight");
            file.experts(&name, (mixture.count, rows, columns), places)
        };
        Ok([
            placed("gate", config.hidden, config.width)?,
            placed("up", config.hidden, config.width)?,
            placed("down", config.width, config.hidden)?,
        ])
    };
    let shape = ExpertShape {
        width: config.width,
        hidden: config.hidden,
        experts: mixture.count,
        choices: mixture.choices,
        over_all: false,
        activation: config.family.activation(),
    };
    let layers = (0..config.layers).map(layer).collect::<Result<_>>()?;
    Ok(Some(ExpertLayers::new(store, shape, layers)?))
}

/// Returns the last matrix in pieces that are no longer than a layer.
fn pieces(last: &WeightMatrix, longest: u64, first_layer: usize) -> Vec<HeadPiece> {
    let most = (longest / last.row_bytes).min(last.rows.into()).max(1) as u32;
    let firsts = (0..last.rows).step_by(most as usize).enumerate();
    firsts
        .map(|(index, first_row)| HeadPiece {
            layer: first_layer + index,
            first_row,
            matrix: WeightMatrix {
                at: 0,
                rows: most.min(last.rows - first_row),
                ..*last
            },
        })
        .collect()
}

fn block(
    config: &ModelConfig,
    file: ModelFile<'_>,
    prefix: &str,
    runs: &ContiguousRuns,
) -> Result<LayerBlock> {
    let (width, hidden) = (config.width, config.hidden);
    let queries = config.heads * config.head_elements;
    let keys = config.kv_heads * config.head_elements;
    let family = config.family;
    let matrix = |name: &str, rows, columns| {
        file.matrix(&format!("{prefix}{name}.weight"), rows, columns, runs)
    };
    let vector = |name: &str, elements| {
        let shape = [u64::from(elements)];
        file.numbers(&format!("{prefix}{name}"), &shape, runs)
    };
    let norm = |name: &str, elements| vector(&format!("{name}.weight"), elements);
    let biases = match family.has_biases() {
        false => None,
        true => Some(AttentionBiases {
            query: vector("attn_q.bias", queries)?,
            key: vector("attn_k.bias", keys)?,
            value: vector("attn_v.bias", keys)?,
            output: vector("attn_output.bias", width)?,
            sinks: vector("attn_sinks.weight", config.heads)?,
        }),
    };
    let head_norms = match family.has_head_norms() {
        false => None,
        true => Some(HeadNorms {
            query: norm("attn_q_norm", config.head_elements)?,
            key: norm("attn_k_norm", config.head_elements)?,
        }),
    };
    let second = match config.experts {
        None => FeedForward::Dense {
            gate: matrix("ffn_gate", hidden, width)?,
            up: matrix("ffn_up", hidden, width)?,
            down: matrix("ffn_down", width, hidden)?,
        },
        Some(mixture) => FeedForward::Experts {
            router: matrix("ffn_gate_inp", mixture.count, width)?,
            biases: router_biases(config, mixture.count, file, prefix, runs)?,
        },
    };
    Ok(LayerBlock {
        attention_norm: norm("attn_norm", width)?,
        head_norms,
        biases,
        query: matrix("attn_q", queries, width)?,
        key: matrix("attn_k", keys, width)?,
        value: matrix("attn_v", keys, width)?,
        output: matrix("attn_output", width, queries)?,
        hidden_norm: norm(family.second_norm(), width)?,
        second,
    })
}

/// Returns the biases of a layer's router and of its `count` experts, if the family has them.
fn router_biases(
    config: &ModelConfig,
    count: u32,
    file: ModelFile<'_>,
    prefix: &str,
    runs: &ContiguousRuns,
) -> Result<Option<RouterBiases>> {
    if !config.family.has_biases() {
        return Ok(None);
    }
    let of_experts = |name: &str, rows: u32| {
        let shape = [count, rows].map(u64::from);
        file.numbers(&format!("{prefix}ffn_{name}_exps.bias"), &shape, runs)
    };
    let router = format!("{prefix}ffn_gate_inp.bias");
    Ok(Some(RouterBiases {
        router: file.numbers(&router, &[count.into()], runs)?,
        experts: [
            of_experts("gate", config.hidden)?,
            of_experts("up", config.hidden)?,
            of_experts("down", config.width)?,
        ],
    }))
}

/// Ranges of the file that are loaded into contiguous memory.
struct ContiguousRuns(Vec<Range<u64>>);

impl From<u64> for ContiguousRuns {
    /// Describes the file from that byte on.
    fn from(begin: u64) -> Self {
        let all = begin..u64::MAX;
        Self(vec![all])
    }
}

impl ContiguousRuns {
    /// Returns the position of byte `offset` of the file after loading.
    fn at(&self, offset: u64) -> Option<u64> {
        let mut before = 0;
        for run in &self.0 {
            if run.contains(&offset) {
                return Some(before + (offset - run.start));
            }
            before += run.end - run.start;
        }
        None
    }
}

#[derive(Clone, Copy)]
struct ModelFile<'a> {
    catalog: &'a Catalog,
    manifest: Option<&'a Manifest>,
    /// Names of the tensors that the model uses.
    used: &'a RefCell<HashSet<&'a str>>,
}

impl<'a> ModelFile<'a> {
    fn entry(self, name: &str) -> Result<&'a TensorEntry> {
        let entry = self.catalog.get(name);
        let entry = entry.ok_or_else(|| refused(format!("there is no {name}")))?;
        self.used.borrow_mut().insert(&entry.name);
        Ok(entry)
    }

    /// Refuses tensors that no code here uses: an ignored bias, or ignored factors of the angles of positions, would
    /// silently lead to other tokens.
    fn check_all_used(self) -> Result<()> {
        let used = self.used.borrow();
        let mut entries = self.catalog.entries().iter();
        match entries.find(|entry| !used.contains(entry.name.as_str())) {
            None => Ok(()),
            Some(entry) => Err(refused(format!(
                "the tensor {} is not known here and would change the result",
                shortened(&entry.name)
            ))),
        }
    }

    /// Extends the range to whole chunks of the manifest.
    fn cover(self, range: Range<u64>) -> Range<u64> {
        let begin = self.catalog.begin();
        self.manifest.map_or(range.clone(), |manifest| {
            let whole = manifest.cover(range.start - begin..range.end - begin);
            whole.start + begin..whole.end + begin
        })
    }

    /// Compares the tensor at `offset`, whose content is `bytes`, with the manifest.
    fn verify(self, offset: u64, bytes: &[u8]) -> Result<()> {
        let manifest = self.manifest.into_iter();
        let mut verified = manifest.map(|one| one.verify(offset - self.catalog.begin(), bytes));
        verified.next().unwrap_or(Ok(()))
    }

    /// Returns the tensors with a prefix, but for experts.
    fn runs(self, prefix: &str) -> Result<ContiguousRuns> {
        let mut mine: Vec<&TensorEntry> = self.catalog.with_prefix(prefix).collect();
        mine.sort_by_key(|entry| (entry.offset, entry.bytes));
        let (mut runs, mut is_cut): (Vec<Range<u64>>, _) = (Vec::new(), true);
        for entry in mine {
            let end = entry.offset + entry.bytes;
            match runs.last_mut() {
                Some(run) if entry.name.ends_with("_exps.weight") => {
                    // The end is rounded up, so that the next run keeps the alignment that it has in the file.
                    if !is_cut {
                        run.end = run.end.next_multiple_of(ALIGNMENT).min(entry.offset);
                    }
                    is_cut = true;
                }
                None if entry.name.ends_with("_exps.weight") => {}
                Some(run) if !is_cut => run.end = run.end.max(end),
                _ => {
                    runs.push(entry.offset..end);
                    is_cut = false;
                }
            }
        }
        let runs: Vec<_> = runs.into_iter().map(|run| self.cover(run)).collect();
        match runs.is_empty() {
            false => Ok(ContiguousRuns(runs)),
            true => Err(refused(format!("there is no {prefix}*"))),
        }
    }

    /// Returns the matrix `name`, with its position after loading by `runs`.
    fn matrix(
        self,
        name: &str,
        rows: u32,
        columns: u32,
        runs: &ContiguousRuns,
    ) -> Result<WeightMatrix> {
        let entry = self.entry(name)?;
        let stored = stored(entry.dtype)
            .ok_or_else(|| refused(format!("{name} is of {}", entry.dtype.name())))?;
        let at = runs.at(entry.offset).filter(|at| at.is_multiple_of(2));
        let is_so = entry.shape == [u64::from(rows), u64::from(columns)];
        let row_bytes = stored.row_bytes(columns).filter(|_| is_so);
        let (Some(row_bytes), Some(at)) = (row_bytes, at) else {
            return Err(refused(format!(
                "{name} has the shape {:?}, not {rows} times {columns}",
                entry.shape
            )));
        };
        Ok(WeightMatrix {
            at,
            stored,
            rows,
            columns,
            row_bytes,
        })
    }

    /// Returns the matrices `name` of all experts.
    fn experts(
        self,
        name: &str,
        (count, rows, columns): (u32, u32, u32),
        places: Places<'_>,
    ) -> Result<ExpertMatrices> {
        let entry = self.entry(name)?;
        let stored = stored(entry.dtype)
            .ok_or_else(|| refused(format!("{name} is of {}", entry.dtype.name())))?;
        if entry.shape != [count, rows, columns].map(u64::from) {
            return Err(refused(format!(
                "{name} has the shape {:?}, not {count} times {rows} times {columns}",
                entry.shape
            )));
        }
        match &places(entry.offset, entry.bytes)?[..] {
            [place] => Ok(ExpertMatrices {
                offset: place.start,
                stored,
            }),
            places => Err(Error::usage(
                format!("{name} lies in {} places of the drive", places.len()),
                "put the file into one extent, as `nvme-gpu pack` and `import` do",
            )),
        }
    }

    /// Returns a matrix with a row for each token, which is loaded separately; its positions are those of the
    /// file.
    fn alone(self, name: &str, config: &ModelConfig) -> Result<WeightMatrix> {
        let at = self.entry(name)?.offset;
        let matrix = self.matrix(
            name,
            config.vocabulary,
            config.width,
            &ContiguousRuns::from(at),
        )?;
        Ok(WeightMatrix { at, ..matrix })
    }

    /// Returns the first byte of a tensor of `f32`, counted through `runs`.
    fn numbers(self, name: &str, shape: &[u64], runs: &ContiguousRuns) -> Result<u64> {
        let entry = self.entry(name)?;
        let is_so = entry.dtype == Dtype::F32 && entry.shape == shape;
        let at = runs
            .at(entry.offset)
            .filter(|at| is_so && at.is_multiple_of(4));
        at.ok_or_else(|| {
            let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
            refused(format!(
                "{name} is no tensor of {} float32",
                shape.join(" x ")
            ))
        })
    }
}

fn refused(cause: String) -> Error {
    Error::usage(
        format!("not a model that is run here: {cause}"),
        "use a GGUF file with matrices of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K or MXFP4",
    )
}

fn stored(dtype: Dtype) -> Option<StoredFormat> {
    Some(match dtype {
        Dtype::F32 => StoredFormat::F32,
        Dtype::F16 => StoredFormat::F16,
        Dtype::Bf16 => StoredFormat::Bf16,
        Dtype::Q4_0 => StoredFormat::Q4_0,
        Dtype::Q4_1 => StoredFormat::Q4_1,
        Dtype::Q8_0 => StoredFormat::Q8_0,
        Dtype::Q4K => StoredFormat::Q4K,
        Dtype::Q6K => StoredFormat::Q6K,
        Dtype::Mxfp4 => StoredFormat::Mxfp4,
        _ => return None,
    })
}
