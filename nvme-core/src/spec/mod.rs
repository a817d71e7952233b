//! Wire types of NVMe: layouts, codes and builders of commands; no behaviour.
//!
//! Revisions cited throughout: NVM Express Base Specification 2.0c, NVM Command Set Specification 1.0c, NVMe
//! over PCIe Transport Specification 1.0c. These types are the only code that the simulator shares with the
//! driver, so they are checked against byte vectors written by hand from the specification's figures
//! (tests/tests/spec/vectors.rs). Unknown values are data, never panics.
#![forbid(unsafe_code)]

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
