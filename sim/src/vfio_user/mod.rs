//! The controller as a PCI device over a socket: the vfio-user protocol.

pub mod wire;
