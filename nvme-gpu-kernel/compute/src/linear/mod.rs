//! Linear layers, `y = act(x W^T + b)`, and their gradients, with everything in memory of the GPU: a rung a file.
//!
//! Matrices lie row after row. `docs/ladder-linear.md` is the course.

mod activation;
#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(target_arch = "nvptx64")]
mod backward;
#[cfg(target_arch = "nvptx64")]
mod forward;
#[cfg(target_arch = "nvptx64")]
mod gemm;
#[cfg(target_arch = "nvptx64")]
mod naive;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
#[cfg(target_arch = "nvptx64")]
mod warp;

pub use activation::{Activation, Logistic};

/// The names of the kernels. Those of the forward pass take a [`Forward`], the others a [`Backward`].
pub mod kernel {
    /// Sums and biases, without the activation. A thread has an element at a time.
    pub const FORWARD_NAIVE: &str = "nvme_linear_forward_naive";
    /// The activation of what [`FORWARD_NAIVE`] left in `y`. A thread has an element at a time.
    pub const ACTIVATE: &str = "nvme_linear_activate";
    /// All of it by tensor cores, each product as three of TF32. A block has a tile of `y`.
    pub const FORWARD_FUSED: &str = "nvme_linear_forward_fused";
    /// The same; a block has several tiles, and loads the next while it ends one.
    pub const FORWARD_PERSISTENT: &str = "nvme_linear_forward_persistent";
    /// The same over bf16, with sums of `f32`.
    pub const FORWARD_MIXED_BF16: &str = "nvme_linear_forward_mixed_bf16";
    /// The same over f16.
    pub const FORWARD_MIXED_F16: &str = "nvme_linear_forward_mixed_f16";
    /// As [`FORWARD_FUSED`] by smaller tiles, for few tokens.
    pub const FORWARD_FEW: &str = "nvme_linear_forward_few";
    /// As [`FORWARD_MIXED_BF16`] by smaller tiles.
    pub const FORWARD_FEW_BF16: &str = "nvme_linear_forward_few_bf16";
    /// As [`FORWARD_MIXED_F16`] by smaller tiles.
    pub const FORWARD_FEW_F16: &str = "nvme_linear_forward_few_f16";
    /// Zeros to the gradients of weights and biases.
    pub const BACKWARD_CLEAR: &str = "nvme_linear_backward_clear";
    /// Gradients by atomic additions: of inputs without, of weights and biases a part of the tokens each thread.
    pub const BACKWARD_NAIVE: &str = "nvme_linear_backward_naive";
    /// The gradient of the sums, and that of the biases, always in the same order.
    pub const BACKWARD_SUMS: &str = "nvme_linear_backward_sums";
    /// The gradient of the inputs by tensor cores. A block has a tile.
    pub const BACKWARD_INPUTS: &str = "nvme_linear_backward_inputs";
    /// As [`BACKWARD_INPUTS`] by smaller tiles, for few tokens.
    pub const BACKWARD_INPUTS_FEW: &str = "nvme_linear_backward_inputs_few";
    /// The gradient of the weights by tensor cores. A block has a tile.
    pub const BACKWARD_WEIGHTS: &str = "nvme_linear_backward_weights";
    /// Both, 4 x 8 elements a warp, whose lanes have terms of their own. After [`BACKWARD_SUMS`].
    pub const BACKWARD_WARP: &str = "nvme_linear_backward_warp_reduce";

    /// All of [`LINEAR_PTX`](crate::LINEAR_PTX).
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

/// Rows and columns of a tile of the tensor cores' kernels.
pub const TILE: u32 = 128;
/// Threads of a block of those over `f32`.
pub const TENSOR_THREADS: u32 = 256;
/// Threads of a block of the mixed kernels, and of those for few tokens.
pub const FEW_THREADS: u32 = 128;
/// Tiles of each operand that are under way or in use.
pub const STAGES: u32 = 3;
/// Tokens of a thread of [`kernel::BACKWARD_NAIVE`].
pub const NAIVE_TOKENS: u32 = 64;
/// Columns of a block of [`kernel::BACKWARD_SUMS`].
pub const SUMS_COLUMNS: u32 = 32;
/// Rows of a warp of [`kernel::BACKWARD_WARP`].
pub const WARP_ROWS: u32 = 4;
/// Columns of a warp of it.
pub const WARP_COLUMNS: u32 = 8;
/// Rows of a tile of the kernels for few tokens.
pub const FEW_ROWS: u32 = 32;
/// Columns of a tile of theirs.
pub const FEW_COLUMNS: u32 = 64;

/// Bytes of a tile of `rows` rows whose terms follow on each other.
pub const fn tile_bytes(rows: u32) -> u32 {
    rows * 128
}

/// Bytes of a tile of 32 terms whose `rows` rows follow on each other.
pub const fn cross_bytes(rows: u32) -> u32 {
    32 * (rows + 8) * 4
}

/// `y = act(x W^T + b)`. Numbers are `f32`, or halves in the mixed kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Forward {
    /// `tokens` rows of `inputs`.
    pub x: u64,
    /// `outputs` rows of `inputs`.
    pub weights: u64,
    /// `outputs` numbers, or 0.
    pub bias: u64,
    /// `tokens` rows of `outputs`.
    pub y: u64,
    /// As `y`, always `f32`: what the activation is of; or 0.
    pub sums: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Elements of a row of `x`.
    pub inputs: u32,
    /// Elements of a row of `y`.
    pub outputs: u32,
    /// The [`Activation`].
    pub activation: u32,
}

/// Gradients of [`Forward`], all of `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Backward {
    /// As [`Forward::x`].
    pub x: u64,
    /// As [`Forward::weights`].
    pub weights: u64,
    /// As [`Forward::sums`]; not used without an activation.
    pub sums: u64,
    /// The gradient of `y`.
    pub dy: u64,
    /// Room for the gradient of the sums, as `y`: `dy` without an activation.
    pub dsums: u64,
    /// The gradient of `x`, or 0.
    pub dx: u64,
    /// The gradient of the weights, or 0.
    pub dweights: u64,
    /// The gradient of the biases, or 0.
    pub dbias: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Elements of a row of `x`.
    pub inputs: u32,
    /// Elements of a row of `y`.
    pub outputs: u32,
    /// The [`Activation`].
    pub activation: u32,
}
