//! The kernels that gather rows as a host thread: block after block, row after row.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::kernels::Bus;
use nvme_core::gate::{Gate, words};
use nvme_core::group::ExecContext;
use nvme_core::handoff::QueueWords;
use nvme_core::row_cache::{Line, RowCache, epoch};
use nvme_core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{Cells, Command, Data, Outcome, SharedQueue, SubmitError, WaitError};
use nvme_formats::{Format, Wide};
use nvme_gpu_kernel::Queues;
use nvme_gpu_kernel::rows::{
    BLOCK_WARPS, Cached, Check, Follow, Gather, ListHead, Listed, Piece, Place, Progress, Range,
    Ranges, STATION_BYTES, STATION_CELLS, Split, Summary, Widened, code, worst,
};
use nvme_gpu_kernel::work::data_word;
use std::sync::Mutex;

/// The symbols, in the order in which the driver numbers them.
pub const NAMES: [&std::ffi::CStr; 10] = [
    c"nvme_gather",
    c"nvme_copy_rows",
    c"nvme_check_rows",
    c"nvme_gather_cached",
    c"nvme_widen_rows",
    c"nvme_gather_striped",
    c"nvme_read_ranges",
    c"nvme_scatter",
    c"nvme_read_listed",
    c"nvme_follow_rows",
];

/// One gather at a time: the blocks of a launch take turns, and a launch is one thread.
pub(crate) static TURN: Mutex<()> = Mutex::new(());

pub(crate) fn ids(rows: &Gather) -> impl Iterator<Item = i64> {
    let (at, is_wide) = (rows.ids as usize, rows.wide_ids != 0);
    (0..rows.count as usize).map(move |index| match is_wide {
        _ if at == 0 => index as i64,
        // SAFETY: the host gives `count` ids.
        true => unsafe { *(at as *const i64).add(index) },
        // SAFETY: as above.
        false => i64::from(unsafe { *(at as *const i32).add(index) }),
    })
}

/// The output's row `index`.
pub(crate) fn out(rows: &Gather, index: usize) -> *mut u8 {
    (rows.out + index as u64 * rows.out_stride) as usize as *mut u8
}

pub fn copy(rows: &Gather) {
    for (index, id) in ids(rows).enumerate() {
        if let Some(place) = rows.place(id) {
            let from = (rows.slots + place.byte) as usize as *const u8;
            // SAFETY: a row of the table and one of the output, which the host vouches for.
            unsafe { from.copy_to(out(rows, index), rows.row_bytes as usize) };
        }
    }
}

pub fn check(check: &Check) {
    let mut wrong = 0;
    for (index, id) in ids(&check.gather).enumerate() {
        let Some(place) = check.gather.place(id) else {
            wrong += 1;
            continue;
        };
        let have = out(&check.gather, index).cast::<u64>();
        let words = 0..check.gather.row_bytes as usize / 8;
        let is_right = |at: usize| {
            // SAFETY: inside the output's row.
            let have = unsafe { have.add(at).read_unaligned() };
            have == data_word(check.seed, place.byte / 8 + at as u64)
        };
        wrong += u64::from(!words.into_iter().all(is_right));
    }
    // SAFETY: the host gives the count.
    unsafe { *(check.wrong as usize as *mut u64) += wrong };
}

/// The cache of a launch.
struct CacheOf<'r> {
    cache: RowCache<'r>,
    epoch: u32,
    data: u64,
    line_bytes: u64,
}

impl CacheOf<'_> {
    fn bytes(&self, line: Line) -> *mut u8 {
        (self.data + u64::from(line.index()) * self.line_bytes) as usize as *mut u8
    }
}

/// The same by way of a cache.
pub fn gather_cached(rows: &Cached, blocks: u32) {
    run(&rows.gather, blocks, cache_of(rows).as_ref());
}

