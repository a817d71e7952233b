//! `bench --interval`: a line about each interval of a run.

use crate::common::{output, say};
use nvme_host::bench::RunProgress;
use nvme_host::{Result, units};
use serde_json::{Value, json};
use std::time::Duration;

/// Prints a line whenever an interval has passed.
pub struct IntervalPrinter {
    every: f64,
    json: bool,
    last: RunProgress,
    /// The first line that could not be written.
    pub failed: Result<()>,
}

impl IntervalPrinter {
    pub fn new(every: Duration, json: bool) -> Self {
        Self {
            every: every.as_secs_f64(),
            json,
            last: RunProgress::default(),
            failed: Ok(()),
        }
    }

    /// Prints the progress since the last line, once an interval has passed since then.
    pub fn at(&mut self, now: &RunProgress) {
        if now.seconds < self.last.seconds + self.every || self.failed.is_err() {
            return;
        }
        let one = IntervalSample::between(&self.last, now);
        self.last = *now;
        match self.json {
            true => self.failed = output::line(&one.to_json()),
            false => say::show(&one.to_text()),
        }
    }
}

/// Work between two samples.
struct IntervalSample {
    end: f64,
    seconds: f64,
    reads: u64,
    writes: u64,
    bytes: u64,
    latency_ns: u64,
}

impl IntervalSample {
    fn between(from: &RunProgress, to: &RunProgress) -> Self {
        let commands = to.reads + to.writes - from.reads - from.writes;
        Self {
            end: to.seconds,
            seconds: to.seconds - from.seconds,
            reads: to.reads - from.reads,
            writes: to.writes - from.writes,
            bytes: to.bytes - from.bytes,
            latency_ns: (to.latency_ns - from.latency_ns) / commands.max(1),
        }
    }

    fn to_json(&self) -> Value {
        json!({ "interval": {
            "end_s": self.end,
            "seconds": self.seconds,
            "reads": self.reads,
            "writes": self.writes,
            "iops": (self.reads + self.writes) as f64 / self.seconds,
            "bw_bytes": (self.bytes as f64 / self.seconds) as u64,
            "lat_ns_mean": self.latency_ns,
        }})
    }

    fn to_text(&self) -> String {
        format!(
            "{:8.2} s: IOPS={}, BW={:.3} GB/s, lat mean={}, reads={}, writes={}\n",
            self.end,
            units::count((self.reads + self.writes) as f64 / self.seconds),
            self.bytes as f64 / self.seconds / 1e9,
            units::nanoseconds(self.latency_ns),
            self.reads,
            self.writes,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_the_difference_of_two_looks() {
        let at = |seconds, reads, latency_ns| RunProgress {
            seconds,
            reads,
            writes: 2 * reads,
            bytes: 3 * reads * 4096,
            latency_ns,
        };
        let one = IntervalSample::between(&at(1.0, 100, 5_000), &at(1.5, 200, 65_000)).to_json();
        let one = &one["interval"];
        assert_eq!(
            (one["reads"].as_u64(), one["writes"].as_u64()),
            (Some(100), Some(200))
        );
        assert_eq!(
            (one["iops"].as_f64(), one["end_s"].as_f64()),
            (Some(600.0), Some(1.5))
        );
        assert_eq!(one["lat_ns_mean"].as_u64(), Some(200));
        assert_eq!(one["bw_bytes"].as_u64(), Some(300 * 4096 * 2));
        let idle = IntervalSample::between(&at(1.0, 1, 5), &at(2.0, 1, 5));
        assert_eq!(idle.latency_ns, 0);
    }
}
