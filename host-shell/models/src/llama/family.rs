//! Families of models: the computations in which they differ from Llama's.

use crate::experts::ExpertActivation;

/// Architecture of a model, by the name that its GGUF file gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelFamily {
    /// Llama 2 and 3, SmolLM2, Mistral, Mixtral.
    #[default]
    Llama,
    /// Qwen3: heads of queries and keys are normalised, and rotated by halves.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// gpt-oss: biases, sinks of attention, a window in every second layer, and its own activation.
    GptOss,
}

impl ModelFamily {
    /// All families.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Qwen3, Self::Qwen3Moe, Self::GptOss];

    /// Returns the value of `general.architecture`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::GptOss => "gpt-oss",
        }
    }

    /// Returns the family of a file's `general.architecture`.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// True if elements of a head's two halves are rotated as pairs; else neighbouring elements are.
    pub const fn rotates_halves(self) -> bool {
        !matches!(self, Self::Llama)
    }

    /// True if each head of queries and keys is normalised before it is rotated.
    pub const fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe)
    }

    /// True if products of attention, router and experts have biases, and heads have sinks.
    pub const fn has_biases(self) -> bool {
        matches!(self, Self::GptOss)
    }

    /// True if the number of an expert's rows has a key of its own, and every layer has experts.
    pub const fn has_experts_only(self) -> bool {
        matches!(self, Self::Qwen3Moe | Self::GptOss)
    }

    /// Returns the name of the norm before a layer's second part.
    pub const fn second_norm(self) -> &'static str {
        match self {
            Self::GptOss => "post_attention_norm",
            _ => "ffn_norm",
        }
    }

    /// Returns the activation of experts.
    pub const fn activation(self) -> ExpertActivation {
        match self {
            Self::GptOss => ExpertActivation::GptOss {
                limit: 7.0,
                alpha: 1.702,
            },
            _ => ExpertActivation::SwiGlu,
        }
    }
}