fn cache_of(rows: &Cached) -> Option<CacheOf<'_>> {
    let lines = rows.lines as usize;
    if lines == 0 {
        return None;
    }
    // SAFETY: the host gives as many words of each kind, and both counts of writes.
    unsafe {
        let states = std::slice::from_raw_parts(rows.states as usize as *const AtomicU32, lines);
        let ids = std::slice::from_raw_parts(rows.ids as usize as *const AtomicU64, lines);
        let epochs = std::slice::from_raw_parts(rows.epochs as usize as *const AtomicU32, lines);
        let by_host = &*(rows.written_by_host as usize as *const AtomicU32);
        let by_gpu = &*(rows.written_by_gpu as usize as *const AtomicU32);
        Some(CacheOf {
            cache: RowCache::new(states, ids, epochs).expect("a set of lines"),
            epoch: epoch(
                by_host.load(Order::Acquire, Scope::Sys),
                by_gpu.load(Order::Acquire, Scope::Gpu),
            ),
            data: rows.data,
            line_bytes: u64::from(rows.line_bytes),
        })
    }
}

pub fn gather(rows: &Gather, blocks: u32) {
    run(rows, blocks, None);
}

/// Pieces of ranges, one by one.
pub fn read_ranges(ranges: &Ranges, blocks: u32) {
    let rows = &ranges.gather;
    read_pieces(rows, rows.count, |index| ranges.piece(index), blocks);
}

/// Pieces of the ranges that a kernel has listed.
pub fn read_listed(listed: &Listed, blocks: u32) {
    // SAFETY: the host vouches for the list.
    let (head, words) = unsafe {
        let head = *(listed.list as usize as *const ListHead);
        let ranges = head.range_count.min(listed.most_ranges.into()) as usize;
        let words = (listed.list as usize + size_of::<ListHead>()) as *const u64;
        (
            head,
            std::slice::from_raw_parts(words, ranges * size_of::<Range>() / 8),
        )
    };
    let ranges = (words.len() * 8 / size_of::<Range>()) as u32;
    let split = Split {
        range_count: ranges,
        piece_shift: listed.piece_shift,
    };
    let piece = |index| split.piece(index, ranges, |at| words[at as usize / 8]);
    let count = if ranges == 0 { 0 } else { head.pieces };
    read_pieces(
        &listed.gather,
        count.min(listed.gather.count),
        piece,
        blocks,
    );
}

fn read_pieces(rows: &Gather, count: u64, piece_of: impl Fn(u64) -> Piece, blocks: u32) {
    let (mut failed, mut first) = (0, 0);
    for block in 0..u64::from(blocks) {
        let _turn = TURN.lock();
        let mut thread = Thread::enter(rows, gate_of(rows), None);
        let lanes = u64::from(rows.lanes * BLOCK_WARPS);
        let mine = |index: &u64| index / lanes % u64::from(blocks) == block;
        for index in (0..count).filter(mine) {
            let piece = piece_of(index);
            let place = rows.blocks_of(piece.byte, piece.bytes);
            let to = piece.to as usize as *mut u8;
            let bytes = piece.bytes as usize;
            let code = thread.move_to(Some(place), (to, bytes), (index % lanes) as u32);
            if rows.status != 0 {
                // SAFETY: the host gives a word for each piece.
                unsafe {
                    (rows.status as usize as *mut i32)
                        .add(index as usize)
                        .write(code)
                };
            }
            if code != code::OK {
                failed += 1;
                first = worst(index, None, code).max(first);
            }
        }
        thread.leave();
    }
    finish(rows, failed, first);
}

pub(crate) fn gate_of(rows: &Gather) -> Gate<'_> {
    let gate = rows.gate as usize as *const AtomicU32;
    // SAFETY: the host gives the words of a gate.
    let gate = unsafe { std::slice::from_raw_parts(gate, words(rows.station_count)) };
    Gate::new(gate).expect("words of a gate")
}

/// All blocks of a launch of `blocks` blocks.
fn run(rows: &Gather, blocks: u32, cache: Option<&CacheOf<'_>>) {
    let gate = gate_of(rows);
    let asked: Vec<i64> = ids(rows).collect();
    let (mut failed, mut first) = (0, 0);
    for block in 0..blocks {
        let _turn = TURN.lock();
        let mut thread = Thread::enter(rows, gate, cache);
        let lanes = (rows.lanes * BLOCK_WARPS) as usize;
        let chunks = asked.chunks(lanes).enumerate();
        for (chunk, asked) in chunks.skip(block as usize).step_by(blocks as usize) {
            for (lane, id) in asked.iter().enumerate() {
                let index = chunk * lanes + lane;
                let code = thread.row(index, *id, lane as u32);
                if code != code::OK {
                    clear(rows, index);
                }
                if rows.status != 0 {
                    // SAFETY: the host gives a word for each row.
                    unsafe { *(rows.status as usize as *mut i32).add(index) = code };
                }
                if code != code::OK {
                    failed += 1;
                    first = worst(index as u64, None, code).max(first);
                }
            }
        }
        thread.leave();
    }
    finish(rows, failed, first);
}

