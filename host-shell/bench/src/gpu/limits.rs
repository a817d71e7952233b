//! Bare limits of bus, memory and controller, measured in the same run as the cases that are compared with
//! them. A rate is judged as a share of them, because hosts of the same kind differ.
// UNSAFETY: copies take raw addresses.
#![allow(unsafe_code)]

use super::rig::{ENTRIES, NullBench};
use crate::measure::median;
use crate::null::{DoorbellEcho, NullController, NullLoad, feed};
use nvme_cuda::DeviceMemory;
use nvme_cuda::Gpu;
use nvme_cuda::LaunchGrid;
use nvme_cuda::RegisteredMemory;
use nvme_cuda::{Kernel, QueueKernels};
use nvme_cuda::{Stream, StreamEvent};
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

const COPY_BYTES: usize = 64 << 20;
const COPIES: f64 = 16.0;
const SQES: u64 = 20_000_000;
const PINGS: u64 = 20_000;
const FED: u64 = 40_000_000;

/// Upper bounds of rates on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RateLimits {
    /// Highest rate at which the GPU wrote submission queue entries into host memory, per second.
    pub sqe_writes: f64,
    /// Entries per second that the GPU writes into 128 rings while the null controller serves them and the GPU
    /// reads completions; 0 when the controller did not keep up.
    pub served: f64,
    /// Nanoseconds of a round trip: 64 bytes, a release fence, a flag; 16 bytes back.
    pub ping_pong_ns: f64,
    /// Bytes per second of copies from host memory into GPU memory.
    pub copy_in: f64,
    /// Commands per second of the null controller, fed by CPU threads.
    pub controller: f64,
}

impl RateLimits {
    /// Measures all limits. `threads` is the number of the null controller's threads in the suite; `emit` is called
    /// with a line for each. `share` is the fraction, above 0, of the usual work in each of `runs` runs.
    pub fn measure(
        kernels: &Arc<QueueKernels>,
        threads: usize,
        (share, runs): (f64, usize),
        emit: &mut dyn FnMut(Value),
    ) -> Result<Self> {
        let mut bench = NullBench::new(kernels, 128, 4)?;
        let part = |whole: u64| ((whole as f64 * share) as u64).max(128);
        let limits = Self {
            controller: controller(bench.null(), threads, (part(FED), runs), emit)?,
            sqe_writes: sqe_writes(kernels, (part(SQES), runs), emit)?,
            served: match served(kernels, threads, (part(SQES), runs), emit) {
                Ok(rate) => rate,
                Err(error) => {
                    let error = error.to_string();
                    emit(json!({ "limit": "traffic_without_queues", "error": error }));
                    0.0
                }
            },
            ping_pong_ns: ping_pong(&mut bench, (part(PINGS), runs), emit)?,
            copy_in: copy_in(kernels, (((COPIES * share) as usize).max(1), runs), emit)?,
        };
        Ok(limits)
    }
}

fn line(name: &str, unit: &str, runs: &[f64]) -> Value {
    json!({ "limit": name, "value": median(runs), "unit": unit, "runs": runs })
}

/// Measures the null controller fed by CPU threads: with the suite's number of threads against feeders that do next to
/// nothing, and with every division of the cores against feeders that write and read like a driver. The higher rate is
/// the best that a GPU could reach.
fn controller(
    null: &NullController,
    threads: usize,
    work: (u64, usize),
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let left = |serving: usize| cores.saturating_sub(serving).max(1);
    let (light, mut value) = fed(null, threads, left(threads), false, work)?;
    value["limit"] = json!("null_controller");
    emit(value);
    let mut splits = [cores / 2, cores * 5 / 8, cores * 3 / 4, threads]
        .map(|count| count.max(1))
        .to_vec();
    splits.sort_unstable();
    splits.dedup();
    let mut best = 0.0f64;
    for serving in splits {
        let (rate, mut value) = fed(null, serving, left(serving), true, work)?;
        value["limit"] = json!("null_controller_with_drivers");
        emit(value);
        best = best.max(rate);
    }
    Ok(best.max(light))
}

/// Returns the rate of `serving` controller threads and as many `feeding` ones, with its description.
fn fed(
    null: &NullController,
    serving: usize,
    feeding: usize,
    thorough: bool,
    (commands, runs): (u64, usize),
) -> Result<(f64, Value)> {
    let how = NullLoad {
        threads: feeding,
        depth: 512,
        commands: commands / u64::from(null.shape().queues),
        thorough,
    };
    let (mut rates, mut busy) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let running = null.start(serving, None)?;
        let fed = feed(null, how)?;
        let account = running.stop();
        if let Some(fault) = account.fault {
            return Err(Error::internal(fault.what));
        }
        rates.push(fed.commands as f64 / fed.seconds / 1e6);
        busy.push(account.busy());
    }
    let mut value = line("", "M commands/s", &rates);
    value["threads"] = json!(serving);
    value["fed_by"] = json!(feeding);
    value["busy"] = json!(median(&busy));
    value["limiter"] = json!(if median(&busy) >= 0.9 {
        "the controller"
    } else {
        "those who feed it"
    });
    Ok((median(&rates) * 1e6, value))
}

