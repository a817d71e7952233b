//! Hyperparameters of a model, from the keys of a GGUF file.

use crate::metadata::MetadataKeys;
use nvme_compute_kernel::experts::MOST_EXPERTS;
use nvme_host::{Catalog, Error, Result};

/// Keys of the architecture that have no effect on the results.
const HARMLESS: [&str; 1] = ["tensor_data_layout"];

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Layers.
    pub layers: u32,
    /// Elements of the vector of a token.
    pub width: u32,
    /// Elements between the two products of a layer's second half.
    pub hidden: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_elements: u32,
    /// Tokens.
    pub vocabulary: u32,
    /// Largest number of positions of a text.
    pub context: u32,
    /// Constant that norms add to the mean square.
    pub epsilon: f32,
    /// The base of the angles of positions.
    pub rope_base: f64,
    /// The experts of each layer's second half, if it has them.
    pub experts: Option<ExpertMixture>,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertMixture {
    /// Number of experts.
    pub count: u32,
    /// Experts of a token.
    pub choices: u32,
}

impl ModelConfig {
    /// Reads it from the keys of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] for another architecture, for a missing key, for an unknown key, and for sizes that do not fit
    /// together.
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let keys = MetadataKeys::of(catalog, refused);
        let architecture = keys.text("general.architecture")?;
        if architecture != Some("llama") {
            let found = architecture.unwrap_or("missing");
            return Err(refused(format!("the architecture is {found}")));
        }
        if let Some(kind) = keys.text("general.type")?
            && kind != "model"
        {
            return Err(refused(format!("the type of the file is {kind}")));
        }
        let vocabulary = vocabulary(catalog)?;
        let (width, heads) = (
            size(&keys, "llama.embedding_length")?,
            size(&keys, "llama.attention.head_count")?,
        );
        let kv_heads = size_or(&keys, "llama.attention.head_count_kv", heads)?;
        let head_elements = size_or(&keys, "llama.attention.key_length", width / heads)?;
        let config = Self {
            layers: size(&keys, "llama.block_count")?,
            width,
            hidden: size(&keys, "llama.feed_forward_length")?,
            heads,
            kv_heads,
            head_elements,
            vocabulary,
            context: size(&keys, "llama.context_length")?,
            epsilon: positive(&keys, "llama.attention.layer_norm_rms_epsilon")? as f32,
            rope_base: match keys.get("llama.rope.freq_base") {
                Some(_) => positive(&keys, "llama.rope.freq_base")?,
                None => 10_000.0,
            },
            experts: mixture(&keys)?,
        };
        config.check_heads(&keys)?;
        config.check_neutral(&keys)?;
        keys.check_all_read("llama.", &HARMLESS)?;
        keys.check_all_read("adapter.", &[])?;
        Ok(config)
    }

    fn check_heads(&self, keys: &MetadataKeys<'_>) -> Result<()> {
        let elements = self.head_elements;
        let most = nvme_compute_kernel::MOST_HEAD_ELEMENTS;
        if elements == 0 || !elements.is_multiple_of(2) || elements > most {
            return Err(refused(format!(
                "a head has {elements} elements, not an even number from 2 to {most}"
            )));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(refused(format!(
                "the number of heads, {}, is not a multiple of the number of heads of keys, {}",
                self.heads, self.kv_heads
            )));
        }
        for name in ["rope.dimension_count", "attention.value_length"] {
            let found = size_or(keys, &format!("llama.{name}"), elements)?;
            if found != elements {
                return Err(refused(format!(
                    "llama.{name} is {found}, not the {elements} elements of a head"
                )));
            }
        }
        match keys.integer("llama.vocab_size")? {
            Some(found) if found != u64::from(self.vocabulary) => Err(refused(format!(
                "llama.vocab_size is {found}, and token_embd.weight has {} rows",
                self.vocabulary
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses keys that ask for computations which are not implemented here. Each has a value with which it asks for
    /// nothing, and llama.cpp reads some of them without the key that seems to switch them on: a scaling factor without
    /// a scaling type is a linear one.
    fn check_neutral(&self, keys: &MetadataKeys<'_>) -> Result<()> {
        let scaling = keys.text("llama.rope.scaling.type")?;
        if let Some(scaling) = scaling.filter(|scaling| *scaling != "none") {
            return Err(refused(format!("llama.rope.scaling.type is {scaling}")));
        }
        let by_heads = 1.0 / f64::from(self.head_elements).sqrt();
        for (name, neutral) in [
            ("rope.scaling.factor", 1.0),
            ("rope.scale_linear", 1.0),
            ("attention.scale", by_heads),
            ("attention.clamp_kqv", 0.0),
            ("attention.max_alibi_bias", 0.0),
            ("logit_scale", 1.0),
            ("embedding_scale", 1.0),
            ("residual_scale", 1.0),
            ("attn_logit_softcapping", 0.0),
            ("final_logit_softcapping", 0.0),
        ] {
            let name = format!("llama.{name}");
            let Some(found) = keys.number(&name)? else {
                continue;
            };
            // Zero means "not given" for all of these keys.
            if found != 0.0 && (found - neutral).abs() > 1e-6 * neutral.abs() {
                return Err(refused(format!("{name} is {found}, not {neutral}")));
            }
        }
        for (name, neutral) in [
            ("attention.causal", true),
            ("use_parallel_residual", false),
            ("rope.scaling.finetuned", false),
        ] {
            let name = format!("llama.{name}");
            if keys.flag(&name)?.is_some_and(|found| found != neutral) {
                return Err(refused(format!("{name} is {}", !neutral)));
            }
        }
        // A window that is as long as the text hides nothing.
        let window = keys.integer("llama.attention.sliding_window")?;
        match window.filter(|window| *window != 0 && *window < u64::from(self.context)) {
            Some(window) => Err(refused(format!(
                "llama.attention.sliding_window is {window}, less than the {} positions of a text",
                self.context
            ))),
            None => Ok(()),
        }
    }
}

/// Returns the rows of the embeddings.
fn vocabulary(catalog: &Catalog) -> Result<u32> {
    let Some(embedding) = catalog.get("token_embd.weight") else {
        return Err(refused("there is no tensor token_embd.weight".to_owned()));
    };
    let rows = embedding.shape.first().copied().unwrap_or(0);
    u32::try_from(rows)
        .ok()
        .filter(|rows| (1..1 << 24).contains(rows))
        .ok_or_else(|| {
            refused(format!(
                "token_embd.weight has {rows} rows, not 1 to {}",
                (1 << 24) - 1
            ))
        })
}

fn mixture(keys: &MetadataKeys<'_>) -> Result<Option<ExpertMixture>> {
    if keys.integer("llama.expert_count")?.unwrap_or(0) == 0 {
        // Some converters write both keys as 0 for models without experts.
        return match keys.integer("llama.expert_used_count")?.unwrap_or(0) {
            0 => Ok(None),
            used => Err(refused(format!(
                "llama.expert_used_count is {used} of a model without experts"
            ))),
        };
    }
    let mixture = ExpertMixture {
        count: size(keys, "llama.expert_count")?,
        choices: size(keys, "llama.expert_used_count")?,
    };
    if mixture.choices > mixture.count || mixture.count > MOST_EXPERTS {
        return Err(refused(format!(
            "a layer has {} experts, and a token {} of them: a layer has {MOST_EXPERTS} at most, and a token none twice",
            mixture.count, mixture.choices
        )));
    }
    Ok(Some(mixture))
}

pub(super) fn refused(cause: String) -> Error {
    Error::usage(
        format!("not a model that is run here: {cause}"),
        "use a GGUF file of the architecture llama, as SmolLM2, Llama 2 or Mixtral",
    )
}

fn size(keys: &MetadataKeys<'_>, name: &str) -> Result<u32> {
    let value = keys
        .get(name)
        .ok_or_else(|| refused(format!("there is no key {name}")))?;
    let value = value.as_u64().and_then(|value| u32::try_from(value).ok());
    value
        .filter(|value| (1..1 << 24).contains(value))
        .ok_or_else(|| {
            refused(format!(
                "the value of the key {name} is not an integer from 1 to {}",
                (1 << 24) - 1
            ))
        })
}

fn size_or(keys: &MetadataKeys<'_>, name: &str, value: u32) -> Result<u32> {
    match keys.get(name) {
        Some(_) => size(keys, name),
        None => Ok(value),
    }
}

fn positive(keys: &MetadataKeys<'_>, name: &str) -> Result<f64> {
    let value = keys.number(name)?.filter(|value| *value > 0.0);
    value.ok_or_else(|| refused(format!("there is no key {name} with a number above 0")))
}
