//! The thread of one queue: keeps it full, measures, checks.

use super::pattern::{Access, Stream, first_difference, stamp};
use super::shared::Shared;
use crate::controller::Controller;
use crate::controller::outage::Outages;
use crate::controller::queue::{Batch, Queue};
use crate::controller::statistics::Statistics;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use crate::lock::relax;
use hdrhistogram::Histogram;
use nvme_core::spec::{Lba, Qid, nvm};
use nvme_core::{Outcome, SubmitError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Latencies up to a minute are kept apart with three digits.
const MAX_NS: u64 = 60_000_000_000;

/// How long commands in flight are waited for after Ctrl-C.
const LEAVE: Duration = Duration::from_millis(500);

/// What one direction of one queue did.
pub(crate) struct Count {
    pub commands: u64,
    pub bytes: u64,
    pub latency: Histogram<u64>,
}

impl Count {
    pub fn new() -> Self {
        let latency =
            Histogram::new_with_bounds(1, MAX_NS, 3).expect("1 ns to 60 s with 3 digits is valid");
        Self {
            commands: 0,
            bytes: 0,
            latency,
        }
    }

    pub fn add(&mut self, other: &Count) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.latency.add(&other.latency).expect("same bounds");
    }
}

/// What one queue did in one step.
pub(crate) struct Tally {
    pub read: Count,
    pub write: Count,
}

/// A command in flight, or one to be sent again.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    access: Access,
    due: Instant,
    /// The unit held stamped data before this read was sent.
    check: bool,
}

/// A queue, its buffers and its stream of accesses.
pub(crate) struct Worker<'a> {
    shared: &'a Shared<'a>,
    queue: Queue,
    stream: Stream,
    free: Vec<DmaBuffer>,
    pending: Vec<Option<Pending>>,
    /// What was lost and is to be sent again.
    again: Vec<Pending>,
    pub outages: Outages,
    index: u64,
}

impl<'a> Worker<'a> {
    pub fn new(controller: &Controller, shared: &'a Shared<'a>, index: u32) -> Result<Self> {
        let job = shared.job;
        let mut queue = controller.create_queue_pair(job.depth + 1)?;
        queue.goes_by(shared.info);
        let depth = job.depth.min(queue.depth()) as usize;
        let mut free = DmaBuffer::several(&controller.session().device, job.bytes as usize, depth)?;
        if job.read_percent < 100 {
            for (n, buffer) in free.iter_mut().enumerate() {
                // Not zeroes: a store may treat those apart.
                stamp(job.seed, n as u64, buffer.as_mut_slice());
            }
        }
        let turn = shared.opened.load(Ordering::Relaxed) * u64::from(job.queues);
        let seed = job.seed.wrapping_add(turn + u64::from(index));
        let stream = Stream::new(job.pattern, job.read_percent, shared.units, seed);
        Ok(Self {
            shared,
            queue,
            stream,
            pending: vec![None; depth],
            again: Vec::new(),
            outages: Outages::default(),
            free,
            index: u64::from(index),
        })
    }

    pub fn qid(&self) -> Qid {
        self.queue.qid()
    }

    pub fn statistics(&self) -> Statistics {
        self.queue.statistics()
    }

    /// Commands to be sent before all others, in the stead of a worker whose device left.
    pub fn take_over(&mut self, again: Vec<Pending>) {
        self.again = again;
    }

    /// Leaves a device that is gone: what was under way, and what there is to say of it.
    pub fn leave(self) -> (Vec<Pending>, Outages) {
        let Self {
            pending,
            mut again,
            mut outages,
            ..
        } = self;
        let before = again.len();
        again.extend(pending.into_iter().flatten());
        outages.lost += (again.len() - before) as u64;
        (again, outages)
    }

