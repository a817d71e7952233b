//! Model-checking twin: loom's atomics, scopes ignored.

use super::{Order, Scope};
use loom::sync::atomic::{self, Ordering};

fn ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// loom's twin of the host type.
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name);

        impl $name {
            /// A new atomic that holds `value`; not `const`, since loom registers it with the model.
            pub fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            pub fn load(&self, order: Order, _scope: Scope) -> $value {
                self.0.load(match order {
                    Order::Acquire | Order::AcqRel => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                self.0.store(
                    value,
                    match order {
                        Order::Release | Order::AcqRel => Ordering::Release,
                        Order::Relaxed | Order::Acquire => Ordering::Relaxed,
                    },
                );
            }

            /// A relaxed store: the doorbell as the model sees it.
            pub fn store_mmio(&self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

impl AtomicU32 {
    /// Adds `value`, wrapping; returns what was there.
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.0.fetch_add(value, ordering(order))
    }

    /// Sets the bits of `value`; returns what was there.
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.0.fetch_or(value, ordering(order))
    }

    /// Keeps the bits of `value` alone; returns what was there.
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.0.fetch_and(value, ordering(order))
    }

    /// Stores `value`; returns what was there.
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.0.swap(value, ordering(order))
    }

    /// Stores `new` where `current` is; returns what was there. `order` holds when it stored.
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, _scope: Scope) -> u32 {
        match self
            .0
            .compare_exchange(current, new, ordering(order), Ordering::Relaxed)
        {
            Ok(was) | Err(was) => was,
        }
    }
}

/// loom's fence.
pub fn fence(order: Order, _scope: Scope) {
    match order {
        Order::Relaxed => {}
        Order::Acquire => atomic::fence(Ordering::Acquire),
        Order::Release => atomic::fence(Ordering::Release),
        Order::AcqRel => atomic::fence(Ordering::AcqRel),
    }
}

/// Lets the model run another thread.
pub fn spin() {
    loom::thread::yield_now();
}
