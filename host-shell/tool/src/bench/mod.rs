//! `bench`: workloads from the CPU or a GPU, live rates, charts.

mod gather;
#[cfg(feature = "cuda")]
mod gemv;
#[cfg(feature = "cuda")]
mod gpu;
mod intervals;
#[cfg(feature = "cuda")]
mod ladder;
mod paths;
mod plot;
mod run;

pub use run::Bench;

/// The option that needs no --device, and what stands for the device then.
pub const NO_DEVICE_FOR: &str = "paths";
pub const NO_DEVICE: &str = "none";
