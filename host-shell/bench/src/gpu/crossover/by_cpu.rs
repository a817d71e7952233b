//! The CPU's side: looks ids up in its index, submits the reads of missing rows from threads with a queue each,
//! and launches the kernel that copies rows from slots and from the cache to the output.
//!
//! A batch is processed in chunks. Each thread has a share of each chunk, and continues with the next chunk
//! while reads are under way, as far as slots are free. When all rows of a chunk are in memory, the first
//! thread launches the copy to the output, and a second copy into the cache lines that were assigned to the
//! chunk. The GPU runs them in this order.

use super::index::RowIndex;
use super::words::SharedWords;
use nvme_core::CommandData;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_driver::controller::queue::DriverQueue;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Entries of a queue, and commands in flight on it.
pub(super) const ENTRIES: u32 = 1024;
const DEPTH: u32 = 512;
/// Rows that are looked up before the reads of those that are missing are submitted.
const PART: usize = 64;
/// Limit of the chunks whose slots are in use together.
pub(super) const REGIONS: u32 = 4;
/// Slots of commands: CIDs have 12 bits of slot.
const SLOTS: usize = 1 << 12;

/// Work of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BatchPlan {
    /// Rows.
    pub count: u32,
    /// Rows of a chunk.
    pub chunk_rows: u32,
    /// Threads.
    pub threads: u32,
    /// The number of the batch's first chunk: chunks are numbered through all batches, from 1 on.
    pub first: u32,
    /// Position of the first row, in rows of the output.
    pub first_row: u64,
    /// Rows are looked for in the cache, and kept there.
    pub caches: bool,
}

impl BatchPlan {
    pub fn chunks(&self) -> u32 {
        self.count.div_ceil(self.chunk_rows.max(1))
    }

    /// Returns the rows of a chunk.
    pub fn rows(&self, chunk: u32) -> Range<u32> {
        let first = chunk * self.chunk_rows;
        first..(first + self.chunk_rows).min(self.count)
    }

    /// Returns the rows that thread `thread` looks up.
    fn share(&self, chunk: u32, thread: u32) -> Range<u32> {
        let rows = self.rows(chunk);
        let cut = |part: u32| {
            let all = u64::from(rows.end - rows.start) * u64::from(part);
            rows.start + (all / u64::from(self.threads.max(1))) as u32
        };
        cut(thread)..cut(thread + 1)
    }
}

/// Geometry of rows that all batches share.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowGeometry {
    pub nsid: Nsid,
    pub row_bytes: u64,
    pub blocks: u32,
    pub slots_iova: Iova,
    /// Addresses of the GPU in units of rows.
    pub slots: u64,
    pub cache: u64,
    pub out: u64,
}

