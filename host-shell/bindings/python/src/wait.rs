//! Waits that Ctrl-C ends: the GIL is released, and signals are looked at between slices of time.

use crate::error::ExceptionParts;
use crate::pool::PoolJob;
use nvme_host::ProcessMark;
use nvme_host::lock::lock;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Interval of checking for signals: Python runs its handlers only when a thread that holds the GIL asks, so a
/// wait without these checks could not be ended by Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// The end of a wait for several things, which have one time-out together.
pub struct CommonDeadline(Option<(Instant, Duration)>);

impl CommonDeadline {
    /// Ends in `limit`, or never.
    pub fn after(limit: Option<Duration>) -> Self {
        Self(limit.map(|limit| (Instant::now(), limit)))
    }

    /// Returns the remaining time; `None` without an end.
    pub fn left(&self) -> Option<Duration> {
        self.0
            .map(|(begin, limit)| limit.saturating_sub(begin.elapsed()))
    }
}

/// Calls `end` with one slice of time after another until it returns true, `limit` at most; returns true if it
/// did.
///
/// # Errors
/// The exception of a signal's handler: `KeyboardInterrupt`. The operation continues.
pub fn until(
    py: Python<'_>,
    limit: Option<Duration>,
    end: impl Fn(Duration) -> bool + Sync,
) -> PyResult<bool> {
    let begin = Instant::now();
    loop {
        let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if py.detach(|| end(slice)) {
            return Ok(true);
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= slice) {
            return Ok(false);
        }
    }
}

/// Runs `work` on a thread of the pool and returns its result.
///
/// # Errors
/// Its own; `KeyboardInterrupt`, after which the thread drops the later result.
pub fn of<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, ExceptionParts> + Send + 'static,
) -> PyResult<T> {
    let made = Arc::new(Mutex::new(None));
    let place = Arc::clone(&made);
    let job = PoolJob::start(move || {
        *lock(&place) = Some(work()?);
        Ok(())
    })?;
    until(py, None, |slice| job.wait(slice))?;
    job.result()?;
    let made = lock(&made).take();
    made.ok_or_else(|| {
        ExceptionParts::of(&nvme_host::Error::internal("a call came to nothing")).into()
    })
}

/// Drops a value that may be the last owner of a store without the GIL; in a child of a fork not at all.
pub fn drop_elsewhere<T: Send>(process: ProcessMark, value: Option<T>) {
    match value {
        Some(value) if process == ProcessMark::here() => {
            Python::attach(|py| py.detach(|| drop(value)));
        }
        // The parent's.
        other => std::mem::forget(other),
    }
}

/// Converts a time-out of Python, in seconds.
pub fn seconds(timeout: Option<f64>) -> Result<Option<Duration>, ExceptionParts> {
    let Some(seconds) = timeout else {
        return Ok(None);
    };
    match seconds {
        ..0.0 => Ok(Some(Duration::ZERO)),
        _ if seconds.is_nan() => Err(ExceptionParts::usage(
            "timeout is not a number",
            "give seconds, or None for no limit",
        )),
        // Longer than any wait. Not None, which would select the operation's own deadline.
        _ => Ok(Some(
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
        )),
    }
}
