//! The controller as a PCI device over a socket: the vfio-user protocol.
//!
//! [`Server`] makes a controller, its threads and a socket. Clients are not trusted: whatever they
//! send, the server answers or puts them out, and the controller reaches no memory but what they
//! have mapped.

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
pub mod wire;

pub use server::{Left, ServeError, Server, Stopper};
