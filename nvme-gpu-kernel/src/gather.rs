//! `nvme_gather`: rows of a table by ids that lie in GPU memory.
//!
//! A warp takes 32 ids at a time. Each lane finds its row's blocks; lanes with the same first block share one read,
//! and reads of neighbouring blocks by neighbouring lanes become one command, into the slots of those lanes, which
//! lie one after the other. When the reads have ended, the warp copies the rows from the slots to their places.
//! A read that failed for several rows is done again for each by itself, so that a row fails for its own blocks only.
//!
//! A block of threads holds a station while it runs: slots and result cells that no other block uses, and its word
//! at the gate. A station with a read that got no answer is not given back: the read may still write to its slot.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::{Block, Gpu, Narrow, converged};
use crate::rows::{
    BLOCK_WARPS, Check, Gather, Place, Progress, STATION_CELLS, Summary, WARP_BYTES, code, worst,
};
use crate::work::data_word;
use nvme_core::gate::{Gate, words};
use nvme_core::group::{ExecContext, Group, GroupOp};
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence};
use nvme_core::{Command, Data, Outcome, SharedQueue, SubmitError, WaitError};

/// No station was free in time, or the gate is shut.
const NO_STATION: u32 = u32::MAX;
/// Whether a block has a station.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// How much longer than one read a block waits for a station.
const STATION_PATIENCE: u64 = 16;

/// Gathers rows: blocks of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads, as many as are useful.
///
/// # Safety
/// Every address in `rows` is what [`Gather`] says; the queues exist on the controller and are shared.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_gather(rows: Gather) {
    let gate = rows.gate as usize as *const AtomicU32;
    // SAFETY: the host gives the words of a gate for `station_count` stations; they are atomics.
    let gate = unsafe { core::slice::from_raw_parts(gate, words(rows.station_count)) };
    let Some(gate) = Gate::new(gate) else { return };
    let block = Block::here();
    let mut station = NO_STATION;
    if block.leads() {
        station = claim(&rows, &gate);
    }
    let station = block.broadcast(station);
    let warp = arch::thread() / 32;
    let number = station
        .wrapping_mul(BLOCK_WARPS)
        .wrapping_add(warp)
        .checked_rem(rows.queues.queue_count)
        .unwrap_or(0);
    // SAFETY: the host vouches for the queues.
    let queue = match station {
        NO_STATION => None,
        _ => unsafe { rows.queues.shared(number) },
    };
    let mut work = Warp {
        rows: &rows,
        gate: Some(gate),
        queue,
        cell: station * STATION_CELLS + warp * 32,
        slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
        // A warp without a station writes codes alone.
        ends: match station {
            NO_STATION if gate.look().is_err() => code::GONE,
            NO_STATION => code::NOT_RUN,
            _ => code::OK,
        },
        has_lost: false,
        failed: 0,
        worst: 0,
    };
    work.gather_all(
        arch::block() * BLOCK_WARPS + warp,
        arch::blocks() * BLOCK_WARPS,
    );
    if arch::lane() == 0 {
        work.report();
        if work.has_lost {
            gate.report_trouble();
        }
    }
    // Every warp has left its slots, and its writes are ordered before what the leader does.
    let keeps = block.vote(work.has_lost).total > 0;
    if block.leads() {
        if station != NO_STATION {
            if keeps {
                gate.leave_lost(station);
            } else {
                gate.leave(station);
                give_back(&rows, station);
            }
        }
        end_block(&rows);
    }
}

/// The bare limit beside it: rows of a table in memory that the GPU reads, at `rows.slots`. No drive.
///
/// # Safety
/// As [`nvme_gather`], for ids, output and the table.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_copy_rows(rows: Gather) {
    let lanes = u64::from(rows.lanes.clamp(1, 32));
    let work = Warp::without_queue(&rows);
    let mut chunk = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
    while chunk < rows.count.div_ceil(lanes) {
        let index = chunk * lanes + u64::from(arch::lane());
        let is_live = index < rows.count && arch::lane() < rows.lanes;
        let mut row = work.row(index, is_live);
        row.from = rows.slots + row.place.byte;
        work.copy(index, &row, row.code == code::OK);
        chunk += u64::from(arch::blocks() * BLOCK_WARPS);
    }
}

