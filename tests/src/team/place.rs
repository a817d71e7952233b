//! The place where the members of a team wait for each other.

/// A meeting of a team's members. Each comes once a round, and no round begins before the last has ended.
pub trait Place: Send + Sync {
    /// Makes a meeting for `size` members.
    fn new(size: usize) -> Self;

    /// Waits for every member. If it `orders`, everything that members did before it happens before everything that
    /// they do after it; otherwise no code may rely on an order.
    ///
    /// # Panics
    /// If another member has left.
    fn meet(&self, rank: usize, orders: bool);

    /// Notes that this member has panicked and never arrives again.
    fn leave(&self);
}

#[cfg(loom)]
pub use unseen::Unseen;
#[cfg(not(loom))]
pub use {spins::Spins, waits::Waits};

#[cfg(not(loom))]
mod waits {
    use super::Place;
    use std::sync::{Condvar, Mutex};

    /// Members sleep, so teams may have more members than there are processors. Every meeting orders memory.
    pub struct Waits {
        size: u64,
        come: Mutex<(u64, bool)>,
        changed: Condvar,
    }

    impl Place for Waits {
        fn new(size: usize) -> Self {
            Self {
                size: size as u64,
                come: Mutex::default(),
                changed: Condvar::new(),
            }
        }

        fn meet(&self, _rank: usize, _orders: bool) {
            let mut come = self.come.lock().expect("no panic under this lock");
            let all = (come.0 / self.size + 1) * self.size;
            come.0 += 1;
            if come.0 == all {
                self.changed.notify_all();
            }
            while come.0 < all && !come.1 {
                come = self.changed.wait(come).expect("no panic under this lock");
            }
            let broken = come.1;
            drop(come);
            assert!(!broken, "another member has panicked");
        }

        fn leave(&self) {
            self.come.lock().expect("no panic under this lock").1 = true;
            self.changed.notify_all();
        }
    }
}

#[cfg(not(loom))]
mod spins {
    use super::Place;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Number of looks before a thread yields to others.
    const SPINS: u32 = if cfg!(tsan) { 8 } else { 200 };

    /// Members spin, as the lanes of a block do. Without `orders` meeting is relaxed, for the sanitizer.
    pub struct Spins {
        size: u64,
        come: AtomicU64,
        broken: AtomicBool,
    }

    impl Place for Spins {
        fn new(size: usize) -> Self {
            Self {
                size: size as u64,
                come: AtomicU64::new(0),
                broken: AtomicBool::new(false),
            }
        }

        fn meet(&self, _rank: usize, orders: bool) {
            let (release, acquire) = match orders {
                true => (Ordering::Release, Ordering::Acquire),
                false => (Ordering::Relaxed, Ordering::Relaxed),
            };
            // Release: pairs with the load below by every other member.
            let come = self.come.fetch_add(1, release);
            let all = (come / self.size + 1) * self.size;
            let mut looks = 0;
            // Acquire: what the others did before they came.
            while self.come.load(acquire) < all {
                looks += 1;
                match looks % SPINS {
                    0 => std::thread::yield_now(),
                    _ => std::hint::spin_loop(),
                }
                assert!(
                    !self.broken.load(Ordering::Relaxed),
                    "another member has panicked"
                );
            }
        }

        fn leave(&self) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(loom)]
mod unseen {
    use super::Place;
    use crate::team::turns::wait;
    use loom::thread::{Thread, current};
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, MutexGuard};

    /// A meeting that the model sees as waiting alone: only with `orders` does the model learn of an order.
    pub struct Unseen {
        size: u64,
        come: AtomicU64,
        shared: AtomicU64,
        threads: Mutex<BTreeMap<usize, Thread>>,
    }

    impl Unseen {
        fn all_come(&self, count: &AtomicU64) {
            let come = count.fetch_add(1, Ordering::Relaxed);
            let all = (come / self.size + 1) * self.size;
            while count.load(Ordering::Relaxed) < all {
                wait();
            }
        }

        fn threads(&self) -> MutexGuard<'_, BTreeMap<usize, Thread>> {
            self.threads.lock().expect("no panic under this lock")
        }
    }

    impl Place for Unseen {
        fn new(size: usize) -> Self {
            Self {
                size: size as u64,
                come: AtomicU64::new(0),
                shared: AtomicU64::new(0),
                threads: Mutex::default(),
            }
        }

        fn meet(&self, rank: usize, orders: bool) {
            // The entry says which thread the member is now: it may have moved from one thread to another.
            self.threads().insert(rank, current());
            self.all_come(&self.come);
            if orders {
                // Unparking makes this member's actions happen before the others' next ones, and is no operation that
                // the model would have to reorder.
                self.threads().values().for_each(Thread::unpark);
                self.all_come(&self.shared);
            }
        }

        fn leave(&self) {}
    }
}
