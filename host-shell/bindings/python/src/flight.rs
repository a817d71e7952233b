//! Transfers that were launched on a GPU, and the objects that they need until they have ended. An object that Python
//! forgets is kept here, since the GPU may still write to memory that only this transfer holds.

use crate::error::ExceptionParts;
use crate::left::{self, BufferedTransfer};
use crate::process;
use crate::wait::{self, CommonDeadline};
use nvme_host::Error;
use nvme_host::ProcessMark;
use nvme_host::cuda::GatherOutcome;
use nvme_host::lock::lock;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A gather, or another transfer on a GPU, that was launched.
pub struct LaunchedTransfer {
    process: ProcessMark,
    pending: nvme_host::cuda::PendingRows,
    word: &'static str,
    number: u64,
    /// Rows, or bytes of a read or write.
    count: u64,
    /// Deadline of a wait for which the caller names no limit.
    patience: Duration,
    is_reported: AtomicBool,
    /// Rows that failed are no error: they are counted by the store alone.
    only_counts_rows: bool,
    /// Number of runs of a captured flight that were examined.
    seen: AtomicU32,
}

impl LaunchedTransfer {
    /// # Errors
    /// In a child of a fork: the GPU is its parent's.
    pub fn check_process(&self) -> Result<(), ExceptionParts> {
        process::check(self.process, "transfer")
    }

    /// Waits `limit` at most; returns true if it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        self.pending.settles_within(limit)
    }

    /// Waits `limit` at most, or until its own deadline; returns true if it has ended. Ctrl-C ends the wait.
    pub fn wait_in(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<bool> {
        let limit = limit.unwrap_or(self.patience);
        wait::until(py, Some(limit), |slice| self.wait(slice))
    }

    /// Returns the fault of a flight that has not ended by its own deadline.
    pub fn late(&self) -> ExceptionParts {
        ExceptionParts::of(&Error::Unfinished {
            cause: format!(
                "the {} has not ended within {} s",
                self.word,
                self.patience.as_secs_f64()
            ),
            remedy: "wait for what its stream does before it, and ask again: it goes on".to_owned(),
        })
    }

    /// Takes the fault, which is returned once.
    fn fault(&self) -> Option<ExceptionParts> {
        let outcome = self.pending.outcome()?;
        if self.pending.is_captured() {
            let ended = self.pending.ended();
            // The swap lets one of several threads report a run of a captured flight: each run's outcome is
            // raised once, even if two calls of Python look at the same time.
            if self.seen.swap(ended, Ordering::AcqRel) == ended {
                return None;
            }
        } else if self.is_reported.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.describe(outcome)
    }

    /// Returns its first failure, however often it was returned, if it has ended and its outcome is known. The
    /// failure counts as reported.
    pub fn failure(&self) -> Option<ExceptionParts> {
        let outcome = self.pending.outcome()?;
        let fault = self.describe(outcome)?;
        self.is_reported.store(true, Ordering::Release);
        Some(fault)
    }

    fn describe(&self, outcome: nvme_host::Result<GatherOutcome>) -> Option<ExceptionParts> {
        let failures = match outcome {
            Ok(_) if self.only_counts_rows => return None,
            Ok(ended) => ended.failures,
            Err(error) => return Some(ExceptionParts::of(&error)),
        };
        let (row, code) = failures.first?;
        let (word, number, count) = (self.word, self.number, self.count);
        let what = match word {
            "read" | "write" => {
                format!("{word} {number} of {count} bytes on the GPU, in rows of 64 KiB")
            }
            "search" => format!("{word} {number} of {count} queries on the GPU"),
            "attention" => format!("{word} {number} of {count} heads of keys on the GPU"),
            "experts" => {
                format!(
                    "{word} {number} of {count} tokens on the GPU, in rows that are parts of reads"
                )
            }
            _ => format!("{word} {number} of {count} rows on the GPU"),
        };
        let what = match failures.member {
            Some(member) => format!("{what} (member {member} of the stripe)"),
            None => what,
        };
        Some(match word {
            "search" => ExceptionParts::query(code, row, &what, failures.rows),
            _ => ExceptionParts::row(code, row, None, &what, failures.rows),
        })
    }
}

