//! Gathers of few rows through a cache of rows: hits are copied from the cache while the drive reads the other rows, by
//! a queue that the block owns.
//!
//! Each thread has one row. A row that is in the block more than once is looked up and read once. A row that was read
//! goes from its slot to a line of the cache, and from there to the output, so that the slots, which may be in host
//! memory, are read once.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::batched::{BatchOrigin, BatchWork, NOWHERE, command, in_slot};
use super::failed::clear;
use super::hits::HitCount;
use super::map::{OneRange, RowMap};
use super::warp::{CacheOf, leader_of};
use super::{cache_of, epoch_of};
use crate::arch;
use crate::groups::{GpuThread, WholeBlock};
use crate::launch;
use crate::row_cache::PinnedLine;
use crate::rows::{BLOCK_THREADS, CachedBatched, RowBlocks, STATION_BYTES, code};
use crate::station::{self, NO_STATION, ended};
use crate::units::UnitSteps;
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;
use nvme_core::BatchEnds;
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::sync::{AtomicU32, Order, Scope};

/// Bit of a place: the number of a line of the cache is below it. Without it a place is an offset in the station's
/// slots.
const LINE: u32 = 1 << 31;
/// Words of a kind: one for each thread.
const THREADS: u32 = BLOCK_THREADS;
/// Words of the block: the place that each row is copied from.
const SOURCES: u32 = 0;
/// Line that each row is copied to, [`NOWHERE`] for the output.
const TARGETS: u32 = THREADS;
/// Lower and upper half of each row's id.
const IDS: u32 = 2 * THREADS;
/// Threads that read a row, by the hash of its id, plus 1; there are twice as many words as rows. Later the words are
/// [`CODES`] and [`PLACES`].
const READERS: u32 = 4 * THREADS;
/// The code with which the read of each thread ended.
const CODES: u32 = READERS;
/// The place of the row that each thread has read.
const PLACES: u32 = READERS + THREADS;
/// The station of the block.
const STATION: u32 = 6 * THREADS;
/// Number of all words.
const WORDS: usize = 6 * THREADS as usize + 1;

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows through a cache of rows: blocks as for [`nvme_gather_batched`](super::nvme_gather_batched).
    ///
    /// # Safety
    /// As [`nvme_gather_batched`](super::nvme_gather_batched); the words of the cache are valid as
    /// [`CacheWords`](crate::rows::CacheWords) documents.
    pub unsafe fn nvme_gather_batched_cached(cached: CachedBatched) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather(&cached, OneRange) }
    }
}

/// # Safety
/// As [`nvme_gather_batched_cached`]. The ranges of the table are valid as
/// [`ExtentMap`](crate::extents::ExtentMap) documents, and no row lies in two of them.
#[inline(always)]
pub(super) unsafe fn gather<M: RowMap>(cached: &CachedBatched, map: M) {
    let (batched, rows) = (&cached.batched, &cached.batched.gather);
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let (Some(gate), Some(cache)) = (unsafe { (station::gate(rows), cache_of(&cached.cache)) })
    else {
        return;
    };
    let (block, words) = (WholeBlock::here(), BlockWords::here());
    let first = u64::from(arch::block()) * u64::from(batched.rows_of_block);
    let id = launch::id_of_thread(batched, first);
    words.begin(id as u64);
    if arch::thread() + 1 == block.size() {
        // The last warp has few rows or none, so that the others look them up during these trips over the bus.
        let station = station::claim_of(rows, batched.owned.queue_count, &gate);
        words.put(STATION, station);
    }
    let of = CacheOf {
        cache,
        epoch: match arch::thread() & !31 < batched.rows_of_block {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            true => unsafe { epoch_of(&cached.cache, arch::block() * 2 + arch::thread() / 32) },
            // A warp without rows looks nothing up.
            false => 0,
        },
        data: cached.cache.data,
        line_bytes: cached.cache.line_bytes,
        words: cached.cache,
        hits: 0,
    };
    let (index, is_live) = launch::row_of_thread(batched, first);
    // SAFETY: the host vouches for the ranges.
    let span = unsafe { map.span(rows, (id, 0)) };
    let place = span.map(|span| span.place).filter(|_| is_live);
    let left = rows.count.saturating_sub(first);
    let count = if left < u64::from(batched.rows_of_block) {
        left as u32
    } else {
        batched.rows_of_block
    };
    let row = CachedRow::find(&of, id as u64, place);
    // The barrier of the vote comes between all stores to the words and the first load.
    let misses = block.vote(row.is_missing()).total;
    let found = arch::ballot(arch::FULL, row.is_found()).count_ones();
    let station = words.get(STATION);
    let queue = match station {
        NO_STATION => None,
        _ if misses == 0 => None,
        // SAFETY: the caller keeps the conditions; the station is this block's.
        _ => unsafe { batched.owned.batches(station, block) },
    };
    let mut work = BatchWork::new(
        ((rows, map), block, gate),
        (station, queue),
        BatchOrigin::Own,
    );
    let became = match (station, place) {
        (NO_STATION, _) => {
            row.release(&of);
            match place {
                Some(_) => station::why_none(&work.gate),
                None => code::OUT_OF_RANGE,
            }
        }
        _ => {
            // SAFETY: the caller keeps the conditions; the station is this block's.
            let hits = unsafe { HitCount::of(&cached.cache, station) };
            if arch::lane() == 0 {
                hits.add(found);
            }
            copy_all(
                &mut work,
                (&of, &words, hits),
                row,
                (first, count),
                misses != 0,
            )
        }
    };
    clear(rows, index, is_live && became != code::OK);
    work.failed.note(rows, index, is_live, (None, became));
    work.leave();
}

