//! Workloads against a namespace: what to do, how fast, and what came of it.
//!
//! One thread drives each queue and keeps it full. Latency runs from the moment a command was due (or
//! submitted, without a rate) to the moment its completion was seen.

mod pattern;
mod report;
mod worker;

pub use pattern::{Access, Pattern, SplitMix};
pub use report::{Direction, Report, Step, queues_json};

use crate::controller::Controller;
use crate::error::{Error, Result};
use crate::queue::lock;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::Nsid;
use pattern::Written;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use worker::{Tally, Worker};

/// When a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this long.
    Time(Duration),
    /// After this many bytes, over all queues.
    Bytes(u64),
}

/// Commands per second that a run is held to, in equal steps from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ramp {
    /// Rate of the first step.
    pub from: u64,
    /// Rate of the last step.
    pub to: u64,
    /// Steps, at least 1.
    pub steps: u32,
}

impl Ramp {
    /// The rate of step `index`.
    pub fn rate(&self, index: u32) -> u64 {
        if self.steps <= 1 {
            return self.to;
        }
        let span = self.to as i128 - self.from as i128;
        (self.from as i128 + span * i128::from(index) / i128::from(self.steps - 1)) as u64
    }
}

/// A workload.
#[derive(Clone, Debug)]
pub struct Job {
    /// The namespace.
    pub nsid: Nsid,
    /// Order of addresses.
    pub pattern: Pattern,
    /// Share of reads in percent, 0 to 100.
    pub read_percent: u8,
    /// Bytes per command, a multiple of the block size.
    pub bytes: u32,
    /// Queue pairs, one thread each.
    pub queues: u32,
    /// Commands in flight per queue.
    pub depth: u32,
    /// When to stop. With a [`Ramp`] the time is shared among its steps.
    pub limit: Limit,
    /// Rate over all queues; none runs as fast as possible.
    pub ramp: Option<Ramp>,
    /// Blocks of the namespace to use, from 0 on; 0 is all.
    pub span_blocks: u64,
    /// Seed of addresses, mix and data.
    pub seed: u64,
    /// Writes carry data that names its block; it is read back and checked.
    pub verify: bool,
}

/// What every thread of a run shares.
pub(crate) struct Shared<'a> {
    pub job: &'a Job,
    pub info: NamespaceInfo,
    pub blocks_per_io: u64,
    /// Whole commands that fit into the span.
    pub units: u64,
    /// Units handed out to sequential streams, and to byte-limited runs.
    pub issued: AtomicU64,
    pub total: Option<u64>,
    pub written: Option<Written>,
    pub stop: AtomicBool,
    pub failure: Mutex<Option<Error>>,
    pub bytes_done: AtomicU64,
}

impl Shared<'_> {
    fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs `job`. `progress` is called from this thread ten times a second with the bytes moved and the
/// seconds elapsed.
///
/// # Errors
/// [`Error::Usage`] before anything is sent; otherwise the first error of any queue.
pub fn run(
    controller: &Controller,
    job: &Job,
    mut progress: impl FnMut(u64, f64),
) -> Result<Report> {
    let info = check(controller, job)?;
    let blocks_per_io = u64::from(job.bytes) / u64::from(info.block_bytes);
    let span = if job.span_blocks == 0 {
        info.blocks
    } else {
        job.span_blocks.min(info.blocks)
    };
    let units = span / blocks_per_io;
    if units == 0 {
        return Err(Error::usage(
            "one command is longer than the namespace",
            "use a smaller --bs",
        ));
    }
    let total = match job.limit {
        Limit::Bytes(bytes) => Some(bytes.div_ceil(u64::from(job.bytes)).max(1)),
        Limit::Time(_) => None,
    };
    let shared = Shared {
        job,
        info,
        blocks_per_io,
        units,
        issued: AtomicU64::new(0),
        total,
        written: job.verify.then(|| Written::new(units)),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        bytes_done: AtomicU64::new(0),
    };
    let mut workers = Vec::new();
    for index in 0..job.queues {
        workers.push(Worker::new(controller, &shared, index)?);
    }
    let steps = job.ramp.map_or(1, |ramp| ramp.steps.max(1));
    let mut report = Report::new(controller, job);
    for step in 0..steps {
        let rate = job.ramp.map(|ramp| ramp.rate(step));
        let seconds = match job.limit {
            Limit::Time(time) => Some(time / steps),
            Limit::Bytes(_) => None,
        };
        let (tallies, elapsed) = one_step(&shared, &mut workers, rate, seconds, &mut progress)?;
        report.add_step(rate, tallies, elapsed);
    }
    report.queues = workers
        .iter()
        .map(|worker| (worker.qid(), worker.statistics()))
        .collect();
    // Their queue pairs are needed again.
    drop(workers);
    if let Some(written) = &shared.written {
        report.verified_bytes = worker::read_back(controller, &shared, written)?;
    }
    Ok(report)
}

