//! The machine that a controller is in: PCI functions, their state in sysfs, their connections, and the
//! findings of `doctor`.

pub mod doctor;
mod kernel;
mod nvidia;
pub use nvme_driver::{pci, sysfs};
mod tiers;
pub mod topology;
