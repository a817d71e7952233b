//! A software NVMe controller that a stranger's driver could use.
//!
//! - [`Controller`]: registers with their side effects, doorbells as memory, and `step`: everything
//!   that is due at a virtual time, deterministically.
//! - [`Runner`]: threads that poll the doorbell memory and step in real time.
//! - [`DmaMemory`]: what the controller can reach: [`HostMemory`] is memory of this process at
//!   chosen addresses, [`VecMemory`] owns its bytes.
//! - [`Store`]: where blocks are kept: memory, a file, or nothing.
//! - [`Config`], or [`config::parse`] for its text form; [`Profile`] for timing, [`FaultPlan`] for
//!   trouble.
//!
//! The driver is treated as hostile: bad doorbells, addresses outside the map and deleted queues end
//! in the status, event or fatal state that the specification gives them, never in a panic. Of
//! nvme-core only `spec` is used, so that the two sides cannot agree on a mistake in logic.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

extern crate alloc;
#[cfg(all(test, not(feature = "std")))]
extern crate std;

mod admin;
mod batch;
mod cache;
pub mod config;
mod controller;
mod create;
mod data;
mod device;
mod doorbell;
mod fault;
mod features;
#[cfg(feature = "std")]
mod file_store;
#[cfg(test)]
mod foreign;
mod format;
mod identify;
mod interrupt;
mod latency;
mod logs;
mod memory;
mod namespace;
mod nvm;
mod observe;
#[cfg(feature = "std")]
mod options;
mod prp;
mod queue;
mod registers;
#[cfg(feature = "std")]
mod runner;
mod sanitize;
mod serve;
mod sgl;
mod store;
#[cfg(test)]
mod testing;
mod vec_memory;
#[cfg(all(feature = "std", target_os = "linux"))]
pub mod vfio_user;

pub use config::{Config, ConfigError, NamespaceConfig};
pub use controller::{Controller, Stepped};
pub use doorbell::Doorbells;
pub use fault::{Fault, FaultPlan, FaultRule, Fired, When};
#[cfg(feature = "std")]
pub use file_store::File;
pub use interrupt::Interrupts;
pub use latency::Profile;
pub use memory::{Dma, DmaFault, DmaGuard, DmaMemory, Peer, PeerCopy, Region, Span};
#[cfg(feature = "std")]
pub use memory::{HostMemory, MapError};
pub use nvme_auditor::{Finding, Party, Rule};
pub use queue::QueueStats;
#[cfg(feature = "std")]
pub use runner::Runner;
pub use store::{Memory, Null, Store, StoreError};
pub use vec_memory::VecMemory;
