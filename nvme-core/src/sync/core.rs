//! Host twin: `core::sync::atomic`, scopes ignored.

use super::{Order, Scope};
use core::sync::atomic::{self, Ordering};

macro_rules! atomic {
    ($name:ident, $inner:ident, $value:ty) => {
        /// An integer that other threads and devices may change at any time.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$inner);

        impl $name {
            /// A new atomic that holds `value`.
            pub const fn new(value: $value) -> Self {
                Self(atomic::$inner::new(value))
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            #[inline]
            pub fn load(&self, order: Order, _scope: Scope) -> $value {
                self.0.load(match order {
                    Order::Acquire => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[inline]
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                self.0.store(
                    value,
                    match order {
                        Order::Release => Ordering::Release,
                        Order::Relaxed | Order::Acquire => Ordering::Relaxed,
                    },
                );
            }

            /// Stores `value` to a device register: exactly one store of this width, never merged.
            #[inline]
            pub fn store_mmio(&self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(AtomicU32, AtomicU32, u32);
atomic!(AtomicU64, AtomicU64, u64);

/// A fence between the accesses before and after it.
///
/// On x86-64 and aarch64 a release fence also orders stores to DMA memory before a following store to
/// device memory mapped strongly ordered or uncached (x86: stores are not reordered; aarch64: `dmb ish`
/// and Device-nGnRE, see docs/memory-model.md).
#[inline]
pub fn fence(order: Order, _scope: Scope) {
    match order {
        Order::Relaxed => {}
        Order::Acquire => atomic::fence(Ordering::Acquire),
        Order::Release => atomic::fence(Ordering::Release),
    }
}
