//! Launches of the kernels' source: their lanes run a few collectives at a turn, and other actors act between two
//! turns.
// UNSAFETY: kernels take addresses of what their launch and the world keep.
#![allow(unsafe_code)]

use super::{World, address};
use crate::account::Failure;
use crate::memory::{Area, PAGE};
use crate::setup::BLOCK_BYTES;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::entries::{
    nvme_begin_batched, nvme_finish_batched, nvme_gather, nvme_gather_batched,
    nvme_gather_batched_cached, nvme_gather_cached, nvme_read_listed, nvme_scatter,
    nvme_scatter_batched,
};
use nvme_gpu_kernel::lanes::{HostGrid, LaunchTurn, RunningLaunch as Lanes};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, Batched, BatchedScatter, CachedBatched, CachedGather, GatherLaunch,
    LaunchProgress, LaunchSummary, ListHead, ListedLaunch, RangeTarget, RowBlocks, ScatterLaunch,
    code,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Value of a status word before a launch.
const NO_CODE: u32 = 0x7777_7777;
/// Value of the output before a gather.
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;
/// log2 of the bytes of a piece of a range.
const PIECE_SHIFT: u32 = BLOCK_BYTES.trailing_zeros() + 1;

/// The kind of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Gather,
    Cached,
    Listed,
    Scatter,
    /// A scatter by the queue that one station owns.
    BatchedScatter,
    /// A gather by the queue that one station owns.
    Batched,
    /// The same through the cache.
    BatchedCached,
    /// The two halves of such a gather.
    Begin,
    Finish,
}

impl Work {
    pub fn is_write(self) -> bool {
        matches!(self, Self::Scatter | Self::BatchedScatter)
    }
}

/// A launch under way, or one that has ended.
pub(super) struct Launch {
    pub work: Work,
    pub ids: Vec<i64>,
    rows: GatherLaunch,
    ranges: Vec<RangeTarget>,
    out: Area,
    /// Another launch writes to the same output at the same time: its bytes are of either.
    is_overwritten: bool,
    /// The version of each block that it writes.
    versions: Vec<(u32, u32)>,
    codes: Vec<AtomicU32>,
    /// Version of each block that the launch has to see, or a later one.
    pub(super) floor: Vec<u32>,
    lanes: Option<Lanes>,
    // The kernel gets the addresses of these.
    id_words: Vec<AtomicU64>,
    list: Vec<AtomicU64>,
    ends: Ends,
}

/// Counts of a launch in the kernel's format: a [`LaunchProgress`], and a [`LaunchSummary`].
pub(super) struct Ends {
    pub words: Vec<AtomicU64>,
    /// Index of the summary's first word.
    pub summary: usize,
}

impl Ends {
    /// Stations are tried from one on that the summary's address gives: it is the same in each process.
    pub fn new() -> Self {
        let words = words([0; PROGRESS_WORDS + STATION_WORDS + SUMMARY_WORDS].into_iter());
        let each = super::STATIONS * size_of::<LaunchSummary>() as u32;
        let is_first = |at: &usize| (address(&words[*at..]) as u32).is_multiple_of(each);
        let mut places = PROGRESS_WORDS..PROGRESS_WORDS + STATION_WORDS;
        let summary = places.find(is_first).expect("one of as many words");
        Self { words, summary }
    }

    /// Returns what the summary says: launches that ended, rows that failed, the word of the first of them.
    pub fn counts(&self) -> (u32, u64, u64) {
        let of = |at: usize| word(&self.words[self.summary + at]);
        (of(2) as u32, of(0), of(1))
    }
}

/// Words of a [`LaunchProgress`], which lies before the [`LaunchSummary`].
const PROGRESS_WORDS: usize = size_of::<LaunchProgress>() / 8;

/// Words of a [`LaunchSummary`], and of one for each station.
const SUMMARY_WORDS: usize = size_of::<LaunchSummary>() / 8;
const STATION_WORDS: usize = SUMMARY_WORDS * super::STATIONS as usize;

const _: () = assert!(
    size_of::<LaunchProgress>().is_multiple_of(8) && size_of::<LaunchSummary>().is_multiple_of(8)
);

fn word(word: &AtomicU64) -> u64 {
    word.load(Order::Relaxed, Scope::Gpu)
}

