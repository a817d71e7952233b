//! A protocol auditor: an observer passes it every doorbell, command and completion, and it reports what
//! violates the specification.
//!
//! Here belong rules that can be checked on the wire. Time, registers and the meaning of data do not belong here: no
//! observer reports them.
//!
//! It shares no logic with the driver or the simulator: it depends only on `nvme-spec`, the wire types, so that a
//! mistake of one side is not repeated in the auditor. It checks what is visible on the wire and keeps its own state of
//! rings, phase tags, commands in flight and the memory they use; it never changes anything.
//!
//! - [`Auditor`]: the state, and a method for each event.
//! - [`Finding`]: a violation, with its [`Rule`] and its side.
//! - [`qemu`]: the trace of QEMU's controller as input.
//! - [`journal`]: the events that a queue of the driver records about itself (GPU traces) as input.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod auditor;
mod buffers;
mod capabilities;
mod command_check;
mod data_pointer;
mod finding;
pub mod journal;
pub mod qemu;
mod queues;
mod ring;
mod transfer;

pub use auditor::Auditor;
pub use capabilities::ControllerCapabilities;
pub use finding::{Finding, ProtocolSide, Rule};
