//! The structures and constants of the NVMe specification: layouts and codes, no behaviour.
//!
//! Here belongs what a figure of the specification defines: commands, completions, registers, Identify data, log
//! pages and status codes, and builders of commands. Rings, queues, bring-up and other logic of a driver are in
//! `nvme-core`, those of a controller in `nvme-sim`.
//!
//! Revisions cited throughout: NVM Express Base Specification 2.0c, NVM Command Set Specification
//! 1.0c, NVMe over PCIe Transport Specification 1.0c. This crate is the only thing that the
//! simulator and the auditor share with the driver, so it is checked against byte vectors written by hand from the
//! specification's figures (tests/tests/spec/vectors.rs). Unknown values are data, never panics.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

/// Asserts at compile time that each field is at its offset in the specification's figure.
macro_rules! offsets {
    ($type:ty: $($field:ident @ $offset:literal),* $(,)?) => {
        $(const _: () = assert!(core::mem::offset_of!($type, $field) == $offset);)*
    };
}

pub mod addr;
pub mod admin;
pub mod async_event;
pub mod command;
pub mod completion;
pub mod feature;
pub mod identify;
pub mod log_page;
pub mod nvm;
pub mod register;
pub mod sgl;
pub mod status;

pub use addr::{Cid, Iova, Lba, Nsid, PageSize, Qid};
pub use command::{Psdt, SQE_BYTES, Sqe};
pub use completion::{CQE_BYTES, Cqe};
pub use status::Status;
