//! Both sides over rows of one size, and the check of their results. The drive's count of read commands has to grow
//! by the misses and by nothing else, or the run fails.
// UNSAFETY: launches kernels over this module's own memory.
#![allow(unsafe_code)]

use super::by_cpu::DeadlineWait;
use super::chain::{ChaseBench, ChaseShape};
use super::cpu_side::{BatchDivision, BatchShape, CpuSide, RowBatch};
use super::ids::BatchSeries;
use super::job::{CrossoverJob, POISON, batches};
use crate::measure::median;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::Nsid;
use nvme_core::spec::log_page::{SmartData, lid, u128};
use nvme_cuda::DeviceMemory;
use nvme_cuda::Gpu;
use nvme_cuda::Stream;
use nvme_cuda::{GatherOptions, GpuRows, RowRequest, RowTable, TableCache};
use nvme_cuda::{KernelFunction, Module};
use nvme_driver::controller::Controller;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::ROWS;
use nvme_gpu_kernel::rows::{BLOCK_THREADS, CheckLaunch, GatherLaunch};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Lines of a cache for each row of a train: no set of the GPU's overflows.
const LINES_A_ROW: u64 = 8;
/// Batches of a train at most, and bytes of its rows, in bytes of the longest batch.
const TRAIN: u64 = 16;
const TRAIN_BYTES: u64 = 4;
/// Passes in which the rows are brought that are to be hits.
const PASSES: u32 = 16;
/// Runs of each cut that is tried.
const TRIES: u64 = 2;
/// A division into chunks replaces one that was tried before it only if it takes at most this fraction of its
/// time.
const CLEARLY: f64 = 0.97;
/// Pause between two polls of a count that no longer changes.
const SETTLES: Duration = Duration::from_micros(100);
/// Blocks of the kernel that checks.
const CHECK_BLOCKS: u32 = 128;
/// The host's patience with a kernel.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both sides of one size of rows.
pub(super) struct CrossoverBench<'c> {
    job: CrossoverJob,
    controller: &'c Controller,
    table: RowTable,
    rows: GpuRows,
    cache: TableCache,
    pub cpu: CpuSide,
    module: Module,
    check: KernelFunction,
    stream: Stream,
    ids: DeviceMemory,
    /// The output's memory, and the offset of its first row: a multiple of a row.
    memory: DeviceMemory,
    out: u64,
    wrong: DeviceMemory,
}

/// Side that reads the rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchReader {
    /// The GPU.
    Gpu,
    /// The CPU, to which ids come from the GPU.
    Cpu,
    /// The CPU, which has the ids.
    CpuWithIds,
}

/// Parameters that all runs of a case share.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossoverCase {
    /// Rows of a batch.
    pub count: u64,
    /// Percentage of the batch's rows that are in the cache.
    pub percent: u32,
    /// False for a run without a cache: nothing is looked up, and nothing kept.
    pub caches: bool,
}

/// Batches of `count` rows that follow on each other.
fn train_of(job: &CrossoverJob, table: &RowTable, count: u64) -> u64 {
    let bytes = job.most_bytes * TRAIN_BYTES / (count * u64::from(table.row_bytes)).max(1);
    let most = TRAIN
        .min(bytes)
        .min(BatchSeries::most(table.rows) / count.max(1));
    most.max(1)
}

