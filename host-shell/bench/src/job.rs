//! A workload: operation, rate and duration.

use super::pattern::AccessPattern;
use nvme_core::spec::Nsid;
use std::time::Duration;

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLimit {
    /// After this long.
    Time(Duration),
    /// The run ends after this number of bytes, over all queues.
    Bytes(u64),
}

/// Commands per second that a run is held to, in equal steps from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateRamp {
    /// Rate of the first step.
    pub from: u64,
    /// Rate of the last step.
    pub to: u64,
    /// Steps, at least 1.
    pub steps: u32,
}

impl RateRamp {
    /// Returns the rate of step `index`.
    pub fn rate(&self, index: u32) -> u64 {
        if self.steps <= 1 {
            return self.to;
        }
        let span = self.to as i128 - self.from as i128;
        (self.from as i128 + span * i128::from(index) / i128::from(self.steps - 1)) as u64
    }
}

/// A workload.
#[derive(Clone, Debug)]
pub struct BenchJob {
    /// The namespace.
    pub nsid: Nsid,
    /// Order of addresses.
    pub pattern: AccessPattern,
    /// Share of reads in percent, 0 to 100.
    pub read_percent: u8,
    /// Bytes per command, a multiple of the block size.
    pub bytes: u32,
    /// Queue pairs, one thread each.
    pub queues: u32,
    /// Commands in flight per queue.
    pub depth: u32,
    /// End of the run. With a [`RateRamp`] the time is divided among its steps.
    pub limit: RunLimit,
    /// Rate over all queues; none runs as fast as possible.
    pub ramp: Option<RateRamp>,
    /// Blocks of the namespace to use, from 0 on; 0 is all.
    pub span_blocks: u64,
    /// Seed of addresses, mix and data.
    pub seed: u64,
    /// Writes carry data that names its block; it is read back and checked.
    pub verify: bool,
}
