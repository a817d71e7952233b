//! Strips that pass through stages under loom: one group fills them, one uses them, and groups end.

use loom::cell::UnsafeCell;
use loom::thread;
use nvme_core::sync::{AtomicU32, Order, Scope, spin};
use nvme_gpu_kernel::strips::{LaunchStrips, StripReady, words};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

/// A stage, which holds the number of the strip that was filled in last, plus one.
struct Stage {
    number: AtomicU32,
    /// Read beside each load of the number, written beside each store: the model fails when the two race.
    bytes: UnsafeCell<()>,
}

impl Stage {
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

struct Ring {
    words: Vec<AtomicU32>,
    strips: u32,
    stages: Vec<Stage>,
}

impl Ring {
    fn new(strips: u32, stages: u32) -> Arc<Self> {
        Arc::new(Self {
            words: (0..words(strips)).map(|_| AtomicU32::new(0)).collect(),
            strips,
            stages: (0..stages).map(|_| Stage::new()).collect(),
        })
    }

    fn strips(&self) -> LaunchStrips<'_> {
        LaunchStrips::new(&self.words, self.strips, self.stages.len() as u32).unwrap()
    }

    fn stage(&self, strip: u32) -> &Stage {
        &self.stages[strip as usize % self.stages.len()]
    }

    /// Fills every strip, each of which is used `uses` times. Says how many strips were filled.
    fn fill(&self, uses: u32) -> u32 {
        for strip in 0..self.strips {
            loop {
                match self.strips().may_fill(strip, uses) {
                    StripReady::Now => break,
                    StripReady::NotYet => spin(),
                    StripReady::Never(_) => return strip,
                }
            }
            self.stage(strip).write(strip);
            self.strips().fill(strip);
        }
        self.strips
    }

    /// Uses every strip, of one part each. Says how many strips were there.
    fn use_all(&self) -> u32 {
        for strip in 0..self.strips {
            loop {
                match self.strips().may_use(strip, 1) {
                    StripReady::Now => break,
                    StripReady::NotYet => spin(),
                    StripReady::Never(_) => return strip,
                }
            }
            assert_eq!(self.stage(strip).read(), strip + 1, "another strip");
            self.strips().end_use(strip);
        }
        self.strips
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
            let filler = thread::spawn(move || other.fill(1));
            assert_eq!(ring.use_all(), 3);
            assert_eq!(filler.join().unwrap(), 3);
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
                    ring.stage(strip).write(strip);
                    ring.strips().fill(strip);
                    ring.strips().end_filling(2, 9);
                })
            });
            assert_eq!(ring.use_all(), 2);
            assert_eq!(ring.strips().may_use(2, 1), StripReady::Never(9));
            for filler in fillers {
                filler.join().unwrap();
            }
        },
    );
}
