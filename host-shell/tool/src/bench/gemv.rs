//! `bench --gemv`, `bench --gemm`: products with matrices on a drive, read by the kernel that multiplies, compared with
//! other paths.

use super::stored;
use crate::common::output;
use clap::Args;
use nvme_compute::bench::{GatheredJob, GemmJob, GemvJob, GemvTimes, gathered, gemm, gemv};
use nvme_compute::gemm::read_blocks;
use nvme_compute::random_weights::StoredFormat;
use nvme_host::bench::median;
use nvme_host::cuda::RowsOptions;
use nvme_host::store::GpuOptions;
use nvme_host::{Error, Result, Store, StoreOptions};
use serde_json::{Value, json};
use std::sync::Arc;

/// Products with a matrix
#[derive(Args)]
#[command(next_help_heading = "Products with a matrix")]
pub struct GemvArgs {
    /// Measure `y = W x` with a matrix on the drive: by the kernel that reads it (needs --gpu), by a read into GPU
    /// memory and a product, by the product alone, and by reads of the CPU, copies and a product; each is compared. The
    /// matrix overwrites the namespace from its start on
    #[arg(long, value_name = "ROWSxCOLUMNS", value_parser = shape, groups = ["in_turns", "by_stations", "product", "by_gemv"], requires = "gpu")]
    gemv: Option<(u32, u32)>,
    /// With --gemv: multiply N rows that ids in GPU memory name, in the same ways
    #[arg(long, value_name = "N", value_parser = crate::common::number::<u64>(1..=u64::from(u32::MAX)), requires = "by_gemv", conflicts_with = "gemm")]
    ids: Option<u64>,
    /// Measure `Y = X W^T` by the tensor cores with TOKENS rows in GPU memory and a matrix on the drive: by one launch
    /// that reads and multiplies (needs --gpu), by the product alone, and for bf16 and f16 after a read into GPU memory
    /// or reads of the CPU; some rows are compared. The matrix overwrites the namespace from its start on
    #[arg(long, value_name = "TOKENSxROWSxCOLUMNS", value_parser = three, groups = ["in_turns", "by_stations", "product", "by_gemm"], conflicts_with = "gemv", requires = "gpu")]
    gemm: Option<(u32, u32, u32)>,
    /// Blocks that read, with --gemm; 0 for the library's choice
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::common::number::<u32>(0..=32), requires = "by_gemm")]
    read_blocks: u32,
    /// Formats of the matrix: one case for each
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', default_value = "bf16,q8_0,q4_0", value_parser = stored, requires = "product")]
    stored: Vec<StoredFormat>,
    /// Threads of the way that reads by the CPU
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = crate::common::number::<usize>(1..=256), requires = "product")]
    readers: usize,
}

/// Values of options that other commands share.
pub struct GemvShared {
    pub gpu: u32,
    pub nsid: u32,
    pub queues: u32,
    pub stations: u32,
    pub runs: usize,
    pub seed: u64,
    pub timeout: std::time::Duration,
}

impl GemvArgs {
    /// True if the user requested one of these measurements.
    pub fn is_wanted(&self) -> bool {
        self.gemv.is_some() || self.gemm.is_some()
    }

    /// Measures every case on `device`, whose data may be overwritten.
    pub fn run(&self, device: Arc<dyn nvme_host::Device>, rest: &GemvShared) -> Result<()> {
        let defaults = RowsOptions::default();
        let options = StoreOptions {
            allow_write: true,
            nsid: rest.nsid,
            queues: self.readers as u32,
            timeout: rest.timeout,
            gpu: Some(GpuOptions {
                index: rest.gpu,
                rows: RowsOptions {
                    queues: match rest.queues {
                        1 => defaults.queues,
                        queues => queues,
                    },
                    stations: rest.stations,
                    ..defaults
                },
            }),
            ..StoreOptions::default()
        };
        let store = Arc::new(Store::over(device, &options)?);
        // All shapes are checked before the first matrix is written.
        let shape = self
            .gemm
            .map(|(_, rows, columns)| (rows, columns))
            .or(self.gemv);
        for stored in &self.stored {
            let bytes = shape
                .and_then(|(rows, columns)| Some(stored.row_bytes(columns)? * u64::from(rows)));
            store.check_room("the matrix", 0, bytes.unwrap_or(0))?;
        }
        for stored in &self.stored {
            let line = match (self.gemm, self.gemv) {
                (Some(shape), _) => self.gemm_line(&store, *stored, shape, rest)?,
                (None, Some(shape)) => self.gemv_line(&store, *stored, shape, rest)?,
                (None, None) => return Ok(()),
            };
            output::line(&line)?;
        }
        Ok(())
    }

    fn gemv_line(
        &self,
        store: &Arc<Store>,
        stored: StoredFormat,
        (rows, columns): (u32, u32),
        rest: &GemvShared,
    ) -> Result<Value> {
        let job = GemvJob {
            stored,
            rows,
            columns,
            runs: rest.runs,
            threads: self.readers,
            seed: rest.seed,
        };
        let Some(ids) = self.ids else {
            return Ok(self.line(store, &job, &gemv(store, &job)?, rest));
        };
        let times = gathered(store, &GatheredJob { matrix: job, ids })?;
        let mut line = self.line(store, &job, &times, rest);
        line["case"] = format!("gemv_ids_{}", stored.name()).into();
        line["ids"] = ids.into();
        Ok(line)
    }