fn one_step<'a>(
    shared: &Shared<'a>,
    workers: &mut [Worker<'_>],
    rate: Option<u64>,
    time: Option<Duration>,
    progress: &mut impl FnMut(u64, f64),
) -> Result<(Vec<Tally>, Duration)> {
    let count = workers.len() as u64;
    let start = Instant::now();
    let deadline = time.map(|time| start + time);
    let tallies = std::thread::scope(|scope| {
        let handles: Vec<_> = workers
            .iter_mut()
            .map(|worker| {
                // Nanoseconds between commands of one queue; the first is due at once.
                let interval_ns = rate.map(|rate| count * 1_000_000_000 / rate.max(1));
                scope.spawn(move || worker.run(start, deadline, interval_ns))
            })
            .collect();
        while !handles.iter().all(|handle| handle.is_finished()) {
            std::thread::sleep(Duration::from_millis(
                if start.elapsed().as_millis() < 200 {
                    5
                } else {
                    100
                },
            ));
            progress(
                shared.bytes_done.load(Ordering::Relaxed),
                start.elapsed().as_secs_f64(),
            );
        }
        handles
            .into_iter()
            .map(|handle| handle.join())
            .collect::<Vec<_>>()
    });
    let elapsed = start.elapsed();
    if let Some(error) = lock(&shared.failure).take() {
        return Err(error);
    }
    let tallies: std::result::Result<Vec<Tally>, _> = tallies.into_iter().collect();
    let tallies = tallies.map_err(|_| Error::device("a bench thread panicked", "report this"))?;
    Ok((tallies, elapsed))
}

fn check(controller: &Controller, job: &Job) -> Result<NamespaceInfo> {
    let info = NamespaceInfo::from_identify(job.nsid, &controller.identify_namespace(job.nsid)?);
    if !info.is_supported() {
        return Err(Error::device(
            "the namespace's format is not supported",
            "format it without metadata",
        ));
    }
    if job.bytes == 0 || !job.bytes.is_multiple_of(info.block_bytes) {
        return Err(Error::usage(
            format!(
                "--bs {} is not a multiple of the namespace's {}-byte blocks",
                job.bytes, info.block_bytes
            ),
            format!("use a multiple of {}", info.block_bytes),
        ));
    }
    let most = controller
        .max_transfer()
        .min(u64::from(nvme_core::spec::nvm::MAX_BLOCKS) * u64::from(info.block_bytes));
    if u64::from(job.bytes) > most {
        return Err(Error::usage(
            format!(
                "--bs {} is above the controller's largest transfer",
                job.bytes
            ),
            format!("use at most {most}"),
        ));
    }
    let granted = controller.info().queue_pairs;
    if job.queues == 0 || job.queues > granted {
        return Err(Error::usage(
            format!(
                "{} queues were asked for, the controller grants {granted}",
                job.queues
            ),
            format!("use --queues 1 to {granted}"),
        ));
    }
    let most_depth = controller.info().capabilities.max_entries.min(4096) - 1;
    if job.depth == 0 || job.depth > most_depth {
        return Err(Error::usage(
            format!(
                "a depth of {} does not fit the controller's queues",
                job.depth
            ),
            format!("use --depth 1 to {most_depth}"),
        ));
    }
    if job.read_percent > 100 {
        return Err(Error::usage("a share of reads above 100 %", "use 0 to 100"));
    }
    if job.verify && job.read_percent == 100 {
        return Err(Error::usage(
            "there is nothing to verify without writes",
            "use --rw write, randwrite, rw or randrw",
        ));
    }
    Ok(info)
}
