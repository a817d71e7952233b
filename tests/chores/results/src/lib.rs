//! Recorded runs: what is appended to docs/results, the page and the tables that are made of it.
//!
//! Here belongs what reads and writes tables of runs. What measures is in `nvme-bench` and in the examples.

pub mod figures;
pub mod results;
pub mod witness;
