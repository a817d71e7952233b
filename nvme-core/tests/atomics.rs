//! The atomics of the host: what each operation does and returns, with every order and scope.
#![cfg(not(any(loom, tsan)))]

use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence, opaque, spin};

const ORDERS: [Order; 4] = [
    Order::Relaxed,
    Order::Acquire,
    Order::Release,
    Order::AcqRel,
];
const SCOPES: [Scope; 3] = [Scope::Cta, Scope::Gpu, Scope::Sys];

/// Calls `work` with each order in each scope.
fn each(mut work: impl FnMut(Order, Scope)) {
    for order in ORDERS {
        for scope in SCOPES {
            work(order, scope);
        }
    }
}

#[test]
fn loads_and_stores_take_every_order() {
    // The standard library's atomics panic on a load that releases and a store that acquires.
    let (word, long) = (AtomicU32::new(7), AtomicU64::new(8));
    let mut value = 0;
    each(|order, scope| {
        value += 1;
        word.store(value, order, scope);
        long.store(u64::from(value) << 32, order, scope);
        assert_eq!(word.load(order, scope), value, "{order:?} {scope:?}");
        assert_eq!(long.load(order, scope), u64::from(value) << 32);
        fence(order, scope);
    });
    word.store_mmio(5);
    long.store_mmio(u64::MAX);
    assert_eq!(word.load(Order::Acquire, Scope::Sys), 5);
    assert_eq!(long.load_settled(Scope::Sys), u64::MAX);
}

#[test]
fn read_modify_write_returns_what_was_there() {
    let word = AtomicU32::new(0);
    each(|order, scope| {
        word.store(u32::MAX, Order::Relaxed, scope);
        assert_eq!(word.fetch_add(3, order, scope), u32::MAX);
        assert_eq!(word.fetch_or(0b1100, order, scope), 2, "it wraps");
        assert_eq!(word.fetch_and(0b0110, order, scope), 0b1110);
        assert_eq!(word.swap(9, order, scope), 0b0110);
        assert_eq!(word.compare_exchange(8, 1, order, scope), 9);
        assert_eq!(word.load(Order::Relaxed, scope), 9, "8 was not there");
        assert_eq!(word.compare_exchange(9, 1, order, scope), 9);
        assert_eq!(word.load(Order::Relaxed, scope), 1);
    });
}

#[test]
fn conditional_operations_change_nothing_without_their_condition() {
    let (word, long) = (AtomicU32::new(0b1111), AtomicU64::new(1));
    assert_eq!(word.fetch_and_if(false, 0b0001), 0);
    word.set_bits_if(false, 1 << 31);
    long.store_if(false, 2);
    assert_eq!(word.load(Order::Relaxed, Scope::Gpu), 0b1111);
    assert_eq!(long.load(Order::Relaxed, Scope::Gpu), 1);
    assert_eq!(word.fetch_and_if(true, 0b0101), 0b1111);
    word.set_bits_if(true, 1 << 31);
    long.store_if(true, 2);
    assert_eq!(word.load(Order::Relaxed, Scope::Gpu), 1 << 31 | 0b0101);
    assert_eq!(long.load(Order::Relaxed, Scope::Gpu), 2);
}

#[test]
fn a_value_made_anew_is_the_same_value() {
    for value in [0, 1, u32::MAX] {
        assert_eq!(opaque(value), value);
    }
}

/// A thread that acquires a flag sees the data that was stored before the flag's release: by loads
/// and stores with these orders, and by fences.
#[test]
fn what_was_stored_before_a_release_is_seen_after_its_acquire() {
    for fenced in [false, true] {
        let (data, flag) = (AtomicU64::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                data.store(42, Order::Relaxed, Scope::Sys);
                if fenced {
                    fence(Order::Release, Scope::Sys);
                    flag.store(1, Order::Relaxed, Scope::Sys);
                } else {
                    flag.store(1, Order::Release, Scope::Sys);
                }
            });
            let order = if fenced {
                Order::Relaxed
            } else {
                Order::Acquire
            };
            while flag.load(order, Scope::Sys) == 0 {
                spin();
            }
            if fenced {
                fence(Order::Acquire, Scope::Sys);
            }
            assert_eq!(data.load(Order::Relaxed, Scope::Sys), 42);
        });
    }
}
