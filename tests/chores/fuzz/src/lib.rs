//! Fuzz targets, and the lines that their corpora reach.

pub mod fuzz;
