//! Gathers in captured graphs: whole, and in halves about a copy.
// UNSAFETY: launches kernels over the fixture's own memory.
#![allow(unsafe_code)]

use super::{GatherCase, GatherFixture, PATIENCE};
use crate::measure::median;
use nvme_cuda::{CudaGraph, DeviceMemory, GatherIds, GatherTarget, PendingRows};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::FailedContent;
use nvme_gpu_kernel::rows::{BLOCK_THREADS, BLOCK_WARPS, GatherLaunch};
use serde_json::{Value, json};
use std::time::Instant;

/// Least and largest number of launches of each graph in a run: one for each of these rows of the case.
const FEWEST: u64 = 10;
const REPLAYS: u64 = 100;
const ROWS_A_REPLAY: u64 = 1024;
/// Bytes that are copied inside GPU memory between the halves: tens of microseconds.
const COPIED: usize = 64 << 20;

impl GatherFixture {
    /// Measures a gather of each number of rows in a captured graph.
    pub(super) fn graphs(&self, case: &GatherCase) -> Result<Vec<Value>> {
        let rows = self.job.graphs.rows.iter();
        rows.map(|rows| self.graph(case, (*rows).min(case.count)))
            .collect()
    }

    /// Compares a graph of one gather with a graph of a kernel that only copies: microseconds from its launch to the
    /// host's knowledge of the end, in turns. With halves, a graph that begins the gather, copies inside GPU memory and
    /// finishes the gather is compared with a graph of the copy.
    fn graph(&self, case: &GatherCase, rows: u64) -> Result<Value> {
        let whole = self.whole(case, rows)?;
        let bare = GatherLaunch {
            count: rows,
            lanes: 8,
            ..self.copied(case)
        };
        let blocks = rows.div_ceil(u64::from(bare.lanes * BLOCK_WARPS)) as u32;
        let (copies, ()) = CudaGraph::capture(&self.stream, |_| {
            // SAFETY: the memory is our own and outlives the graph: its launches are waited for.
            unsafe {
                self.module
                    .launch(&self.stream, self.copy, blocks, BLOCK_THREADS, &bare)
            }
        })?;
        let room = DeviceMemory::new(self.gpu(), 2 * COPIED)?;
        let (halves, work) = match self.job.graphs.halves {
            true => (self.halves(case, rows, &room)?, Some(self.work(&room)?)),
            false => (None, None),
        };
        let write_back = self.write_back(case, rows)?;
        let (mut ours, mut bound, mut written) = (Vec::new(), Vec::new(), Vec::new());
        let (mut about, mut alone) = (Vec::new(), Vec::new());
        case.out.zero()?;
        let replays = (case.count / ROWS_A_REPLAY).clamp(FEWEST, REPLAYS);
        for _ in 0..replays * self.job.cases.runs as u64 {
            ours.push(self.replay(&whole.0, Some(&whole.1))?);
            // Between the two the output has the drive's rows, so that they are written as they were.
            if let Some((graph, pending)) = &write_back {
                written.push(self.replay(graph, Some(pending))?);
            }
            bound.push(self.replay(&copies, None)?);
            if let (Some(halves), Some(work)) = (&halves, &work) {
                about.push(self.replay(&halves.0, Some(&halves.1))?);
                alone.push(self.replay(work, None)?);
            }
        }
        // The copies by the bare kernel have the same output.
        case.out.zero()?;
        self.replay(&whole.0, Some(&whole.1))?;
        self.verify_first(case, rows)?;
        if let Some(halves) = &halves {
            self.replay(&halves.0, Some(&halves.1))?;
            self.verify_first(case, rows)?;
        }
        Ok(json!({
            "rows": rows,
            "us_p50": median(&ours), "us_p99": late(&ours), "bare_us_p50": median(&bound),
            "scatter": write_back.is_some().then(|| json!({
                "us_p50": median(&written), "us_p99": late(&written),
            })),
            "halves": halves.is_some().then(|| json!({
                "us_p50": median(&about), "us_p99": late(&about), "copy_us_p50": median(&alone),
                "over_copy_us": median(&about) - median(&alone),
            })),
        }))
    }

