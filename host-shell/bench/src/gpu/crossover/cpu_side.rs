//! Batches by the CPU, from the ids to the host's knowledge that all rows are in place. The side is tuned for each
//! case: several numbers of threads and cuts of a batch are tried, and the fastest is measured.
// UNSAFETY: launches kernels and copies over this module's own memory.
#![allow(unsafe_code)]

use super::by_cpu::{
    BatchPlan, BatchState, DeadlineWait, ENTRIES, REGIONS, RowGeometry, RowWorker,
};
use super::index::RowIndex;
use super::team::HelperThreads;
use super::words::SharedWords;
use nvme_core::bringup::NamespaceInfo;
use nvme_cuda::DeviceMemory;
use nvme_cuda::Gpu;
use nvme_cuda::GpuData;
use nvme_cuda::{KernelFunction, Module};
use nvme_cuda::{Stream, StreamEvent};
use nvme_driver::controller::Controller;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::ROWS;
use nvme_gpu_kernel::rows::{BLOCK_THREADS, BLOCK_WARPS, GatherLaunch};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of the slots: the same as those of the GPU's 32 stations.
const SLOT_BYTES: u64 = 32 << 20;
/// Chunks of a batch at most.
const MOST_CHUNKS: u32 = 4096;
/// Warps of a launch that copies, at which each has one row at least.
const COPY_WARPS: u32 = 1024;

/// The shape of all batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchShape {
    pub row_bytes: u32,
    /// Rows of the table.
    pub rows: u64,
    /// Rows of a batch at most.
    pub batch: u32,
    /// Lines of the cache.
    pub lines: u32,
    /// Threads at most.
    pub threads: u32,
}

/// Division of a batch into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchDivision {
    pub threads: u32,
    pub chunk_rows: u32,
}

/// Rows that are asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowBatch {
    pub count: u32,
    /// Address of the ids in GPU memory; without it the host has them.
    pub ids: Option<u64>,
    /// Position of the first row, in rows of the output.
    pub first_row: u64,
    /// Rows are looked for in the cache, and kept there.
    pub caches: bool,
}

impl RowBatch {
    /// Requests `count` rows whose ids the host has, to the start of the output.
    pub fn of_host(count: u32) -> Self {
        Self {
            count,
            ids: None,
            first_row: 0,
            caches: true,
        }
    }
}

pub(super) struct CpuSide {
    team: HelperThreads,
    worker: RowWorker,
    shared: Arc<BatchState>,
    launcher: CopyLauncher,
    awake: u32,
    /// Number of chunks of all batches so far.
    chunks: u32,
}

/// Kernels and stream of the launches.
struct CopyLauncher {
    module: Module,
    copy: KernelFunction,
    stream: Stream,
    row_bytes: u32,
    slots: GpuData,
    /// The rows of the cache, from a multiple of a row on.
    cache: DeviceMemory,
    out: u64,
    /// Chunks that were launched, the ends of those whose slots are not free yet, and lines that were filled.
    launched: u32,
    ends: VecDeque<StreamEvent>,
    filled: u64,
}

impl CpuSide {
    /// Creates the queues of `controller` beside the GPU's, and memory. Rows go to `out`, a multiple of a row.
    ///
    /// # Errors
    /// Without memory or queues.
    pub fn new(
        gpu: &Arc<Gpu>,
        controller: &Controller,
        info: NamespaceInfo,
        shape: BatchShape,
        out: u64,
    ) -> Result<Self> {
        let row = u64::from(shape.row_bytes);
        let device = controller.device();
        let slots = GpuData::pinned(gpu, device, (SLOT_BYTES.max(row * 4) + row) as usize)?;
        let cache = DeviceMemory::new(gpu, ((u64::from(shape.lines) + 1) * row) as usize)?;
        let first_slot = slots.address().next_multiple_of(row);
        let places = RowGeometry {
            nsid: info.nsid,
            row_bytes: row,
            blocks: shape.row_bytes / info.block_bytes,
            slots_iova: slots.iova().offset(first_slot - slots.address()),
            slots: first_slot / row,
            cache: cache.address().div_ceil(row),
            out: out / row,
        };
        let words = [shape.batch, shape.batch, shape.lines];
        let [ids, sources, fills] = words.map(|count| SharedWords::new(gpu, count as usize));
        let index = RowIndex::new(shape.rows, shape.lines);
        let words = [ids?, sources?, fills?];
        let shared = Arc::new(BatchState::new(places, index, words, MOST_CHUNKS));
        let queue = |number| {
            controller
                .create_queue_pair(ENTRIES)
                .map(|queue| RowWorker::new(number, queue))
        };
        let worker = queue(0)?;
        let others = (1..shape.threads).map_while(|number| queue(number).ok());
        let module = Module::of_image(gpu, &ROWS)?;
        Ok(Self {
            team: HelperThreads::start(&shared, others.collect())?,
            worker,
            shared,
            launcher: CopyLauncher {
                copy: module.function("nvme_copy_rows")?,
                module,
                stream: Stream::new(gpu)?,
                row_bytes: shape.row_bytes,
                slots,
                cache,
                out,
                launched: 0,
                ends: VecDeque::new(),
                filled: 0,
            },
            awake: 1,
            chunks: 0,
        })
    }

