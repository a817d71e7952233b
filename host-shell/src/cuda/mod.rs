//! CUDA at run time, the crate `nvme-cuda`, and what measures it.
//!
//! - [`mod@bench`]: the suite of measurements.
//! - [`null`]: a controller of CPU threads that moves no data, for benchmarks.

pub mod bench;
pub mod null;

pub use nvme_cuda::*;
