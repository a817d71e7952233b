//! What the name of a tensor says: its layer, its expert, its matrix and its role.

use nvme_compute_kernel::experts::MOST_EXPERTS;

/// A matrix of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExpertMatrix {
    /// Multiplies the token's vector; goes through the activation.
    Gate,
    /// Multiplies the token's vector; is multiplied by the activated gate.
    Up,
    /// Gate and up as one matrix.
    GateUp,
    /// Multiplies the product of both.
    Down,
}

impl ExpertMatrix {
    /// Returns the name in messages and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Up => "up",
            Self::GateUp => "gate_up",
            Self::Down => "down",
        }
    }
}

/// Role of a tensor for its matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorRole {
    /// The elements.
    Weight,
    /// Elements, several in a word of 32 bits, or two in a byte.
    PackedWeight,
    /// Elements in blocks of 16 bytes, as in gpt-oss.
    WeightBlocks,
    /// A scale of each block, row or matrix, by which elements are multiplied.
    Scale,
    /// A scale of the scales, by which they are multiplied.
    GlobalScale,
    /// A scale of the scales, by which they are divided.
    GlobalDivisor,
    /// Numbers that are subtracted before elements are scaled.
    ZeroPoint,
    /// The group of each column.
    GroupIndex,
    /// The lengths of a matrix whose elements are packed.
    PackedShape,
    /// Added to the product.
    Bias,
    /// A scale of the vector, for products of few bits. It does not change the elements.
    InputScale,
}

impl TensorRole {
    /// Returns the name in messages and in Python.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::PackedWeight => "packed_weight",
            Self::WeightBlocks => "weight_blocks",
            Self::Scale => "scale",
            Self::GlobalScale => "global_scale",
            Self::GlobalDivisor => "global_divisor",
            Self::ZeroPoint => "zero_point",
            Self::GroupIndex => "group_index",
            Self::PackedShape => "packed_shape",
            Self::Bias => "bias",
            Self::InputScale => "input_scale",
        }
    }

    /// True for the elements themselves, in whatever form.
    pub const fn is_weight(self) -> bool {
        matches!(self, Self::Weight | Self::PackedWeight | Self::WeightBlocks)
    }
}

/// Names of matrices in safetensors; of those that begin alike, the longest comes first.
const MATRICES: [(&str, ExpertMatrix); 7] = [
    ("gate_up_proj", ExpertMatrix::GateUp),
    ("gate_proj", ExpertMatrix::Gate),
    ("up_proj", ExpertMatrix::Up),
    ("down_proj", ExpertMatrix::Down),
    ("w1", ExpertMatrix::Gate),
    ("w2", ExpertMatrix::Down),
    ("w3", ExpertMatrix::Up),
];

/// Names of matrices in GGUF, between `ffn_` and `_exps`.
const MATRICES_OF_GGUF: [(&str, ExpertMatrix); 4] = [
    ("gate_up", ExpertMatrix::GateUp),
    ("gate", ExpertMatrix::Gate),
    ("up", ExpertMatrix::Up),
    ("down", ExpertMatrix::Down),
];

/// Ends of names, behind the name of a matrix. DeepSeek, ModelOpt, compressed-tensors, gpt-oss, AutoGPTQ and AutoAWQ.
const ROLES: [(&str, TensorRole); 25] = [
    ("", TensorRole::Weight),
    (".weight", TensorRole::Weight),
    (".weight_packed", TensorRole::PackedWeight),
    (".qweight", TensorRole::PackedWeight),
    ("_blocks", TensorRole::WeightBlocks),
    (".scale", TensorRole::Scale),
    (".scales", TensorRole::Scale),
    ("_scales", TensorRole::Scale),
    (".weight_scale", TensorRole::Scale),
    ("_weight_scale", TensorRole::Scale),
    (".weight_scale_inv", TensorRole::Scale),
    ("_scale_inv", TensorRole::Scale),
    (".weight_scale_2", TensorRole::GlobalScale),
    ("_weight_scale_2", TensorRole::GlobalScale),
    (".weight_global_scale", TensorRole::GlobalDivisor),
    (".weight_zero_point", TensorRole::ZeroPoint),
    (".qzeros", TensorRole::ZeroPoint),
    (".weight_g_idx", TensorRole::GroupIndex),
    (".g_idx", TensorRole::GroupIndex),
    (".weight_shape", TensorRole::PackedShape),
    (".bias", TensorRole::Bias),
    ("_bias", TensorRole::Bias),
    (".input_scale", TensorRole::InputScale),
    ("_input_scale", TensorRole::InputScale),
    (".input_global_scale", TensorRole::InputScale),
];

