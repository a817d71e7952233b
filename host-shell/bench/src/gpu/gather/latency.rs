//! Latency of small gathers: launched in sequence, and as a graph.
// UNSAFETY: launches kernels over the rig's own memory.
#![allow(unsafe_code)]

use super::{GatherCase, GatherFixture, PATIENCE};
use crate::measure::median;
use nvme_cuda::CudaGraph;
use nvme_cuda::StreamEvent;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, BLOCK_WARPS, GatherLaunch};
use serde_json::{Value, json};
use std::time::Instant;

/// Rows of a hop, and the most hops of each run.
const HOP_ROWS: u64 = 32;
const HOPS: u64 = 40;
/// Rows of the gather in a graph, and how often it is launched in each run at most.
const GRAPH_ROWS: u64 = 1024;
const REPLAYS: u64 = 100;
/// Least number of samples of each measurement.
const FEWEST: u64 = 10;

impl GatherFixture {
    /// Compares a gather of 32 rows with a kernel that only copies the same number: microseconds from the launch until
    /// the host sees the end, and on the GPU alone. The results are medians of 40 for each run, alternating, or of
    /// fewer rows if a run gathers fewer.
    pub(super) fn hop(&self, case: &GatherCase) -> Result<Value> {
        let request = self.request(case, HOP_ROWS.min(case.count));
        let bare = GatherLaunch {
            count: request.count,
            lanes: 1,
            ..self.copied(case)
        };
        let (mut ours, mut bound) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let hops = (case.count / HOP_ROWS).clamp(FEWEST, HOPS);
        for _ in 0..hops * self.job.cases.runs as u64 {
            let begin = Instant::now();
            let first = StreamEvent::record(&self.stream)?;
            // SAFETY: as in `gather`.
            let pending = unsafe {
                let stream = self.stream.handle();
                self.drives.gather(&case.table, &request, None, stream)?
            };
            let last = StreamEvent::record(&self.stream)?;
            pending.wait(PATIENCE)?;
            ours[0].push(begin.elapsed().as_secs_f64() * 1e6);
            self.stream.wait(PATIENCE, || Ok(()))?;
            ours[1].push(last.seconds_since(&first)? * 1e6);
            let begin = Instant::now();
            let first = StreamEvent::record(&self.stream)?;
            // SAFETY: as in `gather`.
            unsafe {
                self.module
                    .launch(&self.stream, self.copy, 4, BLOCK_THREADS, &bare)?;
            }
            let last = StreamEvent::record(&self.stream)?;
            self.stream.wait(PATIENCE, || Ok(()))?;
            bound[0].push(begin.elapsed().as_secs_f64() * 1e6);
            bound[1].push(last.seconds_since(&first)? * 1e6);
        }
        Ok(json!({
            "us": median(&ours[0]), "gpu_us": median(&ours[1]),
            "bare_us": median(&bound[0]), "bare_gpu_us": median(&bound[1]),
        }))
    }

    /// Compares a graph of one gather with a graph of the bare kernel: microseconds from its launch to the
    /// host's knowledge of the end, in turns.
    pub(super) fn replay(&self, case: &GatherCase) -> Result<Value> {
        let rows = GRAPH_ROWS.min(case.count);
        let request = self.request(case, rows);
        let (graph, pending) = CudaGraph::capture(&self.stream, |stream| {
            // SAFETY: the memory is our own and outlives the graph: its launches are waited for.
            unsafe { self.drives.gather(&case.table, &request, None, stream) }
        })?;
        let bare = GatherLaunch {
            count: rows,
            lanes: 8,
            ..self.copied(case)
        };
        let blocks = rows.div_ceil(u64::from(bare.lanes * BLOCK_WARPS)) as u32;
        let (copies, ()) = CudaGraph::capture(&self.stream, |_| {
            // SAFETY: as above.
            unsafe {
                self.module
                    .launch(&self.stream, self.copy, blocks, BLOCK_THREADS, &bare)
            }
        })?;
        let (mut ours, mut bound) = (Vec::new(), Vec::new());
        let replays = (case.count / GRAPH_ROWS).clamp(FEWEST, REPLAYS);
        for round in 1..=(replays * self.job.cases.runs as u64) as u32 {
            let begin = Instant::now();
            graph.launch(&self.stream)?;
            // Polled without a sleep, which would last longer than the measured time.
            spin(|| Ok(pending.ended() >= round))?;
            ours.push(begin.elapsed().as_secs_f64() * 1e6);
            if pending.last().failures.rows > 0 {
                let failures = pending.last().failures;
                return Err(Error::device(
                    format!("rows were not read: {failures:?}"),
                    "see docs/troubleshooting.md",
                ));
            }
            self.stream.wait(PATIENCE, || Ok(()))?;
            let begin = Instant::now();
            copies.launch(&self.stream)?;
            spin(|| self.stream.is_done())?;
            bound.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        ours.sort_unstable_by(f64::total_cmp);
        let p99 = ours.get(ours.len() * 99 / 100).copied().unwrap_or(0.0);
        Ok(json!({
            "rows": rows, "us_p50": median(&ours), "us_p99": p99, "bare_us_p50": median(&bound),
        }))
    }
}

/// Looks until `is_done`.
///
/// # Errors
/// Past the host's patience.
fn spin(mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !is_done()? {
        if begin.elapsed() > PATIENCE {
            return Err(Error::device(
                "a graph did not end",
                "see docs/troubleshooting.md",
            ));
        }
        std::thread::yield_now();
    }
    Ok(())
}
