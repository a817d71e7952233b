//! Checkpoints of Mixtral in the format of Hugging Face (safetensors, a tensor for each matrix of an expert),
//! rewritten as a GGUF file whose tokens are bytes.

use crate::gguf::{GgufModel, GgufTensor};
use crate::llama::{ExpertMixture, ModelConfig};
use nvme_compute_kernel::MOST_HEAD_ELEMENTS;
use nvme_formats::{StoredFormat, f32_of_bf16};
use nvme_host::catalog::{Dtype, TensorEntry};
use nvme_host::files::open_regular;
use nvme_host::{Catalog, Error, Result, Store, StoreOptions};
use serde_json::Value;
use std::io::{self, Write};
use std::path::Path;

/// Writes the checkpoint in `folder` (config.json and model.safetensors) as GGUF. Matrices stay in bf16.
///
/// # Errors
/// [`Error::Usage`] for a configuration other than a Mixtral with a token for each byte, for a tensor that is missing,
/// and for one of another shape or format; the errors of reads and of `out`.
pub fn mixtral(folder: &Path, out: &mut impl Write) -> Result<()> {
    let path = folder.join("config.json");
    let (file, _) = open_regular(&path)?;
    let text = io::read_to_string(file).map_err(Error::file("read", &path))?;
    let config = config_of(&text)?;
    let weights = folder.join("model.safetensors");
    let device = format!("file:{}", weights.display());
    let store = Store::open(&device, &StoreOptions::default())?;
    let catalog = Catalog::of_store(&store, 0)?;
    let model = GgufModel {
        config: &config,
        stored: StoredFormat::Bf16,
        stored_head: StoredFormat::Bf16,
    };
    let source = CheckpointSource {
        store: &store,
        catalog: &catalog,
        config: &config,
    };
    // Before the file is begun: the sizes in config.json say how many tensors are listed in its header.
    source.check(&model)?;
    let mut failed = None;
    let written = model.write(out, |tensor, out| match source.bytes(tensor) {
        Ok(bytes) => out.write_all(&bytes),
        Err(error) => {
            failed = Some(error);
            Err(io::Error::other("a tensor"))
        }
    });
    match (failed, written) {
        (Some(error), _) => Err(error),
        (None, written) => written.map_err(|error| {
            Error::usage(
                format!("the GGUF file could not be written: {error}"),
                "see that there is room for it",
            )
        }),
    }
}

/// Returns the sizes in a `config.json`.
fn config_of(text: &str) -> Result<ModelConfig> {
    let no_mixtral = |why: String| {
        Error::usage(
            format!("config.json does not describe a checkpoint of Mixtral: {why}"),
            "use a checkpoint of Mixtral whose 256 tokens are bytes and whose last matrix is the embeddings'",
        )
    };
    let json: Value = serde_json::from_str(text).map_err(|error| no_mixtral(error.to_string()))?;
    let number = |key: &str| {
        let found = json[key]
            .as_u64()
            .and_then(|number| u32::try_from(number).ok());
        found.ok_or_else(|| no_mixtral(format!("{key} is {}", json[key])))
    };
    let size = |key: &str| match number(key)? {
        0 => Err(no_mixtral(format!("{key} is 0"))),
        size => Ok(size),
    };
    // GGUF stores 32 bits, which may be 0 or infinite where 64 are not.
    let real = |key: &str| {
        let found = json[key].as_f64();
        let found = found.filter(|number| *number > 0.0 && (*number as f32).is_normal());
        found.ok_or_else(|| {
            no_mixtral(format!(
                "{key} is {}, no positive number of 32 bits",
                json[key]
            ))
        })
    };
    for (key, wanted) in [
        ("model_type", Value::from("mixtral")),
        ("vocab_size", Value::from(256)),
        ("tie_word_embeddings", Value::from(true)),
        ("sliding_window", Value::Null),
    ] {
        if json[key] != wanted {
            return Err(no_mixtral(format!("{key} is {}, not {wanted}", json[key])));
        }
    }
    // Keys that may be missing; any other value is another computation.
    for (key, wanted) in [
        ("hidden_act", Value::from("silu")),
        ("attention_bias", Value::from(false)),
        ("rope_scaling", Value::Null),
        ("rope_parameters", Value::Null),
    ] {
        if !json[key].is_null() && json[key] != wanted {
            return Err(no_mixtral(format!("{key} is {}, not {wanted}", json[key])));
        }
    }
    let (heads, kv_heads) = (size("num_attention_heads")?, size("num_key_value_heads")?);
    if !heads.is_multiple_of(kv_heads) {
        return Err(no_mixtral(format!(
            "num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}"
        )));
    }
    let (head_elements, most) = (size("head_dim")?, MOST_HEAD_ELEMENTS);
    if !head_elements.is_multiple_of(2) || head_elements > most {
        return Err(no_mixtral(format!(
            "head_dim is {head_elements}, not an even number from 2 to {most}"
        )));
    }
    let (count, choices) = (size("num_local_experts")?, size("num_experts_per_tok")?);
    if choices > count {
        return Err(no_mixtral(format!(
            "num_experts_per_tok is {choices}, more than num_local_experts, {count}"
        )));
    }
    Ok(ModelConfig {
        layers: size("num_hidden_layers")?,
        width: size("hidden_size")?,
        hidden: size("intermediate_size")?,
        heads,
        kv_heads,
        head_elements,
        vocabulary: size("vocab_size")?,
        context: size("max_position_embeddings")?,
        epsilon: real("rms_norm_eps")? as f32,
        rope_base: real("rope_theta")?,
        experts: Some(ExpertMixture { count, choices }),
        ..ModelConfig::default()
    })
}

