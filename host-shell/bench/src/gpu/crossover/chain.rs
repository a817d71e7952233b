//! Pointer chases: each row contains the id of the next one, so a row cannot be requested before the one before
//! it has arrived.
//!
//! - By the GPU: one launch of `nvme_follow_rows` for all rows of all chases.
//! - By the CPU: threads read the next id in pinned memory and request that row at once, each chase
//!   independently. All rows are copied to the output at the end.
//! - By the CPU for the GPU: the GPU passes the ids to the host after each row, as in programs whose kernel has to
//!   compute them.
//!
//! The rows are those of the table: their content is a function of their offset, so that the host knows each chase.
// UNSAFETY: launches kernels over this module's own memory.
#![allow(unsafe_code)]

use super::by_cpu::{DeadlineWait, ENTRIES};
use super::cpu_side::{BatchDivision, CpuSide, RowBatch};
use super::job::POISON;
use super::words::SharedWords;
use crate::measure::{median, side_by_side};
use nvme_core::CommandData;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Lba, nvm};
use nvme_cuda::DeviceMemory;
use nvme_cuda::Gpu;
use nvme_cuda::GpuData;
use nvme_cuda::Stream;
use nvme_cuda::{GpuRows, RowTable};
use nvme_cuda::{KernelFunction, Module};
use nvme_driver::controller::Controller;
use nvme_driver::controller::queue::DriverQueue;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, BLOCK_WARPS, CheckLaunch, FollowLaunch, GatherLaunch};
use nvme_gpu_kernel::work::data_word;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const PATIENCE: Duration = Duration::from_secs(60);
/// Threads of the CPU that walk at most.
pub(super) const MOST_THREADS: u32 = 8;
/// Warps of the GPU that walk at most.
const WARPS: u64 = 32 * BLOCK_WARPS as u64;
/// Slots of commands: CIDs have 12 bits of slot.
const SLOTS: usize = 1 << 12;

/// Number of chases, and of rows of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChaseShape {
    pub count: u32,
    pub hops: u32,
}

impl ChaseShape {
    fn rows(self) -> u64 {
        u64::from(self.count) * u64::from(self.hops)
    }
}

/// Memory and kernels for chases over rows of one size.
pub(super) struct ChaseBench<'b> {
    pub gpu: &'b Arc<Gpu>,
    pub controller: &'b Controller,
    pub info: NamespaceInfo,
    pub table: RowTable,
    pub rows: &'b GpuRows,
    pub cpu: &'b mut CpuSide,
    pub threads: u32,
    pub seed: u64,
    pub runs: usize,
}

struct ChaseMemory {
    module: Module,
    follow: KernelFunction,
    copy: KernelFunction,
    check: KernelFunction,
    stream: Stream,
    starts: DeviceMemory,
    ends: DeviceMemory,
    /// All rows of all walks, and the ids that they must have.
    out: DeviceMemory,
    expected: DeviceMemory,
    wrong: DeviceMemory,
    /// Pinned memory for the same number of rows.
    slots: GpuData,
}

/// Returns the row after `id`.
fn next(table: &RowTable, seed: u64, id: u64) -> u64 {
    data_word(seed, id * u64::from(table.row_bytes) / 8) % table.rows
}

/// Expected chases: the first row of each, all rows of all, and the row after the last one of each.
struct ExpectedPaths {
    starts: Vec<i64>,
    all: Vec<i64>,
    ends: Vec<i64>,
}

impl ExpectedPaths {
    fn new(table: &RowTable, seed: u64, walks: ChaseShape, run: u64) -> Self {
        let mut paths = Self {
            starts: Vec::new(),
            all: Vec::new(),
            ends: Vec::new(),
        };
        for walk in 0..u64::from(walks.count) {
            let mut id = data_word(seed ^ (run + 1) << 40, walk) % table.rows;
            paths.starts.push(id as i64);
            for _ in 0..walks.hops {
                paths.all.push(id as i64);
                id = next(table, seed, id);
            }
            paths.ends.push(id as i64);
        }
        paths
    }
}

