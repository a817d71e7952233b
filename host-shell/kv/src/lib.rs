//! Keys and values of language models on an NVMe drive, to be found by other requests and after a restart.
//!
//! Here belongs the store of pages: their keys, their checksums, the index and its journal. Tensors, caches of an
//! inference server and its connectors are in the crates above; commands of a drive are in `nvme-store`.
//!
//! - [`PageStore`]: pages by key, in an area of a drive.
//! - [`ModelFingerprint`]: what pages depend on besides their tokens; it is in every key.
//! - `on_gpu`: pages in memory of a GPU, with the feature `cuda`.
//! - [`mod@format`]: the structures on the drive, which docs/kv-format.md describes.
//!
//! Nothing that is read from the drive is trusted. A page is either what was stored, or an error; where
//! [`KvError::is_miss`] is true, it should be computed.
#![deny(missing_docs)]

mod area;
mod error;
mod fingerprint;
pub mod format;
mod index;
mod journal;
mod key;
mod layout;
mod load;
mod medium;
#[cfg(feature = "cuda")]
pub mod on_gpu;
mod record;
mod recovery;
mod shared_index;
mod stats;
mod store;
mod write;

pub use area::AreaRequest;
pub use error::{KvError, PageFault, Result};
pub use fingerprint::{FingerprintDigest, MOST_FIELD_BYTES, ModelFingerprint};
pub use key::PageKey;
pub use layout::{AreaLayout, MOST_PAGE_BYTES, MOST_SLOTS};
pub use load::{ArrivedPage, LoadPlan, LoadedPage, PagePlace, PinnedPages, WeakPins};
pub use medium::BlockMedium;
pub use recovery::RecoveryReport;
pub use stats::KvStats;
pub use store::PageStore;
pub use write::{MOST_TOGETHER, PayloadFacts, StoreOutcome, StorePlan};
