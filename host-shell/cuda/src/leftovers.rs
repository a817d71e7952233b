//! Objects that their last user could not free. They are kept until nothing on the GPU may use them, and freed by a
//! thread that may call the driver.
//!
//! A graph destroys the objects that it needs on a thread of the driver, and an operation of a host thread ends
//! on another one. Neither thread may call the driver, but freeing memory does. A store may also be closed
//! while a stream has not yet reached one of its launches. All of these objects are queued here, and the next
//! thread of the caller that launches, opens or closes something frees them.

use nvme_driver::lock::lock;
use std::sync::Mutex;

/// Memory, kernels or numbers of launches whose last user is gone.
pub(super) trait LaunchLeftover: Send {
    /// True if nothing on the GPU may use it any more.
    fn is_over(&self) -> bool {
        true
    }
}

static LEFT: Mutex<Vec<Box<dyn LaunchLeftover>>> = Mutex::new(Vec::new());

/// Keeps `one` until it is over.
pub(super) fn keep(one: Box<dyn LaunchLeftover>) {
    lock(&LEFT).push(one);
}

/// Frees the objects that nothing uses any more. This calls the driver: never call it on a thread of the
/// driver, nor on one that a kernel waits for.
pub(super) fn reap() {
    let over: Vec<_> = {
        let mut left = lock(&LEFT);
        left.extract_if(.., |one| one.is_over()).collect()
    };
    // Outside the lock: dropping one object may queue another one here, which locks again.
    drop(over);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Memory(Arc<AtomicBool>);

    impl LaunchLeftover for Memory {
        fn is_over(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }
    }

    #[test]
    fn what_is_in_use_stays_until_it_is_over() {
        let is_over = Arc::new(AtomicBool::new(false));
        keep(Box::new(Memory(Arc::clone(&is_over))));
        reap();
        assert_eq!(Arc::strong_count(&is_over), 2);
        is_over.store(true, Ordering::Release);
        // Another test may be running `reap` and hold the object, which it will drop.
        reap();
        while Arc::strong_count(&is_over) > 1 {
            std::thread::yield_now();
        }
    }
}
