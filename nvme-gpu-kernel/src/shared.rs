//! Shared queues: each thread submits and waits for its share of the commands on one of the queues.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::assignment::{AssignedWork, ThreadTally, queue_words};
use crate::groups::{GpuThread, NarrowLane, converged};
use crate::work::LaunchArguments;
use nvme_core::group::{BusTraffic, ExecContext, GroupOp};
use nvme_core::sync::AtomicU64;
use nvme_core::trace::TraceEvent;
use nvme_core::{CommandOutcome, CommandToken, ResultCells, SharedQueue, WaitError};

/// The context of a thread of a launch: it counts accesses to the bus in the launch's report and, if
/// `TRACED`, records the events of its command `index`. If `NARROW`, it acts as a [`NarrowLane`] group when it is
/// alone, for launches of very many threads.
struct CountedThread<'w, 'l, const TRACED: bool, const NARROW: bool> {
    work: &'w AssignedWork<'l>,
    index: u64,
}

impl<const TRACED: bool, const NARROW: bool> ExecContext for CountedThread<'_, '_, TRACED, NARROW> {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        GpuThread.now_ns()
    }

    #[inline(always)]
    fn pause(&self, turn: u32) {
        GpuThread.pause(turn);
    }

    #[inline(always)]
    fn on_bus_access(&self, traffic: BusTraffic) {
        self.work.on_bus_access(traffic);
    }

    #[inline(always)]
    fn record(&self, event: impl FnOnce() -> TraceEvent) {
        if TRACED {
            self.work.record(self.index, event());
        }
    }

    #[inline(always)]
    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        match NARROW {
            true => converged(NarrowLane, key, op),
            false => GpuThread.converged(key, op),
        }
    }
}

/// Finds the thread's queue, processes the thread's commands and reports.
///
/// # Safety
/// As [`nvme_shared`](crate::entry::nvme_shared).
#[inline(always)]
pub unsafe fn sharing<const SEVERAL: bool, const TRACED: bool, const NARROW: bool>(
    launch: &LaunchArguments,
) {
    let began_ns = arch::now_ns();
    let lanes = launch.lanes.clamp(1, 32);
    if arch::lane() >= lanes {
        return;
    }
    let warp = (arch::block() * arch::block_threads() + arch::thread()) / 32;
    let mut number = warp;
    if SEVERAL && launch.mixed != 0 {
        number += arch::lane();
    }
    let number = number.checked_rem(launch.queue_count).unwrap_or(u32::MAX);
    let Some(words) = queue_words(launch, number) else {
        return;
    };
    // SAFETY: the host vouches for the words.
    let Some((memory, state)) = (unsafe { words.attach() }) else {
        return;
    };
    let cells = launch.cells as usize as *const AtomicU64;
    // SAFETY: the host vouches for `cell_count` cells, which are only accessed as atomics.
    let cells = unsafe { core::slice::from_raw_parts(cells, launch.cell_count as usize) };
    let queue = SharedQueue::new(memory, state, ResultCells::new(cells));
    let work = AssignedWork::new(launch, words.page_shift);
    let threads = u64::from(arch::blocks() * arch::block_threads() / 32 * lanes);
    let thread = u64::from(warp * lanes + arch::lane());
    let mut tally = ThreadTally::default();
    if SEVERAL {
        hold_several(&queue, &work, &mut tally, thread, threads);
    } else {
        one_by_one::<TRACED, NARROW>(&queue, &work, &mut tally, thread, threads);
    }
    if let Some(fault) = queue.fault() {
        work.fault(fault);
    }
    work.report(&tally, [0; 3], began_ns);
}

/// Submits a command and waits for it, over and over. The lanes of a warp meet after each command: diverged
/// lanes would act alone from then on, which costs the queue much more.
#[inline(always)]
fn one_by_one<const TRACED: bool, const NARROW: bool>(
    queue: &SharedQueue<'_>,
    work: &AssignedWork<'_>,
    tally: &mut ThreadTally,
    thread: u64,
    threads: u64,
) {
    let launch = work.launch;
    let lanes = arch::active();
    let mut index = thread;
    let mut goes_on = true;
    while arch::ballot(lanes, goes_on && index < launch.commands) != 0 {
        if goes_on && index < launch.commands {
            let deadline_ns = GpuThread.now_ns() + launch.timeout_ns;
            let command = || work.command(index, thread, thread as u32);
            let here = CountedThread::<TRACED, NARROW> { work, index };
            match queue.run(&here, command, deadline_ns) {
                Ok(Ok((outcome, _))) => {
                    tally.sqes += 1;
                    tally.end(work, index, outcome);
                }
                Ok(Err(error)) => {
                    work.refuse(index, error);
                    goes_on = false;
                }
                Err((error, _)) => {
                    tally.sqes += 1;
                    work.give_up(index, error);
                    goes_on = false;
                }
            }
        }
        arch::sync_warp(lanes);
        index += threads;
    }
}

/// Runs rounds of `depth` tokens: submits all, then waits in the reverse order.
#[inline(always)]
fn hold_several(
    queue: &SharedQueue<'_>,
    work: &AssignedWork<'_>,
    tally: &mut ThreadTally,
    thread: u64,
    threads: u64,
) {
    let launch = work.launch;
    let here = CountedThread::<false, false> { work, index: 0 };
    let tokens = launch.tokens as usize as *mut [u32; 3];
    let lanes = arch::active();
    let mut index = thread;
    let mut goes_on = true;
    while arch::ballot(lanes, goes_on && index < launch.commands) != 0 {
        let deadline_ns = GpuThread.now_ns() + launch.timeout_ns;
        let mut held = 0;
        while goes_on && held < u64::from(launch.depth) && index + held * threads < launch.commands
        {
            let at = index + held * threads;
            let cell = held * threads + thread;
            let command = work.command(at, cell, cell as u32);
            match queue.submit(&here, command, deadline_ns) {
                Ok(token) => {
                    tally.sqes += 1;
                    // SAFETY: the host vouches for three words for each thread and token.
                    unsafe { tokens.add(cell as usize).write(token.words()) };
                    held += 1;
                }
                Err(error) => {
                    work.refuse(at, error);
                    goes_on = false;
                }
            }
        }
        arch::sync_warp(lanes);
        while held > 0 {
            held -= 1;
            let cell = held * threads + thread;
            // SAFETY: it was written above by this thread.
            let token = CommandToken::from_words(unsafe { tokens.add(cell as usize).read() });
            let ended = queue.wait(&here, token, deadline_ns);
            goes_on &= finish(work, tally, index + held * threads, ended);
        }
        arch::sync_warp(lanes);
        index += u64::from(launch.depth) * threads;
    }
}

/// Accounts for a command after its wait; returns false if the thread should end.
#[inline(always)]
fn finish(
    work: &AssignedWork<'_>,
    tally: &mut ThreadTally,
    index: u64,
    ended: Result<(CommandOutcome, u32), (WaitError, CommandToken)>,
) -> bool {
    match ended {
        Ok((outcome, _)) => {
            tally.end(work, index, outcome);
            true
        }
        Err((error, _)) => {
            work.give_up(index, error);
            false
        }
    }
}
