//! Products of matrices by kernels that are steps of a course (docs/ladder.md): each rung is the one before with one
//! thing changed.
//!
//! [`Ladder`] has them for a GPU, [`cpu`] the same for the CPU; `bench` measures all beside cuBLAS.

#[cfg(feature = "cuda")]
pub mod bench;
pub mod cpu;
mod element;
#[cfg(feature = "cuda")]
mod gpu;
mod product;

pub use element::Element;
#[cfg(feature = "cuda")]
pub use gpu::Ladder;
pub use product::{Matmul, Operand, Rung};
