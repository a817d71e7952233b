//! ThreadSanitizer back end: `core::sync::atomic`, with fences that the sanitizer understands.
//!
//! ThreadSanitizer has no model of fences. Here each thread has two further fibers, whose clocks stand for
//! the fences of C++: `released` holds what the thread's last release fence published, `pending` what its
//! relaxed loads have seen. Before a relaxed store `released` releases at the word, after a relaxed load
//! `pending` acquires there, and fences transfer the clocks. So nothing is ordered beyond the given orders,
//! with two exceptions: a word keeps everything that any thread released at it before, and a load may acquire
//! what was released a moment after it.
//!
//! [`AtomicU64::load_settled`] is a plain load: a store that is not ordered with it is a race.
// UNSAFETY: the sanitizer's own interface, and plain loads of atomics, whose races it has to report.
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

/// Flag of a switch that orders nothing.
const NO_SYNC: c_uint = 1;

/// The fibers of a thread. Threads are few: this is never freed.
///
/// Copied out before each switch: a fiber that looked into the thread's memory would race with it.
#[derive(Clone, Copy)]
struct ThreadFibers {
    own: *mut c_void,
    released: *mut c_void,
    pending: *mut c_void,
    /// Addresses at which a clock is released and acquired, one for each direction.
    ways: [*mut c_void; 2],
}

std::thread_local!(static FIBERS: Cell<Option<ThreadFibers>> = const { Cell::new(None) });

#[inline(always)]
fn fibers() -> ThreadFibers {
    FIBERS.get().unwrap_or_else(new_fibers)
}

#[cold]
fn new_fibers() -> ThreadFibers {
    let ways = Box::leak(Box::new([0u64; 2]));
    // SAFETY: the program runs under the sanitizer, which provides these functions for any thread.
    let (own, released, pending) = unsafe {
        (
            __tsan_get_current_fiber(),
            __tsan_create_fiber(0),
            __tsan_create_fiber(0),
        )
    };
    let fibers = ThreadFibers {
        own,
        released,
        pending,
        ways: core::array::from_fn(|way| core::ptr::from_mut(&mut ways[way]).cast()),
    };
    FIBERS.set(Some(fibers));
    fibers
}

impl ThreadFibers {
    /// Runs `act` as `fiber`.
    #[inline(always)]
    fn as_fiber<R>(self, fiber: *mut c_void, act: impl FnOnce() -> R) -> R {
        let own = self.own;
        // SAFETY: both are fibers of this thread, neither is ended while the thread runs, and `act` neither
        // switches nor unwinds.
        unsafe { __tsan_switch_to_fiber(fiber, NO_SYNC) };
        let result = act();
        // SAFETY: as above; this returns to the fiber that was left.
        unsafe { __tsan_switch_to_fiber(own, NO_SYNC) };
        result
    }

    /// Releases, before a relaxed store to `word`, what the last release fence published.
    #[inline(always)]
    fn storing(self, word: *mut c_void) {
        // SAFETY: `word` is the address of a live atomic; the sanitizer only uses it as a key.
        self.as_fiber(self.released, || unsafe { __tsan_release(word) });
    }

    /// Acquires, after a relaxed load of `word`, what was released with its value, for the next acquire
    /// fence.
    #[inline(always)]
    fn loaded(self, word: *mut c_void) {
        // SAFETY: `word` is the address of a live atomic; the sanitizer only uses it as a key.
        self.as_fiber(self.pending, || unsafe { __tsan_acquire(word) });
    }

    #[inline(always)]
    fn acquire(self) {
        let way = self.ways[0];
        // SAFETY: the address belongs to this thread's leaked words.
        self.as_fiber(self.pending, || unsafe { __tsan_release(way) });
        // SAFETY: as above.
        unsafe { __tsan_acquire(way) };
    }

    #[inline(always)]
    fn release(self) {
        let way = self.ways[1];
        // SAFETY: the address belongs to this thread's leaked words.
        unsafe { __tsan_release(way) };
        // SAFETY: as above.
        self.as_fiber(self.released, || unsafe { __tsan_acquire(way) });
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// Atomic of the sanitizer's back end.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$name);

        impl $name {
            /// Makes an atomic that holds `value`.
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

            /// Stores relaxed: the doorbell as its reader sees it.
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
        // SAFETY: this reads a live word. No thread may store to it meanwhile, which is the condition that the
        // sanitizer checks here.
        unsafe { self.0.as_ptr().read() }
    }
}

impl AtomicU32 {
    /// Runs a read-modify-write operation: the release half by its order, then the acquire half.
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
            // SAFETY: `at` is the address of a live atomic; the sanitizer only uses it as a key.
            unsafe { __tsan_acquire(at) };
        } else {
            fibers.loaded(at);
        }
        was
    }

    /// Adds `value`, wrapping; returns the previous value.
    #[track_caller]
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_add(value, order))
    }

    /// Sets the bits of `value`; returns the previous value.
    #[track_caller]
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_or(value, order))
    }

    /// Keeps only the bits of `value`; returns the previous value.
    #[track_caller]
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.fetch_and(value, order))
    }

    /// Stores `value`; returns the previous value.
    #[track_caller]
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| word.swap(value, order))
    }

    /// Stores `new` if the value is `current`; returns the previous value. `order` applies when it stored.
    #[track_caller]
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, _scope: Scope) -> u32 {
        self.modify(at_site(order), |word, order| {
            match word.compare_exchange(current, new, order, Ordering::Relaxed) {
                Ok(was) | Err(was) => was,
            }
        })
    }
}

/// A fence, expressed by the clocks of the fibers.
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

/// A sequentially consistent fence; the sanitizer models it as one that acquires and releases.
#[track_caller]
pub fn fence_seq_cst(scope: Scope) {
    atomic::fence(Ordering::SeqCst);
    fence(Order::AcqRel, scope);
}

/// Returns `value`: nothing needs to be hidden from the compiler here.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

/// Hints to the processor that the thread waits for another thread's store.
pub fn spin() {
    core::hint::spin_loop();
}