struct CheckpointSource<'a> {
    store: &'a Store,
    catalog: &'a Catalog,
    config: &'a ModelConfig,
}

/// Rewriting of the elements of a tensor.
enum TensorRewrite {
    Vector,
    Matrix,
    /// The rows of each head, in another order.
    Heads,
    /// The matrix of this name of each expert, one after another.
    Experts(&'static str),
}

impl CheckpointSource<'_> {
    /// Looks up all tensors of all layers.
    ///
    /// # Errors
    /// [`Error::Usage`] for the first one that is missing, or has another size or format.
    fn check(&self, model: &GgufModel<'_>) -> Result<()> {
        for layer in 0..self.config.layers {
            let mut tensors = Vec::new();
            model.layer(layer, &mut tensors);
            for tensor in &tensors {
                match named(tensor)? {
                    (moe, TensorRewrite::Experts(matrix)) => {
                        for expert in 0..tensor.shape[2] {
                            self.find(&expert_name(&moe, expert, matrix), &tensor.shape[..2])?;
                        }
                    }
                    (name, _) => _ = self.find(&name, &tensor.shape)?,
                }
            }
        }
        Ok(())
    }

    fn bytes(&self, tensor: &GgufTensor) -> Result<Vec<u8>> {
        let (name, rewrite) = named(tensor)?;
        match rewrite {
            TensorRewrite::Vector => self.vector(tensor, &name),
            TensorRewrite::Matrix => self.matrix(tensor, &name),
            TensorRewrite::Heads => self.heads(tensor, &name),
            TensorRewrite::Experts(matrix) => self.experts(tensor, &name, matrix),
        }
    }

    /// Finds a tensor of the checkpoint, which must have elements of bf16 for `shape`.
    fn find(&self, name: &str, shape: &[u64]) -> Result<&TensorEntry> {
        let entry = self.catalog.get(name).ok_or_else(|| unknown(name))?;
        let bytes = shape
            .iter()
            .try_fold(2u64, |all, one| all.checked_mul(*one));
        if entry.dtype != Dtype::Bf16 || Some(entry.bytes) != bytes {
            let wanted = bytes.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
            return Err(Error::usage(
                format!("{name} has {} bytes of {}", entry.bytes, entry.dtype.name()),
                format!("the sizes of the model want {wanted} bytes of bf16"),
            ));
        }
        Ok(entry)
    }

    fn read(&self, name: &str, shape: &[u64]) -> Result<Vec<u8>> {
        let entry = self.find(name, shape)?;
        let mut into = vec![0; entry.bytes as usize];
        self.store.read_at(entry.offset, &mut into)?;
        Ok(into)
    }

    fn matrix(&self, tensor: &GgufTensor, name: &str) -> Result<Vec<u8>> {
        self.read(name, &tensor.shape)
    }

    /// Returns the elements of a vector as bytes of `f32`.
    fn vector(&self, tensor: &GgufTensor, name: &str) -> Result<Vec<u8>> {
        let halves = self.matrix(tensor, name)?;
        let numbers = halves.as_chunks::<2>().0.iter();
        let wide = numbers.map(|half| f32_of_bf16(u16::from_le_bytes(*half)).to_le_bytes());
        Ok(wide.flatten().collect())
    }

    /// Returns the rows of heads. The checkpoint turns element `i` with the one half a head further on, GGUF
    /// with its neighbour.
    fn heads(&self, tensor: &GgufTensor, name: &str) -> Result<Vec<u8>> {
        let rows = self.matrix(tensor, name)?;
        let row_bytes = tensor.shape[0] as usize * 2;
        let half = self.config.head_elements as usize / 2;
        let heads = rows.chunks_exact(row_bytes * half * 2);
        let turned = heads.flat_map(|head| {
            (0..half).flat_map(move |pair| {
                [pair, pair + half].map(|row| &head[row * row_bytes..(row + 1) * row_bytes])
            })
        });
        Ok(turned.flatten().copied().collect())
    }

    /// Reads the matrix of each expert into one array, in order.
    fn experts(&self, tensor: &GgufTensor, moe: &str, matrix: &str) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        for expert in 0..tensor.shape[2] {
            all.extend(self.read(&expert_name(moe, expert, matrix), &tensor.shape[..2])?);
        }
        Ok(all)
    }
}

