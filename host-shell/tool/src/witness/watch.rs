//! Limits of a step: its deadline, Ctrl-C, and the bar that shows its progress.

use crate::common::{check_stop, progress};
use indicatif::ProgressBar;
use nvme_host::{Error, Result};
use std::time::{Duration, Instant};

pub struct StepWatch {
    begin: Instant,
    limit: Duration,
    bar: ProgressBar,
}

impl StepWatch {
    /// Creates the watch of a step that begins now, may take `limit` and moves about `bytes` bytes.
    pub fn new(limit: Duration, what: &'static str, bytes: u64) -> Self {
        Self {
            begin: Instant::now(),
            limit,
            bar: progress::bytes(bytes, what),
        }
    }

    /// Notes `bytes` more.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after Ctrl-C; [`Error::Unfinished`] past the deadline.
    pub fn tick(&self, bytes: u64) -> Result<()> {
        self.bar.inc(bytes);
        check_stop()?;
        match self.left() {
            Duration::ZERO => Err(Error::Unfinished {
                cause: format!("the step is not done after {} s", self.limit.as_secs()),
                remedy: "give it more time: --step-limit 10m".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the time that is left.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.begin.elapsed())
    }
}

impl Drop for StepWatch {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