/// Returns the number of entries into the ring of one queue and into 128 rings, eight lanes an entry and a
/// warp's four side by side, and nothing else.
fn sqe_writes(
    kernels: &Arc<QueueKernels>,
    (entries, runs): (u64, usize),
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let mut best = 0.0f64;
    for (name, queues, ring) in [
        ("pcie_sqe_writes", 1, 1 << 16),
        ("pcie_sqe_writes_128_rings", 128, ENTRIES),
    ] {
        let mut bench = NullBench::of_rings(kernels, queues, ring)?;
        let mut lines = Vec::new();
        for threads in [128, 256] {
            let grid = LaunchGrid {
                kernel: Kernel::SqeWrites,
                blocks: 128,
                threads,
            };
            let mut rates = Vec::new();
            bench.bare(grid, entries / 10)?;
            for _ in 0..runs {
                let ran = bench.bare(grid, entries)?;
                rates.push(entries as f64 / ran.seconds / 1e6);
            }
            best = best.max(median(&rates));
            let mut value = line(name, "M SQE/s", &rates);
            value["blocks"] = json!(grid.blocks);
            value["threads_per_block"] = json!(grid.threads);
            lines.push((median(&rates), value));
        }
        lines.sort_unstable_by(|(a, _), (b, _)| b.total_cmp(a));
        if let Some((_, value)) = lines.into_iter().next() {
            emit(value);
        }
    }
    Ok(best * 1e6)
}

/// Measures the traffic of 128 queues without the queues: one warp each writes entries, reads completions and
/// rings without checking anything, while the controller serves them. The difference to a real queue is the
/// cost of the queue.
fn served(
    kernels: &Arc<QueueKernels>,
    threads: usize,
    (entries, runs): (u64, usize),
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let mut bench = NullBench::of_rings(kernels, 128, ENTRIES)?;
    let mut rates = Vec::new();
    // Threads that have just started miss laps, so the result of this first run is discarded.
    let _ = bench.served(entries / 10, threads);
    for _ in 0..runs {
        let ran = bench.served(entries, threads)?;
        rates.push(entries as f64 / ran.seconds / 1e6);
    }
    let mut value = line("traffic_without_queues", "M SQE/s", &rates);
    value["threads"] = json!(threads);
    emit(value);
    Ok(median(&rates) * 1e6)
}

fn ping_pong(
    bench: &mut NullBench,
    (rounds, runs): (u64, usize),
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let mut times = Vec::new();
    let grid = LaunchGrid {
        kernel: Kernel::PingPong,
        blocks: 1,
        threads: 1,
    };
    for _ in 0..runs {
        let echo = DoorbellEcho::start(bench.null())?;
        let ran = bench.bare(grid, rounds);
        let torn = echo.stop();
        let ran = ran?;
        if torn != 0 || ran.report.timed_out != 0 {
            return Err(Error::internal(format!(
                "ping-pong: {torn} torn payloads, {} timeouts",
                ran.report.timed_out
            )));
        }
        times.push(ran.seconds * 1e9 / rounds as f64);
    }
    emit(line("ping_pong", "ns", &times));
    Ok(median(&times))
}

fn copy_in(
    kernels: &Arc<QueueKernels>,
    (copies, runs): (usize, usize),
    emit: &mut dyn FnMut(Value),
) -> Result<f64> {
    let gpu = kernels.gpu();
    let pages = Arc::new(DmaPages::new(COPY_BYTES)?);
    let _registered = RegisteredMemory::pages(gpu, &pages)?;
    let memory = DeviceMemory::new(gpu, COPY_BYTES)?;
    let rates = rates(gpu, (copies, runs), |stream| {
        // SAFETY: both ranges are our own and outlive the stream's work, which ends before `rates` does.
        unsafe { stream.copy_in(memory.address(), pages.start(), COPY_BYTES) }
    })?;
    emit(line("copy_engine_host_to_gpu", "GB/s", &rates));
    Ok(median(&rates) * 1e9)
}

/// Measures the rates of `runs` runs of `copies` copies of [`COPY_BYTES`] each, in GB/s.
fn rates(
    gpu: &Arc<Gpu>,
    (copies, runs): (usize, usize),
    copy: impl Fn(&Stream) -> Result<()>,
) -> Result<Vec<f64>> {
    let stream = Stream::new(gpu)?;
    let mut rates = Vec::new();
    for _ in 0..=runs {
        let begin = StreamEvent::record(&stream)?;
        let copied = (0..copies).try_for_each(|_| copy(&stream));
        let end = StreamEvent::record(&stream)?;
        stream.finish()?;
        copied?;
        rates.push((COPY_BYTES * copies) as f64 / end.seconds_since(&begin)? / 1e9);
    }
    // The first one warms up.
    Ok(rates.split_off(1))
}

/// Returns the bytes a second of the copy engine from pinned host memory to the GPU, and of copies inside the
/// GPU's memory, each byte counted as read and as written.
///
/// # Errors
/// Without memory, and with the driver's answer.
pub(crate) fn copy_rates(gpu: &Arc<Gpu>, runs: usize) -> Result<(f64, f64)> {
    let pages = Arc::new(DmaPages::new(COPY_BYTES)?);
    let _registered = RegisteredMemory::pages(gpu, &pages)?;
    let memory = DeviceMemory::new(gpu, 2 * COPY_BYTES)?;
    let (to, from) = (memory.address(), memory.address() + COPY_BYTES as u64);
    // SAFETY: as in `copy_in`.
    let link = |stream: &Stream| unsafe { stream.copy_in(to, pages.start(), COPY_BYTES) };
    // SAFETY: as above.
    let within = |stream: &Stream| unsafe { stream.copy_within(to, from, COPY_BYTES) };
    let link = rates(gpu, (4, runs), link)?;
    let within = rates(gpu, (COPIES as usize, runs), within)?;
    Ok((median(&link) * 1e9, 2.0 * median(&within) * 1e9))
}
