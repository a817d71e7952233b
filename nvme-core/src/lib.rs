//! The NVMe driver core: `no_std`, no allocation, the same source on the host and in GPU kernels.
//!
//! From the bottom up:
//!
//! - [`spec`]: wire types and codes, nothing else. Shared with the simulator.
//! - [`sync`]: the atomics of the platform, each operation with an order and a scope.
//! - [`mem`]: rings, doorbells and lists over DMA memory.
//! - [`prp`], [`sgl`]: from a buffer to a command's data pointer.
//! - [`SubmissionQueue`], [`CompletionQueue`]: `push`, `ring`, `pop`.
//! - [`QueuePair`]: `submit`, `ring`, `poll`, with a table of the commands in flight.
//! - [`Collective`]: a warp, a block or one thread owns a queue and acts together on it.
//! - [`SharedQueue`]: any thread submits and waits, from divergent code.
//! - [`handoff`], [`queue_state`]: how the host gives a queue to a kernel and takes it back.
//! - [`bringup`], [`shutdown`], [`recovery`]: state machines without IO; time is an argument.
//! - [`transfer`]: splits a range of blocks into commands.
//! - [`trace`]: what happened, as binary events.
//!
//! The core never reads a clock, sleeps, allocates, or panics on what a device says.
#![cfg_attr(not(any(test, loom, tsan)), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!("NVMe is little endian and this driver shares memory with it as it is");

pub mod bringup;
mod collective;
mod command;
mod cq;
mod error;
pub mod group;
pub mod handoff;
mod inflight;
pub mod mem;
pub mod prp;
mod queue_pair;
pub mod queue_state;
mod quiesced;
pub mod recovery;
mod registers;
#[cfg(all(test, not(any(loom, tsan))))]
mod sequences;
pub mod sgl;
mod shared_queue;
pub mod shutdown;
pub mod spec;
mod sq;
pub mod sync;
pub mod trace;
pub mod transfer;

pub use collective::{Collective, Finished};
pub use command::Command;
pub use cq::CompletionQueue;
pub use error::{BringupError, ControllerFault, MapError, SubmitError, WaitError};
pub use inflight::{MAX_IN_FLIGHT, Slot};
pub use queue_pair::{
    AbortReason, Completion, Data, ListMemory, Outcome, QueueMemory, QueuePair, Rejected,
};
pub use quiesced::{ClosedQueue, Identity, Quiesced};
pub use registers::{RegisterBlock, Registers};
pub use shared_queue::{Cells, Drained, SharedQueue, Token};
pub use sq::SubmissionQueue;
