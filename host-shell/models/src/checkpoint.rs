//! Checkpoints of Mixtral in the format of Hugging Face (safetensors, a tensor for each matrix of an expert),
//! rewritten as a GGUF file whose tokens are bytes.

use crate::gguf::{GgufModel, GgufTensor};
use crate::llama::{ExpertMixture, ModelConfig};
use nvme_formats::{StoredFormat, f32_of_bf16};
use nvme_host::catalog::Dtype;
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
    let real = |key: &str| {
        let found = json[key].as_f64();
        found.ok_or_else(|| no_mixtral(format!("{key} is {}", json[key])))
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
    Ok(ModelConfig {
        layers: number("num_hidden_layers")?,
        width: number("hidden_size")?,
        hidden: number("intermediate_size")?,
        heads: number("num_attention_heads")?,
        kv_heads: number("num_key_value_heads")?,
        head_elements: number("head_dim")?,
        vocabulary: number("vocab_size")?,
        context: number("max_position_embeddings")?,
        epsilon: real("rms_norm_eps")? as f32,
        rope_base: real("rope_theta")?,
        experts: Some(ExpertMixture {
            count: number("num_local_experts")?,
            choices: number("num_experts_per_tok")?,
        }),
        ..ModelConfig::default()
    })
}

struct CheckpointSource<'a> {
    store: &'a Store,
    catalog: &'a Catalog,
    config: &'a ModelConfig,
}

impl CheckpointSource<'_> {
    fn bytes(&self, tensor: &GgufTensor) -> Result<Vec<u8>> {
        let mut parts = tensor.name.split('.');
        let (first, layer, what) = (parts.next(), parts.next(), parts.next());
        let name = match (first, what) {
            (Some("token_embd"), _) => "model.embed_tokens.weight".to_owned(),
            (Some("output_norm"), _) => "model.norm.weight".to_owned(),
            (_, Some(what)) => {
                let of_layer = format!("model.layers.{}", layer.unwrap_or_default());
                let moe = format!("{of_layer}.block_sparse_moe");
                return match what {
                    "attn_norm" => {
                        self.vector(tensor, &format!("{of_layer}.input_layernorm.weight"))
                    }
                    "ffn_norm" => self.vector(
                        tensor,
                        &format!("{of_layer}.post_attention_layernorm.weight"),
                    ),
                    "attn_q" => self.heads(tensor, &format!("{of_layer}.self_attn.q_proj.weight")),
                    "attn_k" => self.heads(tensor, &format!("{of_layer}.self_attn.k_proj.weight")),
                    "attn_v" => self.matrix(tensor, &format!("{of_layer}.self_attn.v_proj.weight")),
                    "attn_output" => {
                        self.matrix(tensor, &format!("{of_layer}.self_attn.o_proj.weight"))
                    }
                    "ffn_gate_inp" => self.vector(tensor, &format!("{moe}.gate.weight")),
                    "ffn_gate_exps" => self.experts(tensor, &moe, "w1"),
                    "ffn_down_exps" => self.experts(tensor, &moe, "w2"),
                    "ffn_up_exps" => self.experts(tensor, &moe, "w3"),
                    _ => Err(unknown(&tensor.name)),
                };
            }
            _ => return Err(unknown(&tensor.name)),
        };
        match tensor.shape.len() {
            1 => self.vector(tensor, &name),
            _ => self.matrix(tensor, &name),
        }
    }

    /// Reads a tensor of the checkpoint, which must have `elements` elements of bf16.
    fn read(&self, name: &str, elements: u64) -> Result<Vec<u8>> {
        let entry = self.catalog.get(name).ok_or_else(|| unknown(name))?;
        let bytes = elements * 2;
        if entry.dtype != Dtype::Bf16 || entry.bytes != bytes {
            return Err(Error::usage(
                format!("{name} has {} bytes of {}", entry.bytes, entry.dtype.name()),
                format!("the sizes of the model want {bytes} bytes of bf16"),
            ));
        }
        let mut into = vec![0; bytes as usize];
        self.store.read_at(entry.offset, &mut into)?;
        Ok(into)
    }

    fn matrix(&self, tensor: &GgufTensor, name: &str) -> Result<Vec<u8>> {
        self.read(name, tensor.shape.iter().product())
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
        let (elements, count) = (tensor.shape[0] * tensor.shape[1], tensor.shape[2]);
        let mut all = Vec::new();
        for expert in 0..count {
            all.extend(self.read(&format!("{moe}.experts.{expert}.{matrix}.weight"), elements)?);
        }
        Ok(all)
    }
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
