//! Linear layers, `y = act(x W^T + b)`, and their gradients, with all operands in GPU memory, one
//! implementation a file.
//!
//! Matrices are stored row by row. The order of a training step's launches: forward; then `BACKWARD_SUMS`;
//! then the gradients of inputs and of weights in any order. `docs/ladder-linear.md` explains each step.

mod activation;
#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes.rs"]
mod arch;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod backward;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod forward;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod gemm;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod naive;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod warp;

pub use activation::{ActivationKind, LogisticFunction};

/// The kernels, as each lane of a launch on the host calls them.
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod entries {
    pub use super::backward::{
        nvme_linear_backward_inputs, nvme_linear_backward_inputs_few, nvme_linear_backward_sums,
        nvme_linear_backward_weights,
    };
    pub use super::forward::{
        nvme_linear_forward_few, nvme_linear_forward_few_bf16, nvme_linear_forward_few_f16,
        nvme_linear_forward_fused, nvme_linear_forward_mixed_bf16, nvme_linear_forward_mixed_f16,
        nvme_linear_forward_persistent,
    };
    pub use super::naive::{
        nvme_linear_activate, nvme_linear_backward_clear, nvme_linear_backward_naive,
        nvme_linear_forward_naive,
    };
    pub use super::warp::nvme_linear_backward_warp_reduce;
}

/// The names of the kernels. Those of the forward pass take a [`ForwardParameters`], the others a
/// [`BackwardParameters`].
pub mod kernel {
    /// Computes sums and biases, without the activation. A thread takes one element a turn.
    pub const FORWARD_NAIVE: &str = "nvme_linear_forward_naive";
    /// Applies the activation to the result of [`FORWARD_NAIVE`] in `y`. A thread takes one element a turn.
    pub const ACTIVATE: &str = "nvme_linear_activate";
    /// Does everything by the tensor cores, each product as three of TF32. A block takes one tile of `y`.
    pub const FORWARD_FUSED: &str = "nvme_linear_forward_fused";
    /// Does the same; a block takes several tiles, and loads the next one while it finishes one.
    pub const FORWARD_PERSISTENT: &str = "nvme_linear_forward_persistent";
    /// Does the same over bf16, with sums in `f32`.
    pub const FORWARD_MIXED_BF16: &str = "nvme_linear_forward_mixed_bf16";
    /// Does the same over f16.
    pub const FORWARD_MIXED_F16: &str = "nvme_linear_forward_mixed_f16";
    /// Does the work of [`FORWARD_FUSED`] in smaller tiles, for few tokens.
    pub const FORWARD_FEW: &str = "nvme_linear_forward_few";
    /// Does the work of [`FORWARD_MIXED_BF16`] in smaller tiles.
    pub const FORWARD_FEW_BF16: &str = "nvme_linear_forward_few_bf16";
    /// Does the work of [`FORWARD_MIXED_F16`] in smaller tiles.
    pub const FORWARD_FEW_F16: &str = "nvme_linear_forward_few_f16";
    /// Zeroes the gradients of weights and biases.
    pub const BACKWARD_CLEAR: &str = "nvme_linear_backward_clear";
    /// Computes gradients with atomic additions for weights and biases, a part of the tokens in each thread;
    /// that of the inputs without.
    pub const BACKWARD_NAIVE: &str = "nvme_linear_backward_naive";
    /// Computes the gradient of the sums, and of the biases, always in the same order.
    pub const BACKWARD_SUMS: &str = "nvme_linear_backward_sums";
    /// Computes the gradient of the inputs by the tensor cores. A block takes one tile.
    pub const BACKWARD_INPUTS: &str = "nvme_linear_backward_inputs";
    /// Does the work of [`BACKWARD_INPUTS`] in smaller tiles, for few tokens.
    pub const BACKWARD_INPUTS_FEW: &str = "nvme_linear_backward_inputs_few";
    /// Computes the gradient of the weights by the tensor cores. A block takes one tile.
    pub const BACKWARD_WEIGHTS: &str = "nvme_linear_backward_weights";
    /// Computes both gradients, 4 x 8 elements a warp, each lane over its share of the terms. After
    /// [`BACKWARD_SUMS`].
    pub const BACKWARD_WARP: &str = "nvme_linear_backward_warp_reduce";

