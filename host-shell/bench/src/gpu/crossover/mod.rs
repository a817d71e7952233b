//! GPU-initiated against CPU-initiated reads: the same rows of the same drive, through a cache in GPU memory
//! and pinned slots, by the same copy, to the same output.
//!
//! Each batch has an exact number of rows in the cache: they are read before, and the drive's count of read commands
//! must grow by exactly the number of the other rows. Every word of every row is checked on the GPU after the timed
//! part.
//!
//! - [`ids`]: batches with an exact hit rate. [`bench`]: both sides, alternating.
//! - [`cpu_side`]: the CPU's side; [`by_cpu`]: one of its threads, [`team`]: its thread pool, [`index`]: the
//!   index of its cache, [`words`]: memory that it shares with kernels.
//! - [`chain`]: pointer chases, where a row has to arrive before the next one can be requested.

mod bench;
mod by_cpu;
mod chain;
mod cpu_side;
mod ids;
mod index;
mod job;
mod team;
mod words;

pub use job::CrossoverJob;

use super::gather::lay_out::{check_room, cores, lay_out};
use crate::measure::GatherCases;
use bench::{CrossoverBench, CrossoverCase};
use job::batches;
use nvme_cuda::Gpu;
use nvme_cuda::GpuRows;
use nvme_cuda::{GpuAccess, QueueTier, TierRequest};
use nvme_driver::controller::Controller;
use nvme_driver::controller::config::ControllerConfig;
use nvme_driver::device::Device;
use nvme_driver::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

/// Measures all cases on `device`; `emit` gets one object for the machine and one for each case.
///
/// # Errors
/// Errors that keep a case from running, wrong rows, a count of reads that differs from the misses, and the errors of
/// `emit`.
pub fn crossover(
    device: Arc<dyn Device>,
    config: &ControllerConfig,
    job: &CrossoverJob,
    emit: &mut dyn FnMut(Value) -> Result<()>,
) -> Result<()> {
    let gpu = Gpu::open(job.gpu)?;
    let threads = match job.threads {
        0 => cores() as u32,
        threads => threads,
    };
    let queues = job.options.queues.saturating_add(job.options.owned);
    let others = 2 + threads + chain::MOST_THREADS;
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let config = ControllerConfig {
        // Chases by the CPU use separate queues.
        queue_pairs: u32::from(queues).saturating_add(others),
        ..config.clone()
    };
    let exactly = TierRequest::Exactly(QueueTier::Direct);
    let access = Arc::new(GpuAccess::find(&gpu, device, queues, exactly)?);
    let controller = Controller::start(Arc::clone(access.device()), &config)?;
    let info = controller.usable_namespace(job.nsid)?;
    let cases = GatherCases {
        table_bytes: job.table_bytes,
        row_bytes: job.row_bytes.clone(),
        rows: 0,
        runs: job.runs,
        seed: job.seed,
        zipf: false,
    };
    let controllers = [(controller, info)];
    check_room(&controllers, (job.nsid, &cases))?;
    let [(controller, info)] = &controllers;
    for row_bytes in &job.row_bytes {
        if !row_bytes.is_multiple_of(info.block_bytes) {
            return Err(Error::usage(
                format!(
                    "rows of {row_bytes} bytes are not whole blocks of {} bytes",
                    info.block_bytes
                ),
                "use rows of whole blocks",
            ));
        }
    }
    let options = job.options.within(controller, others);
    let bench_of = |row_bytes: u32| {
        let rows = GpuRows::create(controller, &access, *info, options, config.timeout)?;
        CrossoverBench::new(&gpu, (controller, *info), rows, (row_bytes, threads), job)
    };
    // The table is written only here: a run that is refused for one of its row sizes has overwritten nothing.
    for row_bytes in &job.row_bytes {
        drop(bench_of(*row_bytes)?);
    }
    lay_out(&controllers, (job.nsid, &cases))?;
    for row_bytes in &job.row_bytes {
        let mut bench = bench_of(*row_bytes)?;
        emit(json!({
            "gpu": gpu.describe(), "device": access.device().describe(), "tier": access.describe(),
            "cores": cores(), "block_bytes": info.block_bytes, "row_bytes": row_bytes,
            "queues": job.options.queues, "stations": job.options.stations,
            "cpu_queues": bench.cpu.threads(), "table_bytes": job.table_bytes,
        }))?;
        for count in batches(job, u64::from(*row_bytes)) {
            let case = |percent, caches| CrossoverCase {
                count,
                percent,
                caches,
            };
            emit(bench.case(case(0, false))?)?;
            for percent in &job.hits {
                emit(bench.case(case(*percent, true))?)?;
            }
        }
        for count in &job.walks {
            if let Some(case) = bench.walks(*count, (&gpu, *info), threads)? {
                emit(case)?;
            }
        }
    }
    let [(controller, _)] = controllers;
    controller.shut_down()
}