/// Counts the gathered rows whose words are not those of their ids.
///
/// # Safety
/// The addresses in `check` are what [`Check`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_check_rows(check: Check) {
    let rows = &check.gather;
    let work = Warp::without_queue(rows);
    let warps = u64::from(arch::blocks() * BLOCK_WARPS);
    let mut index = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
    while index < rows.count {
        // Every lane looks at the same id.
        let row = work.row(index, true);
        let mut is_wrong = row.code != code::OK;
        let mut at = u64::from(arch::lane()) * 8;
        while at < u64::from(rows.row_bytes) {
            // SAFETY: inside the output's row.
            let have = unsafe { arch::load_u64(rows.out + index * rows.out_stride + at) };
            is_wrong |= have != data_word(check.seed, (row.place.byte + at) / 8);
            at += 256;
        }
        if arch::ballot(arch::FULL, is_wrong) != 0 && arch::lane() == 0 {
            // SAFETY: the host gives the count.
            unsafe { arch::add(check.wrong as usize as *mut u64, 1) };
        }
        index += warps;
    }
}

/// Takes a free station and passes the gate with it.
#[inline(always)]
fn claim(rows: &Gather, gate: &Gate<'_>) -> u32 {
    let deadline_ns = Gpu
        .now_ns()
        .saturating_add(rows.timeout_ns.saturating_mul(STATION_PATIENCE));
    let count = rows.station_count.max(1);
    // Launches begin at different stations.
    let first = (rows.summary as u32 / size_of::<Summary>() as u32).wrapping_add(arch::block());
    let mut turn = 0;
    loop {
        let mut next = 0;
        while next < count {
            let station = first.wrapping_add(next) % count;
            let owner = owner(rows, station);
            // Acquire: pairs with the release of who had the station.
            if owner.load(Order::Relaxed, Scope::Gpu) == FREE
                && owner.compare_exchange(FREE, TAKEN, Order::Acquire, Scope::Gpu) == FREE
            {
                if gate.enter(station).is_ok() {
                    return station;
                }
                give_back(rows, station);
                return NO_STATION;
            }
            next += 1;
        }
        if gate.look().is_err() || Gpu.now_ns() >= deadline_ns {
            return NO_STATION;
        }
        Gpu.pause(turn);
        turn += 1;
    }
}

#[inline(always)]
fn give_back(rows: &Gather, station: u32) {
    // Release: pairs with the claim; the slots are not touched after this.
    owner(rows, station).store(FREE, Order::Release, Scope::Gpu);
}

#[inline(always)]
fn owner(rows: &Gather, station: u32) -> &AtomicU32 {
    let words = rows.stations as usize as *const AtomicU32;
    // SAFETY: the host gives a word for each station.
    unsafe { &*words.add(station as usize) }
}

