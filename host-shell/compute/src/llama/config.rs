//! What a GGUF file says of a model.

use nvme_compute_kernel::experts::MOST_EXPERTS;
use nvme_host::catalog::Value;
use nvme_host::{Catalog, Error, Result};

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
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
    /// Positions of a text, at most.
    pub context: u32,
    /// What norms add to the mean square.
    pub epsilon: f32,
    /// The base of the angles of positions.
    pub rope_base: f64,
    /// The experts of each layer's second half, if it has them.
    pub experts: Option<Mixture>,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// How many.
    pub count: u32,
    /// How many of them a token has.
    pub choices: u32,
}

impl Config {
    /// Reads it from the keys of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] for another architecture, for a missing key, and for sizes that do not go together.
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let keys = Keys(catalog.metadata());
        let architecture = keys.get("general.architecture").and_then(Value::as_text);
        if architecture != Some("llama") {
            let found = architecture.unwrap_or("none");
            return Err(other(format!("the architecture is {found}")));
        }
        let embedding = catalog.get("token_embd.weight");
        let rows = embedding.and_then(|entry| entry.shape.first().copied());
        let vocabulary = rows.and_then(|rows| u32::try_from(rows).ok());
        let vocabulary =
            vocabulary.ok_or_else(|| other("there is no token_embd.weight".to_owned()))?;
        let (width, heads) = (
            keys.size("llama.embedding_length")?,
            keys.size("llama.attention.head_count")?,
        );
        let kv_heads = keys.size_or("llama.attention.head_count_kv", heads)?;
        let head_elements = keys.size_or("llama.attention.key_length", width / heads)?;
        let config = Self {
            layers: keys.size("llama.block_count")?,
            width,
            hidden: keys.size("llama.feed_forward_length")?,
            heads,
            kv_heads,
            head_elements,
            vocabulary,
            context: keys.size("llama.context_length")?,
            epsilon: keys.number("llama.attention.layer_norm_rms_epsilon")? as f32,
            rope_base: keys.number_or("llama.rope.freq_base", 10_000.0)?,
            experts: keys.mixture()?,
        };
        let turned = keys.size_or("llama.rope.dimension_count", head_elements)?;
        let values = keys.size_or("llama.attention.value_length", head_elements)?;
        let scaling = keys.get("llama.rope.scaling.type").and_then(Value::as_text);
        let most = nvme_compute_kernel::MOST_HEAD_ELEMENTS;
        if heads % kv_heads != 0
            || turned != head_elements
            || values != head_elements
            || head_elements % 2 != 0
            || head_elements > most
        {
            return Err(other(format!(
                "{heads} heads of {head_elements} elements, of which {turned} are turned, {kv_heads} of keys"
            )));
        }
        if scaling.is_some_and(|scaling| scaling != "none")
            || catalog.get("rope_freqs.weight").is_some()
        {
            return Err(other("its angles of positions are scaled".to_owned()));
        }
        Ok(config)
    }
}

fn other(cause: String) -> Error {
    Error::usage(
        format!("not a model that is run here: {cause}"),
        "use a GGUF file of the architecture llama, as SmolLM2, Llama 2 or Mixtral",
    )
}

struct Keys<'a>(&'a [(String, Value)]);

impl Keys<'_> {
    fn mixture(&self) -> Result<Option<Mixture>> {
        let count = self.get("llama.expert_count").and_then(Value::as_u64);
        if count.is_none_or(|count| count == 0) {
            return Ok(None);
        }
        let mixture = Mixture {
            count: self.size("llama.expert_count")?,
            choices: self.size("llama.expert_used_count")?,
        };
        match mixture.choices <= mixture.count && mixture.count <= MOST_EXPERTS {
            true => Ok(Some(mixture)),
            false => Err(other(format!(
                "it has {} experts, {} a token",
                mixture.count, mixture.choices
            ))),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value)
    }

    fn size(&self, name: &str) -> Result<u32> {
        let value = self.get(name).and_then(Value::as_u64);
        let value = value.and_then(|value| u32::try_from(value).ok());
        value
            .filter(|value| (1..1 << 24).contains(value))
            .ok_or_else(|| other(format!("{name} is no size from 1 on")))
    }

    fn size_or(&self, name: &str, value: u32) -> Result<u32> {
        match self.get(name) {
            Some(_) => self.size(name),
            None => Ok(value),
        }
    }

    fn number(&self, name: &str) -> Result<f64> {
        let value = self.get(name).and_then(Value::as_f64);
        value
            .filter(|value| value.is_finite() && *value > 0.0)
            .ok_or_else(|| other(format!("{name} is no number above 0")))
    }

    fn number_or(&self, name: &str, value: f64) -> Result<f64> {
        match self.get(name) {
            Some(_) => self.number(name),
            None => Ok(value),
        }
    }
}
