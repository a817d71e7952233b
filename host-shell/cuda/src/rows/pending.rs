//! An operation in progress: polled and waited for in host memory, without a call into the driver. So it can be waited
//! for while a kernel runs that itself waits for the drive (docs/adr/0008).

mod sequence;

pub use sequence::LaunchSequence;

use super::board::RowFailures;
use super::ended::OperationOutcome;
use super::slot::LaunchSlot;
use super::state::RowsState;
use crate::leftovers;
use nvme_driver::controller::session::FactsStanding;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Looks without a pause, then with one.
const SPIN_LOOKS: u32 = 20_000;
const NAP: Duration = Duration::from_micros(20);

/// Outcome of a gather or scatter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherOutcome {
    /// Rows that were not moved.
    pub failures: RowFailures,
}

/// An operation in a stream. Dropping it does not stop the operation.
#[must_use = "failed rows are known from the result"]
pub struct PendingRows {
    parts: Vec<PendingPart>,
    /// Number of ends up to which the facts that the operation was launched on were found to hold.
    held: AtomicU32,
}

/// A launch, or an operation of a host thread.
struct PendingPart {
    by: PendingExecutor,
    /// The number of its first row in the whole.
    first_row: u64,
}

enum PendingExecutor {
    Kernel {
        slot: Arc<LaunchSlot>,
        /// States of the members of a stripe from which the launch reads.
        members: Option<Arc<[Arc<RowsState>]>>,
    },
    Host {
        ended: Arc<OperationOutcome>,
        is_captured: bool,
    },
}

impl PendingRows {
    pub(super) fn of_kernel(slot: Arc<LaunchSlot>) -> Self {
        Self::of(PendingExecutor::Kernel {
            slot,
            members: None,
        })
    }

    /// Returns its launches read from all of `states`, the members of a stripe.
    pub(super) fn over(mut self, states: &Arc<[Arc<RowsState>]>) -> Self {
        for part in &mut self.parts {
            if let PendingExecutor::Kernel { members, .. } = &mut part.by {
                *members = Some(Arc::clone(states));
            }
        }
        self
    }

    pub(super) fn of_host(ended: Arc<OperationOutcome>, is_captured: bool) -> Self {
        Self::of(PendingExecutor::Host { ended, is_captured })
    }

    fn of(by: PendingExecutor) -> Self {
        let part = PendingPart { by, first_row: 0 };
        Self {
            parts: vec![part],
            held: AtomicU32::new(0),
        }
    }

    /// Returns the operation over no rows, which has ended.
    pub fn nothing() -> Self {
        Self {
            parts: Vec::new(),
            held: AtomicU32::new(0),
        }
    }

    /// Appends `other`, which was launched in the same stream after it: row 0 of `other` is row `first_row`.
    /// Only for [`LaunchSequence`], which waits for the launches when the next one is refused.
    fn append(&mut self, mut other: Self, first_row: u64) {
        for part in &mut other.parts {
            part.first_row += first_row;
        }
        self.parts.append(&mut other.parts);
    }

    /// True if the launch is one of a graph that was captured: it runs each time the graph does.
    pub fn is_captured(&self) -> bool {
        self.parts.iter().any(PendingPart::is_captured)
    }

    /// True if it will not run again: every graph in which it was captured was destroyed, or it is not in a graph and
    /// has ended.
    pub fn is_over(&self) -> bool {
        leftovers::reap();
        self.parts.iter().all(PendingPart::is_over)
    }

    /// Returns how often it has ended: 0 or 1, and for a captured one once for each launch of the graph.
    pub fn ended(&self) -> u32 {
        self.parts.iter().map(PendingPart::ended).min().unwrap_or(1)
    }

    /// True if it has ended, a captured one at least once: it no longer uses its memory. Whether its data can
    /// be trusted is known from [`outcome`](Self::outcome).
    pub fn is_done(&self) -> bool {
        self.ended() != 0
    }

    /// Returns the outcome of the last run that ended, once it is known. It waits for nothing: `None` before
    /// the end, and, while something indicates that the namespace may have changed, until its properties were
    /// read again.
    ///
    /// # Errors
    /// [`Error::Changed`] when the namespace was no longer the one that the operation was launched for, with
    /// the member of a stripe; the error of reading its properties.
    pub fn outcome(&self) -> Option<Result<GatherOutcome>> {
        let ended = self.ended();
        if ended == 0 {
            return None;
        }
        if self.held.load(Ordering::Relaxed) != ended {
            let mut is_known = true;
            for (member, state) in self.states() {
                match state.standing() {
                    FactsStanding::Holds => {}
                    FactsStanding::Unknown => is_known = false,
                    FactsStanding::Refused(error) => return Some(Err(of_member(member, error))),
                }
            }
            if !is_known {
                return None;
            }
            self.held.store(ended, Ordering::Relaxed);
        }
        Some(Ok(self.last()))
    }

