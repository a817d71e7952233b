//! Writer of GGUF files of models that are run here: their tensors, their layout, and the header before them.

use crate::llama::{ModelConfig, ModelFamily};
use crate::tokenizer::sign;
use nvme_formats::StoredFormat;
use std::io::{self, Write};

/// Tensors begin at multiples of this number of bytes.
const ALIGNMENT: u64 = 32;

/// The sizes of a model, and how its matrices are stored.
#[derive(Clone, Copy)]
pub struct GgufModel<'a> {
    pub config: &'a ModelConfig,
    /// Format of the matrices, except those of `stored_head`.
    pub stored: StoredFormat,
    /// Embeddings, which are the last matrix, too; and the matrices of attention in gpt-oss.
    pub stored_head: StoredFormat,
}

/// A tensor to be written: name, shape in GGUF's order (the fastest first), and its stored format.
pub struct GgufTensor {
    pub name: String,
    pub shape: Vec<u64>,
    pub stored: StoredFormat,
}

impl GgufTensor {
    pub fn bytes(&self) -> u64 {
        let columns = self.shape[0] as u32;
        let rows: u64 = self.shape[1..].iter().product();
        match self.shape.len() {
            1 => u64::from(columns) * 4,
            _ => self.stored.row_bytes(columns).unwrap_or(0) * rows,
        }
    }
}

