//! The protocol auditor over the simulator.
#![cfg(not(loom))]

mod auditor;
mod busy_driver;
