//! The machine that a controller is in: PCI functions, their state in sysfs, their connections, the tiers that
//! these allow, and the findings of `doctor`. Everything is read; binding a function to another driver is the
//! subject of `sysfs` in the driver crate.

pub mod doctor;
mod kernel;
mod nvidia;
pub use nvme_driver::{pci, sysfs};
mod tiers;
pub mod topology;
