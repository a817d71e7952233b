//! Faults made on purpose, each of which some test has to find: weakened orders under loom and as threads, and the
//! bugs of tests/mutants.

pub mod loom;
pub mod planted;
pub mod stress;
