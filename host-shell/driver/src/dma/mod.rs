//! Memory that the controller reaches by DMA.
//!
//! - [`Pages`]: page-aligned memory of this process, or of a file.
//! - [`Region`], [`DmaBuffer`]: memory mapped at a device, and the parts of it that commands move.
//! - [`Pair`]: a queue pair and the memory of its rings.
//! - `addresses`, `pool`, `shared`: which addresses and pages the devices hand out.

pub(crate) mod addresses;
pub mod pages;
mod pair;
#[cfg(feature = "vfio-user")]
pub(crate) mod pool;
mod region;
#[cfg(feature = "sim")]
mod shared;

pub use pages::Pages;
pub(crate) use pair::{HostPair, Lease, Pair, PairShape};
pub use region::DmaBuffer;
pub(crate) use region::{Region, Scratch};
#[cfg(feature = "sim")]
pub(crate) use shared::SharedPages;
