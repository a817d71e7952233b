//! Measurements of a run, as a value, as fio's JSON and as text. Latencies count from the first time that a
//! command was sent, so that repeated commands do not look fast.

use super::job::{BenchJob, RunLimit};
use super::pattern::AccessPattern;
use super::worker::{DirectionCount, StepTally};
use hdrhistogram::Histogram;
use nvme_core::spec::Qid;
use nvme_driver::controller::Controller;
use nvme_driver::controller::outage::OutageCounts;
use nvme_driver::controller::statistics::QueueStatistics;
use nvme_driver::units;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::time::Duration;

/// The percentiles that fio prints.
const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Reads or writes of one step, or of a whole run.
#[derive(Clone, Debug)]
pub struct DirectionReport {
    /// Commands completed.
    pub commands: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
    /// Latency in nanoseconds.
    pub latency: Histogram<u64>,
}

impl DirectionReport {
    fn new(count: &DirectionCount, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64();
        Self {
            commands: count.commands,
            bytes: count.bytes,
            seconds,
            latency: count.latency.clone(),
        }
    }

    fn empty() -> Self {
        Self::new(&DirectionCount::new(), Duration::ZERO)
    }

    fn add(&mut self, other: &DirectionReport) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.latency
            .add(&other.latency)
            .expect("every histogram has the same bounds");
    }

    /// Returns the number of commands per second.
    pub fn iops(&self) -> f64 {
        if self.seconds > 0.0 {
            self.commands as f64 / self.seconds
        } else {
            0.0
        }
    }

    /// Returns the number of bytes per second.
    pub fn bandwidth(&self) -> f64 {
        if self.seconds > 0.0 {
            self.bytes as f64 / self.seconds
        } else {
            0.0
        }
    }

    /// Returns the latency that `percent` of the commands did not exceed, in nanoseconds.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.latency.value_at_percentile(percent)
    }

    fn to_json(&self) -> Value {
        let empty = self.latency.is_empty();
        let min = if empty { 0 } else { self.latency.min() };
        let max = if empty { 0 } else { self.latency.max() };
        let mean = self.latency.mean();
        let stddev = self.latency.stdev();
        let percentiles: Map<String, Value> = PERCENTILES
            .iter()
            .map(|p| (format!("{p:.6}"), json!(self.percentile(*p))))
            .collect();
        json!({
            "io_bytes": self.bytes,
            "io_kbytes": self.bytes / 1024,
            "bw_bytes": self.bandwidth() as u64,
            "bw": (self.bandwidth() / 1024.0) as u64,
            "iops": self.iops(),
            "runtime": (self.seconds * 1e3) as u64,
            "total_ios": self.commands,
            "lat_ns": { "min": min, "max": max, "mean": mean, "stddev": stddev, "N": self.commands },
            "clat_ns": {
                "min": min, "max": max, "mean": mean, "stddev": stddev, "N": self.commands,
                "percentile": percentiles,
            },
        })
    }
}

/// One rate of a ramp, or the whole run.
#[derive(Clone, Debug)]
pub struct RampStep {
    /// Requested commands per second; `None` for as many as possible.
    pub rate: Option<u64>,
    /// Reads.
    pub read: DirectionReport,
    /// Writes.
    pub write: DirectionReport,
}

impl RampStep {
    /// Returns the number of commands per second, both directions.
    pub fn iops(&self) -> f64 {
        self.read.iops() + self.write.iops()
    }

    /// Latencies of both directions.
    pub fn latency(&self) -> Histogram<u64> {
        let mut both = self.read.latency.clone();
        both.add(&self.write.latency)
            .expect("every histogram has the same bounds");
        both
    }
}

/// Measurements of a run.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// Description of the device.
    pub device: String,
    /// The workload.
    pub job: BenchJob,
    /// Each rate in turn.
    pub steps: Vec<RampStep>,
    /// Bytes read back and found right after the run.
    pub verified_bytes: u64,
    /// Counts of each queue.
    pub queues: Vec<(Qid, QueueStatistics)>,
    /// Faults from which a run recovered, if it continues after outages.
    pub outages: Option<OutageCounts>,
    /// True if the user ended the run early: the figures cover the time until then, and nothing was read back.
    pub interrupted: bool,
}

impl RunReport {
    pub(super) fn new(controller: &Controller, job: &BenchJob) -> Self {
        let device = controller.device().describe();
        Self {
            device,
            job: job.clone(),
            steps: Vec::new(),
            verified_bytes: 0,
            queues: Vec::new(),
            outages: None,
            interrupted: false,
        }
    }

    /// Adds the counts of a queue to the counts of an earlier queue with the same identifier.
    pub(super) fn add_queue(&mut self, qid: Qid, counts: &QueueStatistics) {
        match self.queues.iter_mut().find(|(known, _)| *known == qid) {
            Some((_, sum)) => sum.add(counts),
            None => self.queues.push((qid, *counts)),
        }
    }

    pub(super) fn add_step(
        &mut self,
        rate: Option<u64>,
        tallies: Vec<StepTally>,
        elapsed: Duration,
    ) {
        let (mut read, mut write) = (DirectionCount::new(), DirectionCount::new());
        for tally in &tallies {
            read.add(&tally.read);
            write.add(&tally.write);
        }
        let (read, write) = (
            DirectionReport::new(&read, elapsed),
            DirectionReport::new(&write, elapsed),
        );
        self.steps.push(RampStep { rate, read, write });
    }