impl ChaseBench<'_> {
    /// Measures chases: medians of runs that alternate between the sides.
    ///
    /// # Errors
    /// Reads that failed, and rows that are wrong.
    pub fn measure(&mut self, walks: ChaseShape) -> Result<Value> {
        let memory = self.memory(walks)?;
        let threads = self.best_threads(&memory, walks)?;
        let cut = BatchDivision {
            threads: threads.min(walks.count.div_ceil(16)).max(1),
            chunk_rows: walks.count.min(self.cpu.most_chunk()),
        };
        let mut seconds = [const { Vec::new() }; 3];
        for run in 0..=self.runs as u64 {
            let paths = ExpectedPaths::new(&self.table, self.seed, walks, run);
            self.prepare(&memory, &paths)?;
            self.cpu.wake(1)?;
            let by_gpu = self.by_gpu(&memory, walks)?;
            self.verify(&memory, &paths, Some(&memory.ends))?;
            self.prepare(&memory, &paths)?;
            let by_cpu = self.by_cpu(&memory, walks, &paths, threads)?;
            self.verify(&memory, &paths, None)?;
            self.prepare(&memory, &paths)?;
            self.cpu.wake(cut.threads)?;
            let for_gpu = self.for_gpu(&memory, walks, &paths, cut)?;
            for (all, took) in seconds.iter_mut().zip([by_gpu, by_cpu, for_gpu]) {
                // The first run finds memory that was never touched.
                if run > 0 {
                    all.push(took);
                }
            }
        }
        let side = |seconds: &[f64]| {
            let took = median(seconds);
            json!({ "us_per_hop": took * 1e6 / f64::from(walks.hops), "hops_per_s": walks.rows() as f64 / took })
        };
        let [gpu, cpu, for_gpu] = seconds.each_ref().map(|all| median(all));
        Ok(json!({
            "row_bytes": self.table.row_bytes, "walks": walks.count, "hops": walks.hops,
            "gpu": side(&seconds[0]), "cpu": side(&seconds[1]), "cpu_for_gpu": side(&seconds[2]),
            "cpu_threads": threads, "times": cpu / gpu, "times_for_gpu": for_gpu / gpu,
            "runs": self.runs, "checked": true,
        }))
    }

    fn memory(&self, walks: ChaseShape) -> Result<ChaseMemory> {
        let bytes = (walks.rows() * u64::from(self.table.row_bytes)) as usize;
        let module = Module::of_image(self.gpu, &nvme_gpu_kernel::ROWS)?;
        let words = |count: u64| DeviceMemory::new(self.gpu, count as usize * 8);
        Ok(ChaseMemory {
            follow: module.function("nvme_follow_rows")?,
            copy: module.function("nvme_copy_rows")?,
            check: module.function("nvme_check_rows")?,
            module,
            stream: Stream::new(self.gpu)?,
            starts: words(walks.count.into())?,
            ends: words(walks.count.into())?,
            out: DeviceMemory::new(self.gpu, bytes)?,
            expected: words(walks.rows())?,
            wrong: words(1)?,
            slots: GpuData::pinned(self.gpu, self.controller.device(), bytes)?,
        })
    }

    fn prepare(&self, memory: &ChaseMemory, paths: &ExpectedPaths) -> Result<()> {
        memory.starts.upload(0, paths.starts.as_bytes())?;
        memory.expected.upload(0, paths.all.as_bytes())?;
        memory.out.fill(POISON)?;
        memory.ends.fill(POISON)
    }

    /// Measures the seconds of all walks by the GPU, until the host knows of their end.
    fn by_gpu(&self, memory: &ChaseMemory, walks: ChaseShape) -> Result<f64> {
        let lanes = u64::from(walks.count)
            .div_ceil(WARPS)
            .next_power_of_two()
            .min(32) as u32;
        let argument = |rows: GatherLaunch| FollowLaunch {
            gather: GatherLaunch {
                ids: memory.starts.address(),
                wide_ids: 1,
                count: walks.count.into(),
                lanes,
                out: memory.out.address(),
                out_stride: self.table.row_bytes.into(),
                unit_shift: 4,
                ..rows
            },
            ends: memory.ends.address(),
            hops: walks.hops,
            reserved: 0,
        };
        let chunks = u64::from(walks.count).div_ceil(lanes.into());
        let begin = Instant::now();
        // SAFETY: the kernel takes one `FollowLaunch`; our own memory, which outlives the launch: it is waited for.
        let pending = unsafe {
            let kernel = (&memory.module, memory.follow);
            let stream = memory.stream.handle();
            self.rows
                .read_by_warps(&self.table, (chunks, 32), kernel, argument, stream)?
        };
        let mut wait = DeadlineWait::begin();
        while !pending.is_done() {
            wait.look()?;
        }
        let took = begin.elapsed().as_secs_f64();
        let failures = pending.last().failures;
        memory.stream.wait(PATIENCE, || Ok(()))?;
        match failures.rows {
            0 => Ok(took),
            _ => Err(Error::device(
                format!("walks did not end: {failures:?}"),
                "see docs/troubleshooting.md",
            )),
        }
    }

    /// Returns the number of threads with which the CPU is fastest.
    fn best_threads(&mut self, memory: &ChaseMemory, walks: ChaseShape) -> Result<u32> {
        let mut best = (f64::MAX, 1);
        for threads in [1, 2, 4, MOST_THREADS] {
            if threads > self.threads || threads > walks.count {
                continue;
            }
            let mut seconds = Vec::new();
            for run in 0..3 {
                let paths = ExpectedPaths::new(&self.table, self.seed, walks, 1000 + run);
                seconds.push(self.by_cpu(memory, walks, &paths, threads)?);
            }
            let took = median(&seconds);
            if took < best.0 {
                best = (took, threads);
            }
        }
        Ok(best.1)
    }

    /// Measures the seconds of all chases by threads of the CPU, which read the next ids in the slots where
    /// rows have arrived, and one copy of all rows by the kernel.
    fn by_cpu(
        &mut self,
        memory: &ChaseMemory,
        walks: ChaseShape,
        paths: &ExpectedPaths,
        threads: u32,
    ) -> Result<f64> {
        self.cpu.wake(1)?;
        let GpuData::Pinned { buffer, .. } = &memory.slots else {
            return Err(Error::internal("slots that the host does not see"));
        };
        let start = buffer.as_slice().as_ptr().expose_provenance();
        let queues = (0..threads).map(|_| self.controller.create_queue_pair(ENTRIES));
        let mut queues = queues.collect::<Result<Vec<_>>>()?;
        let share = walks.count.div_ceil(threads);
        let jobs = queues
            .iter_mut()
            .zip(0..)
            .map(|(queue, number): (&mut DriverQueue, u32)| {
                let mine = number * share..walks.count.min((number + 1) * share);
                let part = ThreadWalks {
                    chain: ChaseRoute {
                        table: self.table,
                        info: self.info,
                        iova: memory.slots.iova(),
                        start,
                    },
                    walks,
                    first: mine.start,
                };
                let starts = &paths.starts[mine.start.min(walks.count) as usize..mine.end as usize];
                move || part.walk(queue, starts)
            });
        // Threads are started before the time is taken.
        let walked = side_by_side(jobs.collect())?;
        let begin = Instant::now();
        let copy = GatherLaunch {
            slots: memory.slots.address(),
            count: walks.rows(),
            out: memory.out.address(),
            out_stride: self.table.row_bytes.into(),
            rows: walks.rows(),
            row_bytes: self.table.row_bytes,
            lanes: walks.rows().div_ceil(1024).next_power_of_two().min(32) as u32,
            unit_shift: 4,
            block_shift: 12,
            ..GatherLaunch::default()
        };
        // SAFETY: the kernel copies rows of the slots to as many rows of the output; both outlive the launch, which is
        // waited for.
        unsafe {
            memory
                .module
                .launch(&memory.stream, memory.copy, 128, BLOCK_THREADS, &copy)?;
        }
        let mut wait = DeadlineWait::begin();
        while !memory.stream.is_done()? {
            wait.look()?;
        }
        Ok(walked + begin.elapsed().as_secs_f64())
    }

    /// Measures the seconds of all walks if the GPU has the rows' ids after each row: they are copied to the host,
    /// which reads the next rows for the GPU.
    fn for_gpu(
        &mut self,
        memory: &ChaseMemory,
        walks: ChaseShape,
        paths: &ExpectedPaths,
        cut: BatchDivision,
    ) -> Result<f64> {
        let words = SharedWords::new(self.gpu, walks.count as usize)?;
        let out = self.cpu.out();
        let first_words = GatherLaunch {
            // The first word of each row, as rows of 8 bytes.
            ids: memory.expected.address(),
            wide_ids: 1,
            slots: out,
            count: walks.count.into(),
            out: words.address(),
            out_stride: 8,
            rows: u64::MAX / 8,
            row_bytes: 8,
            lanes: 32,
            unit_shift: 3,
            block_shift: 12,
            ..GatherLaunch::default()
        };
        let step = i64::from(self.table.row_bytes / 8);
        let places: Vec<i64> = (0..i64::from(walks.count)).map(|row| row * step).collect();
        memory.expected.upload(0, places.as_bytes())?;
        self.cpu.clear()?;
        self.cpu.set_ids(&paths.starts);
        let mut wait = DeadlineWait::begin();
        let begin = Instant::now();
        for _ in 0..walks.hops {
            self.cpu.run(RowBatch::of_host(walks.count), cut)?;
            // SAFETY: the kernel copies the first words of rows in the output to pinned memory with room for them; both
            // outlive the launch, which is waited for.
            unsafe {
                let blocks = walks.count.div_ceil(32 * BLOCK_WARPS);
                memory.module.launch(
                    &memory.stream,
                    memory.copy,
                    blocks,
                    BLOCK_THREADS,
                    &first_words,
                )?;
            }
            while !memory.stream.is_done()? {
                wait.look()?;
            }
            self.cpu.set_next(walks.count, |at| {
                (words.get(at) as u64 % self.table.rows) as i64
            });
        }
        let took = begin.elapsed().as_secs_f64();
        let ends =
            (0..walks.count as usize).map(|at| (words.get(at) as u64 % self.table.rows) as i64);
        match ends.eq(paths.ends.iter().copied()) {
            true => Ok(took),
            false => Err(Error::Mismatch {
                what: "walks by ids from the GPU end elsewhere".to_owned(),
            }),
        }
    }

    /// Checks every word of every row, and where the walks ended.
    fn verify(
        &self,
        memory: &ChaseMemory,
        paths: &ExpectedPaths,
        ends: Option<&DeviceMemory>,
    ) -> Result<()> {
        let check = CheckLaunch {
            gather: GatherLaunch {
                ids: memory.expected.address(),
                wide_ids: 1,
                count: paths.all.len() as u64,
                out: memory.out.address(),
                out_stride: self.table.row_bytes.into(),
                rows: self.table.rows,
                row_bytes: self.table.row_bytes,
                ..GatherLaunch::default()
            },
            seed: self.seed,
            wrong: memory.wrong.address(),
        };
        memory.wrong.zero()?;
        // SAFETY: the rows of the walks and their ids; waited for.
        unsafe {
            memory
                .module
                .launch(&memory.stream, memory.check, 128, BLOCK_THREADS, &check)?;
        }
        memory.stream.wait(PATIENCE, || Ok(()))?;
        let mut wrong = [0; 8];
        memory.wrong.download(0, &mut wrong)?;
        let wrong = u64::from_le_bytes(wrong);
        if wrong > 0 {
            return Err(Error::Mismatch {
                what: format!("{wrong} of {} rows of walks are wrong", paths.all.len()),
            });
        }
        let Some(ends) = ends else { return Ok(()) };
        let mut words = vec![0; paths.ends.len() * 8];
        ends.download(0, &mut words)?;
        match words == paths.ends.as_bytes() {
            true => Ok(()),
            false => Err(Error::Mismatch {
                what: "walks end elsewhere".to_owned(),
            }),
        }
    }
}

