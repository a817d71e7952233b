//! Stations: the I/O contexts of blocks of threads that read or write rows. A station has slots and result
//! cells that no other block uses, and a word at the gate. The first ones also have a queue each, if the
//! controller grants enough.
//!
//! A station with a read that was never answered is not freed: the read may still write to its slot.
//!
//! The order of calls: [`claim`] takes a free station and passes the gate with it; [`read_blocks`] or
//! `write_blocks` any number of times; [`leave`] leaves the gate and frees the station.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::QueueArray;
use crate::arch;
#[cfg(feature = "gathers")]
use crate::gate::GateEpoch;
use crate::gate::{AdmissionGate, words};
use crate::groups::{GpuThread, GroupedThread, NarrowLane};
use crate::rows::{BLOCK_WARPS, GatherLaunch, LaunchSummary, code};
use nvme_core::group::ExecContext;
#[cfg(any(feature = "gathers", feature = "scatter"))]
use nvme_core::spec::Status;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{CommandData, CommandOutcome, MemberCommand, SharedQueue, SubmitError, WaitError};

/// The number that stands for no station: none was free in time, or the gate is closed.
pub const NO_STATION: u32 = u32::MAX;
/// Word of a station: free, or taken by a block.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Time that a group works between two looks at the gate, in nanoseconds.
#[cfg(any(feature = "gathers", feature = "scatter"))]
pub const LOOK_NS: u64 = 1 << LOOK_SHIFT;
/// log2 of [`LOOK_NS`].
pub const LOOK_SHIFT: u32 = 20;
/// A thread that reads or writes rows. When it acts alone it keeps few reads of the completion ring in
/// flight, so that registers remain for copying.
const GATHERER: GroupedThread<NarrowLane> = GroupedThread(NarrowLane);
/// Number of read timeouts that a block waits for a station.
const STATION_PATIENCE: u64 = 16;

/// Returns the gate of a launch.
///
/// # Safety
/// The host vouches for the words of a gate for `station_count` stations.
#[inline(always)]
pub unsafe fn gate(rows: &GatherLaunch) -> Option<AdmissionGate<'_>> {
    let gate = rows.gate as usize as *const AtomicU32;
    // SAFETY: this function's caller vouches for the words, which are accessed through atomics alone.
    let gate = unsafe { core::slice::from_raw_parts(gate, words(rows.station_count)) };
    AdmissionGate::new(gate)
}

/// Returns the number of the queue of warp `warp` of the block at `station`.
#[inline(always)]
pub fn queue_number(rows: &GatherLaunch, station: u32, warp: u32) -> u32 {
    number(&rows.queues, station, warp)
}

/// Returns the same number for other queues.
#[inline(always)]
pub fn number(queues: &QueueArray, station: u32, warp: u32) -> u32 {
    let number = station.wrapping_mul(BLOCK_WARPS).wrapping_add(warp);
    number.checked_rem(queues.queue_count).unwrap_or(0)
}

/// Returns the code of the rows of a block without a station.
#[inline(always)]
pub fn why_none(gate: &AdmissionGate<'_>) -> i32 {
    match gate.look() {
        Ok(()) => code::NOT_RUN,
        Err(_) => code::GONE,
    }
}

/// Takes a free station and passes the gate with it.
#[inline(always)]
pub fn claim(rows: &GatherLaunch, gate: &AdmissionGate<'_>) -> u32 {
    claim_of(rows, rows.station_count, gate)
}

/// Takes a free one of the first `count` stations and passes the gate with it.
#[inline(always)]
pub fn claim_of(rows: &GatherLaunch, count: u32, gate: &AdmissionGate<'_>) -> u32 {
    let enter = |station| gate.enter(station).is_ok();
    claim_by((rows, count), enter, || gate.look().is_err())
}

/// Takes a free one of the first `count` stations with which `enter` returns true. Gives up once `is_shut` returns true.
#[inline(always)]
pub fn claim_by(
    (rows, count): (&GatherLaunch, u32),
    enter: impl Fn(u32) -> bool,
    is_shut: impl Fn() -> bool,
) -> u32 {
    let deadline_ns = GpuThread
        .now_ns()
        .saturating_add(rows.timeout_ns.saturating_mul(STATION_PATIENCE));
    let count = count.max(1);
    let first = first_station(rows);
    let mut turn = 0;
    loop {
        let mut next = 0;
        while next < count {
            let station = first.wrapping_add(next) % count;
            let owner = owner(rows, station);
            // The first station is mostly free, so that a load before the exchange would be a wasted trip to memory.
            let may_be_free = (next | turn) == 0 || owner.load(Order::Relaxed, Scope::Gpu) == FREE;
            // Acquire: pairs with the release of the block that held the station; its last accesses to the
            // slots come before this block's. Without it a late copy out of a slot could see this block's
            // data.
            if may_be_free
                && owner.compare_exchange(FREE, TAKEN, Order::Acquire, Scope::Gpu) == FREE
            {
                if enter(station) {
                    return station;
                }
                give_back(rows, station);
            }
            next += 1;
        }
        if is_shut() || GpuThread.now_ns() >= deadline_ns {
            return NO_STATION;
        }
        GpuThread.pause(turn);
        turn += 1;
    }
}

