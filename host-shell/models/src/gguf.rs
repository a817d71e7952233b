//! Writer of GGUF files of Llama models: their tensors, their layout, and the header before them.

use crate::llama::ModelConfig;
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
    /// Embeddings, which are the last matrix, too.
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
        let (width, hidden) = (u64::from(config.width), u64::from(config.hidden));
        let heads = u64::from(config.heads) * u64::from(config.head_elements);
        let keys = u64::from(config.kv_heads) * u64::from(config.head_elements);
        let matrix = |name: String, columns, rows, stored| GgufTensor {
            name,
            shape: vec![columns, rows],
            stored,
        };
        let vector = |name: String| GgufTensor {
            name,
            shape: vec![width],
            stored: StoredFormat::F32,
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
            let experts = |what: &str, columns, rows| GgufTensor {
                name: name(what),
                shape: vec![
                    columns,
                    rows,
                    config.experts.map_or(0, |of| of.count.into()),
                ],
                stored: self.stored,
            };
            // Interleaved with the dense tensors, in the order in which llama.cpp writes them.
            if let Some(mixture) = config.experts {
                tensors.push(experts("ffn_down_exps", hidden, width));
                tensors.push(experts("ffn_gate_exps", width, hidden));
                let (router, count) = (name("ffn_gate_inp"), mixture.count.into());
                tensors.push(matrix(router, width, count, StoredFormat::F32));
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

    /// Returns the bytes of the file before the tensors' descriptions.
    fn head(&self, tensors: usize) -> Vec<u8> {
        let config = self.config;
        let mut keys = GgufKeys::default();
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