/// Accounts for a block that has ended; the last one tells the host.
#[inline(always)]
fn end_block(rows: &Gather) {
    let progress = rows.progress as usize as *mut Progress;
    let summary = rows.summary as usize as *mut Summary;
    // SAFETY: the host gives both; the fields are used as atomics while blocks run.
    let (blocks, launches, failed, first) = unsafe {
        (
            &*(&raw const (*progress).blocks).cast::<AtomicU32>(),
            &*(&raw const (*progress).launches).cast::<AtomicU32>(),
            &*(&raw const (*progress).failed).cast::<AtomicU64>(),
            &*(&raw const (*progress).worst).cast::<AtomicU64>(),
        )
    };
    // Release: rows and counts of this block; acquire: those of the blocks before it.
    if blocks.fetch_add(1, Order::AcqRel, Scope::Gpu) + 1 != arch::blocks() {
        return;
    }
    let count = failed.load(Order::Relaxed, Scope::Gpu);
    let word = first.load(Order::Relaxed, Scope::Gpu);
    failed.store(0, Order::Relaxed, Scope::Gpu);
    first.store(0, Order::Relaxed, Scope::Gpu);
    blocks.store(0, Order::Relaxed, Scope::Gpu);
    // SAFETY: as above; no other launch with this summary runs.
    let (to_failed, to_worst, ended) = unsafe {
        (
            &*(&raw const (*summary).failed).cast::<AtomicU64>(),
            &*(&raw const (*summary).worst).cast::<AtomicU64>(),
            &*(&raw const (*summary).ended).cast::<AtomicU32>(),
        )
    };
    to_failed.store(count, Order::Relaxed, Scope::Sys);
    to_worst.store(word, Order::Relaxed, Scope::Sys);
    let now = launches.load(Order::Relaxed, Scope::Gpu).wrapping_add(1);
    launches.store(now, Order::Relaxed, Scope::Gpu);
    // Release: who sees the count sees the rows.
    fence(Order::Release, Scope::Sys);
    ended.store(now, Order::Relaxed, Scope::Sys);
}

/// A thread that gathers: alone, it keeps few reads of the completion ring under way, and has registers to copy with.
struct Gatherer;

impl ExecContext for Gatherer {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        Gpu.now_ns()
    }

    #[inline(always)]
    fn pause(&self, turn: u32) {
        Gpu.pause(turn);
    }

    #[inline(always)]
    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        converged(Narrow, key, op)
    }
}

/// A row as its lane has it.
#[derive(Clone, Copy)]
struct Row {
    place: Place,
    /// Its bytes in the slots, once they are there.
    from: u64,
    code: i32,
}

/// A warp of a gather.
struct Warp<'r, 'q> {
    rows: &'r Gather,
    gate: Option<Gate<'r>>,
    queue: Option<SharedQueue<'q>>,
    /// Its first result cell.
    cell: u32,
    /// Where its slots begin in the slot memory.
    slots: u64,
    /// What the rows get that are left, once the warp cannot go on.
    ends: i32,
    /// A read has no end: the controller may still write to its slots.
    has_lost: bool,
    failed: u64,
    worst: u64,
}

