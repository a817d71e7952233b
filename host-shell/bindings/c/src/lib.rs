//! The C interface of nvme-gpu: `nvme_gpu.h` is made from these files.
//!
//! Here belongs what turns a call of C into one of the library, and nothing that another language would need,
//! too. Names of other projects' sketches are in `nvme-gpu-compat`.
//!
//! Invariant: nothing that C passes in is trusted but the extent of its memory. Handles are numbers that are looked
//! up, structures begin with their size, and a panic ends as [`status::NVME_GPU_ERROR_INTERNAL`].
//!
//! - [`status`]: numbers and texts of errors, those of this thread.
//! - [`handles`], [`opened`]: open objects; [`process`]: state that a child of `fork` must not inherit.
//! - [`border`]: the FFI boundary of each call.
//! - [`ends`]: the eventfds and threads that learn the end of an operation.
//! - [`request`], [`rows`]: the parts that functions of tables share.
//! - [`version`], [`store`], [`transfer`], [`batch`], [`table`], [`scales`], [`pending`], [`notices`],
//!   [`halves`], [`device`], [`insight`], [`pages`]: the functions.
// The functions document themselves for readers of the header; the general contract for pointers is in its
// head.
#![allow(clippy::missing_safety_doc)]

pub mod batch;
pub mod border;
pub mod device;
pub mod ends;
pub mod halves;
pub mod handles;
pub mod insight;
#[cfg(feature = "cuda")]
mod kept;
pub mod memory;
pub mod notices;
pub mod opened;
pub mod page_calls;
pub mod page_sharing;
pub mod pages;
pub mod pending;
pub mod process;
pub mod request;
pub mod rows;
pub mod scales;
pub mod status;
pub mod store;
pub mod table;
pub mod transfer;
pub mod version;
