//! ThreadSanitizer backend: `core::sync::atomic`, with fences that the sanitizer understands.
//!
//! ThreadSanitizer knows no fences. Here each thread has two fibers beside its own, whose clocks are what
//! C++ gives fences: `released` knows what the thread's last release fence published, `pending` what its
//! relaxed loads have seen. A relaxed store lets `released` release at its word, a relaxed load lets
//! `pending` acquire there, and fences carry the clocks over. So nothing is ordered that the orders do not
//! order, but for two things: a word keeps what was released at it before, also by others, and a load may
//! acquire what was released a moment after it.
//!
//! [`AtomicU64::load_settled`] is a plain load: a store that is not ordered with it is a race.
// UNSAFETY: the sanitizer's own interface, and plain loads of atomics, which are what it checks.
#![allow(unsafe_code)]

use super::site::at_site;
use super::{Order, Scope};
use core::cell::Cell;
use core::ffi::{c_uint, c_void};
use core::sync::atomic::{self, Ordering};
use std::boxed::Box;

unsafe extern "C" {
    fn __tsan_get_current_fiber() -> *mut c_void;
    fn __tsan_create_fiber(flags: c_uint) -> *mut c_void;
    fn __tsan_switch_to_fiber(fiber: *mut c_void, flags: c_uint);
    fn __tsan_acquire(address: *mut c_void);
    fn __tsan_release(address: *mut c_void);
}

/// Switching alone orders nothing.
const NO_SYNC: c_uint = 1;

/// What a thread has beside itself. Threads are few: this is never freed.
///
/// Copied out before each switch: a fiber that looked into the thread's memory would race with it.
#[derive(Clone, Copy)]
struct Fibers {
    own: *mut c_void,
    released: *mut c_void,
    pending: *mut c_void,
    /// Addresses by which clocks are handed over, one for each way.
    ways: [*mut c_void; 2],
}

std::thread_local!(static FIBERS: Cell<Option<Fibers>> = const { Cell::new(None) });

#[inline(always)]
fn fibers() -> Fibers {
    FIBERS.get().unwrap_or_else(new_fibers)
}

#[cold]
fn new_fibers() -> Fibers {
    let ways = Box::leak(Box::new([0u64; 2]));
    // SAFETY: the program runs under the sanitizer, which provides these.
    let (own, released, pending) = unsafe {
        (
            __tsan_get_current_fiber(),
            __tsan_create_fiber(0),
            __tsan_create_fiber(0),
        )
    };
    let fibers = Fibers {
        own,
        released,
        pending,
        ways: core::array::from_fn(|way| core::ptr::from_mut(&mut ways[way]).cast()),
    };
    FIBERS.set(Some(fibers));
    fibers
}

impl Fibers {
    /// Does `act` as `fiber`.
    #[inline(always)]
    fn as_fiber<R>(self, fiber: *mut c_void, act: impl FnOnce() -> R) -> R {
        let own = self.own;
        // SAFETY: fibers of this thread; `act` neither switches nor unwinds.
        unsafe { __tsan_switch_to_fiber(fiber, NO_SYNC) };
        let result = act();
        // SAFETY: as above.
        unsafe { __tsan_switch_to_fiber(own, NO_SYNC) };
        result
    }

    /// Before a relaxed store to `word`: with it goes what the last release fence published.
    #[inline(always)]
    fn storing(self, word: *mut c_void) {
        // SAFETY: the address of a live word.
        self.as_fiber(self.released, || unsafe { __tsan_release(word) });
    }

    /// After a relaxed load of `word`: what came with its value, for the next acquire fence.
    #[inline(always)]
    fn loaded(self, word: *mut c_void) {
        // SAFETY: the address of a live word.
        self.as_fiber(self.pending, || unsafe { __tsan_acquire(word) });
    }

    #[inline(always)]
    fn acquire(self) {
        let way = self.ways[0];
        // SAFETY: an address of our own.
        self.as_fiber(self.pending, || unsafe { __tsan_release(way) });
        // SAFETY: as above.
        unsafe { __tsan_acquire(way) };
    }

