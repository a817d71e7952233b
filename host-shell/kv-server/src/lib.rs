//! One area of key and value pages for several processes of a machine, as the ranks of an inference server.
//!
//! [`SharedPageStore`] has the calls of [`nvme_kv::PageStore`]. The process that opens an area first owns it: it holds the
//! area's lock, opens the device and listens on a socket. Others are its clients. An owner that ends is replaced by
//! the client that calls next, which recovers the store as after a crash.
//!
//! - [`SharedPageStore`]: the store of a process, whichever role it has.
//! - [`OpenedArea`]: pages of a process that shares them, or has them for itself.
//! - [`message`]: requests and replies, with their limits.
//!
//! Here belongs what processes say to each other. Pages, their checks and their journal are in `nvme-kv`.
#![deny(missing_docs)]

mod client;
pub mod message;
mod opened;
mod place;
mod server;
mod shared;
mod socket;
mod window;

pub use opened::{AreaPins, OpenedArea};
pub use shared::{SharedPageStore, SharedPins, SharedRequest};