/// Source and destination of the rows that a CPU thread reads.
#[derive(Clone, Copy)]
struct ChaseRoute {
    table: RowTable,
    info: NamespaceInfo,
    iova: nvme_core::spec::Iova,
    /// The address of the first slot in this process.
    start: usize,
}

struct ThreadWalks {
    chain: ChaseRoute,
    walks: ChaseShape,
    /// The first of them.
    first: u32,
}

impl ThreadWalks {
    /// Follows chases from `starts`: each continues as soon as its row has arrived.
    fn walk(&self, queue: &mut DriverQueue, starts: &[i64]) -> Result<()> {
        let depth = (queue.depth() as usize).min(starts.len());
        // The walk of each command, the rows that walks have had, and walks that have not begun.
        let mut walk_of = vec![0u32; SLOTS];
        let mut had = vec![0u32; starts.len()];
        let (mut begun, mut under_way) = (0, 0);
        let mut ready: Vec<(u32, i64)> = Vec::new();
        let mut landed: Vec<u32> = Vec::new();
        let mut wait = DeadlineWait::begin();
        loop {
            while under_way + ready.len() < depth && begun < starts.len() {
                ready.push((begun as u32, starts[begun]));
                begun += 1;
            }
            under_way += ready.len();
            if under_way == 0 {
                return Ok(());
            }
            if !ready.is_empty() {
                let mut batch = queue.batch();
                for (walk, id) in ready.drain(..) {
                    let cid = self.submit(&mut batch, (walk, had[walk as usize]), id)?;
                    walk_of[usize::from(cid.0) % SLOTS] = walk;
                }
                batch.ring();
            }
            let mut bad = None;
            queue.poll_batch(depth, |done| {
                landed.push(walk_of[usize::from(done.cid.0) % SLOTS]);
                if !done.is_success() && bad.is_none() {
                    bad = Some(done);
                }
            })?;
            if let Some(done) = bad {
                return Err(queue.error_of(&done, "a read of a row"));
            }
            under_way -= landed.len();
            for walk in landed.drain(..) {
                let word = self.word((walk, had[walk as usize]));
                had[walk as usize] += 1;
                if had[walk as usize] < self.walks.hops {
                    ready.push((walk, (word % self.chain.table.rows) as i64));
                }
            }
            wait.look()?;
        }
    }