/// The row of a thread.
#[derive(Clone, Copy)]
struct CachedRow {
    id: u64,
    /// Its blocks on the drive; `None` if the thread has no row, or the table does not have it.
    place: Option<RowBlocks>,
    /// The lane of the warp that acts for all lanes with this row.
    leader: u32,
    /// The line that this lane has pinned.
    line: Option<PinnedLine>,
    /// The row's place in the cache, [`NOWHERE`] if it is not there.
    source: u32,
}

impl CachedRow {
    /// Looks the row up. Every lane of the warp calls it.
    #[inline(always)]
    fn find(of: &CacheOf<'_>, id: u64, place: Option<RowBlocks>) -> Self {
        let leader = leader_of(id, place.is_some());
        let line = match place.is_some() && leader == arch::lane() {
            true => of.cache.find(id, of.epoch),
            false => None,
        };
        let mine = line.map_or(NOWHERE, |line| LINE | line.index());
        Self {
            id,
            place,
            leader,
            line,
            source: arch::shuffle(arch::FULL, mine, leader),
        }
    }

    #[inline(always)]
    fn is_found(&self) -> bool {
        self.place.is_some() && self.source != NOWHERE
    }

    #[inline(always)]
    fn is_missing(&self) -> bool {
        self.place.is_some() && self.source == NOWHERE
    }

    /// Unpins the line. Nothing of the block reads it any more.
    #[inline(always)]
    fn release(&self, of: &CacheOf<'_>) {
        if let Some(line) = self.line {
            of.cache.release(line);
        }
    }
}

/// Copies the `count` rows of the block from row `first` on: those in the cache at once, the others when the drive has
/// read them. Returns the code of the thread's row. Every thread of the block calls it.
#[inline(always)]
fn copy_all<M: RowMap>(
    work: &mut BatchWork<'_, '_, M>,
    (of, words, hits): (&CacheOf<'_>, &BlockWords, HitCount),
    row: CachedRow,
    (first, count): (u64, u32),
    has_misses: bool,
) -> i32 {
    let (rows, block, station, thread) = (work.rows, work.block, work.station, arch::thread());
    let units = UnitSteps::new(rows.row_bytes >> rows.unit_shift);
    let ends = BatchEnds(block.batch_words());
    let mut became = match row.place {
        Some(_) => code::OK,
        None => code::OUT_OF_RANGE,
    };
    let at = row.place.unwrap_or(RowBlocks {
        byte: 0,
        block: 0,
        blocks: 1,
    });
    let (mut reader, mut submitted, mut claimed) = (thread, Ok(()), None);
    if has_misses {
        reader = words.reader(row.id, row.is_missing() && row.leader == arch::lane());
        reader = arch::shuffle(arch::FULL, reader, row.leader);
        if let Some(queue) = &mut work.queue {
            let wants = row.is_missing() && reader == thread;
            submitted = queue.submit(ends, wants, || command(rows, (station, thread, 0), at));
            if wants && submitted.is_ok() {
                let hand = (arch::now_ns() as u32 >> 5).wrapping_add(thread);
                claimed = of.cache.claim(row.id, of.epoch, hand);
            }
        }
    }
    let deadline_ns = GpuThread.now_ns().saturating_add(rows.timeout_ns);
    let reads = row.is_missing() && reader == thread;
    let line = claimed.map_or(NOWHERE, |line| line.index());
    let (mut source, mut target, mut pass) = (row.source, NOWHERE, 0);
    loop {
        words.put(SOURCES + thread, source);
        words.put(TARGETS + thread, target);
        block.sync();
        // Loaded now and stored after the copy, which hides the time of the load.
        let shows = pass == 0 && block.leads();
        let found = if shows { hits.sum() } else { 0 };
        let run = CopyRun {
            words,
            first,
            count,
            slots: u64::from(station) * STATION_BYTES + rows.slots,
        };
        run.copy(work, of, units);
        if shows {
            hits.show(found);
        }
        // All bytes are copied, and nothing reads the words any more.
        block.sync();
        match pass {
            0 => {
                row.release(of);
                if !has_misses {
                    return became;
                }
                let left = match &mut work.queue {
                    Some(queue) => queue.finish(ends, &GpuThread, deadline_ns),
                    None => Ok(0),
                };
                work.has_lost = left != Ok(0);
                let slot = thread * rows.slot_bytes + in_slot(rows, at);
                let mut mine = code::NOT_RUN;
                if work.queue.is_some() {
                    mine = ended((submitted, left), ends.status(thread));
                }
                words.put(CODES + thread, mine as u32);
                let place = if claimed.is_some() { LINE | line } else { slot };
                words.put(PLACES + thread, place);
                block.sync();
                if row.is_missing() {
                    became = words.get(CODES + reader) as i32;
                }
                source = if reads && became == code::OK {
                    slot
                } else {
                    NOWHERE
                };
                target = line;
            }
            1 => {
                let is_left =
                    row.is_missing() && became == code::OK && (!reads || claimed.is_some());
                if block.vote(is_left).total == 0 {
                    break;
                }
                source = if is_left {
                    words.get(PLACES + reader)
                } else {
                    NOWHERE
                };
                target = NOWHERE;
            }
            _ => break,
        }
        pass += 1;
    }
    if let Some(line) = claimed {
        match became {
            code::OK => of.cache.publish(line, row.id, of.epoch),
            _ => of.cache.abandon(line),
        }
    }
    became
}

/// The rows of a copy by all threads of a block.
struct CopyRun<'w> {
    words: &'w BlockWords,
    first: u64,
    count: u32,
    /// Address of the station's slots.
    slots: u64,
}

