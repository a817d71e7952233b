//! Deterministic simulation: the core's drivers and a controller in virtual time, under a schedule that
//! is drawn from a seed and goes wrong on purpose.
//!
//! Plans, oracles and the loop of a seed belong here. The controller's faults are features of the simulator, so that
//! users can configure each of them, too.
//!
//! A seed becomes a [`Plan`](plan::Plan): two queues with any of the three drivers, operations, and
//! traps, which are faults that wait for the driver to be in some state. [`run`](run::run) plays it
//! against the oracles of [`account`], [`model`] and [`buffers`]. The same plan gives the same trace. [`rows`] does
//! the same with gathers of rows by a GPU, beside writes and recoveries of the host.

pub mod account;
pub mod buffers;
pub mod bus;
mod commands;
pub mod fault;
mod host;
pub mod many;
pub mod model;
pub mod plan;
pub mod queue;
pub mod rows;
pub mod run;
pub mod sabotage;
pub mod setup;
pub mod shrink;
mod steps;
pub mod trace;
mod world;

pub use nvme_tests::{memory, seed};
