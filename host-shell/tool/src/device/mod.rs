//! Commands about devices rather than data: finding and binding them, resetting and serving them, their registers
//! and events.

pub mod bind;
#[cfg(feature = "sim")]
pub mod devices;
pub mod doctor;
pub mod events;
pub mod list;
pub mod p2p;
pub mod regs;
pub mod reset;
#[cfg(feature = "sim")]
pub mod serve;
#[cfg(test)]
mod testing;
pub mod topology;
pub mod why;