/// Widens rows in place.
pub fn widen(wide: &Widened) {
    let format = Format::of_number(wide.format).expect("a format");
    let to = Wide::of_number(wide.wide).expect("a wide one");
    let rows = &wide.gather;
    for index in 0..rows.count as usize {
        // SAFETY: the wide row, whose last bytes the stored one is; the host vouches for it.
        let row = unsafe {
            let begin = out(rows, index).sub(wide.before as usize);
            std::slice::from_raw_parts_mut(begin, (wide.elements * to.bytes()) as usize)
        };
        let stored = row[wide.before as usize..].to_vec();
        assert!(nvme_formats::widen(format, to, &stored, row));
    }
    finish(rows, 0, 0);
}

/// Makes a row of zeros of the output's row `index`.
pub(crate) fn clear(rows: &Gather, index: usize) {
    let format = Format::of_number(rows.failed_as);
    for at in 0..rows.row_bytes {
        let byte = format.map_or(0, |format| format.zero_byte(at));
        // SAFETY: the row's place in the output.
        unsafe { *out(rows, index).add(at as usize) = byte };
    }
}

/// Tells the host of a launch's end.
pub(crate) fn finish(rows: &Gather, failed: u64, first: u64) {
    // SAFETY: the host gives both; the progress stays zero, as the kernel leaves it.
    unsafe {
        let progress = &mut *(rows.progress as usize as *mut Progress);
        progress.launches = progress.launches.wrapping_add(1);
        let summary = rows.summary as usize as *mut Summary;
        (&*(&raw const (*summary).failed).cast::<AtomicU64>()).store(
            failed,
            Order::Relaxed,
            Scope::Sys,
        );
        (&*(&raw const (*summary).worst).cast::<AtomicU64>()).store(
            first,
            Order::Relaxed,
            Scope::Sys,
        );
        let ended = &*(&raw const (*summary).ended).cast::<AtomicU32>();
        ended.store(progress.launches, Order::Release, Scope::Sys);
    }
}

/// A block that reads rows by itself, without a gather.
pub struct Reader<'r>(Thread<'r>);

impl<'r> Reader<'r> {
    pub fn enter(rows: &'r Gather) -> Self {
        Self(Thread::enter(rows, gate_of(rows), None))
    }

    /// The address of row `id` in the slot of `thread`, or why it was not read.
    pub fn row(&mut self, id: i64, thread: u32) -> Result<u64, i32> {
        let here = &mut self.0;
        let Some(place) = here.rows.place(id) else {
            return Err(code::OUT_OF_RANGE);
        };
        if here.ends == code::OK && here.gate.look().is_err() {
            here.ends = code::GONE;
        }
        let ended = match here.ends {
            code::OK if thread >= here.rows.threads() => code::NOT_RUN,
            code::OK => here.read(place, thread),
            other => other,
        };
        let block = place.block << here.rows.block_shift;
        match ended {
            code::OK => Ok(here.rows.slots + here.slot(thread) + (place.byte - block)),
            other => Err(other),
        }
    }

    pub fn leave(self) {
        self.0.leave();
    }
}

