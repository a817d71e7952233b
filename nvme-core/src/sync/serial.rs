//! Numbers that never repeat, which distinguish values made at different times.
//!
//! Only the host makes and compares them. They order nothing, and loom need not explore them, so these are
//! the standard library's atomics on every platform.

use core::sync::atomic::{AtomicU64, Ordering};

static LAST: AtomicU64 = AtomicU64::new(0);

/// Returns a number larger than each earlier one, never 0.
pub(crate) fn next() -> u64 {
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// The number of the last event of one kind; 0 when there was none.
#[derive(Debug)]
pub(crate) struct LastEvent(AtomicU64);

impl LastEvent {
    pub const fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Records an event at this time.
    pub fn happens(&self) {
        // Release: pairs with `at`.
        self.0.store(next(), Ordering::Release);
    }

    pub fn at(&self) -> u64 {
        // Acquire: pairs with `happens`.
        self.0.load(Ordering::Acquire)
    }
}
