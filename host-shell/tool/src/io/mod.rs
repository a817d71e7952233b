//! Commands that read and write blocks.

pub mod compare;
pub mod dsm;
pub mod flush;
pub mod read;
pub mod stream;
pub mod write;
pub mod write_zeroes;
