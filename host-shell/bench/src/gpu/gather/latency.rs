//! Latency of small gathers that are launched in sequence.
// UNSAFETY: launches kernels over the rig's own memory.
#![allow(unsafe_code)]

use super::{GatherCase, GatherFixture, PATIENCE};
use crate::measure::median;
use nvme_cuda::StreamEvent;
use nvme_driver::error::Result;
use nvme_gpu_kernel::rows::{BLOCK_THREADS, GatherLaunch};
use serde_json::{Value, json};
use std::time::Instant;

/// Rows of a hop, and the most hops of each run.
const HOP_ROWS: u64 = 32;
const HOPS: u64 = 40;
/// Least number of hops of each run.
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
}
