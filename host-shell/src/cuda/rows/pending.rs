//! A gather under way: polled and waited for in memory of the host, without a call into the driver.

use super::board::Failures;
use super::state::RowsState;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks without a pause, then with one.
const SPIN_LOOKS: u32 = 20_000;
const NAP: Duration = Duration::from_micros(20);

/// What a gather came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    /// Rows that were not read.
    pub failures: Failures,
}

/// A gather in a stream. Dropping it lets the gather go on.
#[must_use = "failed rows are known from the result"]
pub struct Pending {
    state: Arc<RowsState>,
    launch: Option<Launch>,
}

struct Launch {
    number: u32,
    /// How many launches with this number had ended before it.
    before: u32,
    is_captured: bool,
}

impl Pending {
    pub(super) fn new(state: &Arc<RowsState>, number: u32, before: u32, is_captured: bool) -> Self {
        Self {
            state: Arc::clone(state),
            launch: Some(Launch {
                number,
                before,
                is_captured,
            }),
        }
    }

    /// Of a gather of no rows: it has ended.
    pub(super) fn nothing(state: &Arc<RowsState>) -> Self {
        Self {
            state: Arc::clone(state),
            launch: None,
        }
    }

    /// The launch was refused: its number is free again.
    pub(super) fn never_ran(mut self) {
        if let Some(launch) = self.launch.take() {
            self.state.give_back(launch.number, launch.before, true);
        }
    }

    /// Whether the launch is one of a graph that was captured: it runs each time the graph does.
    pub fn is_captured(&self) -> bool {
        self.launch
            .as_ref()
            .is_some_and(|launch| launch.is_captured)
    }

    /// How often it has ended: 0 or 1, and for a captured one once for each time the graph was launched.
    pub fn ended(&self) -> u32 {
        match &self.launch {
            Some(launch) => self
                .state
                .board
                .ended(launch.number)
                .wrapping_sub(launch.before),
            None => 1,
        }
    }

    /// Whether it has ended, a captured one at least once.
    pub fn is_done(&self) -> bool {
        self.ended() != 0
    }

    /// What the last one that ended came to.
    pub fn last(&self) -> Gathered {
        let failures = match &self.launch {
            Some(launch) if self.is_done() => self.state.board.failures(launch.number),
            _ => Failures::default(),
        };
        Gathered { failures }
    }

    /// Waits until it has ended, `limit` at most.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit: it goes on.
    pub fn wait(&self, limit: Duration) -> Result<Gathered> {
        let begin = Instant::now();
        let mut looks = 0u32;
        while !self.is_done() {
            if begin.elapsed() > limit {
                return Err(Error::Unfinished {
                    cause: format!("a gather has not ended within {} ms", limit.as_millis()),
                    remedy: match self.is_captured() {
                        true => "launch the graph that it was captured in".to_owned(),
                        false => "wait for what the stream does before it, or longer".to_owned(),
                    },
                });
            }
            looks = looks.saturating_add(1);
            match looks {
                0..SPIN_LOOKS => std::hint::spin_loop(),
                _ => std::thread::sleep(NAP),
            }
        }
        Ok(self.last())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let is_done = self.is_done();
        match self.launch.take() {
            // A graph may launch it again at any time.
            Some(launch) if launch.is_captured => {}
            Some(launch) => self.state.give_back(launch.number, launch.before, is_done),
            None => {}
        }
    }
}