    fn gemm_line(
        &self,
        store: &Arc<Store>,
        stored: StoredFormat,
        (tokens, rows, columns): (u32, u32, u32),
        rest: &GemvShared,
    ) -> Result<Value> {
        let job = GemmJob {
            stored,
            tokens,
            rows,
            columns,
            read_blocks: self.read_blocks,
            runs: rest.runs,
            threads: self.readers,
            seed: rest.seed,
        };
        let times = gemm(store, &job)?;
        let operations = 2.0 * f64::from(tokens) * f64::from(rows) * f64::from(columns);
        let way = |seconds: &[f64]| match seconds.is_empty() {
            true => Value::Null,
            false => json!({
                "tflops": operations / median(seconds) / 1e12,
                "gb_per_s": times.bytes as f64 / median(seconds) / 1e9,
                "seconds": seconds,
            }),
        };
        let against = |seconds: &[f64]| match seconds.is_empty() {
            true => Value::Null,
            false => (median(seconds) / median(&times.streamed)).into(),
        };
        let limit = times.limit_bytes as f64 / median(&times.limit) / 1e9;
        Ok(json!({
            "case": format!("gemm_{}", stored.name()),
            "gpu": store.gpu().map(|gpu| gpu.describe()),
            "device": store.path().device,
            "tokens": tokens, "rows": rows, "columns": columns, "bytes": times.bytes,
            "blocks": times.blocks,
            "read_blocks": if self.read_blocks == 0 { read_blocks(stored) } else { self.read_blocks },
            "registers": times.cost.0, "local_bytes": times.cost.1,
            "cpu_threads": self.readers, "runs": rest.runs,
            "streamed": way(&times.streamed),
            "resident": way(&times.resident),
            "read_then_product": way(&times.ranges),
            "by_cpu_then_product": way(&times.by_cpu),
            "host_memory_by_kernel": { "gb_per_s": limit, "bytes": times.limit_bytes, "seconds": times.limit },
            "of_resident": against(&times.resident),
            "of_read_then_product": against(&times.ranges),
            "of_by_cpu": against(&times.by_cpu),
            "checked": true,
        }))
    }

    fn line(&self, store: &Store, job: &GemvJob, times: &GemvTimes, rest: &GemvShared) -> Value {
        let rate = |seconds: &[f64]| times.bytes as f64 / median(seconds) / 1e9;
        let way = |seconds: &[f64]| json!({ "gb_per_s": rate(seconds), "seconds": seconds });
        let limit = times.limit_bytes as f64 / median(&times.limit) / 1e9;
        let streamed = rate(&times.streamed);
        json!({
            "case": format!("gemv_{}", job.stored.name()),
            "gpu": store.gpu().map(|gpu| gpu.describe()),
            "device": store.path().device,
            "rows": job.rows, "columns": job.columns, "bytes": times.bytes,
            "stations": rest.stations, "registers": times.cost.0, "local_bytes": times.cost.1,
            "cpu_threads": self.readers, "runs": rest.runs,
            "streamed": way(&times.streamed),
            "read_then_product": way(&times.ranges),
            "resident": way(&times.resident),
            "by_cpu_then_product": way(&times.by_cpu),
            "host_memory_by_kernel": { "gb_per_s": limit, "bytes": times.limit_bytes, "seconds": times.limit },
            "of_host_memory": streamed / limit,
            "of_read_then_product": streamed / rate(&times.ranges),
            "of_by_cpu": streamed / rate(&times.by_cpu),
            "checked": true,
        })
    }
}

/// Returns the rows and columns.
fn shape(text: &str) -> std::result::Result<(u32, u32), String> {
    let parts = text.split_once('x');
    let parsed =
        parts.and_then(|(rows, columns)| Some((rows.parse().ok()?, columns.parse().ok()?)));
    parsed
        .filter(|(rows, columns)| *rows > 0 && *columns > 0)
        .ok_or_else(|| format!("'{text}' is no ROWSxCOLUMNS, as 32768x8192 is"))
}

/// Parses tokens, rows and columns.
fn three(text: &str) -> std::result::Result<(u32, u32, u32), String> {
    let parts = text.split_once('x');
    let parsed = parts.and_then(|(tokens, rest)| Some((tokens.parse().ok()?, shape(rest).ok()?)));
    parsed
        .filter(|(tokens, _): &(u32, _)| *tokens > 0)
        .map(|(tokens, (rows, columns))| (tokens, rows, columns))
        .ok_or_else(|| format!("'{text}' is no TOKENSxROWSxCOLUMNS, as 16384x8192x8192 is"))
}

impl GemvShared {
    /// # Errors
    /// Returns the GPU, or the error that the option is needed.
    pub fn gpu_of(gpu: Option<u32>) -> Result<u32> {
        gpu.ok_or_else(|| Error::usage("--gemv and --gemm need a GPU", "name a GPU by --gpu"))
    }
}
