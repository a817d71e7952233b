//! `bench --gather`: rows by ids, beside the bare limit and rivals on the same data.

use super::plot;
use crate::common::images::CommandFiles;
use crate::common::{number, output, some_bytes};
use clap::Args;
use nvme_host::bench::{CpuGather, GatherCases, gather_by_cpu};
use nvme_host::{ControllerConfig, Device, Error, Result, Store, StoreOptions};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

/// Rows by ids
#[derive(Args)]
#[command(next_help_heading = "Rows by ids")]
pub struct GatherArgs {
    /// Measure `out = table[ids]`: lays out a table from the namespace's start on and gathers rows by random ids, into
    /// GPU memory with --gpu; each row is checked, and written back where the GPU can
    #[arg(long, groups = ["in_turns", "by_stations", "by_rows", "by_gather"])]
    pub gather: bool,
    /// Bytes of the table, which overwrites the namespace
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = some_bytes, requires = "by_rows")]
    pub table: u64,
    /// Bytes of a row, multiples of 8: a case for each
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_values_t = [4096u64], value_parser = some_bytes, requires = "by_gather")]
    row: Vec<u64>,
    /// Rows of each gather; as many as make a long run when missing
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = number::<u64>(0..=1 << 32), requires = "by_gather")]
    rows: u64,
    /// Ids by Zipf's law, exponent 0.99, instead of uniform ones
    #[arg(long, requires = "by_gather")]
    zipf: bool,
    /// Runs of each case; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = number::<usize>(1..=1000), requires = "in_turns")]
    pub runs: usize,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    pub on_gpu: OnGpuArgs,
}

/// Rows gathered by a GPU
#[cfg(feature = "cuda")]
#[derive(Args)]
pub struct OnGpuArgs {
    /// Blocks of threads that gather or multiply at a time
    #[arg(long, value_name = "N", default_value_t = RowsOptions::default().stations, value_parser = number::<u32>(1..=1024), requires_all = ["by_stations", "gpu"])]
    pub stations: u32,
    /// Drives of `sim:mem` in stripes of 128 KiB on which the table lies
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u32>(1..=32), requires_all = ["by_gather", "gpu"])]
    members: u32,
    /// Measure each case also with a cache of BYTES of GPU memory
    #[arg(long, value_name = "BYTES", value_parser = some_bytes, requires_all = ["by_gather", "gpu"])]
    cache: Option<u64>,
    /// Rows of gathers in captured graphs, each measured beside a kernel that only copies
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1024u64], value_parser = number::<u64>(1..=1 << 32), requires_all = ["by_gather", "gpu"])]
    graph_rows: Vec<u64>,
    /// Measure these graphs also in halves, with a copy inside GPU memory between them
    #[arg(long, requires_all = ["by_gather", "gpu"])]
    halves: bool,
    /// Measure a product of bf16 matrices alone, beside gathers, and beside a graph of the first --graph-rows every 200
    /// us; 8192,8192,8192 without a value
    #[arg(long, value_name = "M,N,K", value_delimiter = ',', num_args = 0..=1, default_missing_value = "8192,8192,8192", value_parser = number::<u32>(1..=1 << 20), requires_all = ["by_gather", "gpu"])]
    beside_gemm: Option<Vec<u32>>,
}

#[cfg(feature = "cuda")]
impl OnGpuArgs {
    fn graphs(&self) -> Result<GraphCases> {
        let product = self.beside_gemm.as_deref().map(|sizes| match *sizes {
            [m, n, k] => Ok(ProductShape { m, n, k }),
            _ => Err(Error::usage(
                format!("--beside-gemm has {} sizes", sizes.len()),
                "give rows, columns and terms: --beside-gemm 8192,8192,8192",
            )),
        });
        Ok(GraphCases {
            rows: self.graph_rows.clone(),
            halves: self.halves,
            product: product.transpose()?,
        })
    }
}

