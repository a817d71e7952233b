//! Models whose weights lie on NVMe and stream through a few slots of memory, layer by layer.
//!
//! - [`Tokenizer`]: text to tokens and back, by the vocabulary of a GGUF file.
//! - [`llama::Llama`]: a model of the architecture `llama`: tokens in, the next token out.
//! - [`steps`]: the operations of a transformer's token, one call each, on a GPU or on the CPU.
//! - [`Matrix`], `StreamedProducts`: products with a matrix that a GPU reads from a drive while it multiplies.
//! - `GpuIds`: the same for rows whose ids lie in GPU memory.
//! - `gemm`: the same for many vectors at once, by the tensor cores.
//! - [`KvPages`], `paged`: attention over keys and values that a GPU reads from a drive while it attends.
//! - [`experts`]: mixture-of-experts layers (MoE); a GPU reads the experts that it selects.
//! - [`Keep`], `choosing`: selection of the pages that matter to a query, by upper bounds of its products with
//!   their keys.
//! - [`flash`], [`linear`]: attention and linear layers over memory, rung by rung.
//! - [`search`]: nearest vectors in a graph on a drive.
//! - [`ladder`]: products of matrices, step by step up to the tensor cores.
//! - [`pipeline`]: batches of matrices that are read while others are multiplied.
//! - [`checkpoint`]: checkpoints of Mixtral as GGUF files.
//! - [`synthetic::Synthetic`]: models of random weights, for tests and measurements.
//!
//! Kernels of a GPU ([`nvme_compute_kernel`]) compute where the store has one, else threads of the CPU.

#[cfg(feature = "cuda")]
pub mod bench;
pub mod checkpoint;
mod choice;
#[cfg(feature = "cuda")]
pub mod choosing;
pub mod experts;
#[cfg(feature = "cuda")]
mod extents;
pub mod flash;
#[cfg(feature = "cuda")]
mod gathered;
#[cfg(feature = "cuda")]
pub mod gemm;
mod gguf;
mod kv;
pub mod ladder;
pub mod linear;
pub mod llama;
mod machine;
mod matrix;
mod metadata;
#[cfg(feature = "cuda")]
pub mod paged;
pub mod pipeline;
pub mod search;
pub mod steps;
#[cfg(feature = "cuda")]
pub mod streamed;
pub mod synthetic;
mod tokenizer;

pub use choice::Keep;
#[cfg(feature = "cuda")]
pub use gathered::GpuIds;
pub use kv::{KvPages, KvShape};
pub use matrix::{Half, Matrix};
#[cfg(feature = "cuda")]
pub use streamed::StreamedProducts;
pub use tokenizer::Tokenizer;

#[cfg(test)]
mod tests;
