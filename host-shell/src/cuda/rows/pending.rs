//! An operation under way: polled and waited for in memory of the host, without a call into the driver.

use super::board::Failures;
use super::ended::Ended;
use super::state::RowsState;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks without a pause, then with one.
const SPIN_LOOKS: u32 = 20_000;
const NAP: Duration = Duration::from_micros(20);

/// What a gather or scatter came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    /// Rows that were not moved.
    pub failures: Failures,
}

/// An operation in a stream. Dropping it lets the operation go on.
#[must_use = "failed rows are known from the result"]
pub struct Pending {
    parts: Vec<Part>,
}

/// A launch, or an operation of a host thread.
struct Part {
    by: By,
    /// How many had ended before it.
    before: u32,
    is_captured: bool,
    /// The number of its first row in the whole.
    first_row: u64,
}

enum By {
    Kernel { state: Arc<RowsState>, number: u32 },
    Host(Arc<Ended>),
}

impl Pending {
    pub(super) fn of_kernel(
        state: &Arc<RowsState>,
        number: u32,
        before: u32,
        is_captured: bool,
    ) -> Self {
        let state = Arc::clone(state);
        Self::of(By::Kernel { state, number }, before, is_captured)
    }

    pub(super) fn of_host(ended: Arc<Ended>, is_captured: bool) -> Self {
        Self::of(By::Host(ended), 0, is_captured)
    }

    fn of(by: By, before: u32, is_captured: bool) -> Self {
        let part = Part {
            by,
            before,
            is_captured,
            first_row: 0,
        };
        Self { parts: vec![part] }
    }

    /// Of an operation over no rows: it has ended.
    pub fn nothing() -> Self {
        Self { parts: Vec::new() }
    }

    /// This and `other`, which was put into the same stream after it, as one: row 0 of `other` is row `first_row`.
    pub fn and(mut self, mut other: Self, first_row: u64) -> Self {
        for part in &mut other.parts {
            part.first_row += first_row;
        }
        self.parts.append(&mut other.parts);
        self
    }

    /// The launch was refused: its number is free again.
    pub(super) fn never_ran(mut self) {
        for part in self.parts.drain(..) {
            part.give_back(true);
        }
    }

    /// Whether the launch is one of a graph that was captured: it runs each time the graph does.
    pub fn is_captured(&self) -> bool {
        self.parts.iter().any(|part| part.is_captured)
    }

    /// How often it has ended: 0 or 1, and for a captured one once for each time the graph was launched.
    pub fn ended(&self) -> u32 {
        self.parts.iter().map(Part::ended).min().unwrap_or(1)
    }

    /// Whether it has ended, a captured one at least once.
    pub fn is_done(&self) -> bool {
        self.ended() != 0
    }

    /// Why what was moved is not to be trusted, as far as that is known: a namespace changed while it was, or before.
    /// [`wait`](Self::wait) looks for that.
    pub fn changed(&self) -> Option<Error> {
        let mut errors = self.states().filter_map(|state| state.check_known().err());
        errors.find(|error| matches!(error, Error::Changed { .. }))
    }

    fn states(&self) -> impl Iterator<Item = &RowsState> {
        self.parts.iter().filter_map(|part| match &part.by {
            By::Kernel { state, .. } => Some(&**state),
            By::Host(_) => None,
        })
    }

    /// What the last one that ended came to.
    pub fn last(&self) -> Gathered {
        let mut all = Failures::default();
        for part in &self.parts {
            let failures = part.failures();
            all.rows += failures.rows;
            if let (None, Some((row, code))) = (all.first, failures.first) {
                all.first = Some((row + part.first_row, code));
                all.member = failures.member;
            }
        }
        Gathered { failures: all }
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
                    cause: format!(
                        "the operation has not ended within {} ms",
                        limit.as_millis()
                    ),
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
        for state in self.states() {
            // What it finds is there for `changed`.
            let _ = state.check_current();
        }
        Ok(self.last())
    }
}

impl Part {
    fn ended(&self) -> u32 {
        let ended = match &self.by {
            By::Kernel { state, number } => state.board.ended(*number),
            By::Host(ended) => ended.count(),
        };
        ended.wrapping_sub(self.before)
    }

    fn failures(&self) -> Failures {
        match &self.by {
            _ if self.ended() == 0 => Failures::default(),
            By::Kernel { state, number } => state.board.failures(*number),
            By::Host(ended) => ended.failures(),
        }
    }

    /// The handle goes away.
    fn give_back(self, is_over: bool) {
        match self.by {
            // A graph may launch it again at any time.
            _ if self.is_captured => {}
            By::Kernel { state, number } => state.give_back(number, self.before, is_over),
            By::Host(_) => {}
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        for part in self.parts.drain(..) {
            let is_over = part.ended() != 0;
            part.give_back(is_over);
        }
    }
}
