//! An I/O queue pair for one thread: submit, ring, poll.
//!
//! The pair lies behind a mutex that only this handle locks, until recovery locks all of them to reset the
//! controller. Completions that recovery reaps wait in a backlog, so each command still ends exactly once here.
//!
//! No command is submitted for a namespace that has changed since the queue's user received its properties: see
//! `facts.rs`.

use crate::controller::facts::QueueFacts;
use crate::controller::queue_inner::{QueueCompletion, QueueInner};
use crate::controller::session::ControllerSession;
use crate::controller::statistics::QueueStatistics;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use crate::lock::{lock, relax};
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Cid, Nsid, Qid, Sqe, Status, nvm};
use nvme_core::{CommandData, CommandOutcome, SubmitError};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Empty polls before a thread sleeps until an interrupt comes.
const SPINS_BEFORE_NAP: u32 = 32;

/// Reason why a command was not submitted.
#[derive(Debug, thiserror::Error)]
pub enum QueueRefusal {
    /// The queue does not take it; [`SubmitError::QueueFull`] asks for a `poll`.
    #[error(transparent)]
    Queue(#[from] SubmitError),
    /// The device or the namespace has changed since the queue was made; the cause. Open it again.
    #[error("{0}")]
    Changed(String),
    /// The properties of the device could not be read: it is gone, did not answer in time, or the wait was
    /// interrupted.
    #[error("{0}")]
    Unread(Box<Error>),
}

impl QueueRefusal {
    /// Returns the error of this refusal; `otherwise` makes it if the queue itself does not take the command.
    pub fn into_error(self, otherwise: impl FnOnce(SubmitError) -> Error) -> Error {
        match self {
            Self::Queue(error) => otherwise(error),
            Self::Changed(cause) => Error::Changed { cause },
            Self::Unread(error) => *error,
        }
    }
}

impl PartialEq<SubmitError> for QueueRefusal {
    fn eq(&self, other: &SubmitError) -> bool {
        matches!(self, Self::Queue(error) if error == other)
    }
}

/// A command that was not submitted, with its buffer.
#[derive(Debug)]
pub struct RejectedSubmission {
    /// Reason of the rejection.
    pub error: QueueRefusal,
    /// The buffer, unused.
    pub buffer: Option<DmaBuffer>,
}

/// Commands that are submitted together. Holds the queue until it is dropped or rung: one at a time in each thread.
pub struct SubmissionBatch<'a> {
    inner: MutexGuard<'a, QueueInner>,
    basis: &'a QueueFacts,
    deadline_ns: u64,
}

impl SubmissionBatch<'_> {
    /// Returns the reason not to place a command that the queue itself would accept.
    #[inline]
    fn refusal(&self, sqe: &Sqe) -> Option<QueueRefusal> {
        if let Some(cause) = &self.inner.failed_reset {
            let cause = cause.clone();
            return Some(QueueRefusal::Unread(Box::new(Error::Gone { cause })));
        }
        Some(match self.basis.refusal(sqe.nsid, sqe.opcode())? {
            Error::Changed { cause } => QueueRefusal::Changed(cause),
            error => QueueRefusal::Unread(Box::new(error)),
        })
    }

    /// Does the same as [`DriverQueue::submit`].
    #[inline]
    pub fn submit(
        &mut self,
        sqe: Sqe,
        buffer: Option<DmaBuffer>,
    ) -> std::result::Result<Cid, RejectedSubmission> {
        let data = match &buffer {
            Some(buffer) => CommandData::Contiguous {
                iova: buffer.iova(),
                len: buffer.len() as u64,
            },
            None => CommandData::None,
        };
        self.submit_data(sqe, data, buffer)
    }

    /// Does the same as [`DriverQueue::submit_data`].
    #[inline]
    pub fn submit_data(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        buffer: Option<DmaBuffer>,
    ) -> std::result::Result<Cid, RejectedSubmission> {
        if let Some(error) = self.refusal(&sqe) {
            return Err(RejectedSubmission { error, buffer });
        }
        let pair = self.inner.pair.queue();
        match pair.submit(sqe, data, buffer, self.deadline_ns) {
            Ok(cid) => {
                let in_flight = pair.in_flight();
                let statistics = &mut self.inner.statistics;
                statistics.submitted += 1;
                statistics.peak = statistics.peak.max(in_flight);
                Ok(cid)
            }
            Err(rejected) => Err(RejectedSubmission {
                error: rejected.error.into(),
                buffer: rejected.buffer,
            }),
        }
    }

    /// Shows the controller everything submitted since the last ring.
    #[inline]
    pub fn ring(mut self) {
        self.inner.ring();
    }
}

