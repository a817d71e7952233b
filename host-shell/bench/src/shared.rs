//! State that the threads of a run share.

use super::job::{BenchJob, RunLimit};
use super::pattern::UnitStamp;
use super::unit_states::UnitStates;
use nvme_core::bringup::NamespaceInfo;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// State that all threads of a run share.
pub(crate) struct RunState<'a> {
    pub job: &'a BenchJob,
    pub info: NamespaceInfo,
    /// Serial number of the controller.
    pub serial: [u8; 20],
    pub blocks_per_io: u64,
    /// Whole commands that fit into the span.
    pub units: u64,
    /// Units assigned to sequential streams, and to byte-limited runs.
    pub issued: AtomicU64,
    pub total: Option<u64>,
    /// Content of the units, in a run that verifies.
    pub states: Option<UnitStates>,
    /// Number of this run, which is part of the written data.
    pub run: u64,
    /// True if lost commands are sent again.
    pub goes_on: bool,
    /// Number of times that the device was opened, each time with other addresses.
    pub opened: AtomicU64,
    pub stop: AtomicBool,
    pub failure: Mutex<Option<Error>>,
    /// Set when the user asks for an end: further commands are not sent, and those in flight are waited
    /// for a while.
    pub interrupted: AtomicBool,
    /// Counts of each worker.
    pub done: Vec<WorkerCounts>,
}

/// Progress of one worker, for the thread that displays it.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct WorkerCounts {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub latency_ns: AtomicU64,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunProgress {
    /// Seconds since the first command.
    pub seconds: f64,
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The latencies of all commands together, in nanoseconds.
    pub latency_ns: u64,
}

impl<'a> RunState<'a> {
    /// Creates the state of a run that has not begun.
    ///
    /// # Errors
    /// [`Error::Usage`] when not even one command fits.
    pub fn new(job: &'a BenchJob, info: NamespaceInfo, goes_on: bool) -> Result<Self> {
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
            RunLimit::Bytes(bytes) => Some(bytes.div_ceil(u64::from(job.bytes)).max(1)),
            RunLimit::Time(_) => None,
        };
        Ok(Self {
            job,
            info,
            serial: [0; 20],
            blocks_per_io,
            units,
            issued: AtomicU64::new(0),
            total,
            states: job.verify.then(|| UnitStates::new(units)),
            run: RandomState::new().hash_one(std::process::id()),
            goes_on,
            opened: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            interrupted: AtomicBool::new(false),
            done: (0..job.queues).map(|_| WorkerCounts::default()).collect(),
        })
    }

    /// Returns the seed of the data of a write of `unit`.
    pub fn stamp(&self, unit: u64, generation: u8) -> UnitStamp {
        UnitStamp {
            run: self.run,
            unit,
            generation,
        }
    }

    pub fn progress(&self, start: Instant) -> RunProgress {
        let sum = |of: fn(&WorkerCounts) -> &AtomicU64| -> u64 {
            self.done
                .iter()
                .map(|done| of(done).load(Ordering::Relaxed))
                .sum()
        };
        let (reads, writes) = (sum(|done| &done.reads), sum(|done| &done.writes));
        RunProgress {
            seconds: start.elapsed().as_secs_f64(),
            reads,
            writes,
            bytes: (reads + writes) * u64::from(self.job.bytes),
            latency_ns: sum(|done| &done.latency_ns),
        }
    }

    pub fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }
}
