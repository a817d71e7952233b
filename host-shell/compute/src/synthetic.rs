//! Models of random weights, for tests and measurements: a GGUF file of any size whose text means nothing.

use crate::llama::{Config, Mixture};
use crate::tokenizer::sign;
pub use nvme_formats::Stored;
use nvme_formats::{bf16_of_f32, f16_of_f32};
use nvme_units::SplitMix;
use rayon::prelude::*;
use std::io::{self, Write};

/// Tensors begin at multiples of this.
const ALIGNMENT: u64 = 32;
/// Bytes of random weights that a thread makes at a time.
const PIECE: u64 = 1 << 20;
/// Pieces that are made before the first of them is written.
const AT_ONCE: usize = 64;

/// A model to be written.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Its sizes.
    pub config: Config,
    /// How its matrices are stored.
    pub stored: Stored,
    /// How its embeddings and the last matrix are stored.
    pub stored_head: Stored,
    /// Other weights for another number.
    pub seed: u64,
}

/// A tensor to be written: name, shape as GGUF has it (the fastest first), and how it is stored.
struct Tensor {
    name: String,
    shape: Vec<u64>,
    stored: Stored,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        let columns = self.shape[0] as u32;
        let rows: u64 = self.shape[1..].iter().product();
        match self.shape.len() {
            1 => u64::from(columns) * 4,
            _ => self.stored.row_bytes(columns).unwrap_or(0) * rows,
        }
    }
}

impl Synthetic {
    /// A model of 14 MB with 8 experts a layer, of 4 MB without.
    pub fn small(experts: Option<Mixture>) -> Self {
        Self {
            config: Config {
                layers: 4,
                width: 256,
                hidden: 512,
                heads: 8,
                kv_heads: 2,
                head_elements: 32,
                vocabulary: 512,
                context: 256,
                epsilon: 1e-5,
                rope_base: 10_000.0,
                experts,
            },
            stored: Stored::Q8_0,
            stored_head: Stored::Q8_0,
            seed: 11,
        }
    }

    /// Writes it as a GGUF file of version 3; `progress` hears of the bytes.
    ///
    /// # Errors
    /// Those of `out`; `InvalidInput` for rows that end inside a block.
    pub fn write(&self, out: &mut impl Write, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let tensors = self.tensors();
        for tensor in &tensors {
            if tensor.stored.row_bytes(tensor.shape[0] as u32).is_none() && tensor.shape.len() > 1 {
                let why = format!("{}: rows of {} elements", tensor.name, tensor.shape[0]);
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
        }
        let mut head = self.head(tensors.len());
        let mut offset = 0u64;
        for tensor in &tensors {
            text(&mut head, &tensor.name);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            for length in &tensor.shape {
                head.extend(length.to_le_bytes());
            }
            head.extend((tensor.stored as u32).to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
        out.write_all(&head)?;
        let mut random = SplitMix::new(self.seed);
        for tensor in &tensors {
            let (bytes, is_vector) = (tensor.bytes(), tensor.shape.len() == 1);
            let (_, block) = tensor.stored.block();
            let most = PIECE / u64::from(block) * u64::from(block);
            let pieces: Vec<(u64, u64)> = (0..bytes)
                .step_by(most as usize)
                .map(|at| (random.next_word(), most.min(bytes - at)))
                .collect();
            for some in pieces.chunks(AT_ONCE) {
                let made = some.par_iter().map(|(seed, len)| {
                    let mut piece = vec![0; *len as usize];
                    match is_vector {
                        true => piece.as_chunks_mut::<4>().0.fill(1f32.to_le_bytes()),
                        false => fill_weights(&mut SplitMix::new(*seed), tensor.stored, &mut piece),
                    }
                    piece
                });
                for piece in made.collect::<Vec<_>>() {
                    out.write_all(&piece)?;
                    progress(piece.len() as u64);
                }
            }
            let padding = bytes.next_multiple_of(ALIGNMENT) - bytes;
            out.write_all(&vec![0; padding as usize])?;
        }
        out.flush()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let config = &self.config;
        let (width, hidden) = (u64::from(config.width), u64::from(config.hidden));
        let heads = u64::from(config.heads) * u64::from(config.head_elements);
        let keys = u64::from(config.kv_heads) * u64::from(config.head_elements);
        let matrix = |name: String, columns, rows, stored| Tensor {
            name,
            shape: vec![columns, rows],
            stored,
        };
        let vector = |name: String| Tensor {
            name,
            shape: vec![width],
            stored: Stored::F32,
        };
        let mut tensors = vec![matrix(
            "token_embd.weight".to_owned(),
            width,
            config.vocabulary.into(),
            self.stored_head,
        )];
        for layer in 0..config.layers {
            let name = |what: &str| format!("blk.{layer}.{what}.weight");
            tensors.push(vector(name("attn_norm")));
            tensors.push(vector(name("ffn_norm")));
            let experts = |what: &str, columns, rows| Tensor {
                name: name(what),
                shape: vec![
                    columns,
                    rows,
                    config.experts.map_or(0, |of| of.count.into()),
                ],
                stored: self.stored,
            };
            // Between the others, as in files of others.
            if let Some(mixture) = config.experts {
                tensors.push(experts("ffn_down_exps", hidden, width));
                tensors.push(experts("ffn_gate_exps", width, hidden));
                let (router, count) = (name("ffn_gate_inp"), mixture.count.into());
                tensors.push(matrix(router, width, count, Stored::F32));
            }
            for (what, columns, rows) in [
                ("attn_q", width, heads),
                ("attn_k", width, keys),
                ("attn_v", width, keys),
                ("attn_output", heads, width),
            ] {
                tensors.push(matrix(name(what), columns, rows, self.stored));
            }
            if config.experts.is_some() {
                tensors.push(experts("ffn_up_exps", width, hidden));
                continue;
            }
            for (what, columns, rows) in [
                ("ffn_gate", width, hidden),
                ("ffn_up", width, hidden),
                ("ffn_down", hidden, width),
            ] {
                tensors.push(matrix(name(what), columns, rows, self.stored));
            }
        }
        tensors.push(vector("output_norm.weight".to_owned()));
        tensors
    }

    /// What comes before the tensors' names.
    fn head(&self, tensors: usize) -> Vec<u8> {
        let config = &self.config;
        let mut keys = Keys::default();
        keys.text("general.architecture", "llama");
        for (key, value) in [
            ("block_count", config.layers),
            ("context_length", config.context),
            ("embedding_length", config.width),
            ("feed_forward_length", config.hidden),
            ("attention.head_count", config.heads),
            ("attention.head_count_kv", config.kv_heads),
            ("attention.key_length", config.head_elements),
            ("attention.value_length", config.head_elements),
            ("rope.dimension_count", config.head_elements),
        ] {
            keys.u32(&format!("llama.{key}"), value);
        }
        if let Some(mixture) = config.experts {
            keys.u32("llama.expert_count", mixture.count);
            keys.u32("llama.expert_used_count", mixture.choices);
        }
        keys.f32("llama.attention.layer_norm_rms_epsilon", config.epsilon);
        keys.f32("llama.rope.freq_base", config.rope_base as f32);
        keys.text("tokenizer.ggml.model", "gpt2");
        let bytes = (0..=u8::MAX).map(|byte| sign(byte).to_string());
        let others = (256..config.vocabulary).map(|token| format!("<{token}>"));
        let tokens = bytes.chain(others).take(config.vocabulary as usize);
        keys.texts("tokenizer.ggml.tokens", &tokens.collect::<Vec<_>>());
        // A merge whose result is no token would be found by no text of single characters.
        keys.texts("tokenizer.ggml.merges", &["<2 56>".to_owned()]);
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors as u64).to_le_bytes());
        head.extend(keys.count.to_le_bytes());
        head.extend(keys.bytes);
        head
    }
}

/// The keys of a GGUF file.
#[derive(Default)]
struct Keys {
    count: u64,
    bytes: Vec<u8>,
}

impl Keys {
    fn key(&mut self, name: &str, kind: u32) {
        self.count += 1;
        text(&mut self.bytes, name);
        self.bytes.extend(kind.to_le_bytes());
    }

