//! Carries out the commands of one call, several in flight on several lanes.
//!
//! Invariant: every piece is passed to [`PieceHandler::done`] or to [`PieceHandler::failed`] once, unless the work
//! stops.

use super::counters::StoreCounter;
use super::lane::{CallLanes, LaneCommand, LaneFailure, LaneOperation};
use super::space::{MemberPiece, StoreSpace};
use nvme_driver::error::Error;
use nvme_driver::lock::relax;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Limit of repetitions of a command that a reset aborted. The command itself may be the cause of the resets,
/// so it is not repeated without end.
const RETRIES: u32 = 3;
/// Latency from which on a command is named in the log.
const SLOW: Duration = Duration::from_millis(100);

/// Reaction to the failure of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureReaction {
    /// Send nothing more.
    Stop,
    /// Continue with the other pieces.
    GoOn,
    /// Send the piece again in parts of this number of bytes, to find out which of them fail.
    Split(u32),
}

/// Handler of a call's pieces: provides bytes to write, receives bytes read, decides about failures.
pub(crate) trait PieceHandler {
    /// Gives a piece that is to be written its bytes. May be called more than once.
    fn fill(&mut self, piece: &MemberPiece, bytes: &mut [u8]) {
        let _ = (piece, bytes);
    }

    /// Called when the piece was moved; `bytes` are the bytes that were read.
    fn done(&mut self, piece: &MemberPiece, bytes: &[u8]);

    /// Called when the piece could not be moved; returns the reaction.
    fn failed(&mut self, piece: &MemberPiece, error: Error) -> FailureReaction;
}

/// A piece that waits or is in flight.
#[derive(Clone, Copy)]
struct PieceTask {
    piece: MemberPiece,
    tries: u32,
}

struct MemberTasks<'a> {
    member: usize,
    waiting: VecDeque<PieceTask>,
    lanes: CallLanes<'a>,
}

/// A task on a lane, and the time at which it was sent.
#[derive(Clone, Copy)]
struct TaskInFlight {
    task: PieceTask,
    lane: usize,
    sent: Instant,
}

/// The tasks in flight; a tag is an index.
#[derive(Default)]
struct TasksInFlight {
    tasks: Vec<Option<TaskInFlight>>,
    free: Vec<u32>,
}

impl TasksInFlight {
    fn add(&mut self, task: TaskInFlight) -> u32 {
        match self.free.pop() {
            Some(tag) => {
                self.tasks[tag as usize] = Some(task);
                tag
            }
            None => {
                self.tasks.push(Some(task));
                self.tasks.len() as u32 - 1
            }
        }
    }

    fn take(&mut self, tag: u32) -> Option<TaskInFlight> {
        let task = self.tasks.get_mut(tag as usize)?.take()?;
        self.free.push(tag);
        Some(task)
    }

    /// Returns the tasks of a lane, which will not end there.
    fn take_lane(&mut self, member: usize, lane: usize) -> Vec<PieceTask> {
        let tags = 0..self.tasks.len() as u32;
        let of_lane = |tag: &u32| {
            let task = self.tasks[*tag as usize];
            task.is_some_and(|one| one.task.piece.member == member && one.lane == lane)
        };
        let tags: Vec<u32> = tags.filter(of_lane).collect();
        let taken = tags.into_iter().filter_map(|tag| self.take(tag));
        taken.map(|one| one.task).collect()
    }
}

struct CallRun<'a> {
    space: &'a StoreSpace,
    op: LaneOperation,
    work: &'a mut dyn PieceHandler,
    flight: TasksInFlight,
    stopped: bool,
    begin: Instant,
    /// Commands that the store's counters take for commands under way.
    under_way: u64,
}

/// Carries out `op` on every piece. Returns when no command of this call is in flight.
pub(crate) fn run(
    space: &StoreSpace,
    op: LaneOperation,
    pieces: Vec<MemberPiece>,
    work: &mut dyn PieceHandler,
) {
    run_all(space, op, pieces, work, usize::MAX);
    if op.is_write() {
        space.wrote();
    }
}

/// Reads every piece.
pub(crate) fn read(space: &StoreSpace, pieces: Vec<MemberPiece>, work: &mut dyn PieceHandler) {
    run(space, LaneOperation::Read, pieces, work);
}

/// Reads as [`read`] does, on one lane of each member: other threads read other parts of the same call.
pub(crate) fn read_beside_others(
    space: &StoreSpace,
    pieces: Vec<MemberPiece>,
    work: &mut dyn PieceHandler,
) {
    run_all(space, LaneOperation::Read, pieces, work, 1);
}

