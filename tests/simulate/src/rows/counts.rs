//! Counts of the events of a seed with gathers.

/// Counts of a seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that were asked for.
    pub rows: u64,
    /// Rows of which a command failed.
    pub failed: u64,
    /// Rows that failed since the gate was shut, or a command was aborted.
    pub gone: u64,
    /// Rows whose command has no end.
    pub lost: u64,
    /// Rows that a launch wrote.
    pub written: u64,
    /// Number of lines of the cache that hold a row at the end.
    pub hits: u64,
    /// Writes of the host that ended.
    pub writes: u64,
    /// Recoveries.
    pub recoveries: u64,
    /// Gathers in halves that ended.
    pub halves: u64,
    /// Rows of scatters by owned queues that ended.
    pub owned_writes: u64,
    /// Rows of gathers from stripes by owned queues that began.
    pub owned_stripes: u64,
}