const ROLES_OF_GGUF: [(&str, TensorRole); 4] = [
    (".weight", TensorRole::Weight),
    (".bias", TensorRole::Bias),
    (".scale", TensorRole::GlobalScale),
    (".input_scale", TensorRole::InputScale),
];

/// Ends of the names of a layer's router, behind the name of the experts' parent. Its matrix has a row for each expert.
const ROUTERS: [&str; 2] = [".gate.weight", ".router.weight"];
const ROUTER_OF_GGUF: &str = ".ffn_gate_inp.weight";

/// A tensor that belongs to the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedTensor<'a> {
    /// A tensor of one expert, or of all.
    Expert {
        /// Name of the experts as a whole: `model.layers.3.mlp.experts`, or `blk.3`.
        bank: &'a str,
        /// Number of the expert; none for a tensor of all.
        expert: Option<u32>,
        /// Matrix and role; none for a tensor whose meaning is not known.
        meaning: Option<(ExpertMatrix, TensorRole)>,
    },
    /// The matrix of the router of a layer, whose experts have this name, or this name and `.experts`.
    Router(&'a str),
}

/// Returns what `name` says; none for a tensor that belongs to no experts.
pub fn parsed(name: &str) -> Option<NamedTensor<'_>> {
    match name.starts_with("blk.") {
        true => of_gguf(name),
        false => of_safetensors(name),
    }
}

fn of_safetensors(name: &str) -> Option<NamedTensor<'_>> {
    const EXPERTS: &str = ".experts.";
    if let Some(at) = name.find(EXPERTS) {
        let bank = &name[..at + EXPERTS.len() - 1];
        let rest = &name[at + EXPERTS.len()..];
        let (first, leaf) = rest.split_once('.').unwrap_or((rest, ""));
        let (expert, leaf) = match number(first) {
            Some(expert) => (Some(expert), leaf),
            None => (None, rest),
        };
        return Some(NamedTensor::Expert {
            bank,
            expert,
            meaning: meaning(leaf, &MATRICES, &ROLES),
        });
    }
    let router = ROUTERS.iter().find_map(|end| name.strip_suffix(end));
    router.map(NamedTensor::Router)
}

fn of_gguf(name: &str) -> Option<NamedTensor<'_>> {
    if let Some(bank) = name.strip_suffix(ROUTER_OF_GGUF) {
        return Some(NamedTensor::Router(bank));
    }
    let layer = name["blk.".len()..].find('.')?;
    let (bank, rest) = name.split_at("blk.".len() + layer);
    let rest = rest.strip_prefix(".ffn_")?;
    let (matrix, role) = rest.split_once('.')?;
    if let Some(matrix) = matrix.strip_suffix("_exps") {
        let role = &rest[matrix.len() + "_exps".len()..];
        let matrix = MATRICES_OF_GGUF.iter().find(|one| one.0 == matrix);
        let role = ROLES_OF_GGUF.iter().find(|one| one.0 == role);
        return Some(NamedTensor::Expert {
            bank,
            expert: None,
            meaning: matrix.zip(role).map(|(matrix, role)| (matrix.1, role.1)),
        });
    }
    // `ffn_gate.3.weight`; without a number it is a matrix of a dense layer.
    let matrix = MATRICES_OF_GGUF.iter().find(|one| one.0 == matrix)?;
    let (expert, _) = role.split_once('.')?;
    let expert = number(expert)?;
    let role = &role[role.find('.')?..];
    let role = ROLES_OF_GGUF.iter().find(|one| one.0 == role);
    Some(NamedTensor::Expert {
        bank,
        expert: Some(expert),
        meaning: role.map(|role| (matrix.1, role.1)),
    })
}

fn meaning(
    leaf: &str,
    matrices: &[(&str, ExpertMatrix)],
    roles: &[(&str, TensorRole)],
) -> Option<(ExpertMatrix, TensorRole)> {
    let mut found = matrices.iter().filter_map(|(name, matrix)| {
        let rest = leaf.strip_prefix(name)?;
        let role = roles.iter().find(|one| one.0 == rest)?;
        Some((*matrix, role.1))
    });
    found.next()
}

/// Returns the number that `text` is, as it is written in names: without signs and leading zeros.
fn number(text: &str) -> Option<u32> {
    let number = text.parse().ok()?;
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    let is_short = text.len() == 1 || !text.starts_with('0');
    (is_plain && is_short && number < MOST_EXPERTS).then_some(number)
}

