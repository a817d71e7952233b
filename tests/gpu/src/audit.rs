//! The protocol auditor beside the simulated controllers: the choice of the controllers that it watches, and its
//! findings.

use nvme_sim::{Controller, Finding, HostMemory, Rule};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs of at most this many commands are all audited; of longer ones, a few: half a microsecond for each
/// command, behind one lock.
const SHORT: u64 = 100_000;
/// One in this number of longer runs is audited; the number is prime, so that each mode, tier and fault has its turn.
const ONE_IN: u32 = 7;

/// Findings about controllers that were dropped, since the last verdict.
static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn found() -> MutexGuard<'static, Vec<String>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Chooses the controllers to watch.
#[derive(Debug)]
pub struct Sampling {
    one_in: u32,
    turn: AtomicU32,
}

impl Sampling {
    /// Makes the sampling for tests of `commands` commands each.
    pub fn new(commands: u64) -> Self {
        let one_in = if commands <= SHORT { 1 } else { ONE_IN };
        Self {
            one_in,
            turn: AtomicU32::new(0),
        }
    }

    /// Returns whether the next controller is watched.
    pub fn next(&self) -> bool {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        turn.is_multiple_of(self.one_in)
    }
}

/// Keeps the findings about `controller`, which is about to be dropped, except the rules in `explained`, which its
/// faults break.
pub fn keep(controller: &Controller<HostMemory>, explained: &[Rule]) {
    let unexpected = |one: &Finding| !explained.contains(&one.rule);
    let findings = controller.findings();
    let lines = findings.iter().filter(|one| unexpected(one));
    found().extend(lines.map(ToString::to_string));
}

/// Returns the findings since the last call, in one line.
pub fn verdict() -> Option<String> {
    let found = std::mem::take(&mut *found());
    let first = found.first()?;
    Some(format!(
        "the auditor found {}, the first: {first}",
        found.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_are_watched_and_of_long_ones_some() {
        let count = |commands| {
            let sampling = Sampling::new(commands);
            (0..70).filter(|_| sampling.next()).count()
        };
        assert_eq!((count(20_000), count(1_000_000)), (70, 10));
    }
}
