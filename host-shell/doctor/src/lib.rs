//! Examination of the machine that a controller is in: how its PCI functions are connected, the tier that follows, and
//! the findings of `doctor`.
//!
//! Here belongs code that examines a machine and changes nothing. Code that opens a controller is in `nvme-driver`, and
//! so are [`pci`](nvme_driver::pci) and [`sysfs`](nvme_driver::sysfs), through which everything here is read.
//!
//! - [`doctor`]: findings, each with its remedy.
//! - [`advice`]: what would move the bytes of a store better.
//! - [`topology`]: root ports, switches, links and the path of each controller to each GPU.
#![deny(missing_docs)]

pub mod advice;
pub mod doctor;
mod kernel;
mod nvidia;
mod sharing;
mod tiers;
pub mod topology;