    /// Returns the number of threads that it has.
    pub fn threads(&self) -> u32 {
        self.team.threads()
    }

    /// Cuts that are worth a try for batches of `count` rows.
    pub fn cuts(&self, count: u32) -> Vec<BatchDivision> {
        let most = self.most_chunk();
        let least = count.div_ceil(MOST_CHUNKS);
        let chunks = [count, count / 4, count / 16, most, most / 4];
        let mut cuts = Vec::new();
        for threads in [1, 2, 4, 8, 16] {
            // Long batches are not for few threads.
            let is_few = count > 4096 && threads < 4 && self.threads() >= 4;
            if threads > self.threads() || is_few {
                continue;
            }
            for rows in chunks {
                let cut = BatchDivision {
                    threads,
                    chunk_rows: rows.clamp(least.max(1), most).min(count),
                };
                // A thread has 16 rows of a chunk at least.
                let is_fine = threads == 1 || cut.chunk_rows >= threads * 16;
                if is_fine && !cuts.contains(&cut) {
                    cuts.push(cut);
                }
            }
        }
        cuts
    }

    /// Returns the number of rows of a chunk at most.
    pub fn most_chunk(&self) -> u32 {
        let row = u64::from(self.launcher.row_bytes);
        (SLOT_BYTES / row / u64::from(REGIONS)).max(1) as u32
    }

    /// Empties the cache.
    ///
    /// # Errors
    /// The driver's.
    pub fn clear(&mut self) -> Result<()> {
        self.launcher.stream.finish()?;
        self.shared.index.clear(self.chunks.wrapping_add(1));
        self.launcher.filled = 0;
        Ok(())
    }

    /// Lets all threads sleep that are not needed for `threads`.
    ///
    /// # Errors
    /// As [`HelperThreads::wake`].
    pub fn wake(&mut self, threads: u32) -> Result<()> {
        if self.awake != threads {
            self.team.wake(threads)?;
            self.awake = threads;
        }
        Ok(())
    }

    /// Stores `ids` in the memory from which the host reads them.
    pub fn set_ids(&self, ids: &[i64]) {
        self.set_next(ids.len() as u32, |at| ids[at]);
    }

    /// Makes the ids of the next batch of `count` rows.
    pub fn set_next(&self, count: u32, id: impl Fn(usize) -> i64) {
        (0..count as usize).for_each(|at| self.shared.ids.set(at, id(at)));
    }

    /// Returns the address of the output.
    pub fn out(&self) -> u64 {
        self.launcher.out
    }

    /// Measures the seconds of a batch, from its ids to the time when the host sees that all rows are in the output.
    /// `cut` has the number of threads that are awake.
    ///
    /// # Errors
    /// A read that failed, the driver's, and past a deadline.
    pub fn run(&mut self, batch: RowBatch, cut: BatchDivision) -> Result<f64> {
        let plan = BatchPlan {
            count: batch.count,
            chunk_rows: cut.chunk_rows,
            threads: cut.threads,
            first: self.chunks.wrapping_add(1),
            first_row: batch.first_row,
            caches: batch.caches,
        };
        self.chunks = self.chunks.wrapping_add(plan.chunks());
        if plan.chunks() > self.shared.most_chunks() || self.awake != cut.threads {
            return Err(Error::internal(format!(
                "{plan:?} with {} threads awake",
                self.awake
            )));
        }
        let (shared, launcher) = (&*self.shared, &mut self.launcher);
        let mut wait = DeadlineWait::begin();
        let begin = Instant::now();
        if let Some(ids) = batch.ids {
            let bytes = batch.count as usize * 8;
            // SAFETY: the source is the caller's ids, the target pinned memory with room for them; the copy is waited
            // for.
            unsafe { launcher.stream.copy_out(shared.ids.start(), ids, bytes)? };
            while !launcher.stream.is_done()? {
                wait.look()?;
            }
        }
        launcher.launched = 0;
        launcher.ends.clear();
        self.team.begin(plan);
        let worked = self
            .worker
            .work(shared, &plan, &mut || launcher.step(shared, &plan));
        let ended = worked.and_then(|()| launcher.end(shared, &plan));
        if let Err(error) = ended {
            shared.fail(error);
            self.worker.settle();
        }
        let seconds = begin.elapsed().as_secs_f64();
        while !self.team.is_done(&plan) {
            wait.look()?;
        }
        match shared.failure() {
            Some(error) => Err(error),
            None => Ok(seconds),
        }
    }
}

