//! Models whose weights stream from a drive.

pub mod generate;