impl GgufModel<'_> {
    /// Writes the file, of version 3. `fill` writes each tensor's bytes.
    ///
    /// # Errors
    /// The errors of `out` and `fill`; `InvalidInput` for rows that end inside a block.
    pub fn write<W: Write>(
        &self,
        out: &mut W,
        mut fill: impl FnMut(&GgufTensor, &mut W) -> io::Result<()>,
    ) -> io::Result<()> {
        let tensors = self.tensors();
        out.write_all(&self.directory(&tensors)?)?;
        for tensor in &tensors {
            fill(tensor, out)?;
            let bytes = tensor.bytes();
            let padding = bytes.next_multiple_of(ALIGNMENT) - bytes;
            out.write_all(&vec![0; padding as usize])?;
        }
        out.flush()
    }

    /// Returns the bytes of the file before the tensors' data.
    fn directory(&self, tensors: &[GgufTensor]) -> io::Result<Vec<u8>> {
        let mut head = self.head(tensors.len());
        let mut offset = 0u64;
        for tensor in tensors {
            if tensor.stored.row_bytes(tensor.shape[0] as u32).is_none() && tensor.shape.len() > 1 {
                let why = format!("{}: rows of {} elements", tensor.name, tensor.shape[0]);
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
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
        Ok(head)
    }

    fn tensors(&self) -> Vec<GgufTensor> {
        let config = self.config;
        let width = u64::from(config.width);
        let embedding = GgufTensor {
            name: "token_embd.weight".to_owned(),
            shape: vec![width, config.vocabulary.into()],
            stored: self.stored_head,
        };
        let mut tensors = vec![embedding];
        for layer in 0..config.layers {
            self.layer(layer, &mut tensors);
        }
        tensors.push(vector("output_norm.weight".to_owned(), width));
        tensors
    }

    /// Appends the tensors of a layer: experts are interleaved with the others, as llama.cpp writes them.
    pub(crate) fn layer(&self, layer: u32, tensors: &mut Vec<GgufTensor>) {
        let (config, family) = (self.config, self.config.family);
        let (width, hidden) = (u64::from(config.width), u64::from(config.hidden));
        let heads = u64::from(config.heads) * u64::from(config.head_elements);
        let keys = u64::from(config.kv_heads) * u64::from(config.head_elements);
        let name = |what: &str| format!("blk.{layer}.{what}");
        let norm = |what: &str, elements| vector(name(&format!("{what}.weight")), elements);
        let matrix = |what: &str, columns, rows, stored| GgufTensor {
            name: name(&format!("{what}.weight")),
            shape: vec![columns, rows],
            stored,
        };
        tensors.push(norm("attn_norm", width));
        tensors.push(norm(family.second_norm(), width));
        if family.has_head_norms() {
            tensors.push(norm("attn_q_norm", config.head_elements.into()));
            tensors.push(norm("attn_k_norm", config.head_elements.into()));
        }
        let count = config.experts.map_or(0, |of| u64::from(of.count));
        if family.has_biases() {
            for (what, elements) in [
                ("attn_q.bias", heads),
                ("attn_k.bias", keys),
                ("attn_v.bias", keys),
                ("attn_output.bias", width),
                ("attn_sinks.weight", config.heads.into()),
                ("ffn_gate_inp.bias", count),
            ] {
                tensors.push(vector(name(what), elements));
            }
            for (what, rows) in [("gate", hidden), ("up", hidden), ("down", width)] {
                tensors.push(GgufTensor {
                    name: name(&format!("ffn_{what}_exps.bias")),
                    shape: vec![rows, count],
                    stored: StoredFormat::F32,
                });
            }
        }
        let experts = |what: &str, columns, rows| GgufTensor {
            name: name(&format!("{what}.weight")),
            shape: vec![columns, rows, count],
            stored: self.stored,
        };
        if config.experts.is_some() {
            tensors.push(experts("ffn_down_exps", hidden, width));
            tensors.push(experts("ffn_gate_exps", width, hidden));
            tensors.push(matrix("ffn_gate_inp", width, count, StoredFormat::F32));
        }
        let attention = match family {
            ModelFamily::GptOss => self.stored_head,
            _ => self.stored,
        };
        for (what, columns, rows) in [
            ("attn_q", width, heads),
            ("attn_k", width, keys),
            ("attn_v", width, keys),
            ("attn_output", heads, width),
        ] {
            tensors.push(matrix(what, columns, rows, attention));
        }
        if config.experts.is_some() {
            tensors.push(experts("ffn_up_exps", width, hidden));
            return;
        }
        for (what, columns, rows) in [
            ("ffn_gate", width, hidden),
            ("ffn_up", width, hidden),
            ("ffn_down", hidden, width),
        ] {
            tensors.push(matrix(what, columns, rows, self.stored));
        }
    }

    /// Returns the bytes of the file before the tensors' descriptions.
    fn head(&self, tensors: usize) -> Vec<u8> {
        let (config, family) = (self.config, self.config.family);
        let name = |key: &str| format!("{}.{key}", family.name());
        let mut keys = GgufKeys::default();
        keys.text("general.architecture", family.name());
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
            keys.u32(&name(key), value);
        }
        if let Some(mixture) = config.experts {
            keys.u32(&name("expert_count"), mixture.count);
            keys.u32(&name("expert_used_count"), mixture.choices);
        }
        if family.has_experts_only() {
            keys.u32(&name("expert_feed_forward_length"), config.hidden);
        }
        if config.window != 0 {
            keys.u32(&name("attention.sliding_window"), config.window);
        }
        if let Some(yarn) = &config.yarn {
            keys.text(&name("rope.scaling.type"), "yarn");
            keys.f32(&name("rope.scaling.factor"), yarn.factor as f32);
            let positions = yarn.original_positions;
            keys.u32(&name("rope.scaling.original_context_length"), positions);
            for (key, turns, usual) in [
                ("rope.scaling.yarn_beta_fast", yarn.fast_turns, 32.0),
                ("rope.scaling.yarn_beta_slow", yarn.slow_turns, 1.0),
            ] {
                if turns != usual {
                    keys.f32(&name(key), turns as f32);
                }
            }
        }
        keys.f32(&name("attention.layer_norm_rms_epsilon"), config.epsilon);
        keys.f32(&name("rope.freq_base"), config.rope_base as f32);
        keys.text("tokenizer.ggml.model", "gpt2");
        keys.text("tokenizer.ggml.pre", "gpt-2");
        let bytes = (0..=u8::MAX).map(|byte| sign(byte).to_string());
        let others = (256..config.vocabulary).map(|token| format!("<{token}>"));
        let tokens = bytes.chain(others).take(config.vocabulary as usize);
        keys.texts("tokenizer.ggml.tokens", &tokens.collect::<Vec<_>>());
        keys.texts("tokenizer.ggml.merges", &[]);
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors as u64).to_le_bytes());
        head.extend(keys.count.to_le_bytes());
        head.extend(keys.bytes);
        head
    }
}

/// Returns the description of a vector of `f32`.
fn vector(name: String, elements: u64) -> GgufTensor {
    GgufTensor {
        name,
        shape: vec![elements],
        stored: StoredFormat::F32,
    }
}

#[derive(Default)]
struct GgufKeys {
    count: u64,
    bytes: Vec<u8>,
}

impl GgufKeys {
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