/// Walks from row to row: block after block, warp after warp, walk after walk.
pub fn follow(follow: &Follow, blocks: u32) {
    let rows = &follow.gather;
    let starts: Vec<i64> = ids(rows).collect();
    let (mut failed, mut first) = (0, 0);
    let lanes = (rows.lanes * BLOCK_WARPS) as usize;
    for block in 0..blocks {
        let mut reader = Reader::enter(rows);
        let chunks = starts.chunks(lanes).enumerate();
        for (chunk, starts) in chunks.skip(block as usize).step_by(blocks as usize) {
            for (lane, start) in starts.iter().enumerate() {
                let (walk, mut id, mut became) = (chunk * lanes + lane, *start, code::OK);
                for hop in 0..follow.hops as usize {
                    let from = match reader.row(id, lane as u32) {
                        Ok(from) => from as usize as *const u8,
                        Err(why) => {
                            became = why;
                            break;
                        }
                    };
                    let to = out(rows, walk * follow.hops as usize + hop);
                    // SAFETY: the row in its slot, and its place in the output.
                    let word = unsafe {
                        from.copy_to(to, rows.row_bytes as usize);
                        from.cast::<u64>().read_unaligned()
                    };
                    id = (word % rows.rows) as i64;
                }
                // SAFETY: the host gives a word for each walk, and for its code.
                unsafe {
                    (follow.ends as usize as *mut i64).add(walk).write(id);
                    if rows.status != 0 {
                        (rows.status as usize as *mut i32).add(walk).write(became);
                    }
                }
                if became != code::OK {
                    failed += 1;
                    first = worst(walk as u64, None, became).max(first);
                }
            }
        }
        reader.leave();
    }
    finish(rows, failed, first);
}

/// What a block is here.
pub(crate) struct Thread<'r> {
    rows: &'r Gather,
    gate: Gate<'r>,
    station: Option<u32>,
    queue: Option<SharedQueue<'r>>,
    pub ends: i32,
    has_lost: bool,
    cache: Option<&'r CacheOf<'r>>,
}

impl<'r> Thread<'r> {
    /// A block that writes rows: not while a command without an end may still take place.
    pub(crate) fn enter_to_write(rows: &'r Gather) -> Self {
        let gate = gate_of(rows);
        let mut thread = Self::enter(rows, gate, None);
        if thread.station.is_some() && gate.has_trouble() {
            thread.ends = code::GONE;
        }
        thread
    }

    fn enter(rows: &'r Gather, gate: Gate<'r>, cache: Option<&'r CacheOf<'r>>) -> Self {
        let station = claim(rows, &gate);
        let ends = match station {
            Some(_) => code::OK,
            None if gate.look().is_err() => code::GONE,
            None => code::NOT_RUN,
        };
        Self {
            rows,
            gate,
            station,
            queue: station.map(|station| queue(&rows.queues, station)),
            ends,
            has_lost: false,
            cache,
        }
    }

    /// Reads one row and copies it, or zeroes its place.
    fn row(&mut self, index: usize, id: i64, lane: u32) -> i32 {
        let rows = self.rows;
        let place = rows.place(id);
        let to = out(rows, index);
        let bytes = rows.row_bytes as usize;
        self.look();
        let cache = self
            .cache
            .filter(|_| place.is_some() && self.ends == code::OK);
        if let Some(of) = cache
            && let Some(line) = of.cache.find(id as u64, of.epoch)
        {
            // SAFETY: the row's line, and its place in the output.
            unsafe { of.bytes(line).copy_to(to, bytes) };
            of.cache.release(line);
            return code::OK;
        }
        let code = self.move_to(place, (to, bytes), lane);
        if let Some(of) = cache.filter(|_| code == code::OK)
            && let Some(line) = of.cache.claim(id as u64, of.epoch, index as u32)
        {
            // SAFETY: as above.
            unsafe { to.copy_to(of.bytes(line), bytes) };
            of.cache.publish(line, id as u64, of.epoch);
        }
        code
    }

    pub(crate) fn look(&mut self) {
        if self.ends == code::OK && self.gate.look().is_err() {
            self.ends = code::GONE;
        }
    }

    /// Reads the bytes at `place` and copies them, or zeroes where they go.
    fn move_to(&mut self, place: Option<Place>, (to, bytes): (*mut u8, usize), lane: u32) -> i32 {
        let rows = self.rows;
        self.look();
        let code = match place {
            None => code::OUT_OF_RANGE,
            Some(place) if self.ends == code::OK => self.read(place, lane),
            Some(_) => self.ends,
        };
        match (code, place) {
            (code::OK, Some(place)) => {
                let block = place.block << rows.block_shift;
                let from = rows.slots + self.slot(lane) + (place.byte - block);
                // SAFETY: the bytes in their slot, and their place in the output.
                unsafe { (from as usize as *const u8).copy_to(to, bytes) };
            }
            // SAFETY: the place in the output.
            _ => unsafe { to.write_bytes(0, bytes) },
        }
        code
    }

