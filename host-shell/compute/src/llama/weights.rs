//! Where the weights of a model lie, and in which layers they are loaded.

use super::config::Config;
use nvme_formats::Stored;
use nvme_host::catalog::{Dtype, Entry};
use nvme_host::loader::Layers;
use nvme_host::{Catalog, Error, Result, Store, Table};
use std::ops::Range;

/// A matrix inside of a layer's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// First byte.
    pub at: u64,
    pub stored: Stored,
    pub rows: u32,
    pub columns: u32,
    pub row_bytes: u64,
}

/// The matrices of a layer of the model, and the first bytes of its two norms.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub attention_norm: u64,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub output: Matrix,
    pub hidden_norm: u64,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// Rows of the last matrix, which is as long as many layers.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The layer of the loader.
    pub layer: usize,
    /// Its first row.
    pub first_row: u32,
    pub matrix: Matrix,
}

/// The embeddings, read row by row.
#[derive(Clone)]
pub struct Embedding {
    pub table: Table,
    pub stored: Stored,
}

/// All of a model.
pub struct Weights {
    pub blocks: Vec<Block>,
    /// Factors of the norm behind the last layer.
    pub last_norm: Vec<f32>,
    pub head: Vec<Piece>,
    pub embedding: Embedding,
}

/// Of the file to that of the store.
type Place<'a> = &'a dyn Fn(u64, u64) -> Result<u64>;

impl Weights {
    /// # Errors
    /// [`Error::Usage`] for tensors that are missing, or of another shape or type.
    pub fn of(
        config: &Config,
        catalog: &Catalog,
        store: &Store,
        place: Place<'_>,
    ) -> Result<(Self, Layers)> {
        let file = File { catalog };
        let (mut ranges, mut blocks) = (Vec::new(), Vec::new());
        for index in 0..config.layers {
            let prefix = format!("blk.{index}.");
            let range = file.range(&prefix)?;
            blocks.push(block(config, file, &prefix, range.start)?);
            let bytes = range.end - range.start;
            let first = place(range.start, bytes)?;
            ranges.push((prefix, first..first + bytes));
        }
        let embedding = file.matrix("token_embd.weight", config.vocabulary, config.width, 0)?;
        let last = match catalog.get("output.weight") {
            Some(_) => file.matrix("output.weight", config.vocabulary, config.width, 0)?,
            None => embedding,
        };
        let longest = ranges
            .iter()
            .map(|(_, range)| range.end - range.start)
            .max();
        let head = pieces(&last, longest.unwrap_or(0), blocks.len());
        for piece in &head {
            let bytes = piece.matrix.row_bytes * u64::from(piece.matrix.rows);
            let begin = last.at + u64::from(piece.first_row) * last.row_bytes;
            let first = place(begin, bytes)?;
            let name = format!("output.{}", piece.first_row);
            ranges.push((name, first..first + bytes));
        }
        let bytes = embedding.row_bytes * u64::from(embedding.rows);
        let table = store.table(
            place(embedding.at, bytes)?,
            embedding.rows.into(),
            embedding.row_bytes,
        )?;
        let norm = file.vector("output_norm.weight", config.width, 0)?;
        let mut bytes = vec![0; config.width as usize * 4];
        store.read_at(place(norm, bytes.len() as u64)?, &mut bytes)?;
        let last_norm = bytes.as_chunks::<4>().0.iter();
        let weights = Self {
            blocks,
            last_norm: last_norm.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            head,
            embedding: Embedding {
                table,
                stored: embedding.stored,
            },
        };
        Ok((weights, Layers::of_ranges(ranges)?))
    }
}

/// The last matrix in pieces that are no longer than a layer.
fn pieces(last: &Matrix, longest: u64, first_layer: usize) -> Vec<Piece> {
    let most = (longest / last.row_bytes).max(1).min(last.rows.into()) as u32;
    let firsts = (0..last.rows).step_by(most as usize).enumerate();
    firsts
        .map(|(index, first_row)| Piece {
            layer: first_layer + index,
            first_row,
            matrix: Matrix {
                at: 0,
                rows: most.min(last.rows - first_row),
                ..*last
            },
        })
        .collect()
}

