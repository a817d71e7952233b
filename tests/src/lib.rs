//! Test support: the driver core and the simulated controller in one thread, on virtual time.
//!
//! Code that tests of several crates share belongs here. A check that needs one crate alone is in that crate.
//!
//! [`Pair`] drives both sides. Its schedule is drawn from a seed, which is printed when a test fails;
//! `NVME_TEST_SEED=N` repeats it. Loom models use only the core: there only `hand`, `model`, `team` and `told` are built.

#[cfg(not(loom))]
pub mod audit;
#[cfg(not(loom))]
mod bar;
#[cfg(not(loom))]
pub mod bringup;
#[cfg(all(not(loom), feature = "fuzz"))]
pub mod fuzz;
pub mod hand;
#[cfg(not(loom))]
pub mod memory;
#[cfg(loom)]
pub mod model;
#[cfg(not(loom))]
mod pair;
#[cfg(not(loom))]
pub mod properties;
#[cfg(not(loom))]
pub mod seed;
pub mod team;
pub mod told;
mod watch;

#[cfg(not(loom))]
pub use bar::Bar;
#[cfg(not(loom))]
pub use memory::{Area, Memory, PAGE};
#[cfg(not(loom))]
pub use pair::{End, Pair, Setup, with_pair};
#[cfg(not(loom))]
pub use seed::{Rng, Seed};
