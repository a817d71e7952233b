//! The lock around the controller's state. The crate is no_std and core has no lock, so this one
//! spins; with std it yields to the scheduler after some tries.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

/// A spin lock, held for one batch of commands or one register access.
#[derive(Debug, Default)]
pub(crate) struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `held` admits one guard at a time, and the value is reached only through a guard. Its
// Acquire and Release hand the value from one thread to the next, which T: Send allows.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock and returns its guard.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_, T> {
        let mut tries = 0u32;
        loop {
            if let Some(held) = self.try_lock() {
                return held;
            }
            tries += 1;
            relax(tries);
        }
    }

    /// Takes the lock, unless another thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        // Acquire: pairs with the Release in LockGuard::drop, so that the earlier holder's writes are
        // visible. The relaxed load first keeps waiting threads from taking the cache line for a
        // swap that must fail.
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        // Lazily: `then_some` would build a guard in the other case too, and dropping it would
        // release the lock of another thread. Two threads would then be inside at the same time.
        free.then(|| LockGuard { lock: self })
    }
}

/// Lets other threads run: a processor pause at first, later the scheduler, if there is one.
pub(crate) fn relax(tries: u32) {
    #[cfg(feature = "std")]
    if tries > 64 {
        std::thread::yield_now();
        return;
    }
    let _ = tries;
    core::hint::spin_loop();
}

/// Guard of a lock, which is released when the guard is dropped.
pub(crate) struct LockGuard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in try_lock. The next holder must see all writes of this
        // one; with a relaxed store it could read the queue state from before this batch.
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::SpinLock;

    #[test]
    fn a_failed_try_leaves_the_lock_to_its_holder() {
        let lock = SpinLock::new(0);
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(
            lock.try_lock().is_none(),
            "the first try must not release it"
        );
        drop(held);
        assert!(lock.try_lock().is_some());
    }
}
