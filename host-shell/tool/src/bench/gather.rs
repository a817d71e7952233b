//! `bench --gather`: rows by ids that lie in GPU memory, beside the bare limit and rivals on the same data.

use crate::common::{number, output, some_bytes};
use clap::Args;
use nvme_host::core::spec::Nsid;
use nvme_host::cuda::RowsOptions;
use nvme_host::cuda::bench::{GatherJob, gather};
use nvme_host::{Config, Device, Error, Result};
use serde_json::Value;
use std::sync::Arc;

/// Rows gathered by a GPU
#[derive(Args)]
#[command(next_help_heading = "GPU")]
pub struct GatherArgs {
    /// Measure `out = table[ids]`, one object a line: lays out a table from the namespace's start on, and gathers
    /// rows by random ids; each row is checked
    #[arg(long, requires = "gpu")]
    pub gather: bool,
    /// Bytes of the table, which overwrites the namespace
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = some_bytes, requires = "gather")]
    table: u64,
    /// Bytes of a row, multiples of 8: one case for each
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_values_t = [4096u64], value_parser = some_bytes, requires = "gather")]
    row: Vec<u64>,
    /// Rows of each gather; as many as make a long run when missing
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = number::<u64>(0..=1 << 32), requires = "gather")]
    rows: u64,
    /// Blocks of threads that gather at a time
    #[arg(long, value_name = "N", default_value_t = RowsOptions::default().stations, value_parser = number::<u32>(1..=1024), requires = "gather")]
    stations: u32,
    /// Ids by Zipf's law, exponent 0.99, instead of uniform ones
    #[arg(long, requires = "gather")]
    zipf: bool,
    /// Measure each case with a cache of so many bytes of GPU memory, too
    #[arg(long, value_name = "BYTES", value_parser = some_bytes, requires = "gather")]
    cache: Option<u64>,
    /// Runs of each, of which the middle one counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = number::<usize>(1..=1000), requires = "gather")]
    runs: usize,
}

/// What of the job other options say.
pub struct Rest {
    pub gpu: u32,
    pub nsid: Nsid,
    pub queues: u32,
    pub seed: u64,
}

impl GatherArgs {
    /// Measures every case on `device`, which may be written to.
    pub fn run(&self, device: Arc<dyn Device>, config: &Config, rest: Rest) -> Result<()> {
        let row_bytes = self.row.iter().map(|bytes| {
            let small = u32::try_from(*bytes).ok();
            small
                .filter(|bytes| bytes.is_multiple_of(8))
                .ok_or_else(|| {
                    Error::usage(
                        format!("rows of {bytes} bytes"),
                        "use a multiple of 8 below 4 GiB",
                    )
                })
        });
        let defaults = RowsOptions::default();
        let job = GatherJob {
            gpu: rest.gpu,
            nsid: rest.nsid,
            table_bytes: self.table,
            row_bytes: row_bytes.collect::<Result<_>>()?,
            rows: self.rows,
            runs: self.runs,
            seed: rest.seed,
            zipf: self.zipf,
            cache_bytes: self.cache.unwrap_or(0),
            options: RowsOptions {
                queues: match rest.queues {
                    1 => defaults.queues,
                    queues => queues,
                },
                stations: self.stations,
                ..defaults
            },
        };
        let mut failure = None;
        gather(device, config, &job, &mut |line: Value| {
            if let Err(error) = output::line(&line) {
                failure.get_or_insert(error);
            }
        })?;
        failure.map_or(Ok(()), Err)
    }
}
