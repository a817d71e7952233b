//! The host side of nvme-gpu: bring up an NVMe controller and move blocks, from ordinary threads.
//!
//! Only names belong here: each crate below has its own code, and new code goes there.
//!
//! - [`Store`]: bytes on a drive or in a file, at any offset, from any thread; [`Table`]: rows by ids.
//! - [`LayerLoader`](loader::LayerLoader): layers of a model, read while others are used.
//! - [`Manifest`]: the hashes of a file, by which layers are verified where they were loaded.
//! - [`Device`]: how a controller is reached. [`open`] makes one from the text of `--device`.
//! - [`Controller`]: bring-up, admin commands, shutdown on drop.
//! - [`Namespace`]: blocking reads and writes of any range.
//! - [`DriverQueue`]: a queue pair for one thread: submit, ring, poll.
//! - [`mod@bench`]: workloads, latency histograms and reports.
//!
//! Errors carry their cause, a remedy and the exit code of the command line: [`Error`].
//!
//! ```
//! use nvme_host::core::spec::{Lba, Nsid};
//! use nvme_host::{ControllerConfig, Controller};
//!
//! # #[cfg(feature = "sim")]
//! fn copy_a_block() -> nvme_host::Result<()> {
//!     // A simulated drive in memory; `vfio:0000:01:00.0` is one on PCIe.
//!     let device = nvme_host::open("sim:mem?size=16MiB")?;
//!     let controller = Controller::start(device, &ControllerConfig::default())?;
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
//! [`DriverQueue`] has an example with commands in flight, [`Controller`] one with a command that is lost.
//!
//! This crate is a facade: it only re-exports `nvme-driver`, `nvme-cuda`, `nvme-store`,
//! `nvme-files`, `nvme-doctor` and `nvme-bench` under the names that they had here. A user of blocks alone depends on
//! `nvme-driver`.
#![deny(missing_docs)]

#[cfg(feature = "cuda")]
pub mod cuda {
    //! CUDA at run time, and what measures it.

    pub use nvme_bench::{gpu as bench, null};
    pub use nvme_cuda::*;
}

pub use nvme_bench as bench;
pub use nvme_core as core;
pub use nvme_doctor::{advice, doctor, topology};
#[cfg(feature = "sim")]
pub use nvme_driver::sim;
#[cfg(feature = "vfio")]
pub use nvme_driver::vfio;
#[cfg(feature = "vfio-user")]
pub use nvme_driver::vfio_user;
pub use nvme_driver::{
    Controller, ControllerConfig, ControllerNotice, Device, DeviceEvent, DmaBuffer, DmaPages,
    DoorbellMap, DriverQueue, Error, Namespace, NoticeListener, PageError, PeerMemory, ProcessMark,
    QueueCompletion, QueueRefusal, QueueStatistics, RejectedSubmission, Result, RingLocation,
    RingMemory, RingPiece, SubmissionBatch, exit, lock, log, open, open_reading, outage, passthru,
    pci, relay, sysfs, units, words,
};
pub use nvme_files::{Catalog, Manifest, catalog, files, loader, manifest};
pub use nvme_store as store;
pub use nvme_store::{Store, StoreOptions, Table};

/// The Rust of the README compiles and runs.
#[cfg(all(doctest, feature = "sim"))]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So does that of the guide to stores.
#[cfg(all(doctest, feature = "sim"))]
#[doc = include_str!("../../docs/guide/store.md")]
struct StoreGuide;
