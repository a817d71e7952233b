//! Strips that pass through stages under loom: groups that fill them, groups that use them, and one that gives up.

use loom::cell::UnsafeCell;
use loom::thread;
use nvme_core::strips::{Ready, Strips, words};
use nvme_core::sync::{AtomicU32, Order, Scope, spin};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

/// A part of a stage, which holds the number of the strip that was filled in last, plus one.
struct Part {
    number: AtomicU32,
    /// Read beside each load of the number, written beside each store: the model fails when the two race.
    bytes: UnsafeCell<()>,
}

impl Part {
    fn new() -> Self {
        Self {
            number: AtomicU32::new(0),
            bytes: UnsafeCell::new(()),
        }
    }

    fn write(&self, strip: u32) {
        self.bytes.with_mut(|_| ());
        self.number.store(strip + 1, Order::Relaxed, Scope::Gpu);
    }

    fn read(&self) -> u32 {
        self.bytes.with(|_| ());
        self.number.load(Order::Relaxed, Scope::Gpu)
    }
}

/// Stages of two parts each.
struct Ring {
    words: Vec<AtomicU32>,
    strips: u32,
    stages: Vec<[Part; 2]>,
}

impl Ring {
    fn new(strips: u32, stages: u32) -> Arc<Self> {
        let stage = || [Part::new(), Part::new()];
        Arc::new(Self {
            words: (0..words(strips)).map(|_| AtomicU32::new(0)).collect(),
            strips,
            stages: (0..stages).map(|_| stage()).collect(),
        })
    }

    fn strips(&self) -> Strips<'_> {
        Strips::new(&self.words, self.strips, self.stages.len() as u32).unwrap()
    }

    fn stage(&self, strip: u32) -> &[Part; 2] {
        &self.stages[strip as usize % self.stages.len()]
    }

    /// Fills part `part` of every strip, each of which is used `uses` times. Says how many strips were filled.
    fn fill(&self, part: usize, uses: u32) -> u32 {
        for strip in 0..self.strips {
            loop {
                match self.strips().may_fill(strip, uses) {
                    Ready::Now => break,
                    Ready::NotYet => spin(),
                    Ready::Never(_) => return strip,
                }
            }
            self.stage(strip)[part].write(strip);
            self.strips().fill(strip);
        }
        self.strips
    }

    /// Uses every strip, of so many parts. Says how many strips were there.
    fn use_all(&self, parts: u32) -> u32 {
        for strip in 0..self.strips {
            loop {
                match self.strips().may_use(strip, parts) {
                    Ready::Now => break,
                    Ready::NotYet => spin(),
                    Ready::Never(_) => return strip,
                }
            }
            self.look(strip, parts);
            self.strips().end_use(strip);
        }
        self.strips
    }

    fn look(&self, strip: u32, parts: u32) {
        for part in &self.stage(strip)[..parts as usize] {
            assert_eq!(part.read(), strip + 1, "another strip, or half of one");
        }
    }
}

#[test]
fn one_stage_passes_from_group_to_group() {
    check(
        "a strip is used whole, and not written to meanwhile",
        Bound::Preemptions(3),
        || {
            let ring = Ring::new(3, 1);
            let other = ring.clone();
            let filler = thread::spawn(move || other.fill(0, 1));
            assert_eq!(ring.use_all(1), 3);
            assert_eq!(filler.join().unwrap(), 3);
        },
    );
}

#[test]
fn two_fill_and_two_use() {
    check(
        "parts of several groups make a strip, which is written to again after every use",
        Bound::Preemptions(2),
        || {
            let ring = Ring::new(2, 1);
            let fillers = [0, 1].map(|part| {
                let ring = ring.clone();
                thread::spawn(move || ring.fill(part, 2))
            });
            let other = ring.clone();
            let user = thread::spawn(move || other.use_all(2));
            assert_eq!(ring.use_all(2), 2);
            assert_eq!(user.join().unwrap(), 2);
            for filler in fillers {
                assert_eq!(filler.join().unwrap(), 2);
            }
        },
    );
}

/// The use that is given up may go on for a while, as a group does that has seen the strip before.
#[test]
fn a_stage_whose_use_did_not_end_is_left_alone() {
    check(
        "after a group gave up, what others use is whole",
        Bound::Preemptions(3),
        || {
            let ring = Ring::new(3, 1);
            let other = ring.clone();
            let filler = thread::spawn(move || other.fill(0, 2));
            let other = ring.clone();
            let user = thread::spawn(move || other.use_all(1));
            // This group gives up on the first strip: whether it is there or not.
            ring.strips().give_up(1);
            assert!(filler.join().unwrap() <= 1);
            assert!(user.join().unwrap() <= 1);
        },
    );
}

/// Each filler has one strip of three.
#[test]
fn what_the_fillers_left_is_used_and_the_rest_is_not_waited_for() {
    check(
        "after the last filler has ended, all that was filled is there, and nothing else comes",
        Bound::Preemptions(3),
        || {
            let ring = Ring::new(3, 3);
            let fillers = [0, 1].map(|strip| {
                let ring = ring.clone();
                thread::spawn(move || {
                    ring.stage(strip)[0].write(strip);
                    ring.strips().fill(strip);
                    ring.strips().end_filling(2, 9);
                })
            });
            assert_eq!(ring.use_all(1), 2);
            assert_eq!(ring.strips().may_use(2, 1), Ready::Never(9));
            for filler in fillers {
                filler.join().unwrap();
            }
        },
    );
}
