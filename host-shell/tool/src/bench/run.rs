//! `bench`: a workload with fio's terms. Options that belong to one kind of measurement are refused together with the
//! others here, before a device is opened.

use super::intervals::IntervalPrinter;
use super::plot;
use crate::common::file::check_output;
use crate::common::images::CommandFiles;
use crate::common::{
    NamespaceArgs, WriteArgs, beyond, duration, number, output, progress, some_bytes,
};
use clap::{ArgGroup, Args, ValueEnum};
use nvme_host::bench::{self, AccessPattern, BenchJob, RateRamp, RunLimit};
use nvme_host::{Controller, Error, Result};
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::time::Duration;

/// Options of a workload; the other measurements use none: `--gather --verify` would check nothing.
const OF_WORKLOADS: &[&str] = &[
    "rw",
    "rwmixread",
    "bs",
    "depth",
    "runtime",
    "rate_iops",
    "ramp",
    "verify",
    "recover",
    "interval",
    #[cfg(feature = "cuda")]
    "mode",
    #[cfg(feature = "cuda")]
    "tier",
    #[cfg(feature = "cuda")]
    "data_in_cmb",
    #[cfg(feature = "cuda")]
    "threads",
    #[cfg(feature = "cuda")]
    "trace",
    #[cfg(feature = "cuda")]
    "pattern",
];

/// Options of a device; some measurements have none.
#[cfg(feature = "cuda")]
const OF_DEVICES: &[&str] = &[
    "device",
    "namespace_id",
    "timeout_ms",
    "rings",
    "doorbells",
    "irq",
    "allow_write",
    "queues",
    "size",
    "io_size",
];

/// Measure IOPS, bandwidth and latency of a workload
#[derive(Args)]
#[command(
    group = ArgGroup::new("in_turns").conflicts_with_all(OF_WORKLOADS),
    // These measurements overwrite as much as their table or matrix has, whatever the sizes of a workload are.
    group = ArgGroup::new("by_stations").conflicts_with_all(["size", "io_size"]),
)]
#[cfg_attr(feature = "cuda", command(
    group = ArgGroup::new("without_device").conflicts_with_all(OF_DEVICES),
    group = ArgGroup::new("by_suite").conflicts_with_all(OF_WORKLOADS).conflicts_with_all(["in_turns", "seed", "plot"]),
))]
pub struct BenchCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Workload, as fio names it
    #[arg(long, value_enum, default_value = "randread")]
    rw: WorkloadKind,
    /// Share of reads in rw and randrw, in percent
    #[arg(long, default_value_t = 50, value_parser = number::<u8>(0..=100))]
    rwmixread: u8,
    /// Bytes per command
    #[arg(long, visible_alias = "bytes", default_value = "4KiB", value_parser = some_bytes)]
    bs: u64,
    /// Queue pairs, one thread each
    #[arg(long, visible_alias = "numjobs", default_value_t = 1, value_parser = number::<u32>(1..=4096))]
    queues: u32,
    /// Commands in flight per queue
    #[arg(long, visible_alias = "iodepth", default_value_t = 32, value_parser = number::<u32>(1..=65_535))]
    depth: u32,
    /// Duration of the run: 10s, 500ms
    #[arg(long, value_parser = duration, conflicts_with = "io_size")]
    runtime: Option<Duration>,
    /// Bytes to move, instead of a time; with --paths of one run, 256 MiB when missing
    #[arg(long, value_parser = some_bytes)]
    io_size: Option<u64>,
    /// Bytes of the namespace to use, all when missing; with --paths of the file, 1 GiB at most when missing
    #[arg(long, value_parser = some_bytes)]
    size: Option<u64>,
    /// Commands per second over all queues
    #[arg(long, value_name = "IOPS", conflicts_with = "ramp", value_parser = number::<u64>(1..=1_000_000_000_000))]
    rate_iops: Option<u64>,
    /// Raise the rate from FROM to TO commands per second in STEPS equal steps
    #[arg(long, value_name = "FROM:TO:STEPS", value_parser = ramp, conflicts_with = "io_size")]
    ramp: Option<RateRamp>,
    /// Write data that names its block, and check every read of it and all of it at the end
    #[arg(long)]
    verify: bool,
    /// Seed of addresses, mix and data; a new one for each run, which the report names, when missing
    #[arg(long, value_parser = number::<u64>(0..=u64::MAX))]
    seed: Option<u64>,
    /// Go on after lost commands, resets, and a device that left: wait TIME (10s when missing) for it, send what was
    /// lost again and count it
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "10s", value_parser = duration)]
    recover: Option<Duration>,
    /// Print a line each TIME: on standard error, or with --json an object on standard output: {"interval": {"end_s",
    /// "seconds", "reads", "writes", "iops", "bw_bytes", "lat_ns_mean"}}
    #[arg(long, value_name = "TIME", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw latency percentiles into FILE.svg or FILE.png (latency over rate with --ramp, rows over their size with
    /// --gather, GB/s over the size of reads with --paths, GFLOP/s over the side with --matmul)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    gpu: crate::gpu::transfer::GpuArgs,
    /// Order of the commands, whatever --rw says
    #[cfg(feature = "cuda")]
    #[arg(long, value_enum, requires = "gpu", help_heading = "GPU")]
    pattern: Option<crate::gpu::transfer::PatternArg>,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    suite: super::gpu::SuiteArgs,
    #[command(flatten)]
    gather: super::gather::GatherArgs,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    crossover: super::crossover::CrossoverArgs,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    gemv: super::gemv::GemvArgs,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    ladder: super::ladder::LadderArgs,
    #[command(flatten)]
    paths: super::paths::PathsArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum WorkloadKind {
    Read,
    Write,
    #[value(name = "randread")]
    RandRead,
    #[value(name = "randwrite")]
    RandWrite,
    #[value(name = "rw", alias = "readwrite")]
    Mixed,
    #[value(name = "randrw")]
    RandMixed,
}