/// Report of the failure of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FailureReport {
    /// By the next call of its table or store, or by its own check.
    Table,
    /// By its own check alone.
    Apart,
    /// As [`Table`](Self::Table), without rows that failed: the store counts them, and they are no error.
    Counted,
    /// As [`Apart`](Self::Apart), without rows that failed.
    CountedApart,
}

impl FailureReport {
    /// Returns the same report by the operation's own check alone.
    pub fn apart(self) -> Self {
        match self {
            Self::Table | Self::Apart => Self::Apart,
            Self::Counted | Self::CountedApart => Self::CountedApart,
        }
    }

    /// True if no other call reports the failure.
    fn is_apart(self) -> bool {
        matches!(self, Self::Apart | Self::CountedApart)
    }

    /// True if rows that failed are no error.
    fn only_counts_rows(self) -> bool {
        matches!(self, Self::Counted | Self::CountedApart)
    }
}

/// A gather under way, with the objects that it needs.
struct RetainedGather {
    flight: Arc<LaunchedTransfer>,
    store: Option<Arc<nvme_host::Store>>,
    #[expect(dead_code, reason = "kept until the gather has ended")]
    buffers: Option<Py<PyAny>>,
}

/// The gathers of one table, or the transfers of bytes of one store.
#[derive(Default)]
pub struct LaunchedTransfers {
    held: Mutex<VecDeque<RetainedGather>>,
    captured: Mutex<Vec<Arc<LaunchedTransfer>>>,
    failed: Mutex<Option<ExceptionParts>>,
    launched: AtomicU64,
}

impl LaunchedTransfers {
    /// Launches a transfer in a stream by `launch`, and keeps its objects alive until it has ended. Its failure
    /// is found here by [`Self::check`], unless `report` says otherwise.
    pub fn launch(
        self: &Arc<Self>,
        py: Python<'_>,
        store: Arc<nvme_host::Store>,
        (word, count, bytes): (&'static str, u64, u64),
        buffers: Option<Py<PyAny>>,
        report: FailureReport,
        launch: impl FnOnce() -> nvme_host::Result<nvme_host::cuda::PendingRows> + Send,
    ) -> PyResult<GpuOperation> {
        let pending = match py.detach(launch) {
            Ok(pending) => pending,
            Err(error) => {
                if matches!(error, Error::Unfinished { .. }) {
                    // A part of it is under way and has no end that could be asked for.
                    std::mem::forget((store, buffers));
                }
                return Err(ExceptionParts::of(&error).into());
            }
        };
        let flight = Arc::new(LaunchedTransfer {
            process: ProcessMark::here(),
            pending,
            word,
            patience: store.patience(bytes),
            number: self.launched.fetch_add(1, Ordering::Relaxed),
            count,
            is_reported: AtomicBool::new(report.is_apart()),
            only_counts_rows: report.only_counts_rows(),
            seen: AtomicU32::new(0),
        });
        if flight.pending.is_captured() {
            let mut captured = lock(&self.captured);
            // One whose graphs are gone cannot run again, and its last outcome was reported when it was last
            // examined.
            captured.retain(|one| !one.pending.is_over());
            captured.push(Arc::clone(&flight));
        } else {
            lock(&self.held).push_back(RetainedGather {
                flight: Arc::clone(&flight),
                store: Some(store),
                buffers,
            });
        }
        Ok(GpuOperation {
            flight,
            flights: Arc::clone(self),
        })
    }

    /// Releases the buffers of transfers that have ended, and keeps the first failure.
    pub fn reap(&self) {
        let mut over = Vec::new();
        {
            let mut held = lock(&self.held);
            // Those of one stream end in order; of several streams, a long list is looked through.
            if held.len() > 32 {
                let (done, left): (Vec<RetainedGather>, Vec<RetainedGather>) =
                    held.drain(..).partition(RetainedGather::is_settled);
                over = done;
                *held = VecDeque::from(left);
            } else {
                while held.front().is_some_and(RetainedGather::is_settled) {
                    over.extend(held.pop_front());
                }
            }
        }
        for one in &over {
            if let Some(fault) = one.flight.fault() {
                lock(&self.failed).get_or_insert(fault);
            }
        }
    }

    /// Keeps the first failure of captured ones that ended again.
    pub fn look_at_captured(&self) {
        for flight in lock(&self.captured).iter() {
            if let Some(fault) = flight.fault() {
                lock(&self.failed).get_or_insert(fault);
            }
        }
    }

    /// Waits for the flights that were launched before, `timeout` seconds at most; returns True if they have
    /// ended.
    ///
    /// # Errors
    /// As [`check`](Self::check), with failures of captured ones, too.
    pub fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = CommonDeadline::after(wait::seconds(timeout)?);
        for flight in self.under_way() {
            flight.check_process()?;
            if !flight.wait_in(py, deadline.left())? {
                return Ok(false);
            }
        }
        self.reap();
        self.look_at_captured();
        self.check()?;
        Ok(true)
    }

