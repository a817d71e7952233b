//! Rates of GPU-driven queues, compared with their limits: the suite of `nvme-gpu bench --gpu
//! --suite`.
//!
//! The controller is the null controller of CPU threads, so that driver, bus and the controller's
//! own speed are measured; each line names which of them was the limit.

mod case;
mod crossover;
mod gather;
mod limits;
mod rig;
mod stream;
mod suite;

pub use case::SuiteCase;
pub use crossover::{CrossoverJob, crossover};
pub use gather::{GatherJob, GraphCases, ProductShape, gather};
pub use limits::RateLimits;
pub(crate) use limits::copy_rates;
pub use nvme_cuda::SubmitMode;
pub use rig::{CaseRun, NullBench};
pub use suite::{SuiteOptions, run};
