//! Models whose weights lie on NVMe and stream through a few slots of memory, layer by layer.
//!
//! Products and the operations of a token are in [`nvme_compute`]; here belongs the code that knows of tokens, layers,
//! experts and keys and values.
//!
//! - [`Tokenizer`]: text to tokens and back, by the vocabulary of a GGUF file.
//! - [`llama::Llama`]: a model of the architecture `llama`: tokens in, the next token out.
//! - [`KvStore`], `paged`: attention over keys and values that a GPU reads from a drive while it attends.
//! - [`experts`]: mixture-of-experts layers (MoE); a GPU reads the experts that it selects.
//! - [`PageLimits`], `choosing`: selection of the pages that matter to a query, by upper bounds of its products with
//!   their keys.
//! - [`checkpoint`]: checkpoints of Mixtral as GGUF files.
//! - [`synthetic::SyntheticModel`]: models of random weights, for tests and measurements.

pub mod checkpoint;
mod choice;
#[cfg(feature = "cuda")]
pub mod choosing;
pub mod experts;
mod gguf;
mod kv;
pub mod layout;
pub mod llama;
mod machine;
mod metadata;
#[cfg(feature = "cuda")]
pub mod paged;
pub mod synthetic;
mod tokenizer;

pub use choice::PageLimits;
pub use kv::{KvShape, KvStore};
pub use tokenizer::Tokenizer;

#[cfg(test)]
mod tests;
