//! The record of a page, from which the index is made.

use crate::key::PageKey;

/// A committed page, as the log and a checkpoint name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRecord {
    /// Key of the page.
    pub key: PageKey,
    /// Number of this use of the slot; no two pages of a store ever have the same.
    pub generation: u64,
    /// [`payload_checksum`](crate::format::payload_checksum) of the payload.
    pub checksum: u64,
    /// Slot that holds it.
    pub slot: u32,
    /// Bytes of the payload.
    pub length: u32,
}