/// Returns a seed that no earlier run has had, so that data of an earlier run are not mistaken for data of this one.
fn fresh_seed() -> u64 {
    // The seed has only as many bits as every reader of JSON keeps.
    RandomState::new().hash_one(std::process::id()) >> 11
}

fn ramp(text: &str) -> std::result::Result<RateRamp, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let [from, to, steps] = parts[..] else {
        return Err(format!(
            "'{text}' is not FROM:TO:STEPS, for example 1000:100000:10"
        ));
    };
    let rate = number::<u64>(1..=1_000_000_000_000);
    Ok(RateRamp {
        from: rate(from)?,
        to: rate(to)?,
        steps: number(1..=1000)(steps)?,
    })
}

impl BenchCommand {
    pub fn run(mut self, files: &CommandFiles) -> Result<()> {
        // From here on there is one.
        self.seed.get_or_insert_with(fresh_seed);
        #[cfg(feature = "cuda")]
        if self.suite.suite.is_some() {
            return self.suite.run(self.gpu.gpu);
        }
        if let Some(path) = &self.plot {
            plot::check(path)?;
            check_output(path, files)?;
        }
        if self.gather.gather {
            return self.gather_rows(files);
        }
        #[cfg(feature = "cuda")]
        if self.crossover.crossover {
            return self.compare_sides(files);
        }
        #[cfg(feature = "cuda")]
        if self.gemv.is_wanted() {
            return self.multiply();
        }
        #[cfg(feature = "cuda")]
        if !self.ladder.matmul.is_empty() {
            return self.climb(files);
        }
        if let Some(file) = self.paths.paths.clone() {
            return self.read_by_all_paths(files, file);
        }
        #[cfg(feature = "cuda")]
        if self.gpu.gpu.is_some() {
            return self.run_on_gpu(files);
        }
        let config = nvme_host::ControllerConfig {
            queue_pairs: self.queues,
            ..self.namespace.config()
        };
        let device = &self.namespace.device;
        // Before the device is opened.
        let bytes = self.command_bytes()?;
        let open = || match self.accesses() {
            (_, 100) if !self.verify => device.start_with(&config),
            _ => device.start_writing(&self.write, "this workload", &config),
        };
        let controller = open()?;
        let job = self.job(&controller, bytes)?;
        let go_on = self.recover.map(|patience| bench::GoOn {
            patience,
            open: &open,
        });
        let (controller, report) = self.measure(controller, &job, go_on.as_ref())?;
        let left = controller.shut_down();
        if let Some(path) = &self.plot {
            plot::draw((path, files), &plot::latency::chart(&report))?;
        }
        match (device.form.json, self.interval) {
            (true, Some(_)) => output::line(&report.to_json())?,
            (true, None) => output::json(&report.to_json())?,
            (false, _) => output::print(&report.to_text())?,
        }
        if report.interrupted {
            return Err(Error::Interrupted);
        }
        left
    }