    /// True if its [outcome](Self::outcome) is known.
    pub fn is_settled(&self) -> bool {
        self.outcome().is_some()
    }

    /// Returns the states of the drives that its launches use, with the number of each in a stripe.
    fn states(&self) -> impl Iterator<Item = (Option<usize>, &RowsState)> {
        self.parts.iter().flat_map(|part| {
            let (slot, members) = match &part.by {
                PendingExecutor::Kernel { slot, members } => (Some(slot), members.as_deref()),
                PendingExecutor::Host { .. } => (None, None),
            };
            let alone = slot.filter(|_| members.is_none());
            let alone = alone.map(|slot| (None, &**slot.state()));
            let members = members.unwrap_or_default().iter().enumerate();
            alone
                .into_iter()
                .chain(members.map(|(member, state)| (Some(member), &**state)))
        })
    }

    /// Returns the numbers of the last one that ended, whether they are to be trusted or not.
    pub fn last(&self) -> GatherOutcome {
        let mut all = RowFailures::default();
        for part in &self.parts {
            let failures = part.failures();
            all.rows += failures.rows;
            let Some((row, code)) = failures.first else {
                continue;
            };
            // Launches of one operation may fail rows of the same range, in any order.
            let row = row + part.first_row;
            if all.first.is_none_or(|(lowest, _)| row < lowest) {
                all.first = Some((row, code));
                all.member = failures.member;
            }
        }
        GatherOutcome { failures: all }
    }

    /// Waits until its outcome is known, `limit` at most. With a limit of zero it sends no command to the
    /// drive.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit: the operation continues. Every other error is an [outcome](Self::outcome):
    /// the operation has ended.
    pub fn wait(&self, limit: Duration) -> Result<GatherOutcome> {
        let begin = Instant::now();
        let waited = self.wait_from(begin, limit);
        if let Some((_, state)) = self.states().next() {
            let ns = begin.elapsed().as_nanos() as u64;
            state.counts.waited_ns.fetch_add(ns, Ordering::Relaxed);
        }
        waited
    }

    fn wait_from(&self, begin: Instant, limit: Duration) -> Result<GatherOutcome> {
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
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            if begin.elapsed() >= limit {
                return Err(Error::Unfinished {
                    cause: format!(
                        "the operation has ended, but its namespace could not be checked within {} ms",
                        limit.as_millis()
                    ),
                    remedy: "wait again, or longer".to_owned(),
                });
            }
            for (member, state) in self.states() {
                let checked = state.check_current();
                checked.map_err(|error| of_member(member, error))?;
            }
        }
    }

    /// Waits until its outcome is known, `limit` at most; returns true if it is.
    pub fn settles_within(&self, limit: Duration) -> bool {
        !matches!(self.wait(limit), Err(Error::Unfinished { .. }))
    }
}

/// Returns `error` of member `member` of a stripe.
pub(super) fn of_member(member: Option<usize>, error: Error) -> Error {
    match member {
        Some(member) => error.with_context(&format!("member {member} of the stripe")),
        None => error,
    }
}

impl PendingPart {
    fn is_captured(&self) -> bool {
        match &self.by {
            PendingExecutor::Kernel { slot, .. } => slot.is_captured(),
            PendingExecutor::Host { is_captured, .. } => *is_captured,
        }
    }

    /// True if it will not run again. A captured one is referenced by graphs and this handle only, so a single
    /// reference means that no graph has it.
    fn is_over(&self) -> bool {
        match &self.by {
            _ if !self.is_captured() => self.ended() != 0,
            PendingExecutor::Kernel { slot, .. } => Arc::strong_count(slot) == 1,
            PendingExecutor::Host { ended, .. } => Arc::strong_count(ended) == 1,
        }
    }

    fn ended(&self) -> u32 {
        match &self.by {
            PendingExecutor::Kernel { slot, .. } => slot.ended(),
            PendingExecutor::Host { ended, .. } => ended.count(),
        }
    }

    fn failures(&self) -> RowFailures {
        match &self.by {
            _ if self.ended() == 0 => RowFailures::default(),
            PendingExecutor::Kernel { slot, .. } => {
                slot.state().memory.board.failures(slot.number())
            }
            PendingExecutor::Host { ended, .. } => ended.failures(),
        }
    }
}
