//! A log of a thread's operations on shared memory, in order, with each operation's order and scope. Unit
//! tests compare it with the sequence that the memory model requires.

use super::{Order, Scope};
use std::cell::RefCell;
use std::vec::Vec;

/// One operation of the calling thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedStep {
    pub operation: &'static str,
    pub order: Order,
    pub scope: Scope,
    /// Address of the word, which the test maps to a name.
    pub at: usize,
}

std::thread_local! {
    static STEPS: RefCell<Option<Vec<RecordedStep>>> = const { RefCell::new(None) };
}

/// Logs an operation if this thread records.
pub(crate) fn note<T>(operation: &'static str, order: Order, scope: Scope, at: &T) {
    STEPS.with_borrow_mut(|steps| {
        if let Some(steps) = steps {
            let at = core::ptr::from_ref(at).addr();
            steps.push(RecordedStep {
                operation,
                order,
                scope,
                at,
            });
        }
    });
}

/// Returns the operations of this thread while `work` runs.
pub(crate) fn recorded(work: impl FnOnce()) -> Vec<RecordedStep> {
    STEPS.set(Some(Vec::new()));
    work();
    STEPS.take().unwrap_or_default()
}
