//! Model-checking back end: loom's atomics, scopes ignored. Orders are passed on as they are written, so that
//! weakening one in the source must make some model fail.

use super::site::at_site;
use super::{Order, Scope};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{self, Ordering};
use loom::thread::{ThreadId, current};
use std::cell::Cell;
use std::panic::Location;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

fn ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

/// Plain accesses that accompany those of a 64-bit word; they tell the model which accesses must not race.
#[derive(Debug, Default)]
struct PlainAccesses {
    /// Written by each `load_settled`, read by each store (stores may race with each other).
    settled: UnsafeCell<()>,
    /// Read by each load, written by each store within [`overwriting`].
    seen: UnsafeCell<()>,
}

/// The promise of a thread about its stores, valid while a closure runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreClaim {
    Overwriting,
    Uncontended,
}

std::thread_local! {
    /// Separate for each model, whose threads all run in one thread of the system.
    static CLAIM: Cell<Option<(ThreadId, StoreClaim)>> = const { Cell::new(None) };
}

/// Runs `act`, whose stores to 64-bit words must be ordered after every earlier load of them: their readers
/// have released them. One thread at a time, and not for words that another thread may still read.
pub fn overwriting<R>(act: impl FnOnce() -> R) -> R {
    claiming(StoreClaim::Overwriting, act)
}

/// Runs `act`, to whose targets no other thread writes meanwhile: its stores remain plain stores, which do
/// not continue an earlier release sequence. One thread at a time.
pub fn uncontended<R>(act: impl FnOnce() -> R) -> R {
    claiming(StoreClaim::Uncontended, act)
}

fn claiming<R>(claim: StoreClaim, act: impl FnOnce() -> R) -> R {
    CLAIM.set(Some((current().id(), claim)));
    let result = act();
    CLAIM.set(None);
    result
}

fn claims(claim: StoreClaim) -> bool {
    let said = CLAIM.get();
    said.is_some_and(|(who, said)| said == claim && who == current().id())
}

macro_rules! atomic {
    ($name:ident, $value:ty, $beside:ty, $seen:expr, $stored:expr, $rung:expr) => {
        /// Loom's atomic of the host type, and whether a read-modify-write operation has touched it.
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name, $beside, AtomicBool);

        impl $name {
            /// Makes an atomic that holds `value`; not `const`, since loom registers it with the model.
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
                ($seen)(&self.1);
                self.0.load(match at_site(order) {
                    Order::Acquire | Order::AcqRel => Ordering::Acquire,
                    Order::Relaxed | Order::Release => Ordering::Relaxed,
                })
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[track_caller]
            pub fn store(&self, value: $value, order: Order, _scope: Scope) {
                ($stored)(&self.1);
                let order = match at_site(order) {
                    Order::Release | Order::AcqRel => Ordering::Release,
                    Order::Relaxed | Order::Acquire => Ordering::Relaxed,
                };
                if self.2.load(Ordering::Relaxed) && !claims(StoreClaim::Uncontended) {
                    // loom orders a store only after what its thread has seen: another thread's failed
                    // attempt on a lock would count as newer than the store that unlocks. A swap is newer,
                    // and continues the last holder's release sequence, which a store does not:
                    // `uncontended`.
                    self.0.swap(value, order);
                } else {
                    self.0.store(value, order);
                }
            }

            /// Stores relaxed: the doorbell as the model sees it. Two stores that are not ordered fail the
            /// model.
            pub fn store_mmio(&self, value: $value) {
                ($rung)(&self.1);
                self.0.store(value, Ordering::Relaxed);
            }
        }
    };
}

atomic!(
    AtomicU32,
    u32,
    OnceLock<UnsafeCell<()>>,
    |_: &_| (),
    |_: &_| (),
    |rung: &OnceLock<UnsafeCell<()>>| rung.get_or_init(UnsafeCell::default).with_mut(|_| ())
);
atomic!(
    AtomicU64,
    u64,
    PlainAccesses,
    |beside: &PlainAccesses| beside.seen.with(|_| ()),
    |beside: &PlainAccesses| {
        beside.settled.with(|_| ());
        if claims(StoreClaim::Overwriting) {
            beside.seen.with_mut(|_| ());
        }
    },
    |_: &_| ()
);

impl AtomicU32 {
    /// Adds `value`, wrapping; returns the previous value.
    #[track_caller]
    pub fn fetch_add(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_add(value, ordering(at_site(order)))
    }

    /// Sets the bits of `value`; returns the previous value.
    #[track_caller]
    pub fn fetch_or(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_or(value, ordering(at_site(order)))
    }

    /// Keeps only the bits of `value`; returns the previous value.
    #[track_caller]
    pub fn fetch_and(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_and(value, ordering(at_site(order)))
    }

    /// Stores `value`; returns the previous value.
    #[track_caller]
    pub fn swap(&self, value: u32, order: Order, _scope: Scope) -> u32 {
        self.2.store(true, Ordering::Relaxed);
        self.0.swap(value, ordering(at_site(order)))
    }

    /// Stores `new` if the value is `current`; returns the previous value. `order` applies when it stored.
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
    /// Loads the value of a word that no thread stores to meanwhile: a store that is not ordered with this
    /// load fails the model.
    pub fn load_settled(&self, _scope: Scope) -> u64 {
        self.1.settled.with_mut(|_| ());
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `value`, wrapping; returns the previous value.
    #[track_caller]
    pub fn fetch_add(&self, value: u64, order: Order, _scope: Scope) -> u64 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_add(value, ordering(at_site(order)))
    }

    /// Raises the value to `value` if it is smaller; returns the previous value.
    #[track_caller]
    pub fn fetch_max(&self, value: u64, order: Order, _scope: Scope) -> u64 {
        self.2.store(true, Ordering::Relaxed);
        self.0.fetch_max(value, ordering(at_site(order)))
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

/// Loom's sequentially consistent fence; weakened by a mutation test, an ordinary one.
#[track_caller]
pub fn fence_seq_cst(_scope: Scope) {
    match at_site(Order::AcqRel) {
        Order::AcqRel => atomic::fence(Ordering::SeqCst),
        Order::Relaxed => {}
        _ => atomic::fence(Ordering::AcqRel),
    }
}

/// Optimisation barrier: returns `value` without letting the compiler know that it is the same, so that
/// derived values are computed again instead of kept in registers, which a GPU has fewer of than
/// instructions.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}

/// Limit of the waits of all threads in one execution before it has failed. The models need some
/// hundred at most. More of them are taken for threads that wait for each other.
const MOST_WAITS: u32 = 2_000;

std::thread_local! {
    /// Waits so far, separate for each model.
    static WAITS: Cell<u32> = const { Cell::new(0) };
}

/// Starts a new execution of the model.
pub fn begin_execution() {
    WAITS.set(0);
}

/// Lets the model run another thread.
///
/// # Panics
/// After too many waits in one execution, with the location of the caller.
#[track_caller]
pub fn spin() {
    WAITS.set(WAITS.get() + 1);
    let place = Location::caller();
    assert!(
        WAITS.get() < MOST_WAITS,
        "what {}:{} waits for does not come",
        place.file(),
        place.line()
    );
    loom::thread::yield_now();
}
