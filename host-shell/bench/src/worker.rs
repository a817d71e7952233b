//! The thread of one queue: keeps the queue full, measures, and checks data. With --verify each write names its block,
//! and at most one write of a unit is in flight, so that every read has one right answer.

use super::pattern::{AccessStream, PlannedAccess};
use super::shared::RunState;
use super::unit_states::UnitContent;
use hdrhistogram::Histogram;
use nvme_core::spec::{Lba, Qid, nvm};
use nvme_core::{CommandOutcome, SubmitError};
use nvme_driver::controller::Controller;
use nvme_driver::controller::outage::OutageCounts;
use nvme_driver::controller::queue::{DriverQueue, SubmissionBatch};
use nvme_driver::controller::statistics::QueueStatistics;
use nvme_driver::dma::DmaBuffer;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::relax;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Upper end of the latency histogram in ns, a minute: up to it latencies are recorded with three significant
/// digits.
const MAX_NS: u64 = 60_000_000_000;

/// Deadline of commands in flight after Ctrl-C: short, because the user waits, but long enough for a drive to
/// complete them, so that they need no reset.
const LEAVE: Duration = Duration::from_millis(500);

/// Counts of one direction of one queue.
pub(crate) struct DirectionCount {
    pub commands: u64,
    pub bytes: u64,
    pub latency: Histogram<u64>,
}

impl DirectionCount {
    pub fn new() -> Self {
        let latency =
            Histogram::new_with_bounds(1, MAX_NS, 3).expect("1 ns to 60 s with 3 digits is valid");
        Self {
            commands: 0,
            bytes: 0,
            latency,
        }
    }

    pub fn add(&mut self, other: &DirectionCount) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.latency.add(&other.latency).expect("same bounds");
    }
}

/// Counts of one queue in one step.
pub(crate) struct StepTally {
    pub read: DirectionCount,
    pub write: DirectionCount,
}

/// A command in flight, or one to be sent again.
#[derive(Clone, Copy)]
pub(crate) struct PendingAccess {
    access: PlannedAccess,
    due: Instant,
    /// Content of the unit when this read was sent.
    content: Option<UnitContent>,
    /// The generation of this write, once it was sent.
    generation: Option<u8>,
    /// True if the command was sent and lost, and is to be sent again.
    lost: bool,
}

/// A queue, its buffers and its stream of accesses.
pub(crate) struct BenchWorker<'a> {
    shared: &'a RunState<'a>,
    queue: DriverQueue,
    stream: AccessStream,
    free: Vec<DmaBuffer>,
    pending: Vec<Option<PendingAccess>>,
    /// Commands to send: lost ones, and those that wait for another write of their unit.
    again: Vec<PendingAccess>,
    pub outages: OutageCounts,
    index: u64,
}

impl<'a> BenchWorker<'a> {
    pub fn new(controller: &Controller, shared: &'a RunState<'a>, index: u32) -> Result<Self> {
        let job = shared.job;
        let mut queue = controller.create_queue_pair(job.depth + 1)?;
        queue.goes_by(shared.info);
        let depth = job.depth.min(queue.depth()) as usize;
        let mut free = DmaBuffer::several(&controller.session().device, job.bytes as usize, depth)?;
        if job.read_percent < 100 {
            for (n, buffer) in free.iter_mut().enumerate() {
                // The buffer is not filled with zeroes, because a drive may treat zeroes specially.
                shared.stamp(n as u64, 0).fill(buffer.as_mut_slice());
            }
        }
        let turn = shared.opened.load(Ordering::Relaxed) * u64::from(job.queues);
        let seed = job.seed.wrapping_add(turn + u64::from(index));
        let stream = AccessStream::new(job.pattern, job.read_percent, shared.units, seed);
        Ok(Self {
            shared,
            queue,
            stream,
            pending: vec![None; depth],
            again: Vec::new(),
            outages: OutageCounts::default(),
            free,
            index: u64::from(index),
        })
    }

