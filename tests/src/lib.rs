//! Test support: the driver core and the simulated controller in one thread, on virtual time.
//!
//! [`Pair`] drives both sides. Its schedule is drawn from a seed, which is printed when a test fails;
//! `NVME_TEST_SEED=N` repeats it. Loom models use only the core, so there this crate is empty.
#![cfg(not(loom))]

pub mod fuzz;
pub mod memory;
mod pair;
mod seed;

pub use memory::{Area, Memory, PAGE};
pub use pair::{End, Pair, Setup, with_pair};
pub use seed::{Rng, Seed};