    fn u32(&mut self, name: &str, value: u32) {
        self.key(name, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn f32(&mut self, name: &str, value: f32) {
        self.key(name, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    fn text(&mut self, name: &str, value: &str) {
        self.key(name, 8);
        text(&mut self.bytes, value);
    }

    fn texts(&mut self, name: &str, values: &[String]) {
        self.key(name, 9);
        self.bytes.extend(8u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| text(&mut self.bytes, value));
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Fills `bytes`, which are whole blocks of `stored`, with random weights of about 0.1.
pub fn fill(stored: Stored, seed: u64, bytes: &mut [u8]) {
    fill_weights(&mut SplitMix::new(seed), stored, bytes);
}

/// From -0.1 to 0.1.
fn weight(random: &mut SplitMix) -> f32 {
    (random.next_word() >> 40) as f32 / (1 << 24) as f32 * 0.2 - 0.1
}

/// Fills `bytes` with weights of about that size, as `stored` has them.
fn fill_weights(random: &mut SplitMix, stored: Stored, bytes: &mut [u8]) {
    let half = |value: f32| f16_of_f32(value).to_le_bytes();
    match stored {
        Stored::F32 => {
            let numbers = bytes.as_chunks_mut::<4>().0;
            numbers
                .iter_mut()
                .for_each(|to| *to = weight(random).to_le_bytes());
        }
        Stored::F16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            numbers.iter_mut().for_each(|to| *to = half(weight(random)));
        }
        Stored::Bf16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            let mut number = || bf16_of_f32(weight(random)).to_le_bytes();
            numbers.iter_mut().for_each(|to| *to = number());
        }
        _ => {
            random.fill(bytes);
            // Where scales and least values of a block lie, and what they are.
            let scales: &[(usize, f32)] = match stored {
                Stored::Q4_0 => &[(0, 0.0125)],
                Stored::Q4_1 => &[(0, 0.0133), (2, -0.1)],
                Stored::Q8_0 => &[(0, 0.000_78)],
                Stored::Q4K => &[(0, 0.000_4), (2, 0.003)],
                _ => &[(208, 0.000_05)],
            };
            let (_, block) = stored.block();
            for block in bytes.chunks_exact_mut(block as usize) {
                for (at, value) in scales {
                    block[*at..at + 2].copy_from_slice(&half(*value));
                }
            }
        }
    }
}
