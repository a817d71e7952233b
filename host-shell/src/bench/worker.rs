//! The thread of one queue: keeps it full, measures, checks.

use super::Shared;
use super::pattern::{Access, Stream, Written, first_difference, stamp};
use crate::controller::Controller;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use crate::queue::{Done, Queue, Statistics, relax};
use hdrhistogram::Histogram;
use nvme_core::SubmitError;
use nvme_core::spec::{Lba, Qid, nvm};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Latencies up to a minute are kept apart with three digits.
const MAX_NS: u64 = 60_000_000_000;

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

#[derive(Clone, Copy)]
struct Pending {
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
    index: u64,
}

impl<'a> Worker<'a> {
    pub fn new(controller: &Controller, shared: &'a Shared<'a>, index: u32) -> Result<Self> {
        let job = shared.job;
        let queue = controller.create_queue_pair(job.depth + 1)?;
        let depth = job.depth.min(queue.depth()) as usize;
        let mut free = DmaBuffer::several(&controller.session().device, job.bytes as usize, depth)?;
        if job.read_percent < 100 {
            for (n, buffer) in free.iter_mut().enumerate() {
                // Not zeroes: a store may treat those apart.
                stamp(job.seed, n as u64, buffer.as_mut_slice());
            }
        }
        let seed = job.seed.wrapping_add(u64::from(index));
        let stream = Stream::new(job.pattern, job.read_percent, shared.units, seed);
        Ok(Self {
            shared,
            queue,
            stream,
            pending: vec![None; depth],
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
        loop {
            let mut submitted = false;
            while open && !self.free.is_empty() {
                if self.shared.stop.load(Ordering::Relaxed)
                    || deadline.is_some_and(|deadline| now >= deadline)
                {
                    open = false;
                    break;
                }
                let due = match interval_ns {
                    // Queues take turns within one interval.
                    Some(interval) => {
                        let shift = interval * self.index / u64::from(self.shared.job.queues);
                        start + std::time::Duration::from_nanos(shift + issued * interval)
                    }
                    None => now,
                };
                if due > now {
                    break;
                }
                let sequence = self.shared.issued.fetch_add(1, Ordering::Relaxed);
                if self.shared.total.is_some_and(|total| sequence >= total) {
                    open = false;
                    break;
                }
                self.issue(sequence, due)?;
                issued += 1;
                submitted = true;
            }
            if submitted {
                self.queue.ring();
            }
            let in_flight = self.pending.len() - self.free.len();
            if !open && in_flight == 0 {
                return Ok(());
            }
            let mut any = false;
            while let Some(done) = self.queue.poll()? {
                if !any {
                    now = Instant::now();
                    any = true;
                }
                self.finish(done, now, tally)?;
            }
            if any {
                spins = 0;
            } else {
                spins += 1;
                relax(spins);
                now = Instant::now();
                self.check_stop()?;
            }
        }
    }

    fn check_stop(&self) -> Result<()> {
        // An interrupt ends the run at once; buffers in flight stay with the queue.
        if self.queue.is_interrupted() {
            Err(Error::Interrupted)
        } else {
            Ok(())
        }
    }

    fn issue(&mut self, sequence: u64, due: Instant) -> Result<()> {
        let shared = self.shared;
        let access = self.stream.next(sequence);
        let Some(mut buffer) = self.free.pop() else {
            return Ok(());
        };
        let (nsid, blocks) = (shared.job.nsid, shared.blocks_per_io as u32);
        let lba = Lba(access.unit * shared.blocks_per_io);
        let mut check = false;
        let sqe = if access.read {
            check = shared
                .written
                .as_ref()
                .is_some_and(|written| written.contains(access.unit));
            nvm::read(nsid, lba, blocks)
        } else {
            if shared.written.is_some() {
                stamp(shared.job.seed, access.unit, buffer.as_mut_slice());
            }
            nvm::write(nsid, lba, blocks)
        };
        let slot = buffer.index();
        match self.queue.submit(sqe, Some(buffer)) {
            Ok(_) => {
                self.pending[slot] = Some(Pending { access, due, check });
                Ok(())
            }
            Err(refused) if refused.error == SubmitError::QueueFull => Err(Error::device(
                "the queue is smaller than its depth",
                "report this",
            )),
            Err(refused) => Err(Error::device(refused.error.to_string(), "use another --bs")),
        }
    }

    fn finish(&mut self, done: Done, now: Instant, tally: &mut Tally) -> Result<()> {
        if !done.is_success() {
            return Err(self.queue.error_of(&done, "a bench command"));
        }
        let Some(buffer) = done.buffer else {
            return Ok(());
        };
        let Some(pending) = self.pending[buffer.index()].take() else {
            return Ok(());
        };
        let bytes = buffer.len() as u64;
        let count = if pending.access.read {
            &mut tally.read
        } else {
            &mut tally.write
        };
        count.commands += 1;
        count.bytes += bytes;
        let ns = now.saturating_duration_since(pending.due).as_nanos() as u64;
        count.latency.saturating_record(ns.max(1));
        self.shared.bytes_done.fetch_add(bytes, Ordering::Relaxed);
        if pending.check {
            check_unit(self.shared, pending.access.unit, buffer.as_slice())?;
        } else if let Some(written) = self
            .shared
            .written
            .as_ref()
            .filter(|_| !pending.access.read)
        {
            written.insert(pending.access.unit);
        }
        self.free.push(buffer);
        Ok(())
    }
}

fn check_unit(shared: &Shared<'_>, unit: u64, bytes: &[u8]) -> Result<()> {
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

/// Reads everything that the run wrote and checks it; the bytes checked.
pub(crate) fn read_back(
    controller: &Controller,
    shared: &Shared<'_>,
    written: &Written,
) -> Result<u64> {
    let mut namespace = controller.namespace(shared.job.nsid)?;
    let mut bytes = vec![0; shared.job.bytes as usize];
    let mut total = 0;
    for unit in written.iter() {
        namespace.read(Lba(unit * shared.blocks_per_io), &mut bytes)?;
        check_unit(shared, unit, &bytes)?;
        total += bytes.len() as u64;
    }
    Ok(total)
}