/// Returns the name in the checkpoint of a tensor of the GGUF file, and how it is rewritten. For experts the name is that
/// of what holds them.
fn named(tensor: &GgufTensor) -> Result<(String, TensorRewrite)> {
    let mut parts = tensor.name.split('.');
    let (first, layer, what) = (parts.next(), parts.next(), parts.next());
    let of_layer = |name: &str| format!("model.layers.{}.{name}", layer.unwrap_or_default());
    Ok(match (first, what) {
        (Some("token_embd"), _) => (
            "model.embed_tokens.weight".to_owned(),
            TensorRewrite::Matrix,
        ),
        (Some("output_norm"), _) => ("model.norm.weight".to_owned(), TensorRewrite::Vector),
        (_, Some(what)) => {
            let (name, rewrite) = match what {
                "attn_norm" => ("input_layernorm.weight", TensorRewrite::Vector),
                "ffn_norm" => ("post_attention_layernorm.weight", TensorRewrite::Vector),
                "attn_q" => ("self_attn.q_proj.weight", TensorRewrite::Heads),
                "attn_k" => ("self_attn.k_proj.weight", TensorRewrite::Heads),
                "attn_v" => ("self_attn.v_proj.weight", TensorRewrite::Matrix),
                "attn_output" => ("self_attn.o_proj.weight", TensorRewrite::Matrix),
                "ffn_gate_inp" => ("block_sparse_moe.gate.weight", TensorRewrite::Vector),
                "ffn_gate_exps" => ("block_sparse_moe", TensorRewrite::Experts("w1")),
                "ffn_down_exps" => ("block_sparse_moe", TensorRewrite::Experts("w2")),
                "ffn_up_exps" => ("block_sparse_moe", TensorRewrite::Experts("w3")),
                _ => return Err(unknown(&tensor.name)),
            };
            (of_layer(name), rewrite)
        }
        _ => return Err(unknown(&tensor.name)),
    })
}

fn expert_name(moe: &str, expert: u64, matrix: &str) -> String {
    format!("{moe}.experts.{expert}.{matrix}.weight")
}

fn unknown(name: &str) -> Error {
    Error::usage(
        format!("there is no tensor {name}"),
        "use a checkpoint of Mixtral in one safetensors file",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_is_another_model_is_refused() {
        let good = include_str!("../tests/mixture/config.json");
        assert_eq!(config_of(good).unwrap().layers, 3);
        let usual = "{\"hidden_act\": \"silu\", \"attention_bias\": false, \"rope_scaling\": null,";
        assert_eq!(config_of(&good.replacen('{', usual, 1)).unwrap().layers, 3);
        for (from, to, cause) in [
            ("\"mixtral\"", "\"llama\"", "model_type"),
            ("\"vocab_size\": 256", "\"vocab_size\": 32000", "vocab_size"),
            ("\"head_dim\": 16", "\"head_dim\": -1", "head_dim"),
            ("\"hidden_size\"", "\"hidden\"", "hidden_size is null"),
            ("\"head_dim\": 16", "\"head_dim\": 0", "head_dim is 0"),
            (
                "\"head_dim\": 16",
                "\"head_dim\": 1",
                "head_dim is 1, not an even",
            ),
            (
                "\"head_dim\": 16",
                "\"head_dim\": 15",
                "head_dim is 15, not an even",
            ),
            (
                "\"head_dim\": 16",
                "\"head_dim\": 65536",
                "head_dim is 65536, not",
            ),
            ("_layers\": 3", "_layers\": 0", "num_hidden_layers is 0"),
            ("hidden_size\": 96", "hidden_size\": 0", "hidden_size is 0"),
            (
                "value_heads\": 2",
                "value_heads\": 4",
                "no multiple of num_key_value",
            ),
            (
                "value_heads\": 2",
                "value_heads\": 0",
                "num_key_value_heads is 0",
            ),
            (
                "per_tok\": 2",
                "per_tok\": 9",
                "num_experts_per_tok is 9, more",
            ),
            ("per_tok\": 2", "per_tok\": 0", "num_experts_per_tok is 0"),
            ("1e-05", "1e-60", "rms_norm_eps is 1.0"),
            ("1e-05", "-1e-05", "rms_norm_eps"),
            ("10000.0", "1e300", "rope_theta is 1e+300, no positive"),
            ("10000.0", "0", "rope_theta is 0, no positive"),
            ("{", "", "config.json"),
            (
                "{",
                "{\"hidden_act\": \"gelu\",",
                "hidden_act is \"gelu\", not \"silu\"",
            ),
            (
                "{",
                "{\"attention_bias\": true,",
                "attention_bias is true, not false",
            ),
            ("{", "{\"rope_scaling\": {\"factor\": 2.0},", "rope_scaling"),
            (
                "{",
                "{\"rope_parameters\": {\"rope_type\": \"yarn\"},",
                "rope_parameters",
            ),
        ] {
            let error = config_of(&good.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(cause), "{error}");
        }
    }
}
