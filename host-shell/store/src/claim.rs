//! Ranges of a device that structures, as an area of pages, have for themselves.

use super::Store;
use super::file::RangeLock;
use super::space::{StoreSpace, common};
use nvme_driver::ProcessMark;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The claims of this process. A child of a fork has those of its parent, whose mark they bear.
static CLAIMED: Mutex<Vec<ClaimedRange>> = Mutex::new(Vec::new());

/// Number of the next claim.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The bytes that offsets count: a file has several stores, a drive or a stripe one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClaimedDevice {
    File(u64, u64),
    Store(usize),
}

struct ClaimedRange {
    number: u64,
    process: ProcessMark,
    device: ClaimedDevice,
    range: Range<u64>,
}

/// A range of a store that no claim overlaps in part, until this is dropped.
pub struct RangeClaim {
    number: u64,
    process: ProcessMark,
    _lock: Option<RangeLock>,
    /// Keeps the address of the store's memory from being another store's.
    _space: Weak<StoreSpace>,
}

impl std::fmt::Debug for RangeClaim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeClaim")
            .field("number", &self.number)
            .finish()
    }
}

impl Store {
    /// Claims `bytes` bytes from byte `offset` on. The same range may be claimed several times: who may change it is for
    /// its owners to settle. Claims of one file by other processes count as well, and of a stripe those by this store.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range that overlaps a claimed one in part: each would write over the other's bytes.
    pub fn claim(&self, offset: u64, bytes: u64) -> Result<RangeClaim> {
        let range = offset..offset.saturating_add(bytes);
        let file = match &self.space.members[..] {
            [one] => one.changes.as_ref(),
            _ => None,
        };
        let device = file.and_then(|file| file.number());
        let device = device.map_or_else(
            || ClaimedDevice::Store(Arc::as_ptr(&self.space).addr()),
            |(device, inode)| ClaimedDevice::File(device, inode),
        );
        let process = ProcessMark::here();
        let mut all = lock(&CLAIMED);
        let overlaps = |one: &&ClaimedRange| {
            let is_same = one.process == process && one.device == device;
            is_same && one.range != range && !common(&one.range, &range).is_empty()
        };
        if let Some(other) = all.iter().find(overlaps) {
            return Err(overlapping(&range, &other.range, "here"));
        }
        let taken = file.map_or(Ok(None), |file| file.lock(range.clone()));
        let held = taken.map_err(|other| overlapping(&range, &other, "in another process"))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        all.push(ClaimedRange {
            number,
            process,
            device,
            range,
        });
        Ok(RangeClaim {
            number,
            process,
            _lock: held,
            _space: Arc::downgrade(&self.space),
        })
    }
}

impl Drop for RangeClaim {
    fn drop(&mut self) {
        // Not in a child of a fork: another thread of its parent may have held the lock.
        if self.process == ProcessMark::here() {
            lock(&CLAIMED).retain(|one| one.number != self.number || one.process != self.process);
        }
    }
}

fn overlapping(range: &Range<u64>, other: &Range<u64>, place: &str) -> Error {
    let bytes = |range: &Range<u64>| match range.end {
        u64::MAX => "all".to_owned(),
        end => end.saturating_sub(range.start).to_string(),
    };
    Error::usage(
        format!(
            "the {} bytes from byte {} on overlap {} bytes from byte {} on, which are in use {place}",
            bytes(range),
            range.start,
            bytes(other),
            other.start
        ),
        "give each area bytes of its own, or close the other one first",
    )
}
