//! The gate under loom: groups pass and leave, and a host recovers the queues that they use.

use loom::thread;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, spin};
use nvme_gpu_kernel::gate::{AdmissionGate, GateReference, GateRefusal, words};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

/// A gate, and a word behind it: groups store to it, possibly at the same time. The host reads it non-atomically, which
/// fails the model if a store is not ordered before the read.
struct Yard {
    words: Vec<AtomicU32>,
    queues: AtomicU64,
}

impl Yard {
    fn new(stations: u32) -> Self {
        Self {
            words: (0..words(stations)).map(|_| AtomicU32::new(0)).collect(),
            queues: AtomicU64::new(0),
        }
    }

    fn gate(&self) -> AdmissionGate<'_> {
        AdmissionGate::new(&self.words).unwrap()
    }

    /// Passes at `station` and uses the queues.
    fn use_queues(&self, station: u32) -> Result<(), GateRefusal> {
        let gate = self.gate();
        gate.enter(station)?;
        self.queues.store(1, Order::Relaxed, Scope::Sys);
        gate.leave(station);
        Ok(())
    }

    fn recover(&self) {
        self.gate().close();
        while !self.gate().is_idle() {
            spin();
        }
        self.queues.load_settled(Scope::Sys);
    }
}

#[test]
fn two_groups_and_a_recovery() {
    check(
        "no group is inside while the host recovers the queues, nor after it has until the gate is open",
        Bound::Preemptions(3),
        || {
            let yard = Arc::new(Yard::new(2));
            let groups = [0, 1].map(|station| {
                let yard = yard.clone();
                thread::spawn(move || yard.use_queues(station))
            });
            yard.recover();
            assert!(yard.gate().open());
            for group in groups {
                assert!(matches!(
                    group.join().unwrap(),
                    Ok(()) | Err(GateRefusal::ForNow)
                ));
            }
            assert_eq!(yard.use_queues(0), Ok(()));
        },
    );
}

#[test]
fn a_station_that_changes_hands() {
    check(
        "a group that takes over a station is seen as the one before it was",
        Bound::Preemptions(3),
        || {
            let yard = Arc::new(Yard::new(1));
            let other = yard.clone();
            let groups = thread::spawn(move || {
                // The two uses follow each other, as the claim of a station orders them.
                let _ = other.use_queues(0);
                let _ = other.use_queues(0);
            });
            yard.recover();
            yard.gate().close_for_good();
            groups.join().unwrap();
            assert_eq!(yard.use_queues(0), Err(GateRefusal::ForGood));
        },
    );
}

#[test]
fn a_recovery_and_a_gate_that_is_shut_for_good() {
    check(
        "a recovery opens no gate that another thread shuts for good, whenever it does",
        Bound::Exhaustive,
        || {
            let yard = Arc::new(Yard::new(1));
            let other = yard.clone();
            let watch = thread::spawn(move || other.gate().close_for_good());
            yard.recover();
            yard.gate().open();
            watch.join().unwrap();
            assert_eq!(yard.use_queues(0), Err(GateRefusal::ForGood));
            yard.gate().close();
            assert!(!yard.gate().open());
        },
    );
}

/// A group leaves with commands in flight and returns, beside a recovery: if the epoch is the one in which it left, the
/// queues are unchanged.
#[test]
fn a_group_that_comes_back_knows_of_a_recovery() {
    check(
        "who passes in the epoch in which it left before was not overtaken by a recovery",
        Bound::Preemptions(3),
        || {
            let yard = Arc::new(Yard::new(1));
            let other = yard.clone();
            let group = thread::spawn(move || {
                let gate = other.gate();
                let Ok(began) = gate.pass(0) else { return };
                other.queues.store(1, Order::Relaxed, Scope::Sys);
                gate.leave(0);
                if let Ok(now) = gate.pass(0) {
                    let left = other.queues.load(Order::Relaxed, Scope::Sys);
                    assert_eq!(left == 1, now == began, "{began:?}, {now:?}");
                    gate.leave(0);
                }
            });
            yard.recover();
            yard.queues.store(2, Order::Relaxed, Scope::Sys);
            assert!(yard.gate().open());
            group.join().unwrap();
        },
    );
}

#[test]
fn trouble_reaches_the_host() {
    check(
        "who sees the report of trouble sees what the group wrote before it",
        Bound::Exhaustive,
        || {
            let yard = Arc::new(Yard::new(1));
            let other = yard.clone();
            let group = thread::spawn(move || {
                other.queues.store(1, Order::Relaxed, Scope::Sys);
                other.gate().report_trouble();
            });
            if yard.gate().has_trouble() {
                assert_eq!(yard.queues.load_settled(Scope::Sys), 1);
            }
            group.join().unwrap();
        },
    );
}

/// A station of several groups, which store to the word behind the gate.
struct Station {
    yard: Yard,
    word: AtomicU32,
}

impl Station {
    fn party(&self) -> GateReference<'_> {
        GateReference {
            word: &self.word,
            gate: self.yard.gate(),
            station: 0,
        }
    }

    /// Uses the queues as one of two groups that have passed.
    fn act(&self, lost: bool) {
        self.yard.queues.store(1, Order::Relaxed, Scope::Sys);
        self.party().leave(1, lost);
    }
}

#[test]
fn groups_leave_a_station_one_by_one() {
    check(
        "the host sees a station empty after the last of its groups has left, and lost when one of them lost a read",
        Bound::Preemptions(3),
        || {
            let station = Arc::new(Station {
                yard: Yard::new(1),
                word: AtomicU32::new(0),
            });
            let passed = station.party().enter(2);
            assert!(passed);
            let groups = [false, true].map(|lost| {
                let station = station.clone();
                thread::spawn(move || station.act(lost))
            });
            station.yard.recover();
            assert_eq!(station.yard.gate().take_lost(), Some(0));
            station.word.store(0, Order::Relaxed, Scope::Gpu);
            station.yard.gate().open();
            assert!(station.party().enter(1));
            station.party().leave(1, false);
            for group in groups {
                group.join().unwrap();
            }
        },
    );
}

#[test]
fn a_party_passes_or_the_host_sees_it() {
    check(
        "a party is inside before the host recovers, or does not pass",
        Bound::Preemptions(3),
        || {
            let station = Arc::new(Station {
                yard: Yard::new(1),
                word: AtomicU32::new(0),
            });
            let other = station.clone();
            let group = thread::spawn(move || {
                // One party follows the other, as the claim of a station orders them.
                for _ in 0..2 {
                    if other.party().enter(1) {
                        other.act(false);
                    }
                }
            });
            station.yard.recover();
            group.join().unwrap();
        },
    );
}
