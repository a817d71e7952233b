//! Host back end: `core::sync::atomic`. Scopes are ignored, except by fences on aarch64.

use super::{Order, Scope};
use core::sync::atomic::{self, Ordering};

/// Reports an operation to the recorder of this crate's unit tests.
macro_rules! note {
    ($($what:tt)*) => {
        #[cfg(test)]
        super::record::note($($what)*);
    };
}

#[inline]
fn ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

macro_rules! atomic {
    ($name:ident, $inner:ident, $value:ty) => {
        /// An integer that other threads and devices may change at any time.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$inner);

        impl $name {
            /// Makes an atomic that holds `value`.
            pub const fn new(value: $value) -> Self {
                Self(atomic::$inner::new(value))
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            #[inline]
            pub fn load(&self, order: Order, _scope: Scope) -> $value {
                note!("load", order, _scope, self);
                self.0.load(match order {
                    Order::Acquire | Order::AcqRel => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[inline]
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                note!("store", order, _scope, self);
                self.0.store(
                    value,
                    match order {
                        Order::Release | Order::AcqRel => Ordering::Release,
                        Order::Relaxed | Order::Acquire => Ordering::Relaxed,
                    },
                );
            }

            /// Stores `value` to a device register: exactly one store of this width, never merged.
            #[inline]
            pub fn store_mmio(&self, value: $value) {
                note!("store mmio", Order::Relaxed, Scope::Sys, self);
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(AtomicU32, AtomicU32, u32);
atomic!(AtomicU64, AtomicU64, u64);

impl AtomicU64 {
    /// Loads the value of a word that no thread stores to meanwhile, relaxed; loom checks that none does.
    #[inline]
    pub fn load_settled(&self, _scope: Scope) -> u64 {
        self.load(Order::Relaxed, _scope)
    }

    /// Adds `value`, wrapping; returns the previous value.
    #[inline]
    pub fn fetch_add(&self, value: u64, order: Order, _scope: Scope) -> u64 {
        note!("add", order, _scope, self);
        self.0.fetch_add(value, ordering(order))
    }

    /// Raises the value to `value` if it is smaller; returns the previous value.
    #[inline]
    pub fn fetch_max(&self, value: u64, order: Order, _scope: Scope) -> u64 {
        note!("max", order, _scope, self);
        self.0.fetch_max(value, ordering(order))
    }
}

impl AtomicU32 {
    /// Adds `value`, wrapping; returns the previous value.
    #[inline]
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        note!("add", order, _scope, self);
        self.0.fetch_add(value, ordering(order))
    }

    /// Sets the bits of `value`; returns the previous value.
    #[inline]
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        note!("or", order, _scope, self);
        self.0.fetch_or(value, ordering(order))
    }

    /// Keeps only the bits of `value`; returns the previous value.
    #[inline]
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        note!("and", order, _scope, self);
        self.0.fetch_and(value, ordering(order))
    }

    /// Stores `value`; returns the previous value.
    #[inline]
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        note!("swap", order, _scope, self);
        self.0.swap(value, ordering(order))
    }

    /// Stores `new` if the value is `current`; returns the previous value. `order` applies when it stored.
    #[inline]
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, _scope: Scope) -> u32 {
        note!("cas", order, _scope, self);
        match self
            .0
            .compare_exchange(current, new, ordering(order), Ordering::Relaxed)
        {
            Ok(was) | Err(was) => was,
        }
    }
}

/// A fence between the accesses before and after it.
///
/// On x86-64 and aarch64 a release fence of [`Scope::Sys`] also orders stores to DMA memory before a following store
/// to device memory mapped strongly ordered or uncached (x86: stores are not reordered; aarch64: `dmb osh` and
/// Device-nGnRE, see docs/memory-model.md).
#[inline]
pub fn fence(order: Order, _scope: Scope) {
    note!("fence", order, _scope, &());
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    if _scope == Scope::Sys {
        return super::outer::fence(order);
    }
    match order {
        Order::Relaxed => {}
        Order::Acquire => atomic::fence(Ordering::Acquire),
        Order::Release => atomic::fence(Ordering::Release),
        Order::AcqRel => atomic::fence(Ordering::AcqRel),
    }
}

/// A sequentially consistent fence: all such fences have one order, so a store before one and a
/// load after it are not exchanged. No queue needs it; the litmus tests show that a GPU exchanges
/// the two without it.
#[inline]
pub fn fence_seq_cst(_scope: Scope) {
    note!("fence sc", Order::AcqRel, _scope, &());
    atomic::fence(Ordering::SeqCst);
}

/// Optimisation barrier: returns `value` without letting the compiler know that it is the same, so that
/// derived values are computed again instead of kept in registers, which a GPU has fewer of than
/// instructions.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

/// Hints to the processor that the thread waits for another thread's store.
#[inline]
pub fn spin() {
    #[cfg(feature = "spin-hook")]
    if let Some(hook) = HOOK.get() {
        return hook();
    }
    core::hint::spin_loop();
}

#[cfg(feature = "spin-hook")]
std::thread_local! {
    static HOOK: core::cell::Cell<Option<fn()>> = const { core::cell::Cell::new(None) };
}

/// Makes [`spin`] call `hook` in this thread from now on: the thread that is waited for may be a coroutine of
/// it.
#[cfg(feature = "spin-hook")]
pub fn on_spin(hook: fn()) {
    HOOK.set(Some(hook));
}
