//! Detection of writes to a file, by this process or by another program: a count of our own writes, and the file
//! system's timestamps for other writers. A caller that keeps bytes of the file can compare them to learn that its
//! copy is stale.

use super::range_lock::RangeLock;
use super::regular::RegularFile;
use nvme_driver::lock::lock;
use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Counts of writes by the device and inode of a file.
type WritesByFile = HashMap<(u64, u64), Weak<AtomicU64>>;

/// The number of this process's writes to each open file: several stores may lie on one file.
static WRITES: Mutex<Option<WritesByFile>> = Mutex::new(None);

/// The writes to an open file.
pub(crate) struct FileChanges {
    file: Arc<RegularFile>,
    /// Number of ended writes by all stores of this process.
    writes: Arc<AtomicU64>,
}

impl FileChanges {
    pub(super) fn of(file: &Arc<RegularFile>) -> Self {
        // Without an answer of the system the count is this store's alone.
        let writes = number_of(file).map_or_else(Arc::default, |key| {
            let mut all = lock(&WRITES);
            let all = all.get_or_insert_default();
            all.retain(|_, writes| writes.strong_count() > 0);
            let known = all.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let writes = Arc::default();
                all.insert(key, Arc::downgrade(&writes));
                writes
            })
        });
        Self {
            file: Arc::clone(file),
            writes,
        }
    }

    /// Returns two numbers that no other file of this machine has: the device and the inode.
    pub fn number(&self) -> Option<(u64, u64)> {
        number_of(&self.file)
    }

    /// Locks a range of the file for all processes, as [`RangeLock::take`].
    ///
    /// # Errors
    /// The locked range that overlaps it.
    pub fn lock(&self, range: Range<u64>) -> Result<Option<RangeLock>, Range<u64>> {
        RangeLock::take(&self.file.file, range)
    }

    /// Counts a write that has ended. A release, after the system call: a reader that finds the new mark and
    /// reads the file again cannot get the bytes from before the write.
    pub fn wrote(&self) {
        self.writes.fetch_add(1, Ordering::Release);
    }

    /// Returns the major and minor number of the block device, or of the one that the file lies on; 0 if that is unknown.
    pub fn disk(&self) -> (u32, u32) {
        let number = self
            .file
            .file
            .metadata()
            .map_or(0, |found| match found.rdev() {
                0 => found.dev(),
                device => device,
            });
        (libc::major(number), libc::minor(number))
    }

    /// Returns a mark that changes with each write: the count of this process, and the file's
    /// timestamp for writes by other programs.
    pub fn mark(&self) -> (u64, Option<(i64, i64)>) {
        let found = self.file.file.metadata().ok();
        let time = found.map(|found| (found.mtime(), found.mtime_nsec()));
        (self.writes.load(Ordering::Acquire), time)
    }
}

fn number_of(file: &RegularFile) -> Option<(u64, u64)> {
    let found = file.file.metadata().ok()?;
    Some(match found.rdev() {
        0 => (found.dev(), found.ino()),
        device => (device, u64::MAX),
    })
}
