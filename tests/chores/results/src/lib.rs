//! Recorded runs: the lines that are appended in docs/results, and the page and the tables that are made from them.
//!
//! Code that reads and writes tables of runs belongs here. The code that measures is in `nvme-bench` and in the
//! examples.

pub mod figures;
pub mod results;
pub mod witness;
