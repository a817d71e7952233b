//! Fuzz targets, and the lines that their corpora reach.
//!
//! Code that builds and runs the targets belongs here. The targets are in `fuzz`. Their checks are
//! in `tests/src/fuzz`, and ordinary tests run them, too.

pub mod fuzz;
