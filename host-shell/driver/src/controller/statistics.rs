//! Counts of a queue pair.

/// Counts of one queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct QueueStatistics {
    /// Commands submitted.
    pub submitted: u64,
    /// Commands whose end was returned.
    pub completed: u64,
    /// Completed commands with an error status.
    pub errors: u64,
    /// Completed commands that a reset aborted.
    pub aborted: u64,
    /// Commands whose deadline passed.
    pub expired: u64,
    /// Times the submission doorbell was rung.
    pub rings: u64,
    /// Largest number of commands in flight at once.
    pub peak: u32,
}

impl QueueStatistics {
    /// Adds the counts of another queue, or of the same one before it was created again.
    pub fn add(&mut self, other: &Self) {
        self.submitted += other.submitted;
        self.completed += other.completed;
        self.errors += other.errors;
        self.aborted += other.aborted;
        self.expired += other.expired;
        self.rings += other.rings;
        self.peak = self.peak.max(other.peak);
    }
}