impl<'r> Warp<'r, '_> {
    /// A warp that only moves rows.
    #[inline(always)]
    fn without_queue(rows: &'r Gather) -> Self {
        Self {
            rows,
            gate: None,
            queue: None,
            cell: 0,
            slots: 0,
            ends: code::OK,
            has_lost: false,
            failed: 0,
            worst: 0,
        }
    }

    /// Gathers as many rows at a time as the warp has slots: the warps take turns.
    #[inline(always)]
    fn gather_all(&mut self, first: u32, step: u32) {
        let lanes = u64::from(self.rows.lanes.clamp(1, 32));
        let chunks = self.rows.count.div_ceil(lanes);
        let mut chunk = u64::from(first);
        while chunk < chunks {
            let index = chunk * lanes + u64::from(arch::lane());
            // The block has passed the gate just now.
            let again = chunk != u64::from(first);
            if again && self.ends == code::OK && self.gate.is_none_or(|gate| gate.look().is_err()) {
                self.ends = code::GONE;
            }
            // One lane's look decides for all.
            self.ends = arch::shuffle(arch::FULL, self.ends as u32, 0) as i32;
            self.gather_chunk(index);
            chunk += u64::from(step);
        }
    }

    #[inline(always)]
    fn gather_chunk(&mut self, index: u64) {
        let is_live = index < self.rows.count && arch::lane() < self.rows.lanes;
        let mut row = self.row(index, is_live);
        let (mut wants, mut together) = (row.code == code::OK, true);
        if self.ends == code::OK {
            loop {
                let is_shared = self.read(&mut row, wants, together);
                self.copy(index, &row, wants && row.code == code::OK);
                // A read that failed for several rows: each by itself, now that the others are copied.
                wants &= is_shared && row.code > 0;
                if self.ends != code::OK || arch::ballot(arch::FULL, wants) == 0 {
                    break;
                }
                together = false;
            }
        } else if wants {
            row.code = self.ends;
        }
        self.clear(index, is_live && row.code != code::OK);
        self.account(index, is_live, row.code);
    }

    /// The row that this lane is asked for.
    #[inline(always)]
    fn row(&self, index: u64, is_live: bool) -> Row {
        let rows = self.rows;
        let mut id = -1;
        if is_live {
            // SAFETY: the host gives `count` ids.
            id = unsafe {
                match rows.wide_ids {
                    _ if rows.ids == 0 => index as i64,
                    0 => i64::from(arch::load_u32(rows.ids + index * 4) as i32),
                    _ => arch::load_u64(rows.ids + index * 8) as i64,
                }
            };
        }
        let nowhere = Place {
            byte: 0,
            block: 0,
            blocks: 0,
        };
        let place = rows.place(id);
        Row {
            place: place.unwrap_or(nowhere),
            from: 0,
            code: match place {
                Some(_) => code::OK,
                None => code::OUT_OF_RANGE,
            },
        }
    }

    /// Reads the rows of the lanes that want it into the slots, and finds their bytes there or why not. Whether the
    /// row's read was another row's, too.
    #[inline(always)]
    fn read(&mut self, row: &mut Row, wants: bool, together: bool) -> bool {
        let lane = arch::lane();
        // Lanes with the same first block: the lowest reads for all, and one more block when one of them ends there.
        let key = match wants && together {
            true => row.place.block,
            false => 1 << 63 | u64::from(lane),
        };
        let peers = arch::same(arch::FULL, key);
        let least = self.least_blocks();
        let longer = arch::ballot(arch::FULL, wants && row.place.blocks > least);
        let blocks = match together {
            true => least + u32::from(longer & peers != 0),
            false => row.place.blocks,
        };
        let leader = peers.trailing_zeros();
        let leads = wants && leader == lane;
        let (head, last) = self.run_of(row.place.block, blocks, leads, together);
        let first_block = shuffle64(row.place.block, head);
        let end = shuffle64(row.place.block + u64::from(blocks), last);
        let mut ended = code::OK;
        if leads && head == lane {
            ended = self.read_blocks(row.place.block, (end - row.place.block) as u32);
        }
        arch::sync_warp(arch::FULL);
        // What the leader knows of its run, for those that it reads for.
        let head = arch::shuffle(arch::FULL, head, leader);
        let first_block_of_run = shuffle64(first_block, leader);
        let result = arch::shuffle(arch::FULL, ended as u32, head) as i32;
        let alone = arch::shuffle(arch::FULL, u32::from(last == lane), head) == 1
            && peers.is_power_of_two();
        if wants {
            row.code = result;
            let at = row
                .place
                .byte
                .wrapping_sub(first_block_of_run << self.rows.block_shift);
            row.from = self.rows.slots + self.slot(head) + at;
        }
        // A command without an end keeps its slots, so the warp uses none of its slots any more.
        let is_lost = result == code::TIMED_OUT || result == code::GONE;
        if arch::ballot(arch::FULL, is_lost) != 0 {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
        wants && !alone
    }

    /// Blocks of a row that begins where a block does, at least.
    #[inline(always)]
    fn least_blocks(&self) -> u32 {
        (self.rows.row_bytes - 1 >> self.rows.block_shift) + 1
    }

    /// The lanes at which the run of this lane's read begins and ends: reads of blocks that follow on each other,
    /// by leading lanes that follow on each other. Means nothing for lanes that do not lead.
    #[inline(always)]
    fn run_of(&self, block: u64, blocks: u32, leads: bool, together: bool) -> (u32, u32) {
        let lane = arch::lane();
        let leaders = arch::ballot(arch::FULL, leads);
        if !together {
            return (lane, lane);
        }
        let below = leaders & arch::lanes_below();
        let before = 31 - (below | 1).leading_zeros();
        let from = shuffle64(block, before);
        let to = shuffle64(block + u64::from(blocks), before);
        let follows = leads && below != 0 && block >= from && block <= to;
        let heads = arch::ballot(arch::FULL, leads && !follows);
        let up_to_me = arch::lanes_below() | 1 << lane;
        let head = 31 - (heads & up_to_me | 1).leading_zeros();
        let number = (below >> head).count_ones();
        let cuts = leads && number.checked_rem(self.rows.run_rows).unwrap_or(0) == 0;
        let heads = heads | arch::ballot(arch::FULL, cuts);
        let head = 31 - (heads & up_to_me | 1).leading_zeros();
        let next = heads & !up_to_me;
        let mine = leaders & (next & next.wrapping_neg()).wrapping_sub(1);
        (head, 31 - (mine | 1).leading_zeros())
    }

    /// Where the slot of `lane` begins in the slot memory.
    #[inline(always)]
    fn slot(&self, lane: u32) -> u64 {
        self.slots + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    /// Reads `blocks` blocks from `block` on into the slots from this lane's on, and waits for that.
    #[inline(always)]
    fn read_blocks(&self, block: u64, blocks: u32) -> i32 {
        let rows = self.rows;
        let Some(queue) = &self.queue else {
            return code::GONE;
        };
        let data = || Data::Contiguous {
            iova: Iova(rows.slots_iova + self.slot(arch::lane())),
            len: u64::from(blocks) << rows.block_shift,
        };
        let read = || {
            Command::new(
                nvm::read(Nsid(rows.nsid), Lba(block), blocks),
                data(),
                self.cell + arch::lane(),
            )
        };
        match queue.run(
            &Gatherer,
            read,
            Gpu.now_ns().saturating_add(rows.timeout_ns),
        ) {
            Ok(Ok((Outcome::Done(status), _))) => i32::from(status.code()),
            Ok(Ok((Outcome::Aborted(_), _))) => code::GONE,
            Ok(Err(SubmitError::Refused)) | Err((WaitError::Refused, _)) => code::GONE,
            Ok(Err(SubmitError::QueueFull)) | Err((WaitError::TimedOut, _)) => code::TIMED_OUT,
            Ok(Err(_)) => code::NOT_RUN,
        }
    }

    /// The warp copies the rows of the lanes that want it.
    #[inline(always)]
    fn copy(&self, index: u64, row: &Row, wants: bool) {
        let wanted = arch::ballot(arch::FULL, wants);
        let first = index - u64::from(arch::lane());
        let rows = self.rows;
        match rows.unit_shift {
            4 if rows.row_bytes % 512 == 0 => self.copy_pieces(first, row.from, wanted),
            4 => self.copy_units::<4>(first, row.from, wanted),
            2 | 3 => self.copy_units::<2>(first, row.from, wanted),
            _ => self.copy_units::<0>(first, row.from, wanted),
        }
        // The slots are read before the next reads into them are published.
        arch::sync_warp(arch::FULL);
    }

    /// Rows of a multiple of 512 bytes, in pieces of 512: a warp loads eight pieces before it stores the first,
    /// whichever rows they are of.
    #[inline(always)]
    fn copy_pieces(&self, first: u64, from: u64, wanted: u32) {
        let rows = self.rows;
        let lane = u64::from(arch::lane()) * 16;
        let bytes = u64::from(rows.row_bytes);
        let (mut left, mut at) = (wanted, 0);
        while left != 0 {
            let mut there = 0;
            let mut next = |bit: u32| {
                let row = left.trailing_zeros() & 31;
                let to = rows.out + (first + u64::from(row)) * rows.out_stride + at + lane;
                let from = shuffle64(from, row) + at + lane;
                if left != 0 {
                    there |= bit;
                }
                at += 512;
                if at >= bytes {
                    at = 0;
                    left &= left.wrapping_sub(1);
                }
                (to, from)
            };
            // One by one: what an array would put on a stack stays in registers.
            let ((t0, f0), (t1, f1)) = (next(1), next(2));
            let ((t2, f2), (t3, f3)) = (next(4), next(8));
            let ((t4, f4), (t5, f5)) = (next(16), next(32));
            let ((t6, f6), (t7, f7)) = (next(64), next(128));
            let to = [t0, t1, t2, t3, t4, t5, t6, t7];
            let from = [f0, f1, f2, f3, f4, f5, f6, f7];
            // SAFETY: inside rows, in the slots and in the output, where a bit is set.
            unsafe { arch::copy_pieces(to, from, there) };
        }
    }

    /// Rows in units of 16, 4 or 1 bytes, all of them together: lane after lane takes the next unit.
    #[inline(always)]
    fn copy_units<const SHIFT: u32>(&self, first: u64, from: u64, wanted: u32) {
        let rows = self.rows;
        let units = rows.row_bytes >> SHIFT;
        let mut at = arch::lane();
        // All lanes go round as often: they exchange addresses.
        let mut left = units;
        while left != 0 {
            left -= 1;
            // Never by zero: a row has a unit at least.
            let lane = at.checked_div(units).unwrap_or(0);
            let offset = u64::from(at - lane * units) << SHIFT;
            let from = shuffle64(from, lane) + offset;
            let to = rows.out + (first + u64::from(lane)) * rows.out_stride + offset;
            if wanted >> lane & 1 == 1 {
                // SAFETY: inside the row, in the slots and in the output.
                unsafe {
                    match SHIFT {
                        4 => arch::copy_16(to, from),
                        2 => arch::copy_4(to, from),
                        _ => arch::copy_1(to, from),
                    }
                }
            }
            at += 32;
        }
    }

    /// The warp zeroes the rows of the lanes that want it.
    #[inline(always)]
    fn clear(&self, index: u64, wants: bool) {
        let mut left = arch::ballot(arch::FULL, wants);
        let first = index - u64::from(arch::lane());
        let rows = self.rows;
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let to = rows.out + (first + u64::from(lane)) * rows.out_stride;
            let mut at = u64::from(arch::lane());
            while at < u64::from(rows.row_bytes) {
                // SAFETY: inside the output's row.
                unsafe { arch::store_zero(to + at) };
                at += 32;
            }
        }
    }

    /// Notes what became of the lane's row.
    #[inline(always)]
    fn account(&mut self, index: u64, is_live: bool, code: i32) {
        if is_live && self.rows.status != 0 {
            // SAFETY: the host gives an `i32` for each row.
            unsafe { arch::store_u32(self.rows.status + index * 4, code as u32) };
        }
        let failed = arch::ballot(arch::FULL, is_live && code != code::OK);
        if failed == 0 {
            return;
        }
        self.failed += u64::from(failed.count_ones());
        let lane = failed.trailing_zeros();
        let word = shuffle64(worst(index, code), lane);
        if word > self.worst {
            self.worst = word;
        }
    }

    /// Adds the warp's counts to the launch's. One lane calls it.
    #[inline(always)]
    fn report(&self) {
        if self.failed == 0 {
            return;
        }
        let progress = self.rows.progress as usize as *mut Progress;
        // SAFETY: the host gives it; only such instructions and the last block touch it.
        unsafe {
            arch::add(&raw mut (*progress).failed, self.failed);
            arch::raise(&raw mut (*progress).worst, self.worst);
        }
    }
}

/// The value of lane `from`. Every lane of the warp calls it.
#[inline(always)]
fn shuffle64(value: u64, from: u32) -> u64 {
    let low = arch::shuffle(arch::FULL, value as u32, from);
    let high = arch::shuffle(arch::FULL, (value >> 32) as u32, from);
    u64::from(high) << 32 | u64::from(low)
}