fn block(config: &Config, file: File<'_>, prefix: &str, begin: u64) -> Result<Block> {
    let (width, hidden) = (config.width, config.hidden);
    let queries = config.heads * config.head_elements;
    let keys = config.kv_heads * config.head_elements;
    let matrix = |name: &str, rows, columns| {
        file.matrix(&format!("{prefix}{name}.weight"), rows, columns, begin)
    };
    let vector = |name: &str| file.vector(&format!("{prefix}{name}.weight"), width, begin);
    Ok(Block {
        attention_norm: vector("attn_norm")?,
        query: matrix("attn_q", queries, width)?,
        key: matrix("attn_k", keys, width)?,
        value: matrix("attn_v", keys, width)?,
        output: matrix("attn_output", width, queries)?,
        hidden_norm: vector("ffn_norm")?,
        gate: matrix("ffn_gate", hidden, width)?,
        up: matrix("ffn_up", hidden, width)?,
        down: matrix("ffn_down", width, hidden)?,
    })
}

#[derive(Clone, Copy)]
struct File<'a> {
    catalog: &'a Catalog,
}

impl<'a> File<'a> {
    fn entry(self, name: &str) -> Result<&'a Entry> {
        let entry = self.catalog.get(name);
        entry.ok_or_else(|| refused(format!("there is no {name}")))
    }

    /// From the first byte of the tensors with a prefix to behind their last.
    fn range(self, prefix: &str) -> Result<Range<u64>> {
        let mine = self.catalog.entries().iter();
        let mine = mine.filter(|entry| entry.name.starts_with(prefix));
        let (first, end) = mine.fold((u64::MAX, 0), |(first, end), entry| {
            (first.min(entry.offset), end.max(entry.offset + entry.bytes))
        });
        match first < end {
            true => Ok(first..end),
            false => Err(refused(format!("there is no {prefix}*"))),
        }
    }

    /// The matrix `name`, whose first byte is counted from `begin` on.
    fn matrix(self, name: &str, rows: u32, columns: u32, begin: u64) -> Result<Matrix> {
        let entry = self.entry(name)?;
        let stored = stored(entry.dtype)
            .ok_or_else(|| refused(format!("{name} is of {}", entry.dtype.name())))?;
        let row_bytes = stored.row_bytes(columns);
        let is_so = entry.shape == [u64::from(rows), u64::from(columns)];
        let row_bytes = row_bytes.filter(|_| is_so && (entry.offset - begin) % 2 == 0);
        let row_bytes = row_bytes.ok_or_else(|| {
            refused(format!(
                "{name} has the shape {:?}, not {rows} times {columns}",
                entry.shape
            ))
        })?;
        Ok(Matrix {
            at: entry.offset - begin,
            stored,
            rows,
            columns,
            row_bytes,
        })
    }

    /// The first byte of a vector of `f32`, counted from `begin` on.
    fn vector(self, name: &str, elements: u32, begin: u64) -> Result<u64> {
        let entry = self.entry(name)?;
        let is_so = entry.dtype == Dtype::F32 && entry.shape == [u64::from(elements)];
        match is_so && (entry.offset - begin) % 4 == 0 {
            true => Ok(entry.offset - begin),
            false => Err(refused(format!(
                "{name} is no vector of {elements} float32"
            ))),
        }
    }
}

fn refused(cause: String) -> Error {
    Error::usage(
        format!("not a model that is run here: {cause}"),
        "use a GGUF file with matrices of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K",
    )
}

fn stored(dtype: Dtype) -> Option<Stored> {
    Some(match dtype {
        Dtype::F32 => Stored::F32,
        Dtype::F16 => Stored::F16,
        Dtype::Bf16 => Stored::Bf16,
        Dtype::Q4_0 => Stored::Q4_0,
        Dtype::Q4_1 => Stored::Q4_1,
        Dtype::Q8_0 => Stored::Q8_0,
        Dtype::Q4K => Stored::Q4K,
        Dtype::Q6K => Stored::Q6K,
        _ => return None,
    })
}
