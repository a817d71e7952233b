//! The experts of published files: where each lies, with its scales and biases, without repacking the file.
//!
//! [`ExpertFiles`] reads the headers of a model's files; [`ExpertLayout`] describes the experts of a layer: the tensors
//! or parts of tensors that belong to each, and the reads that fetch them. Known are the layouts of safetensors with
//! tensors for each expert (DeepSeek, Mixtral, Qwen3, GLM, Kimi) and with those of all experts merged (gpt-oss,
//! Qwen3.5), and both of GGUF.
//!
//! - `files`: files on a store; `names`: what a tensor's name says; `bank`: the tensors of a layer
//! - `stored`: how a matrix is stored, by the types and shapes of its tensors; `checked`: the rules of a layer
//! - `reads`: ranges of the store, neighbours merged; `unpacked`: matrices as numbers

mod bank;
mod checked;
mod files;
mod names;
mod reads;
mod stored;
#[cfg(test)]
mod tests;
mod unpacked;

pub use checked::{ExpertLayout, MatrixLayout};
pub use files::{ExpertFiles, PlacedTensors, StoreRegion};
pub use names::{ExpertMatrix, TensorRole};
pub use reads::{ExpertPart, ExpertRanges, ExpertRead};
pub use stored::ExpertFormat;
pub use unpacked::StoredMatrix;
