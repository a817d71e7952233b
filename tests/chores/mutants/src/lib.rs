//! Faults made on purpose, each of which some test has to find: weakened orders under loom and as threads, and the
//! bugs of tests/mutants.
//!
//! Code that applies a fault to a copy of the sources and checks how its test ended belongs here. The patches are in
//! `tests/mutants`, the tests in the crates that they test.

pub mod loom;
pub mod planted;
pub mod stress;
