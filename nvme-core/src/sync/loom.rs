//! Model-checking twin: loom's atomics, scopes ignored.

use super::{Order, Scope};
use loom::sync::atomic::{self, Ordering};

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
                    Order::Acquire => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                self.0.store(
                    value,
                    match order {
                        Order::Release => Ordering::Release,
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

/// loom's fence.
pub fn fence(order: Order, _scope: Scope) {
    match order {
        Order::Relaxed => {}
        Order::Acquire => atomic::fence(Ordering::Acquire),
        Order::Release => atomic::fence(Ordering::Release),
    }
}