    pub fn qid(&self) -> Qid {
        self.queue.qid()
    }

    pub fn statistics(&self) -> QueueStatistics {
        self.queue.statistics()
    }

    /// Takes over commands of a worker whose device left; they are sent before all others.
    pub fn take_over(&mut self, again: Vec<PendingAccess>) {
        self.again = again;
    }

    /// Leaves a device that is gone: returns the commands that were in flight, and the outages.
    pub fn leave(self) -> (Vec<PendingAccess>, OutageCounts) {
        let Self {
            pending,
            mut again,
            mut outages,
            ..
        } = self;
        let before = again.len();
        again.extend(pending.into_iter().flatten().map(PendingAccess::as_lost));
        outages.lost += (again.len() - before) as u64;
        (again, outages)
    }

    /// Runs one step: until `deadline`, or until the total of all workers is reached. Ends with nothing in flight.
    pub fn run(
        &mut self,
        start: Instant,
        deadline: Option<Instant>,
        interval_ns: Option<u64>,
    ) -> StepTally {
        let mut tally = StepTally {
            read: DirectionCount::new(),
            write: DirectionCount::new(),
        };
        if let Err(error) = self.drive(start, deadline, interval_ns, &mut tally) {
            self.shared.fail(error);
        }
        tally
    }

    fn drive(
        &mut self,
        start: Instant,
        deadline: Option<Instant>,
        interval_ns: Option<u64>,
        tally: &mut StepTally,
    ) -> Result<()> {
        let mut issued = 0u64;
        let mut open = true;
        let mut spins = 0;
        let mut now = Instant::now();
        let mut leave_at = None;
        loop {
            if leave_at.is_none() && self.queue.is_interrupted() {
                self.shared.interrupted.store(true, Ordering::Relaxed);
                self.shared.stop.store(true, Ordering::Relaxed);
                leave_at = Some(now + LEAVE);
            }
            if leave_at.is_some_and(|at| now >= at) {
                // Commands still in flight stay with the queue, whose end aborts them.
                return Ok(());
            }
            let stopped = self.shared.stop.load(Ordering::Relaxed);
            let is_late = deadline.is_some_and(|deadline| now >= deadline);
            if is_late {
                open = false;
                // A lost write may still be executed later: its unit gets no other write until this one is sent again.
                self.again.retain(|one| one.generation.is_some());
            }
            open &= !stopped;
            let sends_again = !stopped && !is_late;
            if sends_again && !self.again.is_empty() {
                self.send_again()?;
            }
            // The number of commands that wait for their units is limited to the number of buffers.
            if open && !self.free.is_empty() && self.again.len() < self.pending.len() {
                let turn = CommandSchedule {
                    start,
                    interval_ns,
                    now,
                };
                open = self.issue_all(turn, &mut issued)?;
            }
            let more = open || (sends_again && !self.again.is_empty());
            if !more && self.free.len() == self.pending.len() {
                return Ok(());
            }
            if self.take_all(&mut now, tally)? {
                spins = 0;
            } else {
                spins += 1;
                // Commands that are due do not wait for completions.
                match interval_ns {
                    Some(_) => relax(spins),
                    None => self.queue.pause(spins),
                }
                now = Instant::now();
            }
        }
    }

    /// Sends lost commands, and those that waited for their unit, as far as there are buffers.
    fn send_again(&mut self) -> Result<()> {
        let mut batch = self.queue.batch();
        let mut sent = 0;
        let mut all = std::mem::take(&mut self.again).into_iter();
        while let Some(mut waiting) = all.next() {
            let may_go = !self.free.is_empty() && waiting.may_be_sent(self.shared);
            let Some(buffer) = may_go.then(|| self.free.pop()).flatten() else {
                self.again.push(waiting);
                continue;
            };
            let slot = buffer.index();
            if let Err(error) = issue(self.shared, &mut batch, waiting, buffer) {
                self.again.push(waiting);
                self.again.extend(all);
                return Err(error);
            }
            self.pending[slot] = Some(PendingAccess {
                lost: false,
                ..waiting
            });
            self.outages.retried += u64::from(waiting.lost);
            sent += 1;
        }
        match sent {
            0 => drop(batch),
            _ => batch.ring(),
        }
        Ok(())
    }

