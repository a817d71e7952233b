//! The host side of nvme-gpu: bring up an NVMe controller and move blocks, from ordinary threads.
//!
//! - [`Store`]: bytes on a drive or in a file, at any offset, from any thread; [`Table`]: rows by ids.
//! - [`LayerLoader`](loader::LayerLoader): layers of a model, read while others are used.
//! - [`Manifest`]: the hashes of a file, by which layers are verified where they were loaded.
//! - [`Device`]: how a controller is reached. [`open`] makes one from the text of `--device`.
//! - [`Controller`]: bring-up, admin commands, shutdown on drop.
//! - [`Namespace`]: blocking reads and writes of any range.
//! - [`Queue`]: a queue pair for one thread: submit, ring, poll.
//! - [`mod@bench`]: workloads, latency histograms and reports.
//!
//! Errors carry their cause, a remedy and the exit code of the command line: [`Error`].
//!
//! ```
//! use nvme_host::core::spec::{Lba, Nsid};
//! use nvme_host::{Config, Controller};
//!
//! # #[cfg(feature = "sim")]
//! fn copy_a_block() -> nvme_host::Result<()> {
//!     // A simulated drive in memory; `vfio:0000:01:00.0` is one on PCIe.
//!     let device = nvme_host::open("sim:mem?size=16MiB")?;
//!     let controller = Controller::start(device, &Config::default())?;
//!     let mut namespace = controller.namespace(Nsid(1))?;
//!     let mut block = vec![0; namespace.block_bytes() as usize];
//!     block[..5].copy_from_slice(b"hello");
//!     namespace.write(Lba(0), &block)?;
//!     namespace.flush()?;
//!     namespace.read(Lba(0), &mut block)?;
//!     assert!(block.starts_with(b"hello"));
//!     drop(namespace);
//!     controller.shut_down()
//! }
//! # #[cfg(not(feature = "sim"))]
//! # fn copy_a_block() -> nvme_host::Result<()> { Ok(()) }
//!
//! fn main() -> std::process::ExitCode {
//!     match copy_a_block() {
//!         Ok(()) => std::process::ExitCode::SUCCESS,
//!         Err(error) => {
//!             eprintln!("error: {error}: {}", error.remedy());
//!             std::process::ExitCode::from(error.exit_code())
//!         }
//!     }
//! }
//! ```
//!
//! [`Queue`] has an example with commands in flight, [`Controller`] one with a command that is lost.
#![deny(missing_docs)]

pub mod bench;
pub mod catalog;
mod controller;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod dma;
mod error;
pub mod files;
pub mod loader;
mod lock;
mod machine;
pub mod manifest;
mod measure;
mod names;
mod process_mark;
mod remedy;
pub mod store;
pub mod units;
mod widen;
pub mod words;

pub use catalog::Catalog;
pub use controller::config::{Config, Rings};
pub use controller::namespace::Namespace;
pub use controller::notice::{DeviceEvent, Notice, Notify, PageError};
pub use controller::queue::{Batch, Queue, QueueRefusal, Rejected};
pub use controller::queue_inner::Completion;
pub use controller::statistics::Statistics;
pub use controller::{Controller, outage, passthru};
pub use device::bar::DoorbellMap;
pub use device::open::{open, open_reading};
pub use device::peer::PeerMemory;
pub use device::ring_memory::{Piece, RingMemory};
#[cfg(feature = "sim")]
pub use device::sim;
#[cfg(feature = "vfio")]
pub use device::vfio;
#[cfg(feature = "vfio-user")]
pub use device::vfio_user;
pub use device::{Device, relay};
pub use dma::{DmaBuffer, Pages};
pub use error::{Error, Result, exit};
pub use machine::{doctor, pci, sysfs, topology};
pub use manifest::Manifest;
pub use nvme_core as core;
pub use process_mark::ProcessMark;
pub use store::{Store, StoreOptions, Table};

/// The Rust of the README compiles and runs.
#[cfg(all(doctest, feature = "sim"))]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So does that of the guide to stores.
#[cfg(all(doctest, feature = "sim"))]
#[doc = include_str!("../../docs/guide/store.md")]
struct StoreGuide;
