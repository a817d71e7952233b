//! Streaming: 1 MiB reads of the simulator into GPU memory, against the copy engine.

use super::limits::RateLimits;
use crate::measure::median;
use nvme_core::spec::nvm::opcode;
use nvme_cuda::GpuQueuePairs;
use nvme_cuda::QueueKernels;
use nvme_cuda::SubmitMode;
use nvme_cuda::{GpuAccess, QueueTier, TierRequest};
use nvme_driver::controller::Controller;
use nvme_driver::controller::config::ControllerConfig;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::work::LaunchArguments;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const STREAM_BYTES: u64 = 1 << 20;
const STREAM_COMMANDS: u64 = 4096;
const STREAM_QUEUES: u32 = 2;
/// Commands in flight on each queue: a batch of copies under way, and the next one.
const STREAM_DEPTH: u32 = 32;

/// Measures `runs` runs, after one to warm up, and returns the median.
pub fn stream(
    kernels: &Arc<QueueKernels>,
    limits: &RateLimits,
    share: f64,
    runs: usize,
) -> Result<Value> {
    let gpu = kernels.gpu();
    let text = format!(
        "sim:mem?size=1GiB&block=4096&mdts=8&queues={STREAM_QUEUES}&threads={STREAM_QUEUES}"
    );
    let device = nvme_driver::open(&text)?;
    let request = TierRequest::Exactly(QueueTier::GpuMemory);
    let access = Arc::new(GpuAccess::find(gpu, device, STREAM_QUEUES as u16, request)?);
    let config = ControllerConfig {
        queue_pairs: STREAM_QUEUES,
        ..ControllerConfig::default()
    };
    let controller = Controller::start(Arc::clone(access.device()), &config)?;
    let mut pairs = GpuQueuePairs::create(
        kernels,
        &controller,
        &access,
        STREAM_QUEUES,
        2 * STREAM_DEPTH,
    )?;
    let data =
        Arc::new(access.data((STREAM_QUEUES * 2 * STREAM_DEPTH) as usize * STREAM_BYTES as usize)?);
    let commands = ((STREAM_COMMANDS as f64 * share) as u64).max(16);
    let launch = LaunchArguments {
        commands,
        units: 1024,
        timeout_ns: 5_000_000_000,
        nsid: 1,
        opcode: u32::from(opcode::READ),
        blocks: (STREAM_BYTES >> 12) as u32,
        block_shift: 12,
        depth: STREAM_DEPTH,
        ..LaunchArguments::default()
    };
    let grid = SubmitMode::Warp.grid(STREAM_QUEUES, 0, 32);
    let mut rates = Vec::new();
    for _ in 0..=runs {
        let ran = pairs.run(grid, launch, &data, false, Duration::from_secs(60))?;
        if ran.report.completed != commands {
            return Err(Error::device(
                format!("{:?}", ran.report),
                "see the report's counts",
            ));
        }
        rates.push((commands * STREAM_BYTES) as f64 / ran.seconds / 1e9);
    }
    // The first one warms up.
    let rates = &rates[1..];
    let (rate, limit) = (median(rates), limits.copy_in / 1e9);
    Ok(json!({
        "case": "stream_1mib_tier2", "value": rate, "unit": "GB/s", "runs": rates,
        "mode": "warp", "queues": STREAM_QUEUES, "depth": STREAM_DEPTH, "tier": access.describe(),
        "target": limit * 0.95, "met": rate >= limit * 0.95,
        "limiter": if rate >= limit * 0.95 { "the copy engine" } else { "the simulator's copies" },
    }))
}
