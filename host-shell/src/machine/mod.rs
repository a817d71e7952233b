//! The machine that a controller is in: PCI functions, what sysfs says of them, how they are connected, and what
//! `doctor` finds.

pub mod doctor;
mod kernel;
mod nvidia;
pub mod pci;
pub mod sysfs;
mod tiers;
pub mod topology;
