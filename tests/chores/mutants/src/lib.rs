//! Faults made on purpose, each of which some test has to find: weakened orders under loom and as threads, and the
//! bugs of tests/mutants.
//!
//! Here belongs what applies a fault to a copy of the sources and judges how its test ended. The patches are in
//! `tests/mutants`, the tests in the crates that they test.

pub mod loom;
pub mod planted;
pub mod stress;
