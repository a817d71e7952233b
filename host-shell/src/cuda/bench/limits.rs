//! Bare limits, measured in the same run as what is held against them.
// UNSAFETY: copies take raw addresses.
#![allow(unsafe_code)]

use super::super::kernels::{Kernel, Kernels};
use super::super::memory::{DeviceMemory, Registered};
use super::super::null::{Echo, Feed, feed};
use super::super::queues::Grid;
use super::super::stream::{Event, Stream};
use super::{Bench, median};
use crate::error::{Error, Result};
use crate::pages::Pages;
use serde_json::{Value, json};
use std::sync::Arc;

/// Runs of each measurement.
const RUNS: usize = 5;
const COPY_BYTES: usize = 64 << 20;
const COPIES: f64 = 16.0;
const SQES: u64 = 20_000_000;
const PINGS: u64 = 20_000;
const FED: u64 = 40_000_000;

/// What nothing can exceed here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Submission queue entries per second that the GPU writes into host memory.
    pub sqe_writes: f64,
    /// Nanoseconds of a round trip: 64 bytes, a release fence, a flag; 16 bytes back.
    pub ping_pong_ns: f64,
    /// Bytes per second of copies from host memory into GPU memory.
    pub copy_in: f64,
    /// Commands per second of the null controller: what its threads would do if they never waited,
    /// fed by CPU threads.
    pub controller: f64,
}

impl Limits {
    /// Measures all of them. `threads` is the number of the null controller's threads in the suite;
    /// `emit` gets one line each.
    /// `share` is how much of the usual work is done, above 0.
    pub fn measure(
        kernels: &Arc<Kernels>,
        threads: usize,
        share: f64,
        emit: &mut dyn FnMut(Value),
    ) -> Result<Self> {
        let mut bench = Bench::new(kernels, 128, 4)?;
        let part = |whole: u64| ((whole as f64 * share) as u64).max(128);
        let limits = Self {
            controller: controller(&bench, threads, part(FED), emit)?,
            sqe_writes: sqe_writes(&mut bench, part(SQES), emit)?,
            ping_pong_ns: ping_pong(&mut bench, part(PINGS), emit)?,
            copy_in: copy_in(kernels, ((COPIES * share) as usize).max(1), emit)?,
        };
        Ok(limits)
    }
}

fn line(name: &str, unit: &str, runs: &[f64]) -> Value {
    json!({ "limit": name, "value": median(runs), "unit": unit, "runs": runs })
}

/// The null controller fed by CPU threads: half of them feed, the other half serve.
fn controller(
    bench: &Bench,
    threads: usize,
    commands: u64,
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let half = (threads / 2).max(1);
    let queues = u64::from(bench.null().shape().queues);
    let (mut ceilings, mut rates, mut busy) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let running = bench.null().start(half, None)?;
        let how = Feed {
            threads: half,
            depth: 512,
            commands: commands / queues,
        };
        let fed = feed(bench.null(), how)?;
        let account = running.stop();
        if let Some(fault) = account.fault {
            return Err(Error::device(fault.what, "report this"));
        }
        ceilings.push(account.ceiling(threads) / 1e6);
        rates.push(fed.commands as f64 / fed.seconds / 1e6);
        busy.push(account.busy());
    }
    let mut value = line("null_controller", "M commands/s", &ceilings);
    value["threads"] = json!(threads);
    value["fed_by"] = json!(format!("{half} CPU threads, {half} serving"));
    value["fed_rate"] = json!(median(&rates));
    value["busy"] = json!(median(&busy));
    emit(value);
    Ok(median(&ceilings) * 1e6)
}

fn sqe_writes(bench: &mut Bench, entries: u64, emit: &mut dyn FnMut(Value)) -> Result<f64> {
    let mut rates = Vec::new();
    let grid = Grid {
        kernel: Kernel::SqeWrites,
        blocks: 128,
        threads: 128,
    };
    bench.bare(grid, entries / 10)?;
    for _ in 0..RUNS {
        let ran = bench.bare(grid, entries)?;
        rates.push(entries as f64 / ran.seconds / 1e6);
    }
    emit(line("pcie_sqe_writes", "M SQE/s", &rates));
    Ok(median(&rates) * 1e6)
}

fn ping_pong(bench: &mut Bench, rounds: u64, emit: &mut dyn FnMut(Value)) -> Result<f64> {
    let mut times = Vec::new();
    let grid = Grid {
        kernel: Kernel::PingPong,
        blocks: 1,
        threads: 1,
    };
    for _ in 0..RUNS {
        let echo = Echo::start(bench.null())?;
        let ran = bench.bare(grid, rounds);
        let torn = echo.stop();
        let ran = ran?;
        if torn != 0 || ran.report.timed_out != 0 {
            return Err(Error::device(
                format!(
                    "ping-pong: {torn} torn payloads, {} timeouts",
                    ran.report.timed_out
                ),
                "report this",
            ));
        }
        times.push(ran.seconds * 1e9 / rounds as f64);
    }
    emit(line("ping_pong", "ns", &times));
    Ok(median(&times))
}

fn copy_in(kernels: &Arc<Kernels>, copies: usize, emit: &mut dyn FnMut(Value)) -> Result<f64> {
    let gpu = kernels.gpu();
    let pages = Arc::new(Pages::new(COPY_BYTES)?);
    let _registered = Registered::pages(gpu, &pages)?;
    let memory = DeviceMemory::new(gpu, COPY_BYTES)?;
    let stream = Stream::new(gpu)?;
    let mut rates = Vec::new();
    for _ in 0..=RUNS {
        let begin = Event::record(&stream)?;
        for _ in 0..copies {
            // SAFETY: both ranges are ours and outlive the stream's work, which ends below.
            unsafe { stream.copy_in(memory.address(), pages.start(), COPY_BYTES)? };
        }
        let end = Event::record(&stream)?;
        stream.finish()?;
        rates.push((COPY_BYTES * copies) as f64 / end.seconds_since(&begin)? / 1e9);
    }
    // The first one warms up.
    let rates = &rates[1..];
    emit(line("copy_engine_host_to_gpu", "GB/s", rates));
    Ok(median(rates) * 1e9)
}
