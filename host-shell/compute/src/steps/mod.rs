//! Operations of one token of a transformer, one call each: for programs that bring their own vectors and
//! weights.
//!
//! - `StepKernels`: launches of the kernels in the caller's streams.
//! - [`by_cpu`]: the same by threads of the CPU.

pub mod by_cpu;
#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "cuda")]
pub use gpu::StepKernels;
#[cfg(feature = "cuda")]
pub use nvme_compute_kernel::{
    AddBias, ArgmaxParameters, AttentionParameters, GemvParameters, RmsNorm, RopeParameters,
    SiluMul, UnpackParameters,
};
