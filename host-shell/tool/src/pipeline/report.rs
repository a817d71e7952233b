//! Output of `pipeline`.

use crate::common::{output, say, visible};
use nvme_course::pipeline::{ContinuousRun, PipelineJob, PipelineReport, SourceRuns};
use nvme_host::bench::median;
use nvme_host::{Result, Store, units};
use serde_json::{Value, json};
use std::time::Duration;

/// Machine that it ran on.
pub struct ReportMachine {
    device: Option<String>,
    path: Value,
    gpu: Option<String>,
}

impl ReportMachine {
    pub fn of(store: &Store) -> Self {
        let path = store.path();
        #[cfg(feature = "cuda")]
        let gpu = store.gpu().map(|gpu| gpu.describe());
        #[cfg(not(feature = "cuda"))]
        let gpu = None;
        Self {
            path: json!(path.path),
            device: Some(path.device),
            gpu,
        }
    }
}

/// Printer of the progress lines of a continuous pipeline.
pub struct ProgressInterval {
    every: f64,
    json: bool,
    last: (u64, f64),
}

impl ProgressInterval {
    pub fn new(every: Duration, json: bool) -> Self {
        Self {
            every: every.as_secs_f64(),
            json,
            last: (0, 0.0),
        }
    }

    /// Prints the progress since the last line, once an interval has passed since then.
    pub fn at(&mut self, batches: u64, seconds: f64) -> Result<()> {
        let (before, since) = self.last;
        if seconds < since + self.every {
            return Ok(());
        }
        self.last = (batches, seconds);
        let (done, took) = (batches - before, seconds - since);
        let rate = done as f64 / took;
        if self.json {
            return output::line(&json!({ "interval": {
                "end_s": seconds, "seconds": took, "batches": done, "batches_per_s": rate,
            } }));
        }
        say::show(&format!("{seconds:8.1} s: {done} batches, {rate:.1}/s"));
        Ok(())
    }
}

fn way(way: &SourceRuns) -> Value {
    let took = median(&way.seconds);
    let rate = |amount: f64| amount / took;
    json!({
        "source": way.source.name(),
        "batches": way.batches, "bytes": way.bytes, "seconds": way.seconds,
        "batches_per_s": rate(way.batches as f64),
        "gb_per_s": (way.bytes > 0).then(|| rate(way.bytes as f64) / 1e9),
        "gflop_per_s": rate(way.operations) / 1e9,
        "read_us": way.overlap.read_us, "compute_us": way.overlap.compute_us,
        "both_us": way.overlap.both_us, "overlap": way.overlap.share(),
    })
}

fn continuous(met: &ContinuousRun) -> Value {
    let us = |percent: f64| met.latencies_ns.value_at_percentile(percent) as f64 / 1e3;
    json!({
        "latency_us": {
            "p50": us(50.0), "p90": us(90.0), "p99": us(99.0), "p99_9": us(99.9), "most": us(100.0),
        },
        "failed": met.failed, "retries": met.retries,
        "longest_outage_s": met.longest_outage.as_secs_f64(),
        "last_failure": met.last_failure, "interrupted": met.is_interrupted,
    })
}

pub fn to_json(machine: &ReportMachine, job: &PipelineJob, report: &PipelineReport) -> Value {
    let shape = &job.shape;
    json!({
        "pipeline": job.name.name(), "name": job.name.in_one_word(),
        "gpu": machine.gpu, "device": machine.device, "path": machine.path,
        "stored": shape.stored.name(),
        "rows": shape.rows, "columns": shape.columns, "vectors": shape.vectors, "parts": shape.parts,
        "buffers": shape.buffers, "part_bytes": shape.part_bytes(), "readers": job.readers, "seed": job.seed,
        "ways": report.ways.iter().map(way).collect::<Vec<_>>(),
        "continuous": report.continuous.as_ref().map(continuous),
        "spans": report.trace.spans.len(), "spans_left_out": report.trace.dropped,
        "verified": true,
    })
}

pub fn to_text(report: &Value) -> String {
    let text = |value: &Value| visible::line(value.as_str().unwrap_or("-"));
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut out = format!(
        "{}: {} matrices of {} x {} ({}), {} vectors, {} buffers; {}; {}\n",
        text(&report["name"]),
        report["parts"],
        report["rows"],
        report["columns"],
        text(&report["stored"]),
        report["vectors"],
        report["buffers"],
        text(&report["device"]),
        report["gpu"]
            .as_str()
            .map_or_else(|| "the CPU multiplies".to_owned(), visible::line),
    );
    out += &format!(
        "{:<13}{:>10}{:>12}{:>9}{:>12}{:>12}{:>12}{:>10}\n",
        "source", "batches", "batches/s", "GB/s", "GFLOP/s", "read", "product", "overlap"
    );
    for way in report["ways"].as_array().into_iter().flatten() {
        let us = |value: &Value| format!("{:.1} ms", number(value) / 1e3);
        out += &format!(
            "{:<13}{:>10}{:>12.1}{:>9}{:>12.2}{:>12}{:>12}{:>9.0}%\n",
            text(&way["source"]),
            way["batches"].to_string(),
            number(&way["batches_per_s"]),
            way["gb_per_s"]
                .as_f64()
                .map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2}")),
            number(&way["gflop_per_s"]),
            us(&way["read_us"]),
            us(&way["compute_us"]),
            number(&way["overlap"]) * 100.0,
        );
    }
    let met = &report["continuous"];
    if met.is_object() {
        let us = |name: &str| units::nanoseconds((number(&met["latency_us"][name]) * 1e3) as u64);
        out += &format!(
            "latency of a batch: p50 {}, p90 {}, p99 {}, p99.9 {}, longest {}\n",
            us("p50"),
            us("p90"),
            us("p99"),
            us("p99_9"),
            us("most"),
        );
        out += &format!(
            "failed: {} batches, {} more tries, longest outage {:.3} s\n",
            met["failed"],
            met["retries"],
            number(&met["longest_outage_s"])
        );
        if let Some(last) = met["last_failure"].as_str() {
            out += &format!("last failure: {}\n", visible::line(last));
        }
    }
    out + "every product compared\n"
}