fn words(values: impl Iterator<Item = u64>) -> Vec<AtomicU64> {
    values.map(AtomicU64::new).collect()
}

impl Launch {
    pub fn is_under_way(&self) -> bool {
        self.lanes.is_some()
    }

    pub fn code(&self, index: usize) -> Option<i32> {
        let code = self.codes[index].load(Order::Relaxed, Scope::Gpu);
        (code != NO_CODE).then_some(code as i32)
    }

    /// Returns true if row `index` of a scatter may have been in one command with the row written before it in
    /// its chunk, and both have `code`. Rows whose id comes again later are not written and lie between.
    fn is_neighbour(&self, index: usize, code: i32) -> bool {
        let chunk = self.rows.lanes as usize;
        let first = index - index % chunk;
        let mut earlier = (first..index).rev();
        let before = earlier.find(|at| {
            let id = self.ids[*at];
            self.rows.place(id).is_some() && !self.ids[at + 1..].contains(&id)
        });
        before.is_some_and(|at| {
            self.ids[at].checked_add(1) == Some(self.ids[index]) && self.code(at) == Some(code)
        })
    }

    /// Returns true if an earlier row of the launch is the same one, and both have `code`: it was read once.
    fn is_again(&self, index: usize, code: i32) -> bool {
        (0..index).any(|at| self.ids[at] == self.ids[index] && self.code(at) == Some(code))
    }

    pub fn codes(&self) -> impl Iterator<Item = Option<i32>> {
        (0..self.codes.len()).map(|index| self.code(index))
    }
}