/// State that the threads share.
pub(super) struct BatchState {
    pub places: RowGeometry,
    pub index: RowIndex,
    /// Ids of the batch.
    pub ids: SharedWords,
    /// Source of each row for the copy: an address in units of rows.
    pub sources: SharedWords,
    /// Source of the row of each line.
    pub fills: SharedWords,
    /// Rows of each chunk that are not in memory yet.
    left: Vec<AtomicU32>,
    /// Threads that have looked up their share of the chunk.
    looked: Vec<AtomicU32>,
    /// Rows of each chunk that were read.
    missed: Vec<AtomicU32>,
    /// Chunks whose slots are free again.
    copied: AtomicU32,
    has_failed: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl BatchState {
    pub fn new(
        places: RowGeometry,
        index: RowIndex,
        words: [SharedWords; 3],
        most_chunks: u32,
    ) -> Self {
        let [ids, sources, fills] = words;
        let zeros = || (0..most_chunks).map(|_| AtomicU32::new(0)).collect();
        Self {
            places,
            index,
            ids,
            sources,
            fills,
            left: zeros(),
            looked: zeros(),
            missed: zeros(),
            copied: AtomicU32::new(0),
            has_failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Chunks of a batch at most.
    pub fn most_chunks(&self) -> u32 {
        self.left.len() as u32
    }

    /// Prepares the shared state before the threads begin with a batch.
    pub fn begin(&self, plan: &BatchPlan) {
        for chunk in 0..plan.chunks() {
            let at = chunk as usize;
            self.left[at].store(plan.rows(chunk).len() as u32, Ordering::Relaxed);
            self.looked[at].store(0, Ordering::Relaxed);
            self.missed[at].store(0, Ordering::Relaxed);
        }
        self.copied.store(0, Ordering::Relaxed);
    }

    /// True if all rows of a chunk are in memory.
    pub fn is_whole(&self, chunk: u32) -> bool {
        // Acquire: pairs with the release of every thread that counted rows down. The launching thread then
        // sees all their sources, and the copy kernel that it launches finds every row in its slot.
        self.left[chunk as usize].load(Ordering::Acquire) == 0
    }

    /// Returns the number of rows of a whole chunk that were read.
    pub fn missed(&self, chunk: u32) -> u32 {
        self.missed[chunk as usize].load(Ordering::Relaxed)
    }

    /// Frees the slots of one more chunk.
    pub fn free_slots(&self) {
        // Release: pairs with the acquire in `may_begin`. The GPU has read the rows of that chunk, so a worker
        // that sees the count may have the drive overwrite their slots.
        self.copied.fetch_add(1, Ordering::Release);
    }

    pub fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        // Release: pairs with the acquire in `check`. The error is stored under its lock before, so that the
        // thread which finds the flag set and ends the batch also finds the cause.
        self.has_failed.store(true, Ordering::Release);
    }

    pub fn failure(&self) -> Option<Error> {
        lock(&self.failure).take()
    }

    /// # Errors
    /// An error when another thread has failed, or the time is over.
    pub fn check(&self, wait: &mut DeadlineWait) -> Result<()> {
        if self.has_failed.load(Ordering::Acquire) {
            return Err(Error::internal("another thread of the batch has failed"));
        }
        wait.look()
    }
}

/// A wait with a deadline.
pub(super) struct DeadlineWait {
    begin: Instant,
    looks: u32,
}

impl DeadlineWait {
    const LIMIT: Duration = Duration::from_secs(60);

    pub fn begin() -> Self {
        Self {
            begin: Instant::now(),
            looks: 0,
        }
    }

    /// # Errors
    /// Past the limit.
    pub fn look(&mut self) -> Result<()> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(1024) {
            std::thread::yield_now();
            if self.begin.elapsed() > Self::LIMIT {
                return Err(Error::device(
                    format!("a batch did not end within {:?}", Self::LIMIT),
                    "see docs/troubleshooting.md",
                ));
            }
        }
        std::hint::spin_loop();
        Ok(())
    }
}

/// A thread with a dedicated queue.
pub(super) struct RowWorker {
    pub number: u32,
    pub queue: DriverQueue,
    /// The chunk of each command in flight.
    chunk_of: Vec<u32>,
    under_way: u32,
}

impl RowWorker {
    pub fn new(number: u32, queue: DriverQueue) -> Self {
        Self {
            number,
            queue,
            chunk_of: vec![0; SLOTS],
            under_way: 0,
        }
    }

    /// Works on the thread's shares of all chunks; `step` is called while it waits.
    ///
    /// # Errors
    /// A read that failed, those of `step`, and past the deadline.
    pub fn work(
        &mut self,
        shared: &BatchState,
        plan: &BatchPlan,
        step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut wait = DeadlineWait::begin();
        for chunk in 0..plan.chunks() {
            while !Self::may_begin(shared, plan, chunk) {
                self.reap(shared)?;
                step()?;
                shared.check(&mut wait)?;
            }
            let share = plan.share(chunk, self.number);
            let mut first = share.start;
            while first < share.end {
                let part = first..(first + PART as u32).min(share.end);
                first = part.end;
                self.look_up(shared, plan, chunk, part, step)?;
            }
            // Release: pairs with the acquire in `may_begin`. Everything that this thread looked up and claimed
            // in the index is visible to threads that begin with the next chunk, which must not see lines that
            // this chunk still moves.
            shared.looked[chunk as usize].fetch_add(1, Ordering::Release);
            step()?;
        }
        while self.under_way > 0 {
            self.reap(shared)?;
            step()?;
            shared.check(&mut wait)?;
        }
        Ok(())
    }

    /// True if the slots of a chunk are free, and the previous chunk has finished with the index.
    fn may_begin(shared: &BatchState, plan: &BatchPlan, chunk: u32) -> bool {
        // Acquire: pairs with the release in `free_slots`, and with that of each thread that has looked its
        // share up. Without it a row of this chunk could be read into a slot that the GPU still copies from.
        let has_slots = chunk < shared.copied.load(Ordering::Acquire) + REGIONS;
        let before = chunk
            .checked_sub(1)
            .map(|before| &shared.looked[before as usize]);
        has_slots && before.is_none_or(|looked| looked.load(Ordering::Acquire) == plan.threads)
    }

