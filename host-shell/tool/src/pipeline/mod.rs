//! `pipeline`: matrices from a drive, multiplied batch after batch. Weights come from the seed, so that the CPU can
//! compute the expected product without reading the drive.

mod report;

use crate::bench::plot;
use crate::common::file::check_output;
use crate::common::images::CommandFiles;
use crate::common::{
    CommandTimeout, NamespaceId, OutputForm, WriteArgs, duration, images, number, output, progress,
    some_bytes, stop_flag,
};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, ValueEnum};
use nvme_compute::random_weights::StoredFormat;
use nvme_course::pipeline::{PipelineJob, PipelineName, PipelineReport, PipelineShape, run};
use nvme_host::{Error, Result, Store, StoreOptions};
use report::{ProgressInterval, ReportMachine};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Read matrices from a drive and multiply them, batch after batch; every product is compared with one of the CPU in
/// double precision
#[derive(Args)]
pub struct PipelineCommand {
    /// The pipeline to run
    #[arg(value_enum)]
    name: NameArg,
    /// Device, or file:PATH; a simulated one in memory when missing
    #[arg(long, short = 'd')]
    device: Option<String>,
    #[command(flatten)]
    namespace: NamespaceId,
    #[command(flatten)]
    timeout: CommandTimeout,
    #[command(flatten)]
    form: OutputForm,
    #[command(flatten)]
    write: WriteArgs,
    /// The device has the matrices of an earlier run with the same sizes and seed: write nothing
    #[arg(long)]
    keep_data: bool,
    /// Multiply and read by GPU N (0 without a number)
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", value_parser = number::<u32>(0..=1023))]
    gpu: Option<u32>,
    /// Format of the stored matrices: f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, q6_k
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = crate::bench::stored)]
    stored: StoredFormat,
    /// Rows of a matrix; iterative: the columns divided by --parts when missing
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=1 << 24))]
    rows: Option<u32>,
    /// Columns of a matrix
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = number::<u32>(1..=1 << 24))]
    columns: u32,
    /// Vectors that each matrix is multiplied with
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number::<u32>(1..=4096))]
    vectors: u32,
    /// Matrices on the device, which batches take in turns
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = number::<u32>(1..=65_536))]
    parts: u32,
    /// Matrices in memory at a time
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = number::<u32>(1..=64))]
    buffers: u32,
    /// Batches of a run; iterative: how often the product is fed back
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number::<u64>(1..=1 << 32))]
    batches: u64,
    /// Runs, after one that does not count; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = number::<usize>(1..=1000))]
    runs: usize,
    /// Duration of continuous-processing
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    runtime: Duration,
    /// Time for which continuous-processing tries a failed batch again
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    recover: Duration,
    /// Print a line each TIME of continuous-processing: on standard error, or with --json an object on standard output
    #[arg(long, value_name = "TIME", value_parser = duration)]
    interval: Option<Duration>,
    /// Time limit of a batch
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    limit: Duration,
    /// Threads that read where the CPU reads
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = number::<usize>(1..=256))]
    readers: usize,
    /// Seed of the matrices and vectors
    #[arg(long, default_value_t = 1, value_parser = number::<u64>(0..=u64::MAX))]
    seed: u64,
    /// File that data-source-comparison makes, reads by pread, and removes
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Write what took place when, as trace events (JSON) for Perfetto and Chrome
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draw what took place when into FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Draw and trace the last TIME only
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    window: Duration,
    /// Bytes of the simulated device; as many as it takes when missing
    #[arg(long, value_name = "BYTES", value_parser = some_bytes, conflicts_with = "device")]
    size: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum NameArg {
    /// (DirectNVMeToMatMul) A matrix and the vectors from the device, one product
    #[value(name = "direct-nvme-to-matmul", alias = "DirectNVMeToMatMul")]
    Direct,
    /// (StreamedBatchProcessing) Batches, some of which are read while others are multiplied
    #[value(name = "streamed-batch-processing", alias = "StreamedBatchProcessing")]
    Streamed,
    /// (IterativeComputation) The product is the next vector: each iteration reads the whole matrix again
    #[value(name = "iterative-computation", alias = "IterativeComputation")]
    Iterative,
    /// (DataSourceComparison) The same batches from the device by the GPU and by threads of the CPU, from a file, from pinned
    /// memory, and resident
    #[value(name = "data-source-comparison", alias = "DataSourceComparison")]
    Comparison,
    /// (ContinuousProcessing) Batches for a time, with latencies, beside failures of the device
    #[value(name = "continuous-processing", alias = "ContinuousProcessing")]
    Continuous,
}

/// Options of one pipeline, which the others do not use.
const OF_ONE: [(&str, NameArg); 4] = [
    ("runtime", NameArg::Continuous),
    ("recover", NameArg::Continuous),
    ("interval", NameArg::Continuous),
    ("file", NameArg::Comparison),
];

