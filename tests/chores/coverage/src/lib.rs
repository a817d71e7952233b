//! The lines that tests reach, of the libraries and of the Python package, and the tests of that package.
//!
//! Code that runs tests with instrumentation and reads its output belongs here. The floors are numbers of this crate;
//! the tests are in the crates that they test.

pub mod coverage;
pub mod python;
