//! Model-checking twin: loom's atomics, scopes ignored.

use super::site::at_site;
use super::{Order, Scope};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{self, Ordering};
use std::sync::atomic::AtomicBool;

fn ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty, $beside:ty, $touch:expr) => {
        /// loom's twin of the host type, and whether a read-modify-write operation has met it.
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name, $beside, AtomicBool);

        impl $name {
            /// A new atomic that holds `value`; not `const`, since loom registers it with the model.
            pub fn new(value: $value) -> Self {
                Self(
                    atomic::$name::new(value),
                    Default::default(),
                    AtomicBool::new(false),
                )
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            #[track_caller]
            pub fn load(&self, order: Order, _scope: Scope) -> $value {
                self.0.load(match at_site(order) {
                    Order::Acquire | Order::AcqRel => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[track_caller]
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                ($touch)(&self.1);
                let order = match at_site(order) {
                    Order::Release | Order::AcqRel => Ordering::Release,
                    Order::Relaxed | Order::Acquire => Ordering::Relaxed,
                };
                if self.2.load(Ordering::Relaxed) {
                    // loom orders a store only after what its thread has seen: another thread's failed
                    // attempt on a lock would pass for newer than the store that unlocks. A swap is newer.
                    self.0.swap(value, order);
                } else {
                    self.0.store(value, order);
                }
            }

            /// A relaxed store: the doorbell as the model sees it.
            pub fn store_mmio(&self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(AtomicU32, u32, (), |_: &()| ());
// The cell tells stores that are not ordered with a `load_settled`, in either direction; stores may race
// with each other, so they are its readers.
atomic!(AtomicU64, u64, UnsafeCell<()>, |cell: &UnsafeCell<()>| cell
    .with(|_| ()));

impl AtomicU64 {
    /// Stores `value` when `when` holds, relaxed.
    pub fn store_if(&self, when: bool, value: u64) {
        if when {
            self.store(value, Order::Relaxed, Scope::Gpu);
        }
    }
}

impl AtomicU32 {
    /// As `fetch_and` when `when` holds, else 0; relaxed.
    pub fn fetch_and_if(&self, when: bool, value: u32) -> u32 {
        match when {
            true => self.fetch_and(value, Order::Relaxed, Scope::Gpu),
            false => 0,
        }
    }

    /// Sets the bits of `value` when `when` holds, relaxed.
    pub fn set_bits_if(&self, when: bool, value: u32) {
        if when {
            self.fetch_or(value, Order::Relaxed, Scope::Gpu);
        }
    }
}

impl AtomicU32 {
    /// Adds `value`, wrapping; returns what was there.
    #[track_caller]
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_add(value, ordering(at_site(order)))
    }

    /// Sets the bits of `value`; returns what was there.
    #[track_caller]
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_or(value, ordering(at_site(order)))
    }

    /// Keeps the bits of `value` alone; returns what was there.
    #[track_caller]
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_and(value, ordering(at_site(order)))
    }

    /// Stores `value`; returns what was there.
    #[track_caller]
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.swap(value, ordering(at_site(order)))
    }

    /// Stores `new` where `current` is; returns what was there. `order` holds when it stored.
    #[track_caller]
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        match self
            .0
            .compare_exchange(current, new, ordering(at_site(order)), Ordering::Relaxed)
        {
            Ok(was) | Err(was) => was,
        }
    }
}

impl AtomicU64 {
    /// Loads the value of a word that nobody stores to meanwhile: a store that is not ordered with
    /// this fails the model.
    pub fn load_settled(&self, _scope: Scope) -> u64 {
        self.1.with_mut(|_| ());
        self.0.load(Ordering::Relaxed)
    }
}

/// loom's fence.
#[track_caller]
pub fn fence(order: Order, _scope: Scope) {
    match at_site(order) {
        Order::Relaxed => {}
        Order::Acquire => atomic::fence(Ordering::Acquire),
        Order::Release => atomic::fence(Ordering::Release),
        Order::AcqRel => atomic::fence(Ordering::AcqRel),
    }
}

/// `value`, in a way that the compiler does not see through. What is made of it is made anew each time:
/// a GPU has more instructions to spare than registers.
#[inline(always)]
pub fn anew(value: u32) -> u32 {
    value
}

/// Lets the model run another thread.
pub fn spin() {
    loom::thread::yield_now();
}