/// Limit of the looks at the device before one batch.
const MOST_LOOKS: u32 = 16;

/// Compares the facts on which a queue relies with the present ones, for the time number `looks` in one call.
#[cold]
fn look_again(session: &ControllerSession, basis: &mut QueueFacts, looks: u32) {
    let checked = match looks {
        ..=MOST_LOOKS => session.verify(),
        _ => Err(Error::device(
            format!("the device reported a change during each of {MOST_LOOKS} looks at it"),
            "try again",
        )),
    };
    match checked {
        Ok(count) => basis.compare(&session.facts, count),
        Err(error) => basis.could_not_look(&error),
    }
}

/// A queue pair. `Send`: move it to the thread that drives it. Deleted on drop.
///
/// A buffer that is submitted belongs to its command until [`poll`](Self::poll) or [`wait`](Self::wait)
/// returns it.
///
/// ```
/// use nvme_driver::core::spec::{Lba, Nsid, nvm};
/// use nvme_driver::{ControllerConfig, Controller, Error};
///
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// let device = nvme_driver::open("sim:mem?size=16MiB&block=4096")?;
/// let controller = Controller::start(device, &ControllerConfig::default())?;
/// let mut queue = controller.create_queue_pair(16)?;
/// // Four reads in flight, one doorbell write for all of them.
/// for lba in 0..4 {
///     let buffer = controller.alloc(4096)?;
///     queue
///         .submit(nvm::read(Nsid(1), Lba(lba), 1), Some(buffer))
///         .map_err(|rejected| Error::device(rejected.error.to_string(), "poll first"))?;
/// }
/// queue.ring();
/// let mut bytes = 0;
/// while let Some(done) = queue.wait()? {
///     if !done.is_success() {
///         return Err(queue.error_of(&done, "Read"));
///     }
///     bytes += done.buffer.map_or(0, |buffer| buffer.as_slice().len());
/// }
/// assert_eq!(bytes, 4 * 4096);
/// drop(queue);
/// controller.shut_down()?;
/// # }
/// # Ok(())
/// # }
/// ```
pub struct DriverQueue {
    session: Arc<ControllerSession>,
    inner: Arc<Mutex<QueueInner>>,
    /// Facts about the device on which its user relies.
    basis: QueueFacts,
    qid: Qid,
    depth: u32,
    /// Completions of one poll, until the caller receives them.
    ended: Vec<QueueCompletion>,
    /// Commands past their deadline that may still be in flight.
    overdue: VecDeque<Cid>,
    /// The interrupt vector to wait for, when completions interrupt.
    vector: Option<u16>,
}

impl DriverQueue {
    pub(crate) fn new(session: Arc<ControllerSession>, inner: Arc<Mutex<QueueInner>>) -> Self {
        let (qid, depth, vector) = {
            let mut held = lock(&inner);
            let vector = held.pair.plan().vector;
            (held.pair.queue().qid(), held.pair.queue().depth(), vector)
        };
        Self {
            basis: QueueFacts::new(&session.facts),
            session,
            inner,
            qid,
            depth,
            ended: Vec::new(),
            overdue: VecDeque::new(),
            vector,
        }
    }

    /// Returns the queue's identifier.
    pub fn qid(&self) -> Qid {
        self.qid
    }

    /// Returns the state that the handle and recovery share.
    #[cfg(feature = "cuda")]
    pub fn inner(&self) -> &Arc<Mutex<QueueInner>> {
        &self.inner
    }

    /// Returns the most commands that may be in flight.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Counts since the queue was created.
    pub fn statistics(&self) -> QueueStatistics {
        lock(&self.inner).statistics
    }

    /// Places a command that moves `buffer`, whole; the controller sees it after [`ring`](Self::ring).
    ///
    /// The buffer belongs to the command until [`poll`](Self::poll) returns it.
    #[inline]
    pub fn submit(
        &mut self,
        sqe: Sqe,
        buffer: Option<DmaBuffer>,
    ) -> std::result::Result<Cid, RejectedSubmission> {
        self.batch().submit(sqe, buffer)
    }

