//! A software NVMe controller for any driver.
//!
//! Here belongs the behaviour of a controller, and its failures on request. No code of the driver belongs here, and no
//! code of this crate in the driver: the two sides share only the wire types.
//!
//! A [`Controller`] is made from a [`Config`] (or its text form, [`config::parse`]) and the memory
//! that it may reach. The driver writes registers and doorbells as it would on a BAR; the
//! controller does its work in [`Controller::step`], or in the threads of a [`Runner`].
//!
//! - [`Controller`]: registers with their side effects, doorbells as memory, and `step`, which does
//!   everything that is due at a virtual time, deterministically.
//! - [`Runner`]: threads that poll the doorbell memory and step in real time.
//! - [`DmaMemory`]: the memory in reach: [`HostMemory`] is memory of this process at chosen
//!   addresses, [`VecMemory`] owns its bytes.
//! - [`BlockStore`]: the blocks of a namespace: in memory, in a file, or discarded.
//! - [`LatencyProfile`]: timing; [`FaultPlan`]: injected faults.
//!
//! The driver is treated as hostile: invalid doorbells, addresses outside the map and deleted
//! queues end in the status, event or fatal state that the specification gives them, never in a
//! panic. With the driver it shares `nvme-spec` alone, so that the two sides cannot agree on a mistake
//! in logic.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

extern crate alloc;
#[cfg(all(test, not(feature = "std")))]
extern crate std;

mod bus;
mod command;
pub mod config;
mod controller;
mod device;
mod engine;
#[cfg(all(feature = "std", target_os = "linux"))]
mod event;
mod medium;
mod memory;
mod observer;
#[cfg(feature = "std")]
mod runner;
#[cfg(test)]
mod testing;
#[cfg(all(feature = "std", target_os = "linux"))]
pub mod vfio_user;

pub use bus::doorbell::Doorbells;
pub use bus::interrupt::InterruptSink;
pub use bus::queue::QueueStats;
pub use config::fault::{ExternalChange, Fault, FaultCondition, FaultPlan, FaultRule};
pub use config::{Config, ConfigError, NamespaceConfig};
pub use controller::{Controller, StepOutcome};
pub use device::faults::FiredFault;
#[cfg(feature = "std")]
pub use medium::file::{CreatedImage, FileStore};
pub use medium::latency::LatencyProfile;
pub use medium::store::{BlockStore, GeneratedStore, MemoryStore, NullStore, StoreError};
pub use memory::{
    Dma, DmaFault, DmaGuard, DmaMemory, DmaRegion, MemorySpan, PeerAccess, PeerCopy, VecMemory,
};
#[cfg(feature = "std")]
pub use memory::{HostMemory, MapError};
pub use nvme_auditor::{Finding, ProtocolSide, Rule};
#[cfg(feature = "std")]
pub use runner::Runner;