    /// All kernels of [`LINEAR_PTX`](crate::LINEAR_PTX).
    pub const ALL: [&str; 16] = [
        FORWARD_NAIVE,
        ACTIVATE,
        FORWARD_FUSED,
        FORWARD_PERSISTENT,
        FORWARD_MIXED_BF16,
        FORWARD_MIXED_F16,
        FORWARD_FEW,
        FORWARD_FEW_BF16,
        FORWARD_FEW_F16,
        BACKWARD_CLEAR,
        BACKWARD_NAIVE,
        BACKWARD_SUMS,
        BACKWARD_INPUTS,
        BACKWARD_INPUTS_FEW,
        BACKWARD_WEIGHTS,
        BACKWARD_WARP,
    ];
}

/// Rows and columns of a tile of the tensor core kernels.
pub const TILE: u32 = 128;
/// Threads of a block of the tensor core kernels over `f32`.
pub const TENSOR_THREADS: u32 = 256;
/// Threads of a block of the mixed kernels, and of those for few tokens.
pub const FEW_THREADS: u32 = 128;
/// Tiles of each operand that are being copied or in use.
pub const STAGES: u32 = 3;
/// Tokens of a thread of [`kernel::BACKWARD_NAIVE`].
pub const NAIVE_TOKENS: u32 = 64;
/// Columns of a block of [`kernel::BACKWARD_SUMS`].
pub const SUMS_COLUMNS: u32 = 32;
/// Rows of a warp of [`kernel::BACKWARD_WARP`].
pub const WARP_ROWS: u32 = 4;
/// Columns of a warp of [`kernel::BACKWARD_WARP`].
pub const WARP_COLUMNS: u32 = 8;
/// Rows of a tile of the kernels for few tokens.
pub const FEW_ROWS: u32 = 32;
/// Columns of a tile of the kernels for few tokens.
pub const FEW_COLUMNS: u32 = 64;

/// Returns the bytes of a tile of `rows` rows with consecutive terms.
pub const fn tile_bytes(rows: u32) -> u32 {
    rows * 128
}

/// Returns the bytes of a tile of 32 terms with `rows` consecutive rows.
pub const fn cross_bytes(rows: u32) -> u32 {
    32 * (rows + 8) * 4
}

/// Parameters of `y = act(x W^T + b)`. Numbers are `f32`, or halves in the mixed kernels.
///
/// Argument of the kernels of the forward pass. A training step keeps `sums` for the backward pass; inference
/// passes 0 for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ForwardParameters {
    /// Address of `tokens` rows of `inputs`.
    pub x: u64,
    /// Address of `outputs` rows of `inputs`.
    pub weights: u64,
    /// Address of `outputs` numbers, or 0 for no bias.
    pub bias: u64,
    /// Address of `tokens` rows of `outputs`.
    pub y: u64,
    /// Address for the sums before the activation, in the layout of `y`, always `f32`; or 0.
    pub sums: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Elements of a row of `x`.
    pub inputs: u32,
    /// Elements of a row of `y`.
    pub outputs: u32,
    /// The [`ActivationKind`].
    pub activation: u32,
}

/// Parameters of the gradients of [`ForwardParameters`], all in `f32`.
///
/// Argument of the kernels of the backward pass. A gradient whose address is 0 is not computed, which saves
/// its product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BackwardParameters {
    /// As [`ForwardParameters::x`].
    pub x: u64,
    /// As [`ForwardParameters::weights`].
    pub weights: u64,
    /// As [`ForwardParameters::sums`]; not used without an activation.
    pub sums: u64,
    /// Address of the gradient of `y`.
    pub dy: u64,
    /// Address for the gradient of the sums, in the layout of `y`; equal to `dy` without an activation.
    pub dsums: u64,
    /// Address for the gradient of `x`, or 0.
    pub dx: u64,
    /// Address for the gradient of the weights, or 0.
    pub dweights: u64,
    /// Address for the gradient of the biases, or 0.
    pub dbias: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Elements of a row of `x`.
    pub inputs: u32,
    /// Elements of a row of `y`.
    pub outputs: u32,
    /// The [`ActivationKind`].
    pub activation: u32,
}
