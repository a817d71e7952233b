//! Waits that Ctrl-C ends: the GIL is released, and signals are looked at between slices of time.

use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// How long a signal may go unseen.
const SLICE: Duration = Duration::from_millis(50);

/// Waits until `end` says so within its slice, `limit` at most; whether it did.
///
/// # Errors
/// What a signal's handler raised: `KeyboardInterrupt`. What was waited for goes on.
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

/// A time-out of Python, in seconds.
pub fn seconds(timeout: Option<f64>) -> Result<Option<Duration>, crate::error::Fault> {
    let Some(seconds) = timeout else {
        return Ok(None);
    };
    match seconds {
        ..0.0 => Ok(Some(Duration::ZERO)),
        _ if seconds.is_nan() => Err(crate::error::Fault::usage(
            "timeout is not a number",
            "give seconds, or None for no limit",
        )),
        // Longer than any wait.
        _ => Ok(Duration::try_from_secs_f64(seconds).ok()),
    }
}
