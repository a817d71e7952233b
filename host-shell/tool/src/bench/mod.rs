//! `bench`: workloads from the CPU or a GPU, with live rates and charts. The workloads themselves are in the
//! library; here are their options, their reports and the plots.

#[cfg(feature = "cuda")]
mod crossover;
mod formats;
mod gather;
#[cfg(feature = "cuda")]
mod gemv;
#[cfg(feature = "cuda")]
mod gpu;
mod intervals;
#[cfg(feature = "cuda")]
mod ladder;
mod paths;
pub mod plot;
mod run;

pub use formats::stored;
pub use run::BenchCommand;

/// The option that needs no --device, because it names the device itself.
pub const NO_DEVICE_FOR: &str = "paths";
pub const NO_DEVICE: &str = "none";
