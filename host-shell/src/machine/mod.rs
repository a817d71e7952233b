//! The machine that a controller is in: PCI functions, what sysfs says of them, and what `doctor` finds.

pub mod doctor;
pub mod pci;
pub mod sysfs;
