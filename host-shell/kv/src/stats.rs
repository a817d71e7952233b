//! Counts of a store.

/// Counts since a store was opened, and its present sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Pages that are found.
    pub pages: u64,
    /// Pages that fit.
    pub slots: u64,
    /// Pages that were loaded and verified.
    pub loaded: u64,
    /// Loads of keys without a page.
    pub missed: u64,
    /// Pages that were committed.
    pub stored: u64,
    /// Pages that made room for others.
    pub evicted: u64,
    /// Pages that were dropped because what was read is not what was stored.
    pub lost: u64,
    /// Pages that were not stored because the drive failed.
    pub failed: u64,
    /// Checkpoints that were written.
    pub checkpoints: u64,
}
