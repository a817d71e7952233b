//! `bench`: workloads from the CPU or a GPU, live rates, charts.

mod gather;
#[cfg(feature = "cuda")]
mod gpu;
mod intervals;
mod plot;
mod run;

pub use run::Bench;