    #[inline(always)]
    fn release(self) {
        let way = self.ways[1];
        // SAFETY: an address of our own.
        unsafe { __tsan_release(way) };
        // SAFETY: as above.
        self.as_fiber(self.released, || unsafe { __tsan_acquire(way) });
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// The sanitizer's backend of the host type.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$name);

        impl $name {
            /// A new atomic that holds `value`.
            pub const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            #[track_caller]
            pub fn load(&self, order: Order, _scope: Scope) -> $value {
                match at_site(order) {
                    Order::Acquire | Order::AcqRel => self.0.load(Ordering::Acquire),
                    Order::Relaxed | Order::Release => {
                        let value = self.0.load(Ordering::Relaxed);
                        fibers().loaded(self.0.as_ptr().cast());
                        value
                    }
                }
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[track_caller]
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                match at_site(order) {
                    Order::Release | Order::AcqRel => self.0.store(value, Ordering::Release),
                    Order::Relaxed | Order::Acquire => self.store_mmio(value),
                }
            }

            /// A relaxed store: the doorbell as its reader sees it.
            pub fn store_mmio(&self, value: $value) {
                fibers().storing(self.0.as_ptr().cast());
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

impl AtomicU64 {
    /// Loads the value of a word that no thread stores to meanwhile: a store that is not ordered with this
    /// is a race.
    pub fn load_settled(&self, _scope: Scope) -> u64 {
        // SAFETY: a live word. That no thread stores to it meanwhile is what the sanitizer checks.
        unsafe { self.0.as_ptr().read() }
    }
}

impl AtomicU32 {
    /// A read-modify-write operation: the release half by its order, then the acquire half.
    #[inline(always)]
    fn modify(
        &self,
        order: Order,
        modify: impl FnOnce(&atomic::AtomicU32, Ordering) -> u32,
    ) -> u32 {
        let (acquires, releases) = match order {
            Order::Relaxed => (false, false),
            Order::Acquire => (true, false),
            Order::Release => (false, true),
            Order::AcqRel => (true, true),
        };
        let (fibers, at) = (fibers(), self.0.as_ptr().cast());
        let was = if releases {
            modify(&self.0, Ordering::Release)
        } else {
            fibers.storing(at);
            modify(&self.0, Ordering::Relaxed)
        };
        if acquires {
            // SAFETY: the address of a live word.
            unsafe { __tsan_acquire(at) };
        } else {
            fibers.loaded(at);
        }
        was
    }

    /// Adds `value`, wrapping; returns what was there.
    #[track_caller]
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_add(value, order))
    }

    /// Sets the bits of `value`; returns what was there.
    #[track_caller]
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_or(value, order))
    }

    /// Keeps the bits of `value` alone; returns what was there.
    #[track_caller]
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_and(value, order))
    }

    /// Stores `value`; returns what was there.
    #[track_caller]
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.swap(value, order))
    }

    /// Stores `new` where `current` is; returns what was there. `order` holds when it stored.
    #[track_caller]
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| {
            match word.compare_exchange(current, new, order, Ordering::Relaxed) {
                Ok(was) | Err(was) => was,
            }
        })
    }
}

/// A fence, by the clocks of the fibers.
#[track_caller]
pub fn fence(order: Order, _scope: Scope) {
    let order = at_site(order);
    if matches!(order, Order::Acquire | Order::AcqRel) {
        fibers().acquire();
    }
    if matches!(order, Order::Release | Order::AcqRel) {
        fibers().release();
    }
}

/// A fence in the one order of all such fences, which the sanitizer takes for one of both directions.
#[track_caller]
pub fn fence_seq_cst(scope: Scope) {
    atomic::fence(Ordering::SeqCst);
    fence(Order::AcqRel, scope);
}

/// `value`: there is nothing to hide from the compiler here.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

/// Tells the processor that the thread waits for another one's store.
pub fn spin() {
    core::hint::spin_loop();
}