    /// Returns `--bs`, limited to the length of one command.
    fn command_bytes(&self) -> Result<u32> {
        u32::try_from(self.bs).map_err(|_| {
            Error::usage(
                format!("--bs {} is too large", self.bs),
                "use at most the controller's MDTS",
            )
        })
    }

    /// Returns the order of the blocks, and the percentage of reads.
    fn accesses(&self) -> (AccessPattern, u8) {
        match self.rw {
            WorkloadKind::Read => (AccessPattern::Sequential, 100),
            WorkloadKind::Write => (AccessPattern::Sequential, 0),
            WorkloadKind::Mixed => (AccessPattern::Sequential, self.rwmixread),
            WorkloadKind::RandRead => (AccessPattern::Random, 100),
            WorkloadKind::RandWrite => (AccessPattern::Random, 0),
            WorkloadKind::RandMixed => (AccessPattern::Random, self.rwmixread),
        }
    }

    /// Returns the workload that the options ask for, on the namespace that `controller` has.
    fn job(&self, controller: &Controller, bytes: u32) -> Result<BenchJob> {
        let (pattern, read_percent) = self.accesses();
        let (block, blocks) = {
            let namespace = controller.namespace(self.namespace.nsid())?;
            (u64::from(namespace.block_bytes()), namespace.blocks())
        };
        let constant = |rate: u64| RateRamp {
            from: rate,
            to: rate,
            steps: 1,
        };
        Ok(BenchJob {
            nsid: self.namespace.nsid(),
            pattern,
            read_percent,
            bytes,
            queues: self.queues,
            depth: self.depth,
            limit: match (self.runtime, self.io_size) {
                (None, Some(bytes)) => RunLimit::Bytes(bytes),
                (time, _) => RunLimit::Time(time.unwrap_or(Duration::from_secs(5))),
            },
            ramp: self
                .ramp
                .or(self.rate_iops.map(|rate| constant(rate.max(1)))),
            span_blocks: self.span(block, blocks)?,
            seed: self.seed.unwrap_or_default(),
            verify: self.verify,
        })
    }

    fn measure(
        &self,
        controller: Controller,
        job: &BenchJob,
        go_on: Option<&bench::GoOn<'_>>,
    ) -> Result<(Controller, bench::RunReport)> {
        let bar = match job.limit {
            RunLimit::Bytes(bytes) => progress::bytes(bytes, "bench"),
            RunLimit::Time(time) => progress::time(time.as_millis() as u64, "bench"),
        };
        let mut intervals = self
            .interval
            .map(|every| IntervalPrinter::new(every, self.namespace.device.form.json));
        let ended = bench::run(controller, job, go_on, |now| {
            match job.limit {
                RunLimit::Bytes(_) => bar.set_position(now.bytes),
                RunLimit::Time(_) => {
                    bar.set_position((now.seconds * 1e3) as u64);
                    let rate = now.bytes as f64 / now.seconds / 1e9;
                    bar.set_message(format!("{rate:.2} GB/s"));
                }
            }
            if let Some(intervals) = &mut intervals {
                bar.suspend(|| intervals.at(now));
            }
        })?;
        bar.finish_and_clear();
        match intervals {
            Some(IntervalPrinter {
                failed: Err(error), ..
            }) => Err(error),
            _ => Ok(ended),
        }
    }

    /// Gathers rows by ids.
    fn gather_rows(self, files: &CommandFiles) -> Result<()> {
        let device = &self.namespace.device;
        let open = || device.open_to_write(&self.write, "the table of --gather");
        let rest = super::gather::GatherShared {
            files,
            #[cfg(feature = "cuda")]
            gpu: self.gpu.gpu,
            nsid: self.namespace.nsid().0,
            queues: self.queues,
            seed: self.seed.unwrap_or_default(),
            plot: self.plot,
        };
        self.gather.run(open, &self.namespace.config(), rest)
    }

