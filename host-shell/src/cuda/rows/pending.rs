//! An operation under way: polled and waited for in memory of the host, without a call into the driver.

mod sequence;

pub use sequence::LaunchSequence;

use super::board::Failures;
use super::ended::Ended;
use super::slot::LaunchSlot;
use super::state::RowsState;
use crate::cuda::leftovers;
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
    /// The number of its first row in the whole.
    first_row: u64,
}

enum By {
    Kernel(Arc<LaunchSlot>),
    Host {
        ended: Arc<Ended>,
        is_captured: bool,
    },
}

impl Pending {
    pub(super) fn of_kernel(slot: Arc<LaunchSlot>) -> Self {
        Self::of(By::Kernel(slot))
    }

    pub(super) fn of_host(ended: Arc<Ended>, is_captured: bool) -> Self {
        Self::of(By::Host { ended, is_captured })
    }

    fn of(by: By) -> Self {
        let part = Part { by, first_row: 0 };
        Self { parts: vec![part] }
    }

    /// Of an operation over no rows: it has ended.
    pub fn nothing() -> Self {
        Self { parts: Vec::new() }
    }

    /// Adds `other`, which was put into the same stream after it: row 0 of `other` is row `first_row`. For a
    /// [`LaunchSequence`] alone, which waits for what was launched when the next launch is refused.
    fn append(&mut self, mut other: Self, first_row: u64) {
        for part in &mut other.parts {
            part.first_row += first_row;
        }
        self.parts.append(&mut other.parts);
    }

    /// Whether the launch is one of a graph that was captured: it runs each time the graph does.
    pub fn is_captured(&self) -> bool {
        self.parts.iter().any(Part::is_captured)
    }

    /// Whether it will not end again: every graph that it was captured in is gone, or it is none of a graph and has ended.
    pub fn is_over(&self) -> bool {
        leftovers::reap();
        self.parts.iter().all(Part::is_over)
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
            By::Kernel(slot) => Some(&**slot.state()),
            By::Host { .. } => None,
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
    fn is_captured(&self) -> bool {
        match &self.by {
            By::Kernel(slot) => slot.is_captured(),
            By::Host { is_captured, .. } => *is_captured,
        }
    }

    /// Whether it will not end again. Beside this handle only a graph has what a captured one needs.
    fn is_over(&self) -> bool {
        match &self.by {
            _ if !self.is_captured() => self.ended() != 0,
            By::Kernel(slot) => Arc::strong_count(slot) == 1,
            By::Host { ended, .. } => Arc::strong_count(ended) == 1,
        }
    }

    fn ended(&self) -> u32 {
        match &self.by {
            By::Kernel(slot) => slot.ended(),
            By::Host { ended, .. } => ended.count(),
        }
    }

    fn failures(&self) -> Failures {
        match &self.by {
            _ if self.ended() == 0 => Failures::default(),
            By::Kernel(slot) => slot.state().board.failures(slot.number()),
            By::Host { ended, .. } => ended.failures(),
        }
    }
}