#[cfg(feature = "cuda")]
use nvme_host::cuda::RowsOptions;
#[cfg(feature = "cuda")]
use nvme_host::cuda::bench::{GatherJob, GraphCases, ProductShape, gather};

/// Parameters of the job from options that other commands share.
pub struct GatherShared<'f> {
    pub files: &'f CommandFiles,
    #[cfg(feature = "cuda")]
    pub gpu: Option<u32>,
    pub nsid: u32,
    pub queues: u32,
    pub seed: u64,
    pub plot: Option<PathBuf>,
}

/// The lines that were printed, for the chart; the first failure to print one.
#[derive(Default)]
struct PrintedLines {
    printed: Vec<Value>,
    failure: Option<Error>,
}

impl PrintedLines {
    fn emit(&mut self, line: Value) {
        if let Err(error) = output::line(&line) {
            self.failure.get_or_insert(error);
        }
        self.printed.push(line);
    }

    fn end(self, plot: Option<PathBuf>, files: &CommandFiles) -> Result<()> {
        if let Some(path) = plot {
            plot::draw((&path, files), &plot::rows::chart(&self.printed))?;
        }
        self.failure.map_or(Ok(()), Err)
    }
}

impl GatherArgs {
    /// Measures every case on the device that `open` opens, which may be overwritten.
    pub fn run(
        &self,
        open: impl Fn() -> Result<Arc<dyn Device>>,
        config: &ControllerConfig,
        rest: GatherShared<'_>,
    ) -> Result<()> {
        let mut lines = PrintedLines::default();
        let emit = &mut |line| lines.emit(line);
        #[cfg(feature = "cuda")]
        let is_by_gpu = match rest.gpu {
            Some(gpu) => {
                let job = self.job(gpu, &rest)?;
                let devices = (0..self.on_gpu.members).map(|_| open());
                gather(devices.collect::<Result<_>>()?, config, &job, emit)?;
                true
            }
            None => false,
        };
        #[cfg(not(feature = "cuda"))]
        let is_by_gpu = false;
        if !is_by_gpu {
            let options = StoreOptions {
                allow_write: true,
                nsid: rest.nsid,
                queues: rest.queues,
                timeout: config.timeout,
                ..StoreOptions::default()
            };
            let job = CpuGather {
                cases: self.cases(rest.seed)?,
                threads: rest.queues as usize,
            };
            gather_by_cpu(&Store::over(open()?, &options)?, &job, emit)?;
        }
        lines.end(rest.plot, rest.files)
    }

    fn cases(&self, seed: u64) -> Result<GatherCases> {
        let row_bytes = self.row.iter().map(|bytes| {
            let small = u32::try_from(*bytes).ok();
            small
                .filter(|bytes| bytes.is_multiple_of(8))
                .ok_or_else(|| {
                    Error::usage(
                        format!("rows of {bytes} bytes are not multiples of 8 below 4 GiB"),
                        "use a multiple of 8 below 4 GiB",
                    )
                })
        });
        Ok(GatherCases {
            table_bytes: self.table,
            row_bytes: row_bytes.collect::<Result<_>>()?,
            rows: self.rows,
            runs: self.runs,
            seed,
            zipf: self.zipf,
        })
    }

    #[cfg(feature = "cuda")]
    fn job(&self, gpu: u32, rest: &GatherShared<'_>) -> Result<GatherJob> {
        let defaults = RowsOptions::default();
        Ok(GatherJob {
            gpu,
            nsid: nvme_host::core::spec::Nsid(rest.nsid),
            cases: self.cases(rest.seed)?,
            cache_bytes: self.on_gpu.cache.unwrap_or(0),
            graphs: self.on_gpu.graphs()?,
            options: RowsOptions {
                queues: match rest.queues {
                    1 => defaults.queues,
                    queues => queues,
                },
                stations: self.on_gpu.stations,
                ..defaults
            },
        })
    }
}