    /// Returns every step together: reads and writes.
    pub fn total(&self) -> (DirectionReport, DirectionReport) {
        let (mut read, mut write) = (DirectionReport::empty(), DirectionReport::empty());
        for step in &self.steps {
            read.add(&step.read);
            write.add(&step.write);
        }
        (read, write)
    }

    /// Returns fio's name of the workload.
    pub fn rw(&self) -> &'static str {
        match (self.job.pattern, self.job.read_percent) {
            (AccessPattern::Sequential, 100) => "read",
            (AccessPattern::Sequential, 0) => "write",
            (AccessPattern::Sequential, _) => "rw",
            (AccessPattern::Random, 100) => "randread",
            (AccessPattern::Random, 0) => "randwrite",
            (AccessPattern::Random, _) => "randrw",
        }
    }

    /// Returns one object in the shape of `fio --output-format=json`.
    pub fn to_json(&self) -> Value {
        let (read, write) = self.total();
        let mut options = json!({
            "rw": self.rw(),
            "bs": self.job.bytes.to_string(),
            "iodepth": self.job.depth.to_string(),
            "numjobs": self.job.queues.to_string(),
            "rwmixread": self.job.read_percent.to_string(),
            "randseed": self.job.seed.to_string(),
        });
        match self.job.limit {
            RunLimit::Time(time) => options["runtime"] = json!(time.as_secs_f64().to_string()),
            RunLimit::Bytes(bytes) => options["io_size"] = json!(bytes.to_string()),
        }
        let runtime_ms = (read.seconds.max(write.seconds) * 1e3) as u64;
        let mut job = json!({
            "jobname": "nvme-gpu bench",
            "error": 0,
            "job options": options,
            "read": read.to_json(),
            "write": write.to_json(),
            "job_runtime": runtime_ms,
        });
        if self.job.ramp.is_some() {
            job["steps"] = self.steps.iter().map(step_json).collect();
        }
        let mut all = json!({
            "nvme-gpu version": env!("CARGO_PKG_VERSION"),
            "device": self.device,
            "interrupted": self.interrupted,
            "verified_bytes": self.verified_bytes,
            "jobs": [job],
            "queues": queues_json(&self.queues),
        });
        if let Some(outages) = &self.outages {
            all["recovery"] = outages.to_json();
        }
        all
    }

    /// Returns a few lines in the manner of fio.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let job = &self.job;
        let _ = writeln!(
            text,
            "{}: rw={}, bs={}, queues={}, depth={}, seed={}",
            self.device,
            self.rw(),
            units::bytes(u64::from(job.bytes)),
            job.queues,
            job.depth,
            job.seed
        );
        let (read, write) = self.total();
        for (name, direction) in [("read", &read), ("write", &write)] {
            if direction.commands > 0 {
                direction_text(&mut text, name, direction);
            }
        }
        if job.ramp.is_some() {
            let _ = writeln!(
                text,
                "  {:>12} {:>12} {:>10} {:>10} {:>10}",
                "rate", "IOPS", "p50", "p99", "p99.9"
            );
            for step in &self.steps {
                let latency = step.latency();
                let at = |p| units::nanoseconds(latency.value_at_percentile(p));
                let rate = units::count(step.rate.unwrap_or(0) as f64);
                let iops = units::count(step.iops());
                let _ = writeln!(
                    text,
                    "  {rate:>12} {iops:>12} {:>10} {:>10} {:>10}",
                    at(50.0),
                    at(99.0),
                    at(99.9)
                );
            }
        }
        if self.interrupted {
            let _ = writeln!(
                text,
                "  interrupted after {:.2} s: these are the figures until then",
                read.seconds.max(write.seconds)
            );
        } else if job.verify {
            let _ = writeln!(
                text,
                "  verify: {} read back, every byte as written",
                units::bytes(self.verified_bytes)
            );
        }
        if let Some(outages) = &self.outages {
            text.push_str(&outages.to_text());
        }
        text
    }
}

fn direction_text(text: &mut String, name: &str, direction: &DirectionReport) {
    let _ = writeln!(
        text,
        "  {name}: IOPS={}, BW={:.3} GB/s ({}, {} commands in {:.2} s)",
        units::count(direction.iops()),
        direction.bandwidth() / 1e9,
        units::bytes(direction.bytes),
        direction.commands,
        direction.seconds
    );
    let latency = &direction.latency;
    let _ = writeln!(
        text,
        "    lat: min={}, mean={}, max={}",
        units::nanoseconds(latency.min()),
        units::nanoseconds(latency.mean() as u64),
        units::nanoseconds(latency.max())
    );
    let shown: Vec<String> = [50.0, 90.0, 99.0, 99.9, 99.99]
        .iter()
        .map(|p| format!("{p}%={}", units::nanoseconds(direction.percentile(*p))))
        .collect();
    let _ = writeln!(text, "    percentiles: {}", shown.join(", "));
}

fn step_json(step: &RampStep) -> Value {
    json!({ "rate_iops": step.rate, "iops": step.iops(), "read": step.read.to_json(), "write": step.write.to_json() })
}

/// Converts queue counters to JSON, for every subcommand that prints them.
pub fn queues_json(queues: &[(Qid, QueueStatistics)]) -> Value {
    let one = |(qid, counts): &(Qid, QueueStatistics)| {
        let mut value = json!({ "qid": qid.0 });
        if let (Value::Object(to), Ok(Value::Object(from))) =
            (&mut value, serde_json::to_value(counts))
        {
            to.extend(from);
        }
        value
    };
    queues.iter().map(one).collect()
}