    /// Submits a command whose data is described by `data`: parts of `buffer`, which the command keeps as in
    /// [`submit`](Self::submit), or memory outside of this process, such as a peer device's.
    #[inline]
    pub fn submit_data(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        buffer: Option<DmaBuffer>,
    ) -> std::result::Result<Cid, RejectedSubmission> {
        self.batch().submit_data(sqe, data, buffer)
    }

    /// Starts a batch of commands: it takes the lock and reads the clock once for all of them.
    #[inline]
    pub fn batch(&mut self) -> SubmissionBatch<'_> {
        let Self {
            session,
            inner,
            basis,
            ..
        } = self;
        let mut looks = 0;
        let inner = loop {
            session.look();
            if !basis.is_current(&session.facts.alarm) {
                looks += 1;
                look_again(session, basis, looks);
            }
            let count = basis.seen();
            let inner = lock(inner);
            // A reset holds the queue's lock, and another drive may answer after it, so the count is compared again
            // under the lock.
            if count.is_none_or(|count| count == session.facts.alarm.count()) {
                break inner;
            }
        };
        let now_ns = session.now_ns();
        SubmissionBatch {
            deadline_ns: now_ns.saturating_add(session.timeout_ns()),
            basis,
            inner,
        }
    }

    /// Refuses later commands of this queue if the namespace differs from `info`, on which its user relies.
    pub fn goes_by(&mut self, info: NamespaceInfo) {
        self.basis.goes_by(info);
    }

    /// Checks that namespace `nsid` still has the properties on which the user of this queue relies.
    ///
    /// # Errors
    /// [`Error::Changed`] when it may not be read any more.
    pub fn check_current(&mut self, nsid: Nsid) -> Result<()> {
        self.check_for(nsid, nvm::opcode::READ)
    }

    /// Does the same as [`check_current`](Self::check_current), for commands with `opcode`.
    pub(crate) fn check_for(&mut self, nsid: Nsid, opcode: u8) -> Result<()> {
        self.session.look();
        if !self.basis.is_current(&self.session.facts.alarm) {
            let count = self.session.verify()?;
            self.basis.compare(&self.session.facts, count);
        }
        self.basis.check(nsid, opcode)
    }

    /// Returns the cause to report for `error`, with which a command with `opcode` ended: a change of the namespace
    /// explains more than most statuses, but not more than that it is being sanitized.
    pub fn cause_of(&mut self, nsid: Nsid, opcode: u8, error: Error) -> Error {
        let says_more = [Status::SANITIZE_IN_PROGRESS, Status::SANITIZE_FAILED];
        match &error {
            Error::Command { status, .. } if says_more.iter().any(|one| status.is(*one)) => error,
            _ => match self.check_for(nsid, opcode) {
                Err(changed @ Error::Changed { .. }) => changed,
                _ => error,
            },
        }
    }

    /// Shows the controller everything submitted since the last ring.
    #[inline]
    pub fn ring(&mut self) {
        lock(&self.inner).ring();
    }

    /// True if the stop flag of [`ControllerConfig`](crate::ControllerConfig) is set.
    pub fn is_interrupted(&self) -> bool {
        self.session.is_interrupted()
    }

    /// Returns the number of commands submitted whose end has not been returned.
    pub fn in_flight(&self) -> u32 {
        let mut inner = lock(&self.inner);
        inner.pair.queue().in_flight() + inner.backlog.len() as u32
    }

    /// Returns the next command that ended, or `None` while there is none. Does not block, unless a command has
    /// passed its deadline: then it is aborted, or the controller reset, before this returns.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller does not come back; buffers in flight are then leaked.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<QueueCompletion>> {
        let mut one = None;
        self.poll_batch(1, |done| one = Some(done))?;
        Ok(one)
    }

    /// Calls `each` with at most `most` commands that ended, reaped under one lock, and returns their number.
    /// Waits no longer than [`poll`](Self::poll) does.
    ///
    /// The clock is read once, after they were reaped: a command whose deadline has passed by then is late,
    /// whatever its status says.
    ///
    /// # Errors
    /// As [`poll`](Self::poll). Completions that `each` has received before the error stay valid.
    #[inline]
    pub fn poll_batch(&mut self, most: usize, each: impl FnMut(QueueCompletion)) -> Result<usize> {
        let mut inner = lock(&self.inner);
        let (now_ns, taken) = inner.take(most, &mut self.ended, || self.session.now_ns());
        while let Some(cid) = inner.pair.queue().expire(now_ns) {
            inner.statistics.expired += 1;
            self.overdue.push_back(cid);
        }
        drop(inner);
        let count = self.ended.len();
        let alarm = &self.session.facts.alarm;
        for done in &self.ended {
            if let CommandOutcome::Completed(status) = done.outcome
                && !status.is_success()
            {
                alarm.see(status);
            }
        }
        self.ended.drain(..).for_each(each);
        if let Err(fault) = taken {
            self.session.reset(&fault.to_string())?;
        } else if !self.overdue.is_empty() {
            self.end_overdue()?;
        } else if count == 0 {
            self.session.check_health(now_ns)?;
        }
        Ok(count)
    }

    /// Ends commands that are past their deadline and still in flight.
    #[cold]
    fn end_overdue(&mut self) -> Result<()> {
        // Commands that have completed by now need no Abort.
        let drained = lock(&self.inner).drain(|| self.session.now_ns());
        if let Err(fault) = drained {
            return self.session.reset(&fault.to_string());
        }
        while let Some(cid) = self.overdue.pop_front() {
            self.session.recover(self.qid, cid)?;
        }
        Ok(())
    }

    /// Returns the next command that ended, waiting for it. `None` when none is in flight.
    ///
    /// # Errors
    /// As [`poll`](Self::poll), and [`Error::Interrupted`] once the session's stop flag is set.
    pub fn wait(&mut self) -> Result<Option<QueueCompletion>> {
        let mut spins = 0u32;
        loop {
            if let Some(done) = self.poll()? {
                return Ok(Some(done));
            }
            if self.session.is_interrupted() {
                return Err(Error::Interrupted);
            }
            if self.in_flight() == 0 {
                return Ok(None);
            }
            spins = spins.saturating_add(1);
            self.pause(spins);
        }
    }

    /// Waits a little after `spins` empty polls in a row: for an interrupt, where completions interrupt.
    pub fn pause(&mut self, spins: u32) {
        match self.vector {
            Some(vector) if spins >= SPINS_BEFORE_NAP => {
                let deadline_ns = lock(&self.inner).pair.queue().earliest_deadline_ns();
                let left = deadline_ns.saturating_sub(self.session.now_ns());
                let interrupts = &self.session.interrupts;
                interrupts.nap(vector, Duration::from_nanos(left));
            }
            _ => relax(spins),
        }
    }

    /// Returns the error of `done`; `what` is the command in words.
    pub fn error_of(&self, done: &QueueCompletion, what: &str) -> Error {
        let account = lock(&self.inner).expired.account_of(done.cid);
        let timeout_ms = self.session.timeout_ns() / 1_000_000;
        match done.outcome {
            CommandOutcome::Completed(status) if !done.late => {
                let what = what.to_owned();
                Error::Command { what, status }
            }
            _ if done.late => Error::Timeout {
                qid: self.qid,
                cid: done.cid,
                timeout_ms,
                account: account.unwrap_or_else(|| match done.outcome {
                    CommandOutcome::Completed(status) => {
                        format!("its answer came after the deadline: {status}")
                    }
                    CommandOutcome::Aborted(_) => "a controller reset ended it".to_owned(),
                }),
            },
            _ => self.error_of_reset(what, timeout_ms),
        }
    }

    /// Returns the error of a command that a reset aborted: the cause of the reset.
    fn error_of_reset(&self, what: &str, timeout_ms: u64) -> Error {
        let reset = self.session.last_reset();
        match reset.expired {
            Some((qid, cid)) => Error::Timeout {
                qid,
                cid,
                timeout_ms,
                account: format!(
                    "abort: {}; {}; that ended {what} too",
                    reset.cause,
                    reset.in_words()
                ),
            },
            None => Error::device(
                format!("{what} was ended by a controller reset: {}", reset.cause),
                "send it again",
            ),
        }
    }
}

impl Drop for DriverQueue {
    fn drop(&mut self) {
        self.session.retire(self.qid);
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