    /// Sends commands that are due, as far as there are buffers; returns true if more will become due.
    fn issue_all(&mut self, turn: CommandSchedule, issued: &mut u64) -> Result<bool> {
        let shared = self.shared;
        let room = self.free.len() as u64;
        // Queues take turns within one interval.
        let shift = turn.interval_ns.unwrap_or(0) * self.index / u64::from(shared.job.queues);
        let count = match turn.interval_ns {
            Some(interval) => {
                let since = turn.now.saturating_duration_since(turn.start).as_nanos() as u64;
                let due = since
                    .checked_sub(shift)
                    .map_or(0, |ns| ns / interval.max(1) + 1);
                due.saturating_sub(*issued).min(room)
            }
            None => room,
        };
        if count == 0 {
            return Ok(true);
        }
        let first = shared.issued.fetch_add(count, Ordering::Relaxed);
        let left = shared
            .total
            .map_or(count, |total| total.saturating_sub(first));
        let mut batch = self.queue.batch();
        let mut sent = 0;
        for sequence in first..first + count.min(left) {
            let due = match turn.interval_ns {
                Some(interval) => {
                    turn.start + std::time::Duration::from_nanos(shift + *issued * interval)
                }
                None => turn.now,
            };
            let Some(buffer) = self.free.pop() else { break };
            let mut next = PendingAccess {
                access: self.stream.next(sequence),
                due,
                content: None,
                generation: None,
                lost: false,
            };
            *issued += 1;
            if !next.may_be_sent(shared) {
                self.free.push(buffer);
                self.again.push(next);
                continue;
            }
            let slot = buffer.index();
            if let Err(error) = issue(shared, &mut batch, next, buffer) {
                self.again.push(next);
                return Err(error);
            }
            self.pending[slot] = Some(next);
            sent += 1;
        }
        match sent {
            0 => drop(batch),
            _ => batch.ring(),
        }
        Ok(left >= count)
    }

    /// Accounts for the commands that have ended and takes their buffers back; returns true if there were any,
    /// seen at `now`.
    fn take_all(&mut self, now: &mut Instant, tally: &mut StepTally) -> Result<bool> {
        let Self {
            shared,
            queue,
            free,
            pending,
            again,
            outages,
            index,
            ..
        } = self;
        let (mut reads, mut writes, mut latency_ns) = (0, 0, 0);
        let (mut failed, mut mismatch) = (None, Ok(()));
        let mut lost = None;
        let mut any = false;
        queue.poll_batch(pending.len(), |mut done| {
            if !any {
                *now = Instant::now();
                any = true;
            }
            if !done.is_success() {
                let goes_on = shared.goes_on && (done.late || done.may_retry());
                let Some(buffer) = done.buffer.take().filter(|_| goes_on) else {
                    failed.get_or_insert(done);
                    return;
                };
                again.extend(pending[buffer.index()].take().map(PendingAccess::as_lost));
                free.push(buffer);
                outages.lost += 1;
                outages.aborted += u64::from(matches!(done.outcome, CommandOutcome::Completed(_)));
                lost.get_or_insert(done);
                return;
            }
            let Some(buffer) = done.buffer else { return };
            let Some(pending) = pending[buffer.index()].take() else {
                return;
            };
            let count = if pending.access.read {
                &mut tally.read
            } else {
                &mut tally.write
            };
            count.commands += 1;
            count.bytes += buffer.len() as u64;
            match pending.access.read {
                true => reads += 1,
                false => writes += 1,
            }
            let ns = now.saturating_duration_since(pending.due).as_nanos() as u64;
            count.latency.saturating_record(ns.max(1));
            latency_ns += ns;
            let unit = pending.access.unit;
            if let Some(states) = &shared.states {
                match (pending.access.read, pending.content) {
                    (false, _) => states.end_write(unit),
                    // If a write has begun meanwhile, the read may have returned either content.
                    (true, Some(content)) if states.content(unit) == Some(content) => {
                        let checked = check_unit(shared, unit, content, buffer.as_slice());
                        mismatch = std::mem::replace(&mut mismatch, Ok(())).and(checked);
                    }
                    (true, _) => {}
                }
            }
            free.push(buffer);
        })?;
        if any {
            // Only this worker writes these counters.
            let done = &shared.done[*index as usize];
            let add = |to: &AtomicU64, count: u64| {
                to.store(to.load(Ordering::Relaxed) + count, Ordering::Relaxed)
            };
            add(&done.reads, reads);
            add(&done.writes, writes);
            add(&done.latency_ns, latency_ns);
        }
        if let Some(done) = lost {
            outages.note(queue.error_of(&done, "a bench command").to_string());
        }
        match failed {
            Some(done) => Err(queue.error_of(&done, "a bench command")),
            None => mismatch.map(|()| any),
        }
    }
}

