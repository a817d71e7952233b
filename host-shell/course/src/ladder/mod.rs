//! Matrix products by kernels that are optimised step by step (docs/ladder.md): each step changes one thing of the
//! one before, so that its effect can be measured alone and a wrong result is found where it arose.
//!
//! [`MatmulLadder`] has the kernels of a GPU, [`cpu`] the same products by the CPU; `bench` measures all of them and
//! cuBLAS.

#[cfg(feature = "cuda")]
pub mod bench;
pub mod cpu;
mod element;
#[cfg(feature = "cuda")]
mod gpu;
mod product;

pub use element::MatrixElement;
#[cfg(feature = "cuda")]
pub use gpu::MatmulLadder;
pub use product::{MatmulOperands, MatmulStep, MatrixOperand};