/// Takes one of the first `count` stations that is free now, and passes the gate with it; returns it with the epoch of
/// the gate. Waits for none.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn claim_now(
    rows: &GatherLaunch,
    count: u32,
    gate: &AdmissionGate<'_>,
) -> Option<(u32, GateEpoch)> {
    let first = first_station(rows);
    let mut next = 0;
    while next < count {
        let station = first.wrapping_add(next) % count;
        let owner = owner(rows, station);
        // Acquire: as in `claim_by`.
        if owner.load(Order::Relaxed, Scope::Gpu) == FREE
            && owner.compare_exchange(FREE, TAKEN, Order::Acquire, Scope::Gpu) == FREE
        {
            let passed = gate.pass(station).ok();
            if passed.is_none() {
                give_back(rows, station);
            }
            return passed.map(|epoch| (station, epoch));
        }
        next += 1;
    }
    None
}

/// Returns the number from which a block looks for a station. Launches begin at different ones.
#[inline(always)]
fn first_station(rows: &GatherLaunch) -> u32 {
    (rows.summary as u32 / size_of::<LaunchSummary>() as u32).wrapping_add(arch::block())
}

/// Leaves the station; `keeps` says that a read has not ended, and the station stays taken.
#[inline(always)]
pub fn leave(rows: &GatherLaunch, gate: &AdmissionGate<'_>, station: u32, keeps: bool) {
    if station == NO_STATION {
        return;
    }
    if keeps {
        gate.leave_lost(station);
    } else {
        gate.leave(station);
        give_back(rows, station);
    }
}

/// Frees the station.
#[inline(always)]
pub fn give_back(rows: &GatherLaunch, station: u32) {
    // Release: pairs with the acquire of the next claim; the slots are not touched after this. The next owner
    // has the drive write into them at once, possibly from another multiprocessor.
    owner(rows, station).store(FREE, Order::Release, Scope::Gpu);
}

#[inline(always)]
fn owner(rows: &GatherLaunch, station: u32) -> &AtomicU32 {
    let words = rows.stations as usize as *const AtomicU32;
    // SAFETY: the host vouches for a word for each station, used through atomics alone.
    unsafe { &*words.add(station as usize) }
}

/// Reads `blocks` blocks from `block` on into `slot`, an offset in the slot memory, and waits for the end.
#[inline(always)]
pub fn read_blocks(
    rows: &GatherLaunch,
    queue: &SharedQueue<'_>,
    (block, blocks): (u64, u32),
    slot: u64,
    cell: u32,
) -> i32 {
    let sqe = || nvm::read(Nsid(rows.nsid), Lba(block), blocks);
    let read = || MemberCommand::new(sqe(), blocks_at(rows, slot, blocks), cell);
    run(&GATHERER, queue, read, rows.timeout_ns)
}

/// Writes `blocks` blocks from `block` on out of `slot`, and waits for the end. The slot's content was fenced
/// for the system before.
#[cfg(feature = "scatter")]
#[inline(always)]
pub fn write_blocks(
    rows: &GatherLaunch,
    queue: &SharedQueue<'_>,
    (block, blocks): (u64, u32),
    slot: u64,
    cell: u32,
) -> i32 {
    let sqe = || nvm::write(Nsid(rows.nsid), Lba(block), blocks);
    let write = || MemberCommand::new(sqe(), blocks_at(rows, slot, blocks), cell);
    run(&GATHERER, queue, write, rows.timeout_ns)
}

/// Describes `blocks` blocks from `slot` on as a command's data.
#[inline(always)]
pub fn blocks_at<'d>(rows: &GatherLaunch, slot: u64, blocks: u32) -> CommandData<'d> {
    CommandData::Contiguous {
        iova: Iova(rows.slots_iova + slot),
        len: u64::from(blocks) << rows.block_shift,
    }
}

/// Runs a command; returns its status, 0 for success, or the code of why it has no result.
#[inline(always)]
pub fn run<'d>(
    here: &impl ExecContext,
    queue: &SharedQueue<'_>,
    command: impl Fn() -> MemberCommand<'d>,
    timeout_ns: u64,
) -> i32 {
    let deadline_ns = GpuThread.now_ns().saturating_add(timeout_ns);
    match queue.run(here, command, deadline_ns) {
        Ok(Ok(ended)) => code_of_end(Ok(ended)),
        Ok(Err(why)) => code_of_refusal(why),
        Err((why, _)) => code_of_end(Err(why)),
    }
}

/// Returns the code of a command after its wait.
#[inline(always)]
pub fn code_of_end(ended: Result<(CommandOutcome, u32), WaitError>) -> i32 {
    match ended {
        Ok((CommandOutcome::Completed(status), _)) => i32::from(status.code()),
        Ok((CommandOutcome::Aborted(_), _)) | Err(WaitError::Refused) => code::GONE,
        Err(WaitError::TimedOut) => code::TIMED_OUT,
    }
}

/// Returns the code of a command that was not submitted.
#[inline(always)]
pub fn code_of_refusal(why: SubmitError) -> i32 {
    match why {
        SubmitError::Refused => code::GONE,
        SubmitError::QueueFull => code::TIMED_OUT,
        _ => code::NOT_RUN,
    }
}

/// Returns the code of a command of a batch that was submitted, and waited for, with these results.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub fn ended<L, E>(
    (submitted, left): (Result<(), SubmitError>, Result<L, E>),
    status: Option<Status>,
) -> i32 {
    match (submitted, status) {
        (Err(why), _) => code_of_refusal(why),
        (_, Some(status)) => i32::from(status.code()),
        _ if left.is_ok() => code::TIMED_OUT,
        _ => code::GONE,
    }
}