impl<'c> CrossoverBench<'c> {
    pub fn new(
        gpu: &Arc<Gpu>,
        (controller, info): (&'c Controller, NamespaceInfo),
        rows: GpuRows,
        (row_bytes, threads): (u32, u32),
        job: &CrossoverJob,
    ) -> Result<Self> {
        let row = u64::from(row_bytes);
        let table = RowTable {
            first_byte: 0,
            rows: job.table_bytes / row,
            row_bytes,
        };
        let trains = batches(job, row).into_iter();
        let trains = trains.map(|count| train_of(job, &table, count) * count);
        let walks = job.walks.iter().map(|count| u64::from(*count));
        let most = trains.chain(walks).max().unwrap_or(0);
        if most == 0 {
            return Err(Error::usage(
                format!(
                    "no batch of rows of {row} bytes fits into a table of {} bytes",
                    job.table_bytes
                ),
                "use a larger table or shorter rows",
            ));
        }
        let lines = (most * LINES_A_ROW).next_multiple_of(16);
        let memory = DeviceMemory::new(gpu, ((most + 1) * row) as usize)?;
        let out = memory.address().next_multiple_of(row);
        let shape = BatchShape {
            row_bytes,
            rows: table.rows,
            batch: most as u32,
            lines: lines as u32,
            threads,
        };
        let module = Module::of_image(gpu, &ROWS)?;
        Ok(Self {
            cache: rows.cache(&table, None, lines * (row + 16))?,
            cpu: CpuSide::new(gpu, controller, info, shape, out)?,
            check: module.function("nvme_check_rows")?,
            module,
            stream: Stream::new(gpu)?,
            ids: DeviceMemory::new(gpu, most as usize * 8)?,
            memory,
            out,
            wrong: DeviceMemory::new(gpu, 8)?,
            job: job.clone(),
            controller,
            table,
            rows,
        })
    }

    /// Returns `count` walks from row to row; `None` for rows that a warp does not read for all lanes.
    pub fn walks(
        &mut self,
        count: u32,
        (gpu, info): (&Arc<Gpu>, NamespaceInfo),
        threads: u32,
    ) -> Result<Option<Value>> {
        let row = u64::from(self.table.row_bytes);
        let hops = (self.job.most_bytes / row / u64::from(count)).min(self.job.hops.into());
        if self.rows.reading_lanes(&self.table) < 32 || hops == 0 {
            return Ok(None);
        }
        let mut chain = ChaseBench {
            gpu,
            controller: self.controller,
            info,
            table: self.table,
            rows: &self.rows,
            cpu: &mut self.cpu,
            threads,
            seed: self.job.seed,
            runs: self.job.runs,
        };
        let hops = hops as u32;
        chain.measure(ChaseShape { count, hops }).map(Some)
    }

    fn train(&self, case: CrossoverCase, run: u64) -> Result<BatchSeries> {
        let CrossoverCase { count, percent, .. } = case;
        let seed = self.job.seed ^ (run + 1) << 32 ^ count << 8 ^ u64::from(percent);
        let batches = train_of(&self.job, &self.table, count);
        let train = BatchSeries::draw(self.table.rows, (batches, count), percent, seed);
        train.ok_or_else(|| Error::internal(format!("{count} rows of {}", self.table.rows)))
    }

    /// Returns the cut of batches with which the CPU is fastest on average: of those with more threads, which
    /// wait for a core at times, only one that is clearly faster.
    fn best_cut(&mut self, case: CrossoverCase) -> Result<BatchDivision> {
        let trains = (0..TRIES).map(|run| self.train(case, 1000 + run));
        let trains = trains.collect::<Result<Vec<_>>>()?;
        let mut best: Option<(f64, BatchDivision)> = None;
        for cut in self.cpu.cuts(case.count as u32) {
            let mut seconds = Vec::new();
            for train in &trains {
                seconds.extend(self.run(BatchReader::Cpu, train, case, cut)?);
            }
            let took = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
            if best.is_none_or(|(least, _)| took < least * CLEARLY) {
                best = Some((took, cut));
            }
        }
        let none = || Error::internal("no way to cut a batch");
        best.map(|(_, cut)| cut).ok_or_else(none)
    }

    /// Measures a case: medians over all batches of all trains but the first batch of each, which finds the
    /// processors' caches filled with other data, and is reported separately.
    pub fn case(&mut self, case: CrossoverCase) -> Result<Value> {
        let (cut, count) = (self.best_cut(case)?, case.count);
        let sides = [BatchReader::Gpu, BatchReader::Cpu, BatchReader::CpuWithIds];
        let mut seconds = [const { (Vec::new(), Vec::new()) }; 3];
        let (mut misses, mut batches) = (0, 0);
        for run in 0..=self.job.runs as u64 {
            let train = self.train(case, run)?;
            batches = train.batches();
            misses = train.misses() / batches as u64;
            for (side, (first, rest)) in sides.into_iter().zip(&mut seconds) {
                let took = self.run(side, &train, case, cut)?;
                // The first run finds memory that was never touched.
                if run > 0 {
                    first.push(took[0]);
                    // One that is alone is all there is.
                    rest.extend(&took[took.len().min(2) - 1..]);
                }
            }
        }
        let [gpu, cpu, with_ids] = seconds.each_ref().map(|(_, rest)| median(rest));
        let side = |(first, rest): &(Vec<f64>, Vec<f64>)| {
            let took = median(rest);
            json!({
                "us": took * 1e6, "rows_per_s": count as f64 / took,
                "us_least": rest.iter().copied().fold(f64::MAX, f64::min) * 1e6,
                "us_most": rest.iter().copied().fold(0.0, f64::max) * 1e6,
                "us_first": median(first) * 1e6,
            })
        };
        Ok(json!({
            "row_bytes": self.table.row_bytes, "batch": count, "hit_percent": case.percent, "cached": case.caches,
            "misses": misses, "runs": self.job.runs, "batches_of_a_run": batches,
            "gpu": side(&seconds[0]), "cpu": side(&seconds[1]), "cpu_with_ids": side(&seconds[2]),
            "cpu_threads": cut.threads, "cpu_chunk_rows": cut.chunk_rows,
            "times": cpu / gpu, "times_with_ids": with_ids / gpu,
            "checked": true,
        }))
    }

    /// Measures the seconds of each batch of a train, whose hot rows are brought before.
    fn run(
        &mut self,
        side: BatchReader,
        train: &BatchSeries,
        case: CrossoverCase,
        cut: BatchDivision,
    ) -> Result<Vec<f64>> {
        match side {
            BatchReader::Gpu => {
                self.cpu.wake(1)?;
                self.warm_gpu(&train.hot)?;
            }
            BatchReader::Cpu | BatchReader::CpuWithIds => {
                self.cpu.wake(cut.threads)?;
                self.cpu.clear()?;
                for hot in train.hot.chunks(train.count) {
                    self.cpu.set_ids(hot);
                    self.cpu.run(RowBatch::of_host(hot.len() as u32), cut)?;
                }
            }
        }
        self.ids.upload(0, train.ids.as_bytes())?;
        self.memory.fill(POISON)?;
        let before = self.reads()?;
        let mut seconds = Vec::new();
        for (number, ids) in train.ids.chunks(train.count).enumerate() {
            let first = (number * train.count) as u64;
            let batch = RowBatch {
                count: train.count as u32,
                ids: (side == BatchReader::Cpu).then(|| self.ids.address() + first * 8),
                first_row: first,
                caches: case.caches,
            };
            seconds.push(match side {
                BatchReader::Gpu => self.gather(first, case.count, case.caches)?,
                BatchReader::Cpu => self.cpu.run(batch, cut)?,
                BatchReader::CpuWithIds => {
                    self.cpu.set_ids(ids);
                    self.cpu.run(batch, cut)?
                }
            });
        }
        let reads = self.reads()?.wrapping_sub(before);
        if reads != u128::from(train.misses()) {
            return Err(Error::Mismatch {
                what: format!(
                    "{side:?}: {reads} reads of the drive for {} rows with {} in the cache",
                    train.ids.len(),
                    train.hot.len()
                ),
            });
        }
        self.verify(train.ids.len() as u64)?;
        Ok(seconds)
    }

    /// Fills the GPU's cache with `hot` and nothing else. A row may find no free line for an instant, so that it takes
    /// several passes.
    fn warm_gpu(&mut self, hot: &[i64]) -> Result<()> {
        self.rows.wrote();
        if hot.is_empty() {
            return Ok(());
        }
        self.ids.upload(0, hot.as_bytes())?;
        for _ in 0..PASSES {
            let before = self.reads()?;
            self.gather(0, hot.len() as u64, true)?;
            if self.reads()? == before {
                return Ok(());
            }
        }
        Err(Error::internal(format!(
            "{PASSES} passes did not bring {} rows into the cache",
            hot.len()
        )))
    }

    /// Measures the seconds of a gather by the GPU of the ids from number `first` on, until the host sees its end.
    fn gather(&self, first: u64, count: u64, caches: bool) -> Result<f64> {
        let row = u64::from(self.table.row_bytes);
        let request = RowRequest {
            ids: self.ids.address() + first * 8,
            wide_ids: true,
            count,
            out: self.out + first * row,
            out_stride: row,
            status: 0,
        };
        let ways = GatherOptions {
            cache: caches.then_some(&self.cache),
            ..GatherOptions::default()
        };
        let mut wait = DeadlineWait::begin();
        let begin = Instant::now();
        // SAFETY: the memory is our own and outlives the launch: it is waited for.
        let pending = unsafe {
            let stream = self.stream.handle();
            self.rows.gather(&self.table, &request, ways, stream)?
        };
        while !pending.is_done() {
            wait.look()?;
        }
        let took = begin.elapsed().as_secs_f64();
        let failures = pending.last().failures;
        if failures.rows > 0 {
            return Err(Error::device(
                format!("rows were not read: {failures:?}"),
                "see docs/troubleshooting.md",
            ));
        }
        self.stream.wait(PATIENCE, || Ok(()))?;
        Ok(took)
    }

    /// Returns the number of read commands that the drive has completed. A simulated one may count
    /// them a moment after their ends.
    fn reads(&self) -> Result<u128> {
        let mut before = None;
        loop {
            let page = self
                .controller
                .log_page(lid::SMART, Nsid::ALL, size_of::<SmartData>())?;
            let smart = SmartData::read_from_bytes(&page);
            let smart = smart.map_err(|_| Error::internal("the log is not 512 bytes"))?;
            let now = Some(u128(&smart.host_reads));
            if now == before {
                return Ok(u128(&smart.host_reads));
            }
            before = now;
            std::thread::sleep(SETTLES);
        }
    }

    /// Checks every word of the first `count` rows.
    fn verify(&self, count: u64) -> Result<()> {
        let check = CheckLaunch {
            gather: GatherLaunch {
                ids: self.ids.address(),
                wide_ids: 1,
                count,
                out: self.out,
                out_stride: u64::from(self.table.row_bytes),
                rows: self.table.rows,
                row_bytes: self.table.row_bytes,
                ..GatherLaunch::default()
            },
            seed: self.job.seed,
            wrong: self.wrong.address(),
        };
        self.wrong.zero()?;
        // SAFETY: as in `gather`.
        unsafe {
            self.module.launch(
                &self.stream,
                self.check,
                CHECK_BLOCKS,
                BLOCK_THREADS,
                &check,
            )?;
        }
        self.stream.wait(PATIENCE, || Ok(()))?;
        let mut wrong = [0; 8];
        self.wrong.download(0, &mut wrong)?;
        match u64::from_le_bytes(wrong) {
            0 => Ok(()),
            wrong => Err(Error::Mismatch {
                what: format!("{wrong} of {count} rows are wrong"),
            }),
        }
    }
}