impl CopyRun<'_> {
    /// Copies each row that has a source to its line or to the output.
    #[inline(always)]
    fn copy<M: RowMap>(&self, work: &BatchWork<'_, '_, M>, of: &CacheOf<'_>, units: UnitSteps) {
        let rows = work.rows;
        let of_line = |line: u32| of.data + u64::from(line & !LINE) * u64::from(of.line_bytes);
        let place = |row: u32, byte: u64| {
            let (mut source, mut target) = (NOWHERE, NOWHERE);
            if row < self.count {
                source = self.words.get(SOURCES + row);
                target = self.words.get(TARGETS + row);
            }
            let from = match source & LINE {
                0 => self.slots + u64::from(source),
                _ => of_line(source),
            };
            let to = match target {
                NOWHERE => rows.out + (self.first + u64::from(row)) * rows.out_stride,
                line => of_line(line),
            };
            (source != NOWHERE, to + byte, from + byte)
        };
        // SAFETY: a unit of a row with a source lies inside the row: in its slot or line, and in its line or the output.
        unsafe { units.copy(rows.unit_shift, self.count, place) };
    }
}

/// Words that the threads of a block share.
struct BlockWords(&'static [AtomicU32; WORDS]);

#[cfg(target_arch = "nvptx64")]
const _: () = assert!(WORDS * 4 == 6148);

impl BlockWords {
    /// Returns the words of the calling thread's block. Not inlined: the array must exist once.
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    fn here() -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        let address = arch::shared("nvme_cached", WORDS as u32 * 4);
        #[cfg(target_arch = "nvptx64")]
        let address: u64;
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: the instruction names a static shared array; takes its address only.
        unsafe {
            asm!("{{ .shared .align 4 .b8 nvme_cached[6148]; .reg .u64 a; mov.u64 a, nvme_cached; cvta.shared.u64 {}, a; }}",
                out(reg64) address, options(nostack));
        }
        // SAFETY: 6,148 bytes of shared memory, 4-byte aligned, that live as long as the block.
        Self(unsafe { &*(address as usize as *const [AtomicU32; WORDS]) })
    }

    #[inline(always)]
    fn word(&self, index: u32) -> &AtomicU32 {
        self.0.get(index as usize).unwrap_or(&self.0[0])
    }

    #[inline(always)]
    fn get(&self, index: u32) -> u32 {
        self.word(index).load(Order::Relaxed, Scope::Cta)
    }

    #[inline(always)]
    fn put(&self, index: u32, value: u32) {
        self.word(index).store(value, Order::Relaxed, Scope::Cta);
    }

    /// Stores the id of the thread's row; no row has a reader yet.
    #[inline(always)]
    fn begin(&self, id: u64) {
        let thread = arch::thread();
        self.put(IDS + thread, id as u32);
        self.put(IDS + THREADS + thread, (id >> 32) as u32);
        // A block may have fewer threads than the table has words.
        let mut at = thread;
        while at < 2 * THREADS {
            self.put(READERS + at, 0);
            at += arch::block_threads();
        }
    }

    /// Returns the thread of the block that reads the row `id`: the first one that asks. Threads that do not `want` the
    /// row get their own number.
    #[inline(always)]
    fn reader(&self, id: u64, wants: bool) -> u32 {
        let thread = arch::thread();
        let mut at = (id as u32 ^ (id >> 32) as u32).wrapping_mul(0x9E37_79B1) >> 23;
        // At most half of the words are in use, so that one is free.
        let mut left = if wants { 2 * THREADS } else { 0 };
        while left != 0 {
            let word = self.word(READERS + at);
            let seen = word.compare_exchange(0, thread + 1, Order::Relaxed, Scope::Cta);
            if seen == 0 {
                break;
            }
            let other = seen - 1;
            let low = self.get(IDS + other);
            let high = self.get(IDS + THREADS + other);
            if low == id as u32 && high == (id >> 32) as u32 {
                return other;
            }
            at = (at + 1) % (2 * THREADS);
            left -= 1;
        }
        thread
    }
}