#[derive(Clone, Copy)]
struct CommandSchedule {
    start: Instant,
    /// Nanoseconds between commands of one queue; the first is due at once.
    interval_ns: Option<u64>,
    now: Instant,
}

impl PendingAccess {
    fn as_lost(self) -> Self {
        Self { lost: true, ..self }
    }

    /// Prepares a command to be sent now: a read records the expected content of its unit, a write becomes the unit's
    /// only write. A write whose unit has another write in flight may not be sent; a lost write keeps its generation,
    /// since it may still be executed later.
    fn may_be_sent(&mut self, shared: &RunState<'_>) -> bool {
        let Some(states) = &shared.states else {
            return true;
        };
        if self.access.read {
            self.content = states.content(self.access.unit);
            return true;
        }
        self.generation = self
            .generation
            .or_else(|| states.begin_write(self.access.unit));
        self.generation.is_some()
    }
}

/// Submits one command.
fn issue(
    shared: &RunState<'_>,
    batch: &mut SubmissionBatch<'_>,
    pending: PendingAccess,
    mut buffer: DmaBuffer,
) -> Result<()> {
    let (nsid, blocks) = (shared.job.nsid, shared.blocks_per_io as u32);
    let unit = pending.access.unit;
    let lba = Lba(unit * shared.blocks_per_io);
    let sqe = match pending.access.read {
        true => nvm::read(nsid, lba, blocks),
        false => nvm::write(nsid, lba, blocks),
    };
    if let Some(generation) = pending.generation {
        shared.stamp(unit, generation).fill(buffer.as_mut_slice());
    }
    match batch.submit(sqe, Some(buffer)) {
        Ok(_) => Ok(()),
        Err(refused) if refused.error == SubmitError::QueueFull => {
            Err(Error::internal("the queue is smaller than its depth"))
        }
        Err(refused) => Err(refused
            .error
            .into_error(|error| Error::usage(error.to_string(), "use another --bs"))),
    }
}

pub(super) fn check_unit(
    shared: &RunState<'_>,
    unit: u64,
    content: UnitContent,
    bytes: &[u8],
) -> Result<()> {
    let stamp = shared.stamp(unit, content.generation());
    let Some(at) = stamp.first_difference(bytes) else {
        return Ok(());
    };
    let lba = unit * shared.blocks_per_io + at as u64 / u64::from(shared.info.block_bytes);
    Err(Error::Mismatch {
        what: format!(
            "verify: LBA {lba} does not hold what was written (seed {})",
            shared.job.seed
        ),
    })
}
