//! The driver for users of blocks: reaches an NVMe controller, brings it up, and moves blocks from ordinary threads.
//!
//! Here belongs what a controller needs on the host: transports, DMA memory, PCI and sysfs, bring-up and recovery,
//! admin commands, namespaces and queues, and the [`Error`] of all crates above. Code that reads rows, files or models,
//! launches kernels or measures is in the crates above; `nvme_host` re-exports them all.
//!
//! - [`Device`]: the transport by which a controller is reached. [`open`] makes one from the text of `--device`.
//! - [`Controller`]: bring-up, admin commands, shutdown on drop.
//! - [`Namespace`]: blocking reads and writes of any range.
//! - [`DriverQueue`]: a queue pair for one thread: submit, ring, poll.
//! - [`mod@log`]: events of the libraries, for programs in other languages.
//! - [`pci`], [`sysfs`]: the machine as Linux shows it.
//!
//! Errors carry their cause, a remedy and the exit code of the command line.
#![deny(missing_docs)]

pub mod controller;
pub mod device;
pub mod dma;
pub mod error;
pub mod lock;
pub mod log;
pub mod pci;
mod process_mark;
pub mod remedy;
pub mod sysfs;
pub mod units;
pub mod widen;
pub mod words;

pub use controller::config::{ControllerConfig, RingLocation};
pub use controller::namespace::Namespace;
pub use controller::notice::{ControllerNotice, DeviceEvent, NoticeListener, PageError};
pub use controller::queue::{DriverQueue, QueueRefusal, RejectedSubmission, SubmissionBatch};
pub use controller::queue_inner::QueueCompletion;
pub use controller::statistics::QueueStatistics;
pub use controller::{Controller, outage, passthru};
pub use device::bar::DoorbellMap;
pub use device::open::{open, open_reading};
pub use device::peer::PeerMemory;
pub use device::ring_memory::{RingMemory, RingPiece};
#[cfg(feature = "sim")]
pub use device::sim;
#[cfg(feature = "vfio")]
pub use device::vfio;
#[cfg(feature = "vfio-user")]
pub use device::vfio_user;
pub use device::{Device, relay};
pub use dma::{DmaBuffer, DmaPages};
pub use error::{Error, Result, exit};
pub use nvme_core as core;
pub use process_mark::ProcessMark;
