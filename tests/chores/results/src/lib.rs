//! Recorded runs: what is appended to docs/results, the page and the tables that are made of it.

pub mod figures;
pub mod results;
pub mod witness;
