//! The lock around controller state: the crate is no_std, so it brings its own.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

/// A spin lock: held for one batch of commands or one register access.
#[derive(Debug, Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one guard at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        let mut tries = 0u32;
        loop {
            if let Some(held) = self.try_lock() {
                return held;
            }
            tries += 1;
            relax(tries);
        }
    }

    /// The lock, unless someone holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<Held<'_, T>> {
        // Acquire: pairs with the Release in Held::drop.
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        // Lazily: a guard that is made and dropped would release another's lock.
        free.then(|| Held { lock: self })
    }
}

/// Lets others run: a pause at first, later the scheduler where there is one.
pub(crate) fn relax(tries: u32) {
    #[cfg(feature = "std")]
    if tries > 64 {
        std::thread::yield_now();
        return;
    }
    let _ = tries;
    core::hint::spin_loop();
}

/// The lock is held while this lives.
pub(crate) struct Held<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in try_lock.
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Lock;

    #[test]
    fn a_failed_try_leaves_the_lock_to_its_holder() {
        let lock = Lock::new(0);
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