    fn slot(&self, lane: u32) -> u64 {
        let station = u64::from(self.station.unwrap_or(0)) * STATION_BYTES;
        station + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    fn read(&mut self, place: Place, lane: u32) -> i32 {
        let sqe = nvm::read(Nsid(self.rows.nsid), Lba(place.block), place.blocks);
        self.carry_out(sqe, place.blocks, lane)
    }

    /// Writes the blocks at `place` from `from` on.
    pub(crate) fn write(&mut self, place: Place, from: *const u8, lane: u32) -> i32 {
        let (rows, slot) = (self.rows, self.slot(lane));
        let to = (rows.slots + slot) as usize as *mut u8;
        // SAFETY: a row of the host's, and the slot of the lane.
        unsafe { from.copy_to(to, rows.row_bytes as usize) };
        let sqe = nvm::write(Nsid(rows.nsid), Lba(place.block), place.blocks);
        self.carry_out(sqe, place.blocks, lane)
    }

    /// A command over the slot of `lane`.
    fn carry_out(&mut self, sqe: Sqe, blocks: u32, lane: u32) -> i32 {
        let rows = self.rows;
        let (Some(queue), Some(station)) = (&self.queue, self.station) else {
            return code::GONE;
        };
        let data = Data::Contiguous {
            iova: Iova(rows.slots_iova + self.slot(lane)),
            len: u64::from(blocks) << rows.block_shift,
        };
        let command = || Command::new(sqe, data, station * STATION_CELLS + lane);
        let code = run_command(queue, command, rows.timeout_ns);
        if code == code::TIMED_OUT || code == code::GONE {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
        code
    }

    pub(crate) fn leave(self) {
        if self.has_lost {
            self.gate.report_trouble();
        }
        let Some(station) = self.station else { return };
        if self.has_lost {
            self.gate.leave_lost(station);
        } else {
            self.gate.leave(station);
            owner(self.rows, station).store(0, Order::Release, Scope::Gpu);
        }
    }
}

/// Carries out a command: 0, its status, or why it has no end.
pub(crate) fn run_command<'d>(
    queue: &SharedQueue<'_>,
    command: impl Fn() -> Command<'d>,
    timeout_ns: u64,
) -> i32 {
    let here = Bus::default();
    match queue.run(&here, command, here.now_ns() + timeout_ns) {
        Ok(Ok((Outcome::Completed(status), _))) => i32::from(status.code()),
        Ok(Ok((Outcome::Aborted(_), _))) => code::GONE,
        Ok(Err(SubmitError::Refused)) | Err((WaitError::Refused, _)) => code::GONE,
        Ok(Err(SubmitError::QueueFull)) | Err((WaitError::TimedOut, _)) => code::TIMED_OUT,
        Ok(Err(_)) => code::NOT_RUN,
    }
}

pub(crate) fn owner(rows: &Gather, station: u32) -> &AtomicU32 {
    let words = rows.stations as usize as *const AtomicU32;
    // SAFETY: the host gives a word for each station.
    unsafe { &*words.add(station as usize) }
}

pub(crate) fn claim(rows: &Gather, gate: &Gate<'_>) -> Option<u32> {
    gate.look().ok()?;
    for station in 0..rows.station_count {
        let owner = owner(rows, station);
        if owner.compare_exchange(0, 1, Order::Acquire, Scope::Gpu) != 0 {
            continue;
        }
        if gate.enter(station).is_ok() {
            return Some(station);
        }
        owner.store(0, Order::Release, Scope::Gpu);
        return None;
    }
    None
}

pub(crate) fn queue(queues: &Queues, station: u32) -> SharedQueue<'static> {
    let words = queues.queues as usize as *const QueueWords;
    // SAFETY: the host vouches for the queues and the cells.
    unsafe {
        let words = &*words.add((station % queues.queue_count) as usize);
        let (memory, state) = words.attach().expect("possible sizes");
        let cells = queues.cells as usize as *const AtomicU64;
        let cells = std::slice::from_raw_parts(cells, queues.cell_count as usize);
        SharedQueue::new(memory, state, Cells::new(cells))
    }
}