impl CopyLauncher {
    /// Launches the next chunk if all of it is in memory, and frees the slots of one that was copied.
    fn step(&mut self, shared: &BatchState, plan: &BatchPlan) -> Result<()> {
        if let Some(end) = self.ends.front()
            && end.is_done()?
        {
            self.ends.pop_front();
            shared.free_slots();
        }
        if self.launched == plan.chunks() || !shared.is_whole(self.launched) {
            return Ok(());
        }
        let chunk = self.launched;
        self.launch(shared, plan, chunk)?;
        // The event is needed only if another chunk waits for the slots.
        if plan.chunks() > REGIONS {
            self.ends.push_back(StreamEvent::record(&self.stream)?);
        }
        self.launched += 1;
        Ok(())
    }

    /// Launches the remaining chunks, and waits until the GPU has finished.
    fn end(&mut self, shared: &BatchState, plan: &BatchPlan) -> Result<()> {
        let mut wait = DeadlineWait::begin();
        while self.launched < plan.chunks() {
            self.step(shared, plan)?;
            shared.check(&mut wait)?;
        }
        while !self.stream.is_done()? {
            shared.check(&mut wait)?;
        }
        Ok(())
    }

    fn launch(&mut self, shared: &BatchState, plan: &BatchPlan, chunk: u32) -> Result<()> {
        let row = u64::from(self.row_bytes);
        let rows = plan.rows(chunk);
        let first = u64::from(rows.start);
        let sources = shared.sources.address() + first * 8;
        let to = self.out + (plan.first_row + first) * row;
        self.copy(sources, rows.len() as u64, to)?;
        // The chunk's lines are contiguous, except where they wrap around at the end of the cache.
        let mut left = u64::from(shared.missed(chunk));
        while left > 0 {
            let line = self.filled % shared.index.lines();
            let count = left.min(shared.index.lines() - line);
            let to = (shared.places.cache + line) * row;
            self.copy(shared.fills.address() + line * 8, count, to)?;
            self.filled += count;
            left -= count;
        }
        Ok(())
    }

    /// Copies `count` rows from the addresses at `sources`, in units of rows, to `to` on: the kernel with which a gather
    /// copies rows out of its slots.
    fn copy(&self, sources: u64, count: u64, to: u64) -> Result<()> {
        let lanes = count
            .div_ceil(u64::from(COPY_WARPS))
            .next_power_of_two()
            .min(32) as u32;
        let launch = GatherLaunch {
            ids: sources,
            wide_ids: 1,
            count,
            out: to,
            out_stride: u64::from(self.row_bytes),
            rows: u64::MAX / u64::from(self.row_bytes),
            row_bytes: self.row_bytes,
            lanes,
            unit_shift: self.row_bytes.trailing_zeros().min(4),
            block_shift: 12,
            ..GatherLaunch::default()
        };
        let warps = count.div_ceil(u64::from(lanes)) as u32;
        let blocks = warps.div_ceil(BLOCK_WARPS).min(COPY_WARPS / BLOCK_WARPS);
        // SAFETY: the index names rows of the slots, of the cache and of the output; the stream keeps the order.
        unsafe {
            self.module
                .launch(&self.stream, self.copy, blocks, BLOCK_THREADS, &launch)
        }
    }
}

impl Drop for CpuSide {
    fn drop(&mut self) {
        // Waits so that the GPU no longer uses the memory when it is freed; if the driver fails, the context is
        // lost, and nothing runs any more.
        let _ = self.launcher.stream.finish();
        debug_assert!(!self.launcher.slots.is_empty() && !self.launcher.cache.is_empty());
    }
}