    /// Keeps a failure for [`check`](Self::check), unless an earlier one waits there.
    pub fn keep_failure(&self, fault: ExceptionParts) {
        lock(&self.failed).get_or_insert(fault);
    }

    /// # Errors
    /// The first failure that was not reported yet.
    pub fn check(&self) -> Result<(), ExceptionParts> {
        match lock(&self.failed).take() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    pub fn is_idle(&self) -> bool {
        lock(&self.held).is_empty()
    }

    /// Returns the flights that have not been reported yet, in the order of their launch.
    pub fn under_way(&self) -> Vec<Arc<LaunchedTransfer>> {
        let held = lock(&self.held);
        held.iter().map(|one| Arc::clone(&one.flight)).collect()
    }
}

impl RetainedGather {
    /// True if it has ended and its outcome is known.
    fn is_settled(&self) -> bool {
        self.flight.pending.is_settled()
    }
}

impl BufferedTransfer for RetainedGather {
    fn is_done(&self) -> bool {
        self.flight.pending.is_done()
    }
}

impl Drop for RetainedGather {
    /// Drops the last use of a store without the GIL: it closes the device, which takes time.
    fn drop(&mut self) {
        wait::drop_elsewhere(self.flight.process, self.store.take());
    }
}

impl Drop for LaunchedTransfers {
    fn drop(&mut self) {
        for one in std::mem::take(&mut *lock(&self.held)) {
            if !one.is_done() {
                left::keep(one);
            }
        }
    }
}

/// A gather on a GPU.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct GpuOperation {
    flight: Arc<LaunchedTransfer>,
    flights: Arc<LaunchedTransfers>,
}

impl GpuOperation {
    pub fn flight(&self) -> &Arc<LaunchedTransfer> {
        &self.flight
    }
}

#[pymethods]
impl GpuOperation {
    /// True if it has ended, a captured one at least once, and its outcome is known. Waits for nothing.
    fn done(&self) -> PyResult<bool> {
        self.flight.check_process()?;
        Ok(self.flight.pending.is_settled())
    }

    /// True if it is part of a graph.
    #[getter]
    fn is_captured(&self) -> bool {
        self.flight.pending.is_captured()
    }

    /// Waits `timeout` seconds at most, or until the deadline of its commands; returns True if it has ended.
    /// Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.flight.check_process()?;
        let limit = wait::seconds(timeout)?;
        self.flight.wait_in(py, limit)
    }

    /// Waits until the deadline of its commands, and raises its error, also that it has not ended. Ctrl-C ends
    /// the wait.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        match self.wait(py, None)? {
            true => self.check(),
            false => Err(self.flight.late().into()),
        }
    }

    /// Raises the error, if it has ended with one; no other call raises it again.
    fn check(&self) -> PyResult<()> {
        self.flight.check_process()?;
        let Some(outcome) = self.flight.pending.outcome() else {
            return Ok(());
        };
        self.flight.is_reported.store(true, Ordering::Release);
        let fault = self.flight.describe(outcome);
        self.flights.reap();
        fault.map_or(Ok(()), |fault| Err(fault.into()))
    }
}
