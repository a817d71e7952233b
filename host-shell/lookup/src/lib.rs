//! Row ids of the lookup tables that language models of 2026 carry beside their layers.
//!
//! Such a model hashes the last few tokens of a sequence, by several hashes, and adds the rows that they select to its
//! state. Here belong the hashes and their constants, from a model's own configuration, and the history of a sequence's
//! tokens. Reading the rows is the task of a table of `nvme-store`.
//!
//! - [`NgramHash`]: one table's hashes, from token ids to row ids.
//! - [`NgramHistory`]: the newest tokens of a request, with which its next n-grams begin.
//! - [`GpuNgramHash`]: the same hashes of tokens in GPU memory, by kernels.
//! - [`engram`]: the tables of DeepSeek-V4.1, "Engram". [`ple`]: the tables of Qwen3.8-Flash-Next.
//!
//! The published models compute ids in 64-bit integers that never wrap, because a multiplier is below 2^63 divided by the
//! number of tokens. A token outside that number is refused here: its product could wrap, and select a plausible row.
#![deny(unsafe_code)]
#![deny(missing_docs)]

pub mod engram;
mod error;
mod history;
mod ngram;
mod numpy;
#[cfg(feature = "cuda")]
mod on_gpu;
pub mod ple;
mod primes;
mod settings;
mod tables;

pub use error::LookupError;
pub use history::NgramHistory;
pub use ngram::{HashHead, IMAGE_TOKEN, NgramBoundary, NgramHash};
#[cfg(feature = "cuda")]
pub use on_gpu::{GpuNgramHash, StepTokens};
pub use tables::NgramTables;