/// Returns the number of the layer whose experts have this name: the last one in it. Draft blocks, which models use to
/// guess tokens, are not among the layers.
pub fn layer_of(bank: &str) -> Option<u32> {
    let mut parts = bank.split('.');
    if parts.any(|part| part.starts_with("mtp") || part.starts_with("nextn")) {
        return None;
    }
    let last = bank.rsplit('.').find(|part| {
        !part.is_empty() && part.len() < 10 && part.bytes().all(|byte| byte.is_ascii_digit())
    });
    last?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expert(
        bank: &str,
        expert: Option<u32>,
        matrix: ExpertMatrix,
        role: TensorRole,
    ) -> Option<NamedTensor<'_>> {
        Some(NamedTensor::Expert {
            bank,
            expert,
            meaning: Some((matrix, role)),
        })
    }

    #[test]
    fn names_of_published_files_say_layer_expert_and_role() {
        use ExpertMatrix::{Down, Gate, GateUp, Up};
        use TensorRole::{Bias, GlobalDivisor, GlobalScale, Scale, Weight, WeightBlocks};
        let v4 = "layers.3.ffn.experts";
        let oss = "model.layers.0.mlp.experts";
        for (name, found) in [
            (
                "layers.3.ffn.experts.17.w1.weight",
                expert(v4, Some(17), Gate, Weight),
            ),
            (
                "layers.3.ffn.experts.0.w3.scale",
                expert(v4, Some(0), Up, Scale),
            ),
            (
                "model.layers.0.mlp.experts.5.down_proj.weight_scale_inv",
                expert(oss, Some(5), Down, Scale),
            ),
            (
                "model.layers.0.mlp.experts.5.up_proj.weight_scale_2",
                expert(oss, Some(5), Up, GlobalScale),
            ),
            (
                "model.layers.0.mlp.experts.5.up_proj.weight_global_scale",
                expert(oss, Some(5), Up, GlobalDivisor),
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj_blocks",
                expert(oss, None, GateUp, WeightBlocks),
            ),
            (
                "model.layers.0.mlp.experts.gate_up_proj",
                expert(oss, None, GateUp, Weight),
            ),
            (
                "model.layers.0.mlp.experts.down_proj_bias",
                expert(oss, None, Down, Bias),
            ),
            (
                "blk.12.ffn_gate_exps.weight",
                expert("blk.12", None, Gate, Weight),
            ),
            (
                "blk.12.ffn_gate_up_exps.weight",
                expert("blk.12", None, GateUp, Weight),
            ),
            (
                "blk.12.ffn_down_exps.bias",
                expert("blk.12", None, Down, Bias),
            ),
            (
                "blk.12.ffn_up.7.weight",
                expert("blk.12", Some(7), Up, Weight),
            ),
            (
                "blk.12.ffn_gate_inp.weight",
                Some(NamedTensor::Router("blk.12")),
            ),
            (
                "model.layers.0.mlp.gate.weight",
                Some(NamedTensor::Router("model.layers.0.mlp")),
            ),
            ("blk.12.ffn_up.weight", None),
            ("blk.12.ffn_up_shexp.weight", None),
            ("blk.12.ffn_gate_inp.bias", None),
            ("blk.", None),
            ("model.layers.0.mlp.shared_experts.gate_proj.weight", None),
            ("model.layers.0.mlp.shared_expert_gate.weight", None),
            ("", None),
        ] {
            assert_eq!(parsed(name), found, "{name}");
        }
        for name in [
            "model.layers.0.mlp.experts.5.gate_proj.lora_A",
            "model.layers.0.mlp.experts.",
            "model.layers.0.mlp.experts.05.gate_proj.weight",
            "model.layers.0.mlp.experts.4096.gate_proj.weight",
            "blk.1.ffn_norm_exps.weight",
        ] {
            let found = parsed(name);
            let unknown = matches!(found, Some(NamedTensor::Expert { meaning: None, .. }));
            assert!(unknown, "{name}: {found:?}");
        }
    }

    #[test]
    fn a_draft_block_is_no_layer() {
        assert_eq!(
            layer_of("model.language_model.layers.47.mlp.experts"),
            Some(47)
        );
        assert_eq!(layer_of("blk.3"), Some(3));
        assert_eq!(layer_of("mtp.0.ffn.experts"), None);
        assert_eq!(layer_of("mtp.layers.0.mlp.experts"), None);
        assert_eq!(layer_of("model.experts"), None);
        assert_eq!(layer_of("model.99999999999.experts"), None);
    }
}