    /// Looks rows up, and reads those that are missing.
    fn look_up(
        &mut self,
        shared: &BatchState,
        plan: &BatchPlan,
        chunk: u32,
        rows: Range<u32>,
        step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let (places, number) = (&shared.places, plan.first + chunk);
        let (mut missing, mut misses) = ([0u32; PART], 0);
        let all = rows.len();
        for row in rows {
            let id = shared.ids.get(row as usize);
            let line = match plan.caches {
                true => shared.index.find(id, number),
                false => None,
            };
            match line {
                Some(line) => shared
                    .sources
                    .set(row as usize, (places.cache + line) as i64),
                None => {
                    missing[misses] = row;
                    misses += 1;
                }
            }
        }
        if all > misses {
            // Release: pairs with the acquire in `is_whole`: the sources of these rows, which are lines of the
            // cache, are stored before the count reaches zero and the copy is launched.
            shared.left[chunk as usize].fetch_sub((all - misses) as u32, Ordering::Release);
        }
        if misses == 0 {
            return Ok(());
        }
        let mut first = 0;
        if plan.caches {
            shared.missed[chunk as usize].fetch_add(misses as u32, Ordering::Relaxed);
            first = shared.index.give(misses as u64);
        }
        let first_slot = u64::from(chunk % REGIONS) * u64::from(plan.chunk_rows);
        let mut next = 0;
        while next < misses {
            let room = (DEPTH - self.under_way) as usize;
            if room == 0 {
                self.reap(shared)?;
                step()?;
                continue;
            }
            let until = misses.min(next + room);
            let mut batch = self.queue.batch();
            for (at, row) in missing.iter().enumerate().take(until).skip(next) {
                let id = shared.ids.get(*row as usize);
                let slot = first_slot + u64::from(row - chunk * plan.chunk_rows);
                shared
                    .sources
                    .set(*row as usize, (places.slots + slot) as i64);
                if plan.caches {
                    let line = shared.index.claim(first + at as u64, id, number);
                    let from = places.out + plan.first_row + u64::from(*row);
                    shared.fills.set(line as usize, from as i64);
                }
                let lba = Lba(id as u64 * u64::from(places.blocks));
                let data = CommandData::Contiguous {
                    iova: places.slots_iova.offset(slot * places.row_bytes),
                    len: places.row_bytes,
                };
                let read = nvm::read(places.nsid, lba, places.blocks);
                let cid = batch.submit_data(read, data, None);
                let cid = cid.map_err(|refused| {
                    refused
                        .error
                        .into_error(|error| Error::internal(error.to_string()))
                })?;
                self.chunk_of[usize::from(cid.0) % SLOTS] = chunk;
            }
            batch.ring();
            self.under_way += (until - next) as u32;
            next = until;
        }
        Ok(())
    }

    /// Counts the reads that have ended.
    fn reap(&mut self, shared: &BatchState) -> Result<()> {
        if self.under_way == 0 {
            return Ok(());
        }
        let (mut of, mut count, mut bad) = (0, 0, None);
        let chunk_of = &self.chunk_of;
        let taken = self.queue.poll_batch(DEPTH as usize, |done| {
            let chunk = chunk_of[usize::from(done.cid.0) % SLOTS];
            if chunk != of && count > 0 {
                // Release: as below, for the completions of the chunk before, which one poll may return
                // together with those of this one.
                shared.left[of as usize].fetch_sub(count, Ordering::Release);
                count = 0;
            }
            of = chunk;
            count += 1;
            if !done.is_success() && bad.is_none() {
                bad = Some(done);
            }
        })?;
        self.under_way -= taken as u32;
        if let Some(done) = bad {
            return Err(self.queue.error_of(&done, "a read of a row"));
        }
        if count > 0 {
            // Release: pairs with the acquire in `is_whole`. The completions say that the rows are in their
            // slots; the thread that sees zero launches the copy that reads them.
            shared.left[of as usize].fetch_sub(count, Ordering::Release);
        }
        Ok(())
    }

    /// Waits for the reads that are in flight after a failure: their slots are not reused before.
    pub fn settle(&mut self) {
        let begin = Instant::now();
        while self.under_way > 0 && begin.elapsed() < DeadlineWait::LIMIT {
            match self.queue.poll_batch(DEPTH as usize, drop) {
                Ok(taken) => self.under_way -= taken as u32,
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_chunks_are_all_rows_once() {
        for (count, chunk_rows, threads) in [(1000, 64, 3), (32, 32, 1), (5, 8, 4), (1, 1, 2)] {
            let plan = BatchPlan {
                count,
                chunk_rows,
                threads,
                first: 1,
                ..BatchPlan::default()
            };
            let shares = (0..plan.chunks())
                .flat_map(|chunk| (0..threads).map(move |thread| plan.share(chunk, thread)));
            let all: Vec<u32> = shares.flatten().collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
    }
}
