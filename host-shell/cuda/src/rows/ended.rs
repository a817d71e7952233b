//! Outcome of an operation of a host thread.

use super::board::RowFailures;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Outcome of an operation, shared with the threads that wait for it.
#[derive(Debug, Default)]
pub(super) struct OperationOutcome {
    rows: AtomicU64,
    first: AtomicU64,
    code: AtomicU32,
    ended: AtomicU32,
}

impl OperationOutcome {
    /// Publishes an end with `failures`.
    pub fn add(&self, failures: RowFailures) {
        let (first, code) = failures.first.unwrap_or_default();
        self.rows.store(failures.rows, Ordering::Relaxed);
        self.first.store(first, Ordering::Relaxed);
        self.code.store(code as u32, Ordering::Relaxed);
        // Release: pairs with the acquire load in `count`. A waiter that sees the new count also sees the
        // failures, and the rows that the host function moved before.
        self.ended.fetch_add(1, Ordering::Release);
    }

    /// Returns how often it has ended.
    pub fn count(&self) -> u32 {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns the rows that the last one did not move.
    pub fn failures(&self) -> RowFailures {
        let rows = self.rows.load(Ordering::Relaxed);
        let first = self.first.load(Ordering::Relaxed);
        let code = self.code.load(Ordering::Relaxed) as i32;
        RowFailures {
            rows,
            first: (rows > 0).then_some((first, code)),
            member: None,
        }
    }
}