fn run_all(
    space: &StoreSpace,
    op: LaneOperation,
    pieces: Vec<MemberPiece>,
    work: &mut dyn PieceHandler,
    most_lanes: usize,
) {
    let mut run = CallRun {
        space,
        op,
        work,
        flight: TasksInFlight::default(),
        stopped: false,
        begin: Instant::now(),
        under_way: 0,
    };
    // Waiting for a lane is a part of the call's time.
    let mut shares = shares(space, pieces, most_lanes);
    let mut spins = 0;
    loop {
        let mut moved = false;
        for share in &mut shares {
            moved |= run.advance(share);
        }
        let busy = |share: &MemberTasks| share.lanes.lanes.iter().any(|lane| lane.in_flight() > 0);
        let waits = |share: &MemberTasks| !run.stopped && !share.waiting.is_empty();
        if !shares.iter().any(|share| busy(share) || waits(share)) {
            return;
        }
        spins = if moved { 0 } else { spins + 1 };
        if !moved {
            pause(&mut shares, spins);
        }
    }
}

/// Returns the pieces by member, each member with lanes. Members are taken in order, so that calls cannot wait
/// for each other's lanes in a circle.
fn shares(space: &StoreSpace, pieces: Vec<MemberPiece>, most_lanes: usize) -> Vec<MemberTasks<'_>> {
    let mut waiting = vec![VecDeque::new(); space.members.len()];
    for piece in pieces {
        waiting[piece.member].push_back(PieceTask { piece, tries: 0 });
    }
    let with_work = waiting.into_iter().enumerate();
    let with_work = with_work.filter(|(_, waiting)| !waiting.is_empty());
    let share = |(member, waiting): (usize, VecDeque<PieceTask>)| {
        let bytes = waiting.iter().map(|task| u64::from(task.piece.bytes));
        let pool = &space.members[member].pool;
        let lanes = pool.take(waiting.len(), bytes.sum(), most_lanes);
        MemberTasks {
            member,
            waiting,
            lanes,
        }
    };
    with_work.map(share).collect()
}

