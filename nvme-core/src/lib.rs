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
//! - [`bringup`], [`shutdown`], [`recovery`]: state machines without IO; time is an argument.
//! - [`transfer`]: splits a range of blocks into commands.
//! - [`trace`]: what happened, as binary events.
//!
//! The core never reads a clock, sleeps, allocates, or panics on what a device says.
#![cfg_attr(not(any(test, loom)), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!("NVMe is little endian and this driver shares memory with it as it is");

pub mod bringup;
mod cq;
mod error;
mod inflight;
pub mod mem;
pub mod prp;
mod queue_pair;
pub mod recovery;
mod registers;
pub mod sgl;
pub mod shutdown;
pub mod spec;
mod sq;
pub mod sync;
pub mod trace;
pub mod transfer;

pub use cq::CompletionQueue;
pub use error::{BringupError, ControllerFault, MapError, SubmitError};
pub use inflight::{MAX_IN_FLIGHT, Quiesced, Slot};
pub use queue_pair::{
    AbortReason, Completion, Data, ListMemory, Outcome, QueueMemory, QueuePair, Rejected,
};
pub use registers::{RegisterBlock, Registers};
pub use sq::SubmissionQueue;