    /// Returns the slot of a row of a walk.
    fn slot(&self, (walk, hop): (u32, u32)) -> u64 {
        let row = u64::from(self.first + walk) * u64::from(self.walks.hops) + u64::from(hop);
        row * u64::from(self.chain.table.row_bytes)
    }

    fn submit(
        &self,
        batch: &mut nvme_driver::controller::queue::SubmissionBatch<'_>,
        row: (u32, u32),
        id: i64,
    ) -> Result<nvme_core::spec::Cid> {
        let ChaseRoute {
            table, info, iova, ..
        } = self.chain;
        let blocks = table.row_bytes / info.block_bytes;
        let data = CommandData::Contiguous {
            iova: iova.offset(self.slot(row)),
            len: table.row_bytes.into(),
        };
        let lba = Lba(id as u64 * u64::from(blocks));
        let cid = batch.submit_data(nvm::read(info.nsid, lba, blocks), data, None);
        cid.map_err(|refused| {
            refused
                .error
                .into_error(|error| Error::internal(error.to_string()))
        })
    }

    /// Returns the first word of a row that has arrived.
    fn word(&self, row: (u32, u32)) -> u64 {
        let from = self.chain.start + self.slot(row) as usize;
        // SAFETY: a row of the slots, whose read has ended; a multiple of 8.
        unsafe { std::ptr::with_exposed_provenance::<u64>(from).read_volatile() }
    }
}
