//! The host side of nvme-gpu: bring up an NVMe controller and move blocks, from ordinary threads.
//!
//! - [`Device`]: how a controller is reached. [`open`] makes one from the text of `--device`.
//! - [`Controller`]: bring-up, admin commands, shutdown on drop.
//! - [`Namespace`]: blocking reads and writes of any range.
//! - [`Queue`]: a queue pair for one thread: submit, ring, poll.
//! - [`mod@bench`]: workloads, latency histograms and reports.
//!
//! Errors carry their cause, a remedy and the exit code of the command line: [`Error`].
#![deny(missing_docs)]

mod addresses;
mod bar;
pub mod bench;
mod cmb;
mod controller;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod dma;
pub mod doctor;
mod erase;
mod error;
mod events;
mod interrupt;
mod log_page;
mod namespace;
mod notice;
mod open;
pub mod outage;
mod pages;
pub mod passthru;
pub mod pci;
#[cfg(feature = "vfio-user")]
mod pool;
mod queue;
mod recover;
pub mod relay;
mod remedy;
mod reset;
mod session;
#[cfg(feature = "sim")]
pub mod sim;
mod statistics;
pub mod sysfs;
pub mod units;
#[cfg(feature = "vfio")]
pub mod vfio;
#[cfg(feature = "vfio-user")]
pub mod vfio_user;

pub use bar::DoorbellMap;
pub use cmb::{ControllerMemory, Piece};
pub use controller::{Config, Controller, Rings};
pub use device::Device;
pub use dma::{DmaBuffer, Pages};
pub use error::{Error, Result, exit};
pub use namespace::Namespace;
pub use notice::{DeviceEvent, Notice, Notify, PageError};
pub use nvme_core as core;
pub use open::{open, open_reading};
pub use queue::{Batch, Done, Queue, Refused};
pub use statistics::Statistics;
