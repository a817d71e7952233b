//! Faults, planned and not: errors of the controller, loss of power, recovery, bugs of published
//! drivers.
#![cfg(not(loom))]

mod every_fault;
mod peer_bugs;
mod power_cut;
mod recovery;
