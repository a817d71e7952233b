//! `bench --gpu`: a workload driven by kernels, and the suite of measurements.

use crate::common::images::CommandFiles;
use crate::common::{DeviceArgs, beyond, check_stop, output, progress};
use crate::gpu::reconnecting::{ReconnectingSession, SessionReport, SessionSource};
use crate::gpu::transfer::{GpuArgs, TransferTotals};
use clap::{Args, ValueEnum};
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::nvm::opcode;
use nvme_host::cuda::bench::{self, SuiteOptions};
use nvme_host::cuda::{GpuSession, LaunchWork};
use nvme_host::{Device, Error, Result, units};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Target duration of one launch, in seconds, in a run that is limited by time.
const LAUNCH_SECONDS: f64 = 0.5;

/// The suite that measures the GPU's queues against their limits
#[derive(Args)]
#[command(next_help_heading = "GPU")]
pub struct SuiteArgs {
    /// Measure every case of a suite against a null controller on the CPU; no device
    #[arg(long, value_enum, groups = ["by_suite", "without_device"], requires = "gpu")]
    pub suite: Option<SuiteName>,
    /// Only the cases whose name has TEXT in it
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        requires = "by_suite"
    )]
    only: String,
    /// Threads of the null controller; all cores but two when missing
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = crate::common::number::<usize>(0..=4096),
        hide_default_value = true,
        requires = "by_suite"
    )]
    controller_threads: usize,
    /// Do a small part of the work, for a look
    #[arg(long, requires = "by_suite")]
    quick: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum SuiteName {
    Queue,
}

impl SuiteArgs {
    /// Runs the suite: one JSON object on each line, as it is measured.
    pub fn run(self, gpu: Option<u32>) -> Result<()> {
        let options = SuiteOptions {
            gpu: gpu.unwrap_or(0),
            threads: self.controller_threads,
            only: self.only,
            quick: self.quick,
        };
        let mut failure = None;
        bench::run(&options, &mut |line: Value| {
            if let Err(error) = output::line(&line) {
                failure.get_or_insert(error);
            }
        })?;
        failure.map_or(Ok(()), Err)
    }
}

/// A workload for kernels.
pub struct KernelJob<'a> {
    pub files: &'a CommandFiles,
    pub device: &'a DeviceArgs,
    pub nsid: Nsid,
    pub gpu: &'a GpuArgs,
    pub queues: u32,
    pub depth: u32,
    pub bytes: u64,
    pub read: bool,
    pub random: bool,
    pub size: Option<u64>,
    pub io_size: Option<u64>,
    pub runtime: Duration,
    pub recover: Option<Duration>,
    pub seed: u64,
}

/// Runs `job` on `opened`, its device, and prints the results.
pub fn run(job: &KernelJob<'_>, opened: Arc<dyn Device>) -> Result<()> {
    let setup = job.gpu.setup(job.queues, job.depth, job.nsid, false);
    let source = SessionSource {
        device: &job.device.device,
        config: match job.read {
            true => job.device.reading(),
            false => nvme_host::ControllerConfig {
                changes: Some(nvme_host::sysfs::CommandScope::Namespace(job.nsid.0)),
                ..job.device.config()
            },
        },
        setup,
        trace: job.gpu.trace.as_deref(),
        files: job.files,
        recover: job.recover,
        bytes: job.bytes,
        data_bytes: 0,
    };
    let mut reconnecting = ReconnectingSession::open(source, opened)?;
    let mut work = work_of(job, reconnecting.session()?)?;
    let what = if job.read { "Read" } else { "Write" };
    let total = job.io_size.map(|bytes| bytes.div_ceil(job.bytes).max(1));
    // The first launch warms up and says how many commands half a second is.
    let first = reconnecting.run_whole(what, &work)?;
    let rate = work.commands as f64 / first.seconds.max(1e-9);
    let per_launch = ((rate * LAUNCH_SECONDS) as u64).max(work.commands);
    let bar = match total {
        Some(total) => progress::bytes(total * job.bytes, "bench"),
        None => progress::time(job.runtime.as_millis() as u64, "bench"),
    };
    let mut totals = TransferTotals::default();
    let begin = Instant::now();
    loop {
        check_stop()?;
        let left = match total {
            Some(total) => total - totals.commands,
            None if begin.elapsed() < job.runtime => per_launch,
            None => 0,
        };
        if left == 0 {
            break;
        }
        work.commands = left.min(per_launch);
        work.seed = work.seed.wrapping_add(1);
        if let (Some(ran), _) = reconnecting.run(what, &work)? {
            totals.add(&ran, ran.report.completed);
        }
        match total {
            Some(_) => bar.set_position(totals.commands * job.bytes),
            None => bar.set_position(begin.elapsed().as_millis() as u64),
        }
    }
    bar.finish_and_clear();
    report(job, what, &totals, reconnecting.close()?)
}

/// Returns the work of the first launch, before any was measured.
fn work_of(job: &KernelJob<'_>, session: &GpuSession) -> Result<LaunchWork> {
    if session.command_bytes() != job.bytes {
        return Err(Error::usage(
            format!("--bs {} is not what a command can move", job.bytes),
            format!("use {} or less, whole blocks", session.command_bytes()),
        ));
    }
    let block = u64::from(session.info().block_bytes);
    let all = session.info().blocks * block;
    if let Some(size) = job.size.filter(|size| *size > all) {
        return Err(beyond(size, all));
    }
    let units = job.size.unwrap_or(all) / job.bytes;
    if units == 0 {
        return Err(Error::usage(
            "one command is longer than --size or the namespace",
            "use a smaller --bs",
        ));
    }
    Ok(LaunchWork {
        opcode: if job.read {
            opcode::READ
        } else {
            opcode::WRITE
        },
        lba: 0,
        blocks: (job.bytes / block) as u32,
        commands: u64::from(job.queues) * u64::from(job.depth) * 20,
        units,
        random: job.random,
        seed: job.seed,
        linear: false,
        data_at: 0,
    })
}

fn report(
    job: &KernelJob<'_>,
    what: &str,
    totals: &TransferTotals,
    report: SessionReport,
) -> Result<()> {
    let iops = totals.commands as f64 / totals.seconds.max(1e-9);
    let gbps = iops * job.bytes as f64 / 1e9;
    if job.device.form.json {
        let mut value = json!({
            "driver": report.gpu, "tier": report.tier, "queues": job.queues, "depth": job.depth,
            "bytes_per_command": job.bytes, "rw": what, "random": job.random,
            "commands": totals.commands, "seconds": totals.seconds, "iops": iops, "gb_per_s": gbps,
            "per_command": totals.per_command(), "relayed_doorbells": report.relayed,
        });
        report.add_to(&mut value);
        return output::json(&value);
    }
    output::print(&format!(
        "{what}: {} commands/s, {gbps:.2} GB/s, {} commands in {:.3} s\ndriven by {}\n{}\n\
         per command: {}\n{}",
        units::count(iops),
        totals.commands,
        totals.seconds,
        report.gpu,
        report.tier,
        totals.per_command(),
        report.recovery.unwrap_or_default().to_text()
    ))
}
