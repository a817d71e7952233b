//! The wire types against sources that share no code with them.
#![cfg(not(loom))]

mod libnvme;
mod vectors;
