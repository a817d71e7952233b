//! A protocol auditor: told every doorbell, command and completion, it names what breaks the rules.
//!
//! It shares no logic with the driver or the simulator: of nvme-core only `spec`, the wire types, is
//! used (a test of the sources holds that), so a mistake of one side is no mistake of the auditor. It
//! judges what a wire shows and keeps its own account of rings, phases, commands in flight and lent
//! memory; it never changes anything.
//!
//! - [`Auditor`]: the account, and a method for each thing seen.
//! - [`Finding`]: what was wrong, by which [`Rule`], on whose side.
//! - [`qemu`]: the trace of QEMU's controller as input.
//! - [`journal`]: what a queue of the driver records about itself (GPU traces) as input.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod account;
mod auditor;
mod finding;
pub mod journal;
mod judge;
mod lent;
pub mod qemu;
mod queues;
mod ring;
mod transfer;
mod walk;

pub use account::Account;
pub use auditor::Auditor;
pub use finding::{Finding, Party, Rule};
