//! The index for any number of threads. Lookups wait for this lock alone, which no thread holds while it waits for the
//! drive or for the journal's lock: that one is taken before this one.

use crate::index::PageIndex;
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

/// An index behind its lock, with what is counted beside it.
pub(crate) struct SharedIndex<C>(Mutex<CountedIndex<C>>);

/// An index and counts of its pages.
pub(crate) struct CountedIndex<C> {
    pub index: PageIndex,
    pub counts: C,
}

impl<C: Default> SharedIndex<C> {
    pub fn new(index: PageIndex) -> Self {
        let counts = C::default();
        Self(Mutex::new(CountedIndex { index, counts }))
    }

    /// Locks the index, even if another thread panicked: it is valid between any two calls.
    pub fn lock(&self) -> MutexGuard<'_, CountedIndex<C>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