    /// Reads by the GPU against reads by the CPU.
    #[cfg(feature = "cuda")]
    fn compare_sides(self, files: &CommandFiles) -> Result<()> {
        let rest = super::crossover::CrossoverShared {
            files,
            gpu: self.gpu.gpu.unwrap_or(0),
            namespace: self.namespace,
            write: self.write,
            queues: self.queues,
            stations: self.gather.on_gpu.stations,
            table: self.gather.table,
            runs: self.gather.runs,
            seed: self.seed.unwrap_or_default(),
            plot: self.plot,
        };
        self.crossover.run(&rest)
    }

    /// Products with matrices on the drive.
    #[cfg(feature = "cuda")]
    fn multiply(self) -> Result<()> {
        let device = &self.namespace.device;
        let opened = device.open_to_write(&self.write, "the matrix of the product")?;
        let rest = super::gemv::GemvShared {
            gpu: super::gemv::GemvShared::gpu_of(self.gpu.gpu)?,
            nsid: self.namespace.nsid().0,
            queues: self.queues,
            stations: self.gather.on_gpu.stations,
            runs: self.gather.runs,
            seed: self.seed.unwrap_or_default(),
            timeout: device.timeout.limit(),
        };
        self.gemv.run(opened, &rest)
    }

    /// Products of matrices in GPU memory.
    #[cfg(feature = "cuda")]
    fn climb(self, files: &CommandFiles) -> Result<()> {
        let rest = super::ladder::LadderShared {
            files,
            gpu: super::gemv::GemvShared::gpu_of(self.gpu.gpu)?,
            runs: self.gather.runs,
            seed: self.seed.unwrap_or_default(),
            json: self.namespace.device.form.json,
            plot: self.plot,
        };
        self.ladder.run(rest)
    }

    /// Reads one file by several paths.
    fn read_by_all_paths(self, files: &CommandFiles, file: PathBuf) -> Result<()> {
        let rest = super::paths::PathsShared {
            files,
            #[cfg(feature = "cuda")]
            gpu: self.gpu.gpu,
            #[cfg(not(feature = "cuda"))]
            gpu: None,
            namespace: self.namespace,
            write: self.write,
            queues: self.queues,
            size: self.size,
            io_size: self.io_size,
            runs: self.gather.runs,
            seed: self.seed.unwrap_or_default(),
            plot: self.plot,
        };
        self.paths.run(file, rest)
    }

    /// Runs the same workload with queues that a GPU drives.
    #[cfg(feature = "cuda")]
    fn run_on_gpu(self, files: &CommandFiles) -> Result<()> {
        use crate::gpu::transfer::PatternArg;
        let (random, read) = match self.rw {
            WorkloadKind::Read => (false, true),
            WorkloadKind::Write => (false, false),
            WorkloadKind::RandRead => (true, true),
            WorkloadKind::RandWrite => (true, false),
            WorkloadKind::Mixed | WorkloadKind::RandMixed => {
                return Err(Error::usage(
                    "kernels do not mix reads and writes",
                    "use --rw read, write, randread or randwrite",
                ));
            }
        };
        let unfit = self.plot.is_some() || self.verify || self.ramp.is_some();
        if unfit || self.rate_iops.is_some() || self.interval.is_some() {
            return Err(Error::usage(
                "--plot, --verify, --ramp, --rate-iops and --interval cannot be used with --gpu",
                "leave them out; `stream --gpu --verify` checks data",
            ));
        }
        let device = &self.namespace.device;
        let opened = match read {
            true => device.open()?,
            false => device.open_to_write(&self.write, "this workload")?,
        };
        let job = super::gpu::KernelJob {
            files,
            device: &self.namespace.device,
            nsid: self.namespace.nsid(),
            gpu: &self.gpu,
            queues: self.queues,
            depth: self.depth,
            bytes: self.bs,
            read,
            random: self
                .pattern
                .map_or(random, |order| order == PatternArg::Random),
            size: self.size,
            io_size: self.io_size,
            runtime: self.runtime.unwrap_or(Duration::from_secs(5)),
            recover: self.recover,
            seed: self.seed.unwrap_or_default(),
        };
        super::gpu::run(&job, opened)
    }

    fn span(&self, block: u64, blocks: u64) -> Result<u64> {
        match self.size {
            None => Ok(0),
            Some(size) if size.div_ceil(block) > blocks => Err(beyond(size, block * blocks)),
            Some(size) if size >= self.bs && size >= block => Ok(size / block),
            Some(size) => Err(Error::usage(
                format!("--size {size} is less than one command"),
                "use at least --bs",
            )),
        }
    }
}
