//! The common base of computation: the operations of a transformer's token, and products with matrices that stay on a
//! drive.
//!
//! Models (`nvme-models`) and the course (`nvme-course`) are above this crate; text, files of models and search are in
//! other crates.
//!
//! - [`steps`]: the operations of a transformer's token, one call each, on a GPU or on the CPU.
//! - [`StoredMatrix`], `StreamedProducts`: products with a matrix that a GPU reads from a drive while it multiplies.
//! - `GpuIds`: the same for rows whose ids lie in GPU memory.
//! - `gemm`: the same for many vectors at once, by the tensor cores.
//! - [`random_weights`]: weights for tests and measurements.
//!
//! Kernels of a GPU ([`nvme_compute_kernel`]) compute where the store has one, else threads of the CPU.

#[cfg(feature = "cuda")]
pub mod bench;
pub mod extents;
#[cfg(feature = "cuda")]
mod gathered;
#[cfg(feature = "cuda")]
pub mod gemm;
pub mod matrix;
pub mod random_weights;
pub mod steps;
#[cfg(feature = "cuda")]
pub mod streamed;

#[cfg(feature = "cuda")]
pub use gathered::GpuIds;
pub use matrix::{HalfFormat, StoredMatrix};
#[cfg(feature = "cuda")]
pub use streamed::StreamedProducts;
