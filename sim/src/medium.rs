//! Where blocks are kept, and how long that takes.

pub(crate) mod cache;
#[cfg(feature = "std")]
pub(crate) mod file;
pub(crate) mod latency;
pub(crate) mod namespace;
pub(crate) mod store;