/// Checks that a `pipeline` of the command line is given no option of another one.
///
/// # Errors
/// [`Error::Usage`] with the option, and the pipeline that it belongs to.
pub fn check(matches: &ArgMatches) -> Result<()> {
    let Some(("pipeline", matches)) = matches.subcommand() else {
        return Ok(());
    };
    let Some(name) = matches.get_one::<NameArg>("name") else {
        return Ok(());
    };
    for (option, of) in OF_ONE {
        if of != *name && matches.value_source(option) == Some(ValueSource::CommandLine) {
            return Err(Error::usage(
                format!("--{option} is not used by {}", name.text()),
                format!("leave it out, or run {}", of.text()),
            ));
        }
    }
    Ok(())
}

impl NameArg {
    /// Returns the name on the command line.
    fn text(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl From<NameArg> for PipelineName {
    fn from(name: NameArg) -> Self {
        match name {
            NameArg::Direct => Self::DirectNvmeToMatMul,
            NameArg::Streamed => Self::StreamedBatchProcessing,
            NameArg::Iterative => Self::IterativeComputation,
            NameArg::Comparison => Self::DataSourceComparison,
            NameArg::Continuous => Self::ContinuousProcessing,
        }
    }
}

impl PipelineCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        for path in [&self.plot, &self.trace].into_iter().flatten() {
            check_output(path, files)?;
        }
        if let Some(path) = &self.plot {
            plot::check(path)?;
        }
        let job = self.job();
        job.shape.check()?;
        let store = Arc::new(self.store(&job.shape)?);
        let machine = ReportMachine::of(&store);
        let report = self.measure(&store, &job)?;
        // A later run with `--keep-data` reads the matrices.
        files.keep_created();
        let mut trace = report.trace.clone();
        trace.keep_last(self.window.as_secs_f64() * 1e6);
        if let Some(path) = &self.trace {
            let text = trace.to_json(job.name.in_one_word());
            crate::common::file::write_whole(path, text.as_bytes(), files)?;
        }
        if let Some(path) = &self.plot {
            plot::draw_timeline((path, files), job.name.in_one_word(), &trace)?;
        }
        let value = report::to_json(&machine, &job, &report);
        match (self.form.json, self.interval) {
            (true, Some(_)) => output::line(&value)?,
            (true, None) => output::json(&value)?,
            (false, _) => output::print(&report::to_text(&value))?,
        }
        match report.continuous {
            Some(met) if met.is_interrupted => Err(Error::Interrupted),
            _ => Ok(()),
        }
    }

    fn job(&self) -> PipelineJob {
        let name = PipelineName::from(self.name);
        let joined = name == PipelineName::IterativeComputation;
        let rows = match joined {
            true => self.columns / self.parts,
            false => 1024,
        };
        PipelineJob {
            name,
            shape: PipelineShape {
                stored: self.stored,
                rows: self.rows.unwrap_or(rows),
                columns: self.columns,
                vectors: self.vectors,
                parts: self.parts,
                buffers: self.buffers,
                joined,
            },
            batches: self.batches,
            runs: self.runs,
            runtime: self.runtime,
            patience: self.recover,
            limit: self.limit,
            readers: self.readers,
            seed: self.seed,
            keep: self.keep_data,
            file: match name {
                PipelineName::DataSourceComparison => self.file.clone(),
                _ => None,
            },
        }
    }

    fn store(&self, shape: &PipelineShape) -> Result<Store> {
        let options = StoreOptions {
            allow_write: self.write.allow_write,
            read_only: self.keep_data,
            nsid: self.namespace.namespace_id,
            queues: self.readers.max(2) as u32,
            timeout: self.timeout.limit(),
            #[cfg(feature = "cuda")]
            gpu: self.gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..Default::default()
            }),
            ..StoreOptions::default()
        };
        let Some(device) = &self.device else {
            return Store::open(&self.simulated(shape)?, &options);
        };
        if self.keep_data {
            images::must_exist(device)?;
        }
        Store::open(device, &options)
    }

    /// Returns a simulated device that holds the data.
    fn simulated(&self, shape: &PipelineShape) -> Result<String> {
        let bytes = self.size.unwrap_or(shape.bytes());
        let bytes = bytes.checked_next_multiple_of(1 << 20).ok_or_else(|| {
            Error::usage(
                format!("--size {bytes} is above 2^64 in whole MiB"),
                "use a smaller one",
            )
        })?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.saturating_sub(2).clamp(1, 12);
        Ok(format!("sim:mem?size={bytes}&queues=64&threads={threads}"))
    }

    fn measure(&self, store: &Arc<Store>, job: &PipelineJob) -> Result<PipelineReport> {
        let is_continuous = job.name == PipelineName::ContinuousProcessing;
        let bar = match is_continuous {
            true => progress::time(job.runtime.as_millis() as u64, "pipeline"),
            false => progress::items(0, "pipeline"),
        };
        let stop = stop_flag();
        let mut interval = self
            .interval
            .map(|every| ProgressInterval::new(every, self.form.json));
        let report = run(store, job, &mut |done, total, seconds| {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            match is_continuous {
                true => bar.set_position((seconds * 1e3) as u64),
                false => {
                    bar.set_length(total);
                    bar.set_position(done);
                }
            }
            match &mut interval {
                Some(interval) if is_continuous => bar.suspend(|| interval.at(done, seconds)),
                _ => Ok(()),
            }
        });
        bar.finish_and_clear();
        report
    }
}
