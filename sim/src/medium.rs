//! The storage of blocks, in memory or in files, with the volatile write cache above it and the
//! latency of a real drive. Nothing here knows of commands: ranges are in bytes.

pub(crate) mod cache;
#[cfg(feature = "std")]
pub(crate) mod file;
pub(crate) mod latency;
pub(crate) mod namespace;
pub(crate) mod store;
