//! Memory that the driver shares with the controller, the map of it, and the lock around the
//! controller's state. This folder has all of the crate's unsafe code.
//!
//! A [`MemorySpan`] is accessed by single-copy-atomic words or by one opaque copy, never through a
//! reference to plain data. The driver may write the memory at any moment, and all that this can
//! cause is torn bytes in its own command. Memory that is not in the map is not accessed.
// UNSAFETY: the driver's memory is raw addresses; MemorySpan keeps every access inside one of them.
// SpinLock needs UnsafeCell, because the crate is no_std and core has no lock.
#![allow(unsafe_code)]

mod dma;
#[cfg(all(feature = "std", target_os = "linux"))]
mod file_calls;
#[cfg(all(feature = "std", target_os = "linux"))]
mod guest;
#[cfg(feature = "std")]
mod host;
mod lock;
#[cfg(all(feature = "std", target_os = "linux"))]
mod shared;
mod span;
#[cfg(feature = "std")]
mod staging;
mod vec;
mod words;

pub use dma::{Dma, DmaFault, DmaGuard, DmaMemory, DmaRegion};
#[cfg(all(feature = "std", target_os = "linux"))]
pub(crate) use file_calls::{lock as lock_file, punch_hole};
#[cfg(all(feature = "std", target_os = "linux"))]
pub(crate) use guest::{GuestMemory, MAX_MAPPINGS};
#[cfg(feature = "std")]
pub use host::{HostMemory, MapError};
pub(crate) use lock::{LockGuard, SpinLock};
pub use span::{MemorySpan, PeerAccess, PeerCopy};
#[cfg(all(feature = "std", target_os = "linux"))]
pub(crate) use staging::RemoteMemory;
pub use vec::VecMemory;
pub(crate) use words::{AlignedWords, PAGE};