/// Waits for the only lane that is busy, or a little for all.
fn pause(shares: &mut [MemberTasks<'_>], spins: u32) {
    let lanes = shares.iter_mut().flat_map(|share| &mut share.lanes.lanes);
    let mut busy = lanes.filter(|lane| lane.in_flight() > 0);
    match (busy.next(), busy.next()) {
        (Some(only), None) => only.pause(spins),
        _ => relax(spins),
    }
}

impl CallRun<'_> {
    /// Sends tasks as far as there is room, and reaps completions; returns true if there was any progress.
    fn advance(&mut self, share: &mut MemberTasks<'_>) -> bool {
        let mut moved = false;
        for lane in 0..share.lanes.lanes.len() {
            let went = match self.send(share, lane) {
                Ok(sent) => self.take(share, lane).map(|ended| sent || ended),
                Err(error) => Err(error),
            };
            match went {
                Ok(any) => moved |= any,
                Err(error) => {
                    self.fail_member(share, lane, &error);
                    moved = true;
                }
            }
        }
        moved
    }

    fn send(&mut self, share: &mut MemberTasks<'_>, lane: usize) -> nvme_driver::Result<bool> {
        let queue = &mut share.lanes.lanes[lane];
        let (mut sent, mut now) = (0, None);
        while !self.stopped {
            let Some(task) = share.waiting.front().copied() else {
                break;
            };
            if queue.in_flight() == 0 && sent == 0 {
                queue.begin()?;
            }
            let piece = task.piece;
            let command = LaneCommand {
                op: self.op,
                offset: piece.offset,
                bytes: piece.bytes,
            };
            let sent_at = *now.get_or_insert_with(Instant::now);
            let tag = self.flight.add(TaskInFlight {
                task,
                lane,
                sent: sent_at,
            });
            let work = &mut *self.work;
            let placed = queue.submit(&command, tag, &mut |bytes| work.fill(&piece, bytes));
            if !matches!(placed, Ok(true)) {
                self.flight.take(tag);
                if !placed? {
                    break;
                }
            }
            share.waiting.pop_front();
            sent += 1;
        }
        if sent > 0 {
            self.under_way += sent;
            let counters = &self.space.counters;
            counters.add(StoreCounter::Commands, sent);
            counters.add(StoreCounter::CommandsUnderWay, sent);
            queue.ring()?;
        }
        Ok(sent > 0)
    }

    fn take(&mut self, share: &mut MemberTasks<'_>, lane: usize) -> nvme_driver::Result<bool> {
        let queue = &mut share.lanes.lanes[lane];
        if queue.in_flight() == 0 {
            return Ok(false);
        }
        let MemberTasks {
            member, waiting, ..
        } = share;
        let (mut ended, mut bytes_moved, mut latency_ns, mut now) = (0, 0, 0, None);
        let mut again = Vec::new();
        let result = queue.poll(&mut |tag, result| {
            ended += 1;
            let Some(TaskInFlight { task, sent, .. }) = self.flight.take(tag) else {
                return;
            };
            let now = *now.get_or_insert_with(Instant::now);
            let latency = now.duration_since(sent);
            let ns = latency.as_nanos() as u64;
            latency_ns += ns;
            self.space.counters.ended_after(ns);
            if latency >= SLOW {
                self.space.note_slow(*member, &task.piece, latency);
            }
            match result {
                Ok(bytes) => {
                    bytes_moved += u64::from(task.piece.bytes);
                    self.work.done(&task.piece, bytes);
                }
                Err(failure) => again.extend(self.failed(*member, task, failure)),
            }
        });
        waiting.extend(again);
        let counters = &self.space.counters;
        counters.add(StoreCounter::LatencyNs, latency_ns);
        self.count_ended(ended, bytes_moved);
        result.map(|()| ended > 0)
    }

    /// Counts commands that are not under way any more, and the bytes that they moved.
    fn count_ended(&mut self, commands: u64, bytes: u64) {
        let counters = &self.space.counters;
        if commands > 0 {
            self.under_way -= commands;
            counters.subtract(StoreCounter::CommandsUnderWay, commands);
        }
        counters.add(StoreCounter::Bytes, bytes);
        let of_direction = match self.op.is_write() {
            true => StoreCounter::BytesWritten,
            false => StoreCounter::BytesRead,
        };
        counters.add(of_direction, bytes);
    }

    /// Returns the tasks to send again after a task failed.
    fn failed(&mut self, member: usize, task: PieceTask, failure: LaneFailure) -> Vec<PieceTask> {
        let PieceTask { piece, tries } = task;
        if failure.retry && tries < RETRIES {
            self.space.counters.add(StoreCounter::Retries, 1);
            let tries = tries + 1;
            return vec![PieceTask { piece, tries }];
        }
        let error = self.space.of_member(member, failure.error);
        match self.work.failed(&piece, error) {
            FailureReaction::Stop => self.stopped = true,
            FailureReaction::GoOn => {}
            FailureReaction::Split(bytes) => {
                let tasks: Vec<PieceTask> = parts(piece, bytes).collect();
                let parts = tasks.len() as u64;
                self.space.counters.add(StoreCounter::Retries, parts);
                return tasks;
            }
        }
        Vec::new()
    }

    /// Handles a lane that failed as a whole: its commands fail, and so do the commands for its member that were not
    /// sent.
    fn fail_member(&mut self, share: &mut MemberTasks<'_>, lane: usize, error: &Error) {
        share.lanes.lanes[lane].abandon();
        let mut tasks = self.flight.take_lane(share.member, lane);
        tasks.extend(share.waiting.drain(..));
        for task in tasks {
            let error = self.space.of_member(share.member, error.again());
            // Nothing can be sent again, in parts or not.
            if self.work.failed(&task.piece, error) == FailureReaction::Stop {
                self.stopped = true;
            }
        }
    }
}

impl Drop for CallRun<'_> {
    fn drop(&mut self) {
        // Commands of lanes that failed as a whole have not been reported.
        self.count_ended(self.under_way, 0);
        let waited = self.begin.elapsed().as_nanos() as u64;
        self.space.counters.add(StoreCounter::WaitedNs, waited);
        self.space.count_recoveries();
    }
}

/// Divides a piece into parts of `bytes` bytes.
fn parts(piece: MemberPiece, bytes: u32) -> impl Iterator<Item = PieceTask> {
    let starts = (0..piece.bytes).step_by(bytes.max(1) as usize);
    starts.map(move |start| PieceTask {
        piece: MemberPiece {
            offset: piece.offset + u64::from(start),
            at: piece.at + u64::from(start),
            bytes: bytes.min(piece.bytes - start),
            ..piece
        },
        tries: 0,
    })
}
