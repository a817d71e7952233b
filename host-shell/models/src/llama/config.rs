//! Hyperparameters of a model, from the keys of a GGUF file.

use super::family::ModelFamily;
use super::yarn::YarnScaling;
use crate::metadata::MetadataKeys;
use nvme_compute_kernel::experts::MOST_EXPERTS;
use nvme_compute_kernel::reference;
use nvme_host::{Catalog, Error, Result};

/// Keys of the architecture that have no effect on the results.
const HARMLESS: [&str; 1] = ["tensor_data_layout"];

/// Sizes of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelConfig {
    /// Computations in which models differ.
    pub family: ModelFamily,
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
    /// Scaling of the angles, if there is one.
    pub yarn: Option<YarnScaling>,
    /// Positions that a query sees in the first and then every second layer; 0 for all.
    pub window: u32,
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
        let architecture = keys.text("general.architecture")?.unwrap_or("missing");
        let family = ModelFamily::of_name(architecture)
            .ok_or_else(|| refused(format!("the architecture is {architecture}")))?;
        if let Some(kind) = keys.text("general.type")?
            && kind != "model"
        {
            return Err(refused(format!("the type of the file is {kind}")));
        }
        let vocabulary = vocabulary(catalog)?;
        let keys = FamilyKeys {
            keys: &keys,
            family,
        };
        let (width, heads) = (
            keys.size("embedding_length")?,
            keys.size("attention.head_count")?,
        );
        let kv_heads = keys.size_or("attention.head_count_kv", heads)?;
        let head_elements = keys.size_or("attention.key_length", width / heads)?;
        let experts = mixture(&keys)?;
        let config = Self {
            family,
            layers: keys.size("block_count")?,
            width,
            hidden: match family.has_experts_only() {
                true => {
                    // Rows of layers without experts, which there are none of.
                    keys.size_or("feed_forward_length", 1)?;
                    keys.size("expert_feed_forward_length")?
                }
                false => keys.size("feed_forward_length")?,
            },
            heads,
            kv_heads,
            head_elements,
            vocabulary,
            context: keys.size("context_length")?,
            epsilon: epsilon(&keys)?,
            rope_base: keys.positive_or("rope.freq_base", 10_000.0)?,
            yarn: yarn(&keys)?,
            window: match family {
                ModelFamily::GptOss => keys.size("attention.sliding_window")?,
                _ => 0,
            },
            experts,
        };
        if config.yarn.is_some() && config.rope_base <= 1.0 {
            return Err(refused(format!(
                "{} is {}, and YaRN divides by its logarithm",
                keys.name("rope.freq_base"),
                config.rope_base
            )));
        }
        config.check_heads(&keys)?;
        config.check_neutral(&keys)?;
        let prefix = keys.name("");
        keys.keys.check_all_read(&prefix, &HARMLESS)?;
        keys.keys.check_all_read("adapter.", &[])?;
        Ok(config)
    }

    /// Returns the number of positions that a query of layer `layer` sees; 0 for all.
    pub fn window_of(&self, layer: usize) -> u32 {
        match layer.is_multiple_of(2) {
            true => self.window,
            false => 0,
        }
    }

    /// Returns cosine and sine of each pair of each of `positions` positions.
    pub(crate) fn angles(&self, positions: u32) -> Vec<f32> {
        let (elements, base) = (self.head_elements, self.rope_base);
        match &self.yarn {
            None => reference::angles(positions, elements, base),
            Some(yarn) => {
                let frequencies = yarn.frequencies(elements, base);
                reference::angles_of(positions, &frequencies, yarn.magnitude())
            }
        }
    }

    fn check_heads(&self, keys: &FamilyKeys<'_>) -> Result<()> {
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
            let found = keys.size_or(name, elements)?;
            if found != elements {
                return Err(refused(format!(
                    "{} is {found}, not the {elements} elements of a head",
                    keys.name(name)
                )));
            }
        }
        let name = keys.name("vocab_size");
        match keys.keys.integer(&name)? {
            Some(found) if found != u64::from(self.vocabulary) => Err(refused(format!(
                "{name} is {found}, and token_embd.weight has {} rows",
                self.vocabulary
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses keys that ask for computations which are not implemented here. Each has a value with which it asks for
    /// nothing, and llama.cpp reads some of them without the key that seems to switch them on: a scaling factor without
    /// a scaling type is a linear one.
    fn check_neutral(&self, keys: &FamilyKeys<'_>) -> Result<()> {
        let by_heads = 1.0 / f64::from(self.head_elements).sqrt();
        for (name, neutral) in [
            ("rope.scaling.factor", 1.0),
            ("rope.scale_linear", 1.0),
            ("rope.scaling.attn_factor", 1.0),
            ("attention.scale", by_heads),
            ("attention.clamp_kqv", 0.0),
            ("attention.max_alibi_bias", 0.0),
            ("logit_scale", 1.0),
            ("embedding_scale", 1.0),
            ("residual_scale", 1.0),
            ("expert_weights_scale", 1.0),
            ("attn_logit_softcapping", 0.0),
            ("final_logit_softcapping", 0.0),
        ] {
            let name = keys.name(name);
            if self.yarn.is_some() && name.ends_with("rope.scaling.factor") {
                continue;
            }
            let Some(found) = keys.keys.number(&name)? else {
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
            ("expert_weights_norm", true),
        ] {
            let name = keys.name(name);
            // That the angles were finetuned is said of those that are scaled.
            let is_said = self.yarn.is_some() && name.ends_with("finetuned");
            let found = keys.keys.flag(&name)?;
            if found.is_some_and(|found| found != neutral && !is_said) {
                return Err(refused(format!("{name} is {}", !neutral)));
            }
        }
        if self.family == ModelFamily::GptOss {
            return Ok(());
        }
        // A window that is as long as the text hides nothing.
        let name = keys.name("attention.sliding_window");
        let window = keys.keys.integer(&name)?;
        match window.filter(|window| *window != 0 && *window < u64::from(self.context)) {
            Some(window) => Err(refused(format!(
                "{name} is {window}, less than the {} positions of a text",
                self.context
            ))),
            None => Ok(()),
        }
    }
}

/// Returns the constant of norms. As a number of 32 bits it may be 0 or infinite, with which norms mean nothing.
fn epsilon(keys: &FamilyKeys<'_>) -> Result<f32> {
    const NAME: &str = "attention.layer_norm_rms_epsilon";
    let given = keys.positive(NAME)?;
    let epsilon = given as f32;
    match epsilon.is_normal() {
        true => Ok(epsilon),
        false => Err(refused(format!(
            "{} is {given:e}, no normal number of 32 bits",
            keys.name(NAME)
        ))),
    }
}

/// Returns the scaling of the angles of positions.
fn yarn(keys: &FamilyKeys<'_>) -> Result<Option<YarnScaling>> {
    let name = keys.name("rope.scaling.type");
    match keys.keys.text(&name)? {
        None | Some("none") => Ok(None),
        Some("yarn") if keys.family != ModelFamily::Llama => {
            let scaling = YarnScaling {
                factor: keys.positive("rope.scaling.factor")?,
                original_positions: keys.size("rope.scaling.original_context_length")?,
                fast_turns: keys.positive_or("rope.scaling.yarn_beta_fast", 32.0)?,
                slow_turns: keys.positive_or("rope.scaling.yarn_beta_slow", 1.0)?,
                whole_pairs: keys.family != ModelFamily::GptOss,
            };
            match scaling.fast_turns > scaling.slow_turns {
                true => Ok(Some(scaling)),
                false => Err(refused(format!(
                    "rope.scaling.yarn_beta_fast, {}, is not above yarn_beta_slow, {}",
                    scaling.fast_turns, scaling.slow_turns
                ))),
            }
        }
        Some(scaling) => Err(refused(format!("{name} is {scaling}"))),
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

fn mixture(keys: &FamilyKeys<'_>) -> Result<Option<ExpertMixture>> {
    let needs = keys.family.has_experts_only();
    let integer = |name: &str| keys.keys.integer(&keys.name(name));
    if !needs && integer("expert_count")?.unwrap_or(0) == 0 {
        // Some converters write both keys as 0 for models without experts.
        return match integer("expert_used_count")?.unwrap_or(0) {
            0 => Ok(None),
            used => Err(refused(format!(
                "{} is {used} of a model without experts",
                keys.name("expert_used_count")
            ))),
        };
    }
    let mixture = ExpertMixture {
        count: keys.size("expert_count")?,
        choices: keys.size("expert_used_count")?,
    };
    if mixture.choices > mixture.count || mixture.count > MOST_EXPERTS {
        return Err(refused(format!(
            "a layer has {} experts, and a token {} of them: a layer has {MOST_EXPERTS} at most, and a token none twice",
            mixture.count, mixture.choices
        )));
    }
    if !needs {
        return Ok(Some(mixture));
    }
    // Softmax, over all experts or over the chosen ones: the weights of the chosen ones are the same.
    if let Some(gating) = integer("expert_gating_func")?
        && ![1, 3].contains(&gating)
    {
        let name = keys.name("expert_gating_func");
        return Err(refused(format!("{name} is {gating}, not a softmax")));
    }
    match integer("expert_shared_count")?.unwrap_or(0) {
        0 => Ok(Some(mixture)),
        shared => Err(refused(format!("a layer has {shared} shared experts"))),
    }
}

pub(super) fn refused(cause: String) -> Error {
    Error::usage(
        format!("not a model that is run here: {cause}"),
        "use a GGUF file of the architecture llama (SmolLM2, Llama 2 and 3, Mixtral), qwen3, qwen3moe or gpt-oss",
    )
}

/// The keys of a file whose names begin with its architecture.
struct FamilyKeys<'a> {
    keys: &'a MetadataKeys<'a>,
    family: ModelFamily,
}

impl FamilyKeys<'_> {
    /// Returns the whole name of the key `name`.
    fn name(&self, name: &str) -> String {
        format!("{}.{name}", self.family.name())
    }

    fn size(&self, name: &str) -> Result<u32> {
        let name = self.name(name);
        let value = self.keys.get(&name);
        let value = value.ok_or_else(|| refused(format!("there is no key {name}")))?;
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

    fn size_or(&self, name: &str, value: u32) -> Result<u32> {
        match self.keys.get(&self.name(name)) {
            Some(_) => self.size(name),
            None => Ok(value),
        }
    }

    fn positive(&self, name: &str) -> Result<f64> {
        let name = self.name(name);
        let value = self.keys.number(&name)?.filter(|value| *value > 0.0);
        value.ok_or_else(|| refused(format!("there is no key {name} with a number above 0")))
    }

    fn positive_or(&self, name: &str, value: f64) -> Result<f64> {
        match self.keys.get(&self.name(name)) {
            Some(_) => self.positive(name),
            None => Ok(value),
        }
    }
}
