//! Warps that read by themselves, as a host thread: block after block, warp after warp, the lanes of a warp being one.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::kernels::Bus;
use nvme_core::gate::{AdmissionGate, words};
use nvme_core::group::ExecContext;
use nvme_core::handoff::QueueWords;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{
    CommandData, CommandOutcome, CommandToken, MemberCommand, ResultCells, SharedQueue,
    SubmitError, WaitError,
};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::rows::{
    BLOCK_WARPS, GatherLaunch, LaunchProgress, LaunchSummary, RowBlocks, STATION_CELLS, WARP_BYTES,
    code, worst,
};
use std::sync::Mutex;

/// One launch at a time: a launch is one thread.
static TURN: Mutex<()> = Mutex::new(());

/// A warp's reads, as `nvme_gpu_kernel::WarpReads` has them.
pub struct Reads<'r> {
    pub rows: &'r GatherLaunch,
    pub gate: AdmissionGate<'r>,
    queue: Option<SharedQueue<'r>>,
    /// Its first result cell.
    cell: u32,
    /// Where its slots begin in the slot memory.
    pub slots: u64,
    /// What is left gets, once the warp cannot go on.
    pub ends: i32,
    /// A read has no end.
    pub has_lost: bool,
}

/// Runs `each` for every warp of `blocks` blocks, which gets its number, that of all warps, its reads, and what counts a
/// failed row.
pub fn all_warps(
    rows: &GatherLaunch,
    blocks: u32,
    each: impl Fn((u32, u32), &mut Reads<'_>, &mut dyn FnMut(u64, i32)),
) {
    let (mut failed, mut first) = (0, 0);
    for block in 0..blocks {
        let _turn = TURN.lock();
        let gate = gate_of(rows);
        let station = claim(rows, &gate);
        let mut has_lost = false;
        for warp in 0..BLOCK_WARPS {
            let place = station.unwrap_or(0) * BLOCK_WARPS + warp;
            let mut reads = Reads {
                rows,
                gate,
                queue: station.map(|station| queue(&rows.queues, station)),
                cell: place * (STATION_CELLS / BLOCK_WARPS),
                slots: u64::from(place) * WARP_BYTES,
                ends: match station {
                    Some(_) => code::OK,
                    None if gate.look().is_err() => code::GONE,
                    None => code::NOT_RUN,
                },
                has_lost: false,
            };
            let number = (block * BLOCK_WARPS + warp, blocks * BLOCK_WARPS);
            each(number, &mut reads, &mut |row, why| {
                failed += 1;
                first = worst(row, None, why).max(first);
            });
            has_lost |= reads.has_lost;
        }
        if has_lost {
            gate.report_trouble();
        }
        match station {
            Some(station) if has_lost => gate.leave_lost(station),
            Some(station) => {
                gate.leave(station);
                owner(rows, station).store(0, Order::Release, Scope::Gpu);
            }
            None => {}
        }
    }
    finish(rows, failed, first);
}

impl Reads<'_> {
    /// Submits the read of `place` to `slot` of the slot memory, for lane `lane`.
    pub fn submit(&self, place: RowBlocks, slot: u64, lane: u32) -> Result<CommandToken, i32> {
        let rows = self.rows;
        let data = CommandData::Contiguous {
            iova: Iova(rows.slots_iova + slot),
            len: u64::from(place.blocks) << rows.block_shift,
        };
        let read = nvm::read(Nsid(rows.nsid), Lba(place.block), place.blocks);
        let command = MemberCommand::new(read, data, self.cell + lane);
        let here = Bus::default();
        let queue = self.queue.as_ref().ok_or(code::GONE)?;
        let ended = queue.submit(&here, command, here.now_ns() + rows.timeout_ns);
        ended.map_err(|why| match why {
            SubmitError::Refused => code::GONE,
            SubmitError::QueueFull => code::TIMED_OUT,
            _ => code::NOT_RUN,
        })
    }

    /// How a read ended.
    pub fn wait(&self, token: CommandToken) -> i32 {
        let here = Bus::default();
        let Some(queue) = &self.queue else {
            return code::GONE;
        };
        match queue.wait(&here, token, here.now_ns() + self.rows.timeout_ns) {
            Ok((CommandOutcome::Completed(status), _)) => i32::from(status.code()),
            Ok((CommandOutcome::Aborted(_), _)) | Err((WaitError::Refused, _)) => code::GONE,
            Err((WaitError::TimedOut, _)) => code::TIMED_OUT,
        }
    }
}

fn gate_of(rows: &GatherLaunch) -> AdmissionGate<'_> {
    let gate = rows.gate as usize as *const AtomicU32;
    // SAFETY: the host gives the words of a gate.
    let gate = unsafe { std::slice::from_raw_parts(gate, words(rows.station_count)) };
    AdmissionGate::new(gate).expect("words of a gate")
}

/// Tells the host of a launch's end.
fn finish(rows: &GatherLaunch, failed: u64, first: u64) {
    // SAFETY: the host gives both; the progress stays zero, as the kernel leaves it.
    unsafe {
        let progress = &mut *(rows.progress as usize as *mut LaunchProgress);
        progress.launches = progress.launches.wrapping_add(1);
        let summary = rows.summary as usize as *mut LaunchSummary;
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

fn owner(rows: &GatherLaunch, station: u32) -> &AtomicU32 {
    let words = rows.stations as usize as *const AtomicU32;
    // SAFETY: the host gives a word for each station.
    unsafe { &*words.add(station as usize) }
}

fn claim(rows: &GatherLaunch, gate: &AdmissionGate<'_>) -> Option<u32> {
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

fn queue(queues: &QueueArray, station: u32) -> SharedQueue<'static> {
    let words = queues.queues as usize as *const QueueWords;
    // SAFETY: the host vouches for the queues and the cells.
    unsafe {
        let words = &*words.add((station % queues.queue_count) as usize);
        let (memory, state) = words.attach().expect("possible sizes");
        let cells = queues.cells as usize as *const AtomicU64;
        let cells = std::slice::from_raw_parts(cells, queues.cell_count as usize);
        SharedQueue::new(memory, state, ResultCells::new(cells))
    }
}
