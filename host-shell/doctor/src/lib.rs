//! What the machine that a controller is in allows: how its PCI functions are connected, which tier follows, and what
//! `doctor` finds.
//!
//! Here belongs what looks at a machine and changes nothing. What opens a controller is in `nvme-driver`, and so are
//! [`pci`](nvme_driver::pci) and [`sysfs`](nvme_driver::sysfs), from which everything here is read.
//!
//! - [`doctor`]: findings, each with its remedy.
//! - [`topology`]: root ports, switches, links and the path of each controller to each GPU.
#![deny(missing_docs)]

pub mod doctor;
mod kernel;
mod nvidia;
mod tiers;
pub mod topology;