    /// Captures a gather of the first `rows` ids.
    pub(super) fn whole(&self, case: &GatherCase, rows: u64) -> Result<(CudaGraph, PendingRows)> {
        let request = self.request(case, rows);
        CudaGraph::capture(&self.stream, |stream| {
            // SAFETY: the memory is our own and outlives the graph: its launches are waited for.
            unsafe { self.drives.gather(&case.table, &request, None, stream) }
        })
    }

    /// Captures a scatter of the rows that [`whole`](Self::whole) gathers; `None` if the GPU does not write them.
    fn write_back(&self, case: &GatherCase, rows: u64) -> Result<Option<(CudaGraph, PendingRows)>> {
        let (drive, request) = (&self.drives.first, self.request(case, rows));
        if self.drives.striped.is_some() || !drive.writes(&case.table, &request) {
            return Ok(None);
        }
        let captured = CudaGraph::capture(&self.stream, |stream| {
            // SAFETY: the memory is our own and outlives the graph: its launches are waited for.
            unsafe { drive.scatter(&case.table, &request, stream) }
        });
        captured.map(Some)
    }

    /// Captures both halves of the same gather, and a copy between them; `None` if no queue can be held for it.
    fn halves(
        &self,
        case: &GatherCase,
        rows: u64,
        room: &DeviceMemory,
    ) -> Result<Option<(CudaGraph, PendingRows)>> {
        if self.drives.striped.is_some() {
            return Ok(None);
        }
        let wanted = GatherIds {
            ids: case.ids.address(),
            wide_ids: true,
            count: rows,
        };
        let target = GatherTarget {
            out: case.out.address(),
            out_stride: u64::from(case.table.row_bytes),
            status: 0,
        };
        let (graph, pending) = CudaGraph::capture(&self.stream, |stream| {
            let (table, zero) = (&case.table, FailedContent::Zeros);
            // SAFETY: the memory is our own and outlives the graph: its launches are waited for.
            let begun = unsafe {
                self.drives
                    .first
                    .begin(table, None, zero, &wanted, stream)?
            };
            self.copy_work(room)?;
            // SAFETY: as above.
            let finish =
                |mut begun: nvme_cuda::BegunRows| unsafe { begun.finish(&target, None, stream) };
            begun.map(finish).transpose()
        })?;
        Ok(pending.map(|pending| (graph, pending)))
    }

    fn work(&self, room: &DeviceMemory) -> Result<CudaGraph> {
        let (graph, ()) = CudaGraph::capture(&self.stream, |_| self.copy_work(room))?;
        Ok(graph)
    }

    fn copy_work(&self, room: &DeviceMemory) -> Result<()> {
        let (from, to) = (room.address(), room.address() + COPIED as u64);
        // SAFETY: these are two halves of one memory, which outlives the graph.
        unsafe { self.stream.copy_within(to, from, COPIED) }
    }

    /// Launches a graph and waits for its end; returns the microseconds. Rows of `pending` that fail are an error.
    pub(super) fn replay(&self, graph: &CudaGraph, pending: Option<&PendingRows>) -> Result<f64> {
        let round = pending.map_or(0, |pending| pending.ended().wrapping_add(1));
        let begin = Instant::now();
        graph.launch(&self.stream)?;
        // Polled without a sleep, which would last longer than the measured time.
        spin(|| match pending {
            Some(pending) => Ok(pending.ended() == round),
            None => self.stream.is_done(),
        })?;
        let took = begin.elapsed().as_secs_f64() * 1e6;
        self.stream.wait(PATIENCE, || Ok(()))?;
        match pending.map(|pending| pending.last().failures) {
            Some(failures) if failures.rows > 0 => Err(Error::device(
                format!("rows were not read: {failures:?}"),
                "see docs/troubleshooting.md",
            )),
            _ => Ok(took),
        }
    }
}

/// Returns the value that one in a hundred exceeds.
pub(super) fn late(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(0.0)
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
