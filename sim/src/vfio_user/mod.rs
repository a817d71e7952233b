//! The controller as a PCI device behind a socket: the server side of the vfio-user protocol.
//!
//! [`Server`] makes a controller, its threads and a socket. Clients are not trusted: the server
//! answers or disconnects them whatever they send, and the controller reaches only the memory that
//! they have mapped.

mod channel;
mod config_space;
mod dma;
mod function;
mod irq;
mod requests;
mod server;
mod session;
#[cfg(test)]
mod tests;

pub use nvme_vfio_user as wire;
pub use server::{ClientExit, ServeError, Server, Stopper};

/// Identify Controller and the configuration space name one vendor.
const _: () = assert!(wire::SIMULATOR[0] == crate::command::identify::PCI_VENDOR);
