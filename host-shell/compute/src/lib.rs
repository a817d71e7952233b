//! Models whose weights lie on NVMe and stream through a few slots of memory, layer by layer.
//!
//! - [`Tokenizer`]: text to tokens and back, by what a GGUF file says.
//! - [`llama::Llama`]: a model of the architecture `llama`: tokens in, the next token out.
//! - [`synthetic::Synthetic`]: models of random weights, for tests and measurements.
//!
//! Kernels of a GPU ([`nvme_compute_kernel`]) compute where the store has one, else threads of the CPU.

pub mod llama;
mod machine;
pub mod synthetic;
mod tokenizer;

pub use tokenizer::Tokenizer;

#[cfg(test)]
mod tests;
