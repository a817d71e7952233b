//! Memory that the controller accesses by DMA. Memory with a command in flight is never freed: it is leaked, since the
//! controller may still write to it.
//!
//! - [`DmaPages`]: page-aligned memory of this process, or of a file.
//! - `MappedRegion`, [`DmaBuffer`]: memory mapped at a device, and the parts of it that commands move.
//! - `OwnedPair`: a queue pair and the memory of its rings.
//! - `CompletionView`: the completion ring of a pair as other threads see it.
//! - `addresses`, `pool`, `shared`: allocation of I/O virtual addresses and of pages for the transports.

pub(crate) mod addresses;
pub mod pages;
mod pair;
#[cfg(feature = "vfio-user")]
pub(crate) mod pool;
mod region;
#[cfg(feature = "sim")]
mod shared;

pub use pages::DmaPages;
pub(crate) use pair::{CompletionView, HostPair, Lease, OwnedPair, PairShape};
pub use region::DmaBuffer;
pub(crate) use region::{MappedRegion, ScratchPage};
#[cfg(feature = "sim")]
pub(crate) use shared::SharedPages;