    /// One step: until `deadline`, or until the shared total is used up. Ends with nothing in flight.
    pub fn run(
        &mut self,
        start: Instant,
        deadline: Option<Instant>,
        interval_ns: Option<u64>,
    ) -> Tally {
        let mut tally = Tally {
            read: Count::new(),
            write: Count::new(),
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
        tally: &mut Tally,
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
                // What is still in flight stays with the queue, whose end takes it away.
                return Ok(());
            }
            let stopped = self.shared.stop.load(Ordering::Relaxed);
            if deadline.is_some_and(|deadline| now >= deadline) {
                open = false;
                self.again.clear();
            }
            open &= !stopped;
            if !stopped && !self.again.is_empty() {
                self.send_again()?;
            }
            if open && !self.free.is_empty() {
                let turn = Turn {
                    start,
                    interval_ns,
                    now,
                };
                open = self.issue_all(turn, &mut issued)?;
            }
            let more = open || (!stopped && !self.again.is_empty());
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

    /// Sends what was lost, as far as there are buffers.
    fn send_again(&mut self) -> Result<()> {
        let mut batch = self.queue.batch();
        while let Some(lost) = self.again.last().copied() {
            let Some(buffer) = self.free.pop() else { break };
            self.again.pop();
            let slot = buffer.index();
            let check = issue(self.shared, &mut batch, lost.access, buffer)?;
            self.pending[slot] = Some(Pending { check, ..lost });
            self.outages.retried += 1;
        }
        batch.ring();
        Ok(())
    }

    /// Sends what is due, as far as there are buffers; whether there is more to come.
    fn issue_all(&mut self, turn: Turn, issued: &mut u64) -> Result<bool> {
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
        for sequence in first..first + count.min(left) {
            let due = match turn.interval_ns {
                Some(interval) => {
                    turn.start + std::time::Duration::from_nanos(shift + *issued * interval)
                }
                None => turn.now,
            };
            let Some(buffer) = self.free.pop() else { break };
            let access = self.stream.next(sequence);
            let slot = buffer.index();
            let check = issue(shared, &mut batch, access, buffer)?;
            self.pending[slot] = Some(Pending { access, due, check });
            *issued += 1;
        }
        if left > 0 {
            batch.ring();
        }
        Ok(left >= count)
    }

    /// Accounts for the commands that have ended and takes their buffers back; whether there were
    /// any, seen at `now`.
    fn take_all(&mut self, now: &mut Instant, tally: &mut Tally) -> Result<bool> {
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
                again.extend(pending[buffer.index()].take());
                free.push(buffer);
                outages.lost += 1;
                outages.aborted += u64::from(matches!(done.outcome, Outcome::Completed(_)));
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
            if pending.check && mismatch.is_ok() {
                mismatch = check_unit(shared, unit, buffer.as_slice());
            } else if let (Some(written), false) = (&shared.written, pending.access.read) {
                written.insert(unit);
            }
            free.push(buffer);
        })?;
        if any {
            // One writer each: this worker.
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

/// When commands are due.
#[derive(Clone, Copy)]
struct Turn {
    start: Instant,
    /// Nanoseconds between commands of one queue; the first is due at once.
    interval_ns: Option<u64>,
    now: Instant,
}

/// Submits one access; whether what it reads is to be checked.
fn issue(
    shared: &Shared<'_>,
    batch: &mut Batch<'_>,
    access: Access,
    mut buffer: DmaBuffer,
) -> Result<bool> {
    let (nsid, blocks) = (shared.job.nsid, shared.blocks_per_io as u32);
    let lba = Lba(access.unit * shared.blocks_per_io);
    let written = shared.written.as_ref();
    let (sqe, check) = if access.read {
        let check = written.is_some_and(|written| written.contains(access.unit));
        (nvm::read(nsid, lba, blocks), check)
    } else {
        if written.is_some() {
            stamp(shared.job.seed, access.unit, buffer.as_mut_slice());
        }
        (nvm::write(nsid, lba, blocks), false)
    };
    match batch.submit(sqe, Some(buffer)) {
        Ok(_) => Ok(check),
        Err(refused) if refused.error == SubmitError::QueueFull => {
            Err(Error::internal("the queue is smaller than its depth"))
        }
        Err(refused) => Err(refused
            .error
            .into_error(|error| Error::usage(error.to_string(), "use another --bs"))),
    }
}

pub(super) fn check_unit(shared: &Shared<'_>, unit: u64, bytes: &[u8]) -> Result<()> {
    match first_difference(shared.job.seed, unit, bytes) {
        None => Ok(()),
        Some(at) => {
            let lba = unit * shared.blocks_per_io + at as u64 / u64::from(shared.info.block_bytes);
            Err(Error::Mismatch {
                what: format!(
                    "verify: LBA {lba} does not hold what was written (seed {})",
                    shared.job.seed
                ),
            })
        }
    }
}