impl World<'_> {
    /// Launches `blocks` blocks that read or write the rows of `ids`; pieces of ranges take `ids` for blocks.
    pub(super) fn launch(&mut self, work: Work, ids: Vec<i64>, blocks: u32) {
        let rows = self.rows_of(work);
        let ranges = match work {
            Work::Listed => self.ranges_of(&ids),
            _ => Vec::new(),
        };
        let pieces = ranges.iter().map(|range| range.pieces(PIECE_SHIFT)).sum();
        let count = match work {
            Work::Listed => pieces,
            _ => ids.len() as u64,
        };
        let stride = u64::from(rows.row_bytes).next_multiple_of(16);
        let bytes = match work {
            Work::Listed => ranges.iter().map(|range| range.bytes).sum(),
            _ => count * stride,
        };
        let out = self.drive.memory.take(bytes, PAGE);
        self.overwrite(out);
        let mut launch = Launch {
            work,
            rows,
            versions: Vec::new(),
            codes: (0..count).map(|_| AtomicU32::new(NO_CODE)).collect(),
            floor: self.table.floor(),
            lanes: None,
            id_words: words(ids.iter().map(|id| *id as u64)),
            list: Vec::new(),
            ends: Ends::new(),
            ids,
            ranges,
            out,
            is_overwritten: matches!(work, Work::Cached | Work::BatchedCached)
                && self.others.below(4) == 0,
        };
        if work.is_write() {
            self.fill(&mut launch);
        }
        let at = self.drive.memory.address(out);
        for range in &mut launch.ranges {
            range.to += at;
        }
        let head = [launch.ranges.len() as u64, pieces];
        let of_range = |range: &RangeTarget| [range.byte, range.bytes, range.to, range.first];
        let ranges = launch.ranges.iter().flat_map(of_range);
        launch.list = words(head.into_iter().chain(ranges));
        let unit = (rows.first_byte | u64::from(rows.row_bytes)).trailing_zeros();
        launch.rows = GatherLaunch {
            ids: address(&launch.id_words),
            wide_ids: 1,
            out: at,
            out_stride: stride,
            status: address(&launch.codes),
            progress: address(&launch.ends.words),
            summary: address(&launch.ends.words[launch.ends.summary..]),
            count,
            unit_shift: match work {
                Work::Listed => 0,
                _ => unit.min(4),
            },
            ..rows
        };
        self.start(launch, blocks);
    }

    /// Fills an output with bytes that are of no row.
    fn overwrite(&self, out: Area) {
        let to = self.drive.memory.words(out);
        (0..to.len()).for_each(|at| to.set(at, CANARY));
    }

    /// Returns the table of a launch; pieces of ranges are rows, too.
    fn rows_of(&self, work: Work) -> GatherLaunch {
        match work {
            Work::Scatter | Work::BatchedScatter => self.whole,
            Work::Gather
            | Work::Cached
            | Work::Batched
            | Work::BatchedCached
            | Work::Begin
            | Work::Finish => self.rows,
            Work::Listed => GatherLaunch {
                row_bytes: 1 << PIECE_SHIFT,
                slot_bytes: 1 << PIECE_SHIFT,
                ..self.rows
            },
        }
    }

    fn start(&mut self, mut launch: Launch, blocks: u32) {
        let threads = match launch.work {
            // As many as its rows need, and two warps at least.
            Work::Batched
            | Work::BatchedCached
            | Work::BatchedScatter
            | Work::Begin
            | Work::Finish => (launch.ids.len() as u32).next_multiple_of(32).max(64),
            _ => BLOCK_THREADS,
        };
        let grid = HostGrid {
            blocks,
            threads,
            at_once: 2,
            clock: self.clock.clone(),
        };
        let gather = launch.rows;
        launch.lanes = Some(match launch.work {
            // SAFETY: the addresses lead to memory of the world and of the launch, and the lanes end before either.
            Work::Gather => Lanes::new(grid, move || unsafe { nvme_gather(gather) }),
            Work::Batched
            | Work::BatchedCached
            | Work::BatchedScatter
            | Work::Begin
            | Work::Finish => {
                let batched = Batched {
                    gather,
                    owned: self.owned,
                    rows_of_block: launch.ids.len() as u32,
                    reserved: 0,
                };
                let cache = self.cached;
                let halved = self.halves.launch(batched);
                match launch.work {
                    Work::Begin => Lanes::new(grid, move || {
                        // SAFETY: as above.
                        unsafe { nvme_begin_batched(halved) }
                    }),
                    Work::Finish => Lanes::new(grid, move || {
                        // SAFETY: as above.
                        unsafe { nvme_finish_batched(halved) }
                    }),
                    Work::BatchedScatter => {
                        let written = cache.written_by_gpu;
                        let scatter = BatchedScatter { batched, written };
                        // SAFETY: as above.
                        Lanes::new(grid, move || unsafe { nvme_scatter_batched(scatter) })
                    }
                    Work::BatchedCached => Lanes::new(grid, move || {
                        // SAFETY: as above.
                        unsafe { nvme_gather_batched_cached(CachedBatched { batched, cache }) }
                    }),
                    // SAFETY: as above.
                    _ => Lanes::new(grid, move || unsafe { nvme_gather_batched(batched) }),
                }
            }
            Work::Cached => {
                let cached = CachedGather {
                    gather,
                    cache: self.cached,
                };
                // SAFETY: as above.
                Lanes::new(grid, move || unsafe { nvme_gather_cached(cached) })
            }
            Work::Listed => {
                let listed = ListedLaunch {
                    gather,
                    list: address(&launch.list),
                    most_ranges: launch.ranges.len() as u32,
                    piece_shift: PIECE_SHIFT,
                };
                // SAFETY: as above.
                Lanes::new(grid, move || unsafe { nvme_read_listed(listed) })
            }
            Work::Scatter => {
                let written = self.cached.written_by_gpu;
                let scatter = ScatterLaunch { gather, written };
                // SAFETY: as above.
                Lanes::new(grid, move || unsafe { nvme_scatter(scatter) })
            }
        });
        self.tell("launch", launch.work as u32, blocks as i32);
        self.launches.push(launch);
    }

    /// Ranges that begin at the blocks `ids`, of the lengths that are drawn.
    fn ranges_of(&mut self, ids: &[i64]) -> Vec<RangeTarget> {
        let (mut first, mut to) = (0, 0);
        let all = ids.iter().map(|id| {
            let byte = id.unsigned_abs() % 100 * BLOCK_BYTES + self.rng.below(BLOCK_BYTES);
            let bytes = 1 + self.rng.below(5 * BLOCK_BYTES);
            let range = RangeTarget {
                byte,
                bytes,
                to,
                first,
            };
            first += range.pieces(PIECE_SHIFT);
            to += bytes;
            range
        });
        all.collect()
    }

    /// Fills the buffer of a scatter: the last row with an id gets the next version, others get no version.
    fn fill(&mut self, launch: &mut Launch) {
        let out = self.drive.memory.words(launch.out);
        let blocks = u64::from(launch.rows.row_bytes) / BLOCK_BYTES;
        for (index, id) in launch.ids.iter().enumerate() {
            let Some(place) = launch.rows.place(*id) else {
                continue;
            };
            if launch.ids[index + 1..].contains(id) {
                continue;
            }
            for at in 0..blocks {
                let lba = (place.block + at) as u32;
                let (version, words) = self.table.issue(lba);
                launch.versions.push((lba, version));
                let row = index as u64 * u64::from(launch.rows.row_bytes) + at * BLOCK_BYTES;
                for (word, value) in words.into_iter().enumerate() {
                    out.set(row as usize / 8 + word, value);
                }
            }
        }
    }

    /// Runs a few collectives of one warp of launch `index`.
    pub(super) fn step(&mut self, index: usize) -> Result<LaunchTurn, Failure> {
        let Some(mut lanes) = self.launches[index].lanes.take() else {
            return Ok(LaunchTurn::Ended);
        };
        if self.launches[index].is_overwritten {
            self.overwrite(self.launches[index].out);
        }
        self.clock_ns.set(self.drive.now_ns);
        lanes.wake();
        // The output of such a launch changes between turns: short turns make it change between any two accesses.
        let most = match self.launches[index].is_overwritten {
            true => 4,
            false => 24,
        };
        let calls = 1 + self.rng.below(most) as u32;
        let rng = &mut self.rng;
        let mut pick = |most: u32| rng.below(u64::from(most)) as u32;
        let ran = catch_unwind(AssertUnwindSafe(|| {
            let turn = lanes.turn(calls, &mut pick);
            (lanes, turn)
        }));
        let (lanes, turn) = ran.map_err(|panic| crate::run::of_panic(&*panic))?;
        self.check_stations()?;
        match turn {
            LaunchTurn::Ended => {
                drop(lanes);
                self.end(index)?;
            }
            _ => self.launches[index].lanes = Some(lanes),
        }
        Ok(turn)
    }

    /// Ends a launch: checks the status and the content of its rows.
    fn end(&mut self, index: usize) -> Result<(), Failure> {
        let launch = &self.launches[index];
        let fail = |text: String| Failure::new("rows", format!("{:?}: {text}", launch.work));
        if launch.work == Work::Begin {
            let told = launch.ends.counts();
            let is_silent = told == (0, 0, 0) && launch.codes().all(|code| code.is_none());
            self.tell("begun", index as u32, 0);
            return match is_silent {
                true => Ok(()),
                false => Err(Failure::new("rows", format!("a first half told {told:?}"))),
            };
        }
        let failed = launch.codes().filter(|code| *code != Some(code::OK));
        let (ended, told, worst) = launch.ends.counts();
        if (ended, told) != (1, failed.count() as u64) || (worst == 0) != (told == 0) {
            let text = format!("{ended} launches have ended by the summary, with {told} failures");
            return Err(fail(text));
        }
        let lost = launch.codes().flatten();
        let lost = lost.filter(|code| *code == code::TIMED_OUT).count();
        self.counts.lost += lost as u64;
        let outcome = match launch.work {
            Work::Scatter | Work::BatchedScatter => self.judge_writes(index),
            Work::Listed => self.judge_pieces(index),
            _ => self.judge_rows(index),
        };
        self.counts.halves += u64::from(self.launches[index].work == Work::Finish);
        if self.launches[index].work == Work::BatchedScatter {
            self.counts.owned_writes += self.launches[index].ids.len() as u64;
        }
        outcome.map_err(|text| {
            Failure::new("rows", format!("{:?}: {text}", self.launches[index].work))
        })?;
        self.tell("end", index as u32, told as i32);
        Ok(())
    }

    /// Checks the code of a row; `has` is true if the table has its content. A status code must be that of a failed
    /// command.
    fn judge_code(&mut self, index: usize, row: usize, has: bool) -> Result<i32, String> {
        let launch = &self.launches[index];
        let Some(code) = launch.code(row) else {
            return Err(format!("row {row} has no code"));
        };
        self.counts.rows += 1;
        match code {
            1.. => {
                // Neighbours of a scatter that were one command keep its status if a recovery has closed the gate
                // before they were sent again one by one.
                let is_shared = match launch.work {
                    Work::Scatter => launch.is_neighbour(row, code),
                    Work::BatchedCached => launch.is_again(row, code),
                    _ => false,
                };
                if !is_shared {
                    self.statuses = self.statuses.checked_sub(1).ok_or_else(|| {
                        format!("row {row} has the status {code:#x}, and no command of it failed")
                    })?;
                }
                self.counts.failed += 1;
            }
            code::GONE => self.counts.gone += 1,
            _ => {}
        }
        match (code, has) {
            (code::OUT_OF_RANGE, true) | (code::OK, false) => Err(format!(
                "row {row} has code {code}, the table says otherwise"
            )),
            _ => Ok(code),
        }
    }

    fn judge_rows(&mut self, index: usize) -> Result<(), String> {
        for row in 0..self.launches[index].ids.len() {
            let launch = &self.launches[index];
            let place = launch.rows.place(launch.ids[row]);
            let code = self.judge_code(index, row, place.is_some())?;
            let at = row as u64 * self.launches[index].rows.out_stride;
            let bytes = u64::from(self.rows.row_bytes);
            self.judge_bytes(index, (code, place), (at, bytes))?;
        }
        Ok(())
    }

    fn judge_pieces(&mut self, index: usize) -> Result<(), String> {
        let mut number = 0;
        let begin = self.drive.memory.address(self.launches[index].out);
        for range in self.launches[index].ranges.clone() {
            let end = range.byte + range.bytes;
            let mut byte = range.byte;
            while byte < end {
                let next = ((byte >> PIECE_SHIFT) + 1) << PIECE_SHIFT;
                let bytes = next.min(end) - byte;
                let code = self.judge_code(index, number, true)?;
                let place = Some(self.rows.blocks_of(byte, bytes as u32));
                let at = range.to - begin + (byte - range.byte);
                self.judge_bytes(index, (code, place), (at, bytes))?;
                byte += bytes;
                number += 1;
            }
        }
        Ok(())
    }

    /// Checks that the bytes at `at` of the output are a version of the row's content, or zeros after a failure.
    fn judge_bytes(
        &mut self,
        index: usize,
        (code, place): (i32, Option<RowBlocks>),
        (at, bytes): (u64, u64),
    ) -> Result<(), String> {
        let launch = &self.launches[index];
        if launch.is_overwritten {
            return Ok(());
        }
        let mut have = vec![0; bytes as usize];
        let from = launch.out.iova.offset(at);
        self.drive.memory.read(from, &mut have);
        match (code, place) {
            (code::OK, Some(place)) => self.table.check(place, &have, &launch.floor),
            _ if have.iter().any(|byte| *byte != 0) => {
                let canary = CANARY as u8;
                Err(match have.iter().all(|byte| *byte == canary) {
                    true => format!("bytes at {at} with code {code} were not touched"),
                    false => format!("bytes at {at} with code {code} are not zero"),
                })
            }
            _ => Ok(()),
        }
    }

    /// Marks the blocks of written rows as committed; a failed row may have left any version that was issued.
    fn judge_writes(&mut self, index: usize) -> Result<(), String> {
        for row in 0..self.launches[index].ids.len() {
            let launch = &self.launches[index];
            let (id, blocks) = (launch.ids[row], launch.rows.row_bytes / BLOCK_BYTES as u32);
            let place = launch.rows.place(id);
            let is_last = !launch.ids[row + 1..].contains(&id);
            let code = self.judge_code(index, row, place.is_some())?;
            let Some(place) = place.filter(|_| is_last && code == code::OK) else {
                continue;
            };
            self.counts.written += 1;
            for at in 0..u64::from(blocks) {
                let lba = (place.block + at) as u32;
                let of = |version: &&(u32, u32)| version.0 == lba;
                let version = self.launches[index].versions.iter().find(of).copied();
                let (_, version) = version.ok_or("a row of no version")?;
                self.table.commit(lba, version);
            }
        }
        Ok(())
    }
}

const _: () = assert!(size_of::<ListHead>() == 16 && size_of::<RangeTarget>() == 32);
