//! Locks, and a short wait.

use std::sync::{Mutex, MutexGuard};

/// Waits a little: spins at first, then lets others run.
pub fn relax(spins: u32) {
    match spins {
        0..64 => std::hint::spin_loop(),
        _ => std::thread::yield_now(),
    }
}

/// Locks, even if another thread panicked with the lock held: the state behind our locks is valid
/// between any two calls.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
