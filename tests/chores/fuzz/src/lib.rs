//! Fuzz targets, and the lines that their corpora reach.
//!
//! Here belongs what builds and runs the targets. The targets are in `fuzz`, what they check is in
//! `tests/src/fuzz`, where ordinary tests run it, too.

pub mod fuzz;
