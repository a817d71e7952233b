//! What one token of a transformer takes, each step by itself: for programs that have vectors and weights of their own.
//!
//! - `Steps`: launches of the kernels in streams of others.
//! - [`by_cpu`]: the same by threads of the CPU.

pub mod by_cpu;
#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "cuda")]
pub use gpu::Steps;
#[cfg(feature = "cuda")]
pub use nvme_compute_kernel::{Argmax, Attention, Gemv, RmsNorm, Rope, SiluMul, Unpack};
