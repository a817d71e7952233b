//! Groups of host threads: what the lanes of a warp are on a GPU, one thread each.
//!
//! Under loom the members exchange values behind the model's back, so that votes and broadcasts order
//! nothing there, as on a GPU: only `sync` makes what one member did visible to the others.

use nvme_core::group::{Act, Alone, Group, Here, Vote};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One member of a team; made for all members at once by [`Team::of`]. A clone is the same member.
#[derive(Clone)]
pub struct Team {
    all: Arc<Meeting>,
    rank: usize,
    /// Exchanges so far.
    turn: Arc<AtomicU64>,
}

struct Meeting {
    /// What each member brings to an exchange; the next exchange uses the other row.
    values: [Vec<AtomicU64>; 2],
    place: place::Place,
}

impl Team {
    /// The members of a team of `size`, in the order of their ranks.
    pub fn of(size: usize) -> Vec<Self> {
        let row = || (0..size).map(|_| AtomicU64::new(0)).collect();
        let all = Arc::new(Meeting {
            values: [row(), row()],
            place: place::Place::new(size),
        });
        let member = |rank| Self {
            all: all.clone(),
            rank,
            turn: Arc::default(),
        };
        (0..size).map(member).collect()
    }

    /// Runs `work` in one thread for each member; what each returned.
    ///
    /// # Panics
    /// When a member panics; the others do not wait for it.
    #[cfg(not(loom))]
    pub fn run<R: Send>(size: usize, work: impl Fn(&Self) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = Self::of(size)
                .into_iter()
                .map(|member| scope.spawn(|| work(&{ member })))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no member panics"))
                .collect()
        })
    }

    /// Everybody's value, once everybody has brought one.
    fn exchange(&self, value: u64) -> &[AtomicU64] {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let row = &self.all.values[turn as usize % 2];
        row[self.rank].store(value, Ordering::Relaxed);
        self.all.place.meet(self.rank, turn + 1);
        row
    }

    fn value_of(&self, value: u64, rank: usize) -> u64 {
        self.exchange(value)[rank].load(Ordering::Relaxed)
    }
}

impl Group for Team {
    fn size(&self) -> u32 {
        self.all.values[0].len() as u32
    }

    fn rank(&self) -> u32 {
        self.rank as u32
    }

    #[track_caller]
    fn sync(&self) {
        self.exchange(0);
        if place::orders() {
            self.all.place.share();
            self.exchange(0);
        }
    }

    fn vote(&self, mine: bool) -> Vote {
        let mut vote = Vote {
            total: 0,
            before: 0,
            leading: 0,
        };
        for (rank, value) in (0..).zip(self.exchange(u64::from(mine))) {
            let yes = value.load(Ordering::Relaxed) as u32;
            vote.leading += yes & u32::from(vote.leading == rank);
            vote.before += yes & u32::from(rank < self.rank());
            vote.total += yes;
        }
        vote
    }

    fn broadcast(&self, value: u32) -> u32 {
        self.value_of(u64::from(value), 0) as u32
    }

    fn octets(&self) -> bool {
        self.size().is_multiple_of(8)
    }

    fn of_octet(&self, value: u32, from: u32) -> u32 {
        self.value_of(u64::from(value), self.rank & !7 | from as usize) as u32
    }

    fn swap(&self, value: u64, mask: u32) -> u64 {
        self.value_of(value, self.rank ^ mask as usize)
    }
}

#[cfg(not(loom))]
mod place {
    use std::sync::{Condvar, Mutex};

    /// Meeting orders by itself.
    pub fn orders() -> bool {
        false
    }

    /// Where members wait for each other: how many have come so far, and whether one never will.
    pub struct Place {
        size: u64,
        come: Mutex<(u64, bool)>,
        changed: Condvar,
    }

    impl Place {
        pub fn new(size: usize) -> Self {
            Self {
                size: size as u64,
                come: Mutex::default(),
                changed: Condvar::new(),
            }
        }

        /// Comes for the `turn`-th time (from 1) and waits for the others.
        pub fn meet(&self, _rank: usize, turn: u64) {
            let mut come = self.come.lock().expect("no panic under this lock");
            come.0 += 1;
            if come.0 == self.size * turn {
                self.changed.notify_all();
            }
            while come.0 < self.size * turn && !come.1 {
                come = self.changed.wait(come).expect("no panic under this lock");
            }
            let broken = come.1;
            drop(come);
            assert!(!broken, "another member has panicked");
        }

        pub fn share(&self) {}

        pub fn leave(&self) {
            self.come.lock().expect("no panic under this lock").1 = true;
            self.changed.notify_all();
        }
    }
}

#[cfg(not(loom))]
impl Drop for Team {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.all.place.leave();
        }
    }
}

#[cfg(loom)]
mod place {
    use loom::thread::{Thread, current, yield_now};
    use nvme_core::sync::{Order, at_site};
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, MutexGuard};

    /// Whether `sync` orders at the caller's place: a mutation test takes that away.
    #[track_caller]
    pub fn orders() -> bool {
        at_site(Order::AcqRel) == Order::AcqRel
    }

    /// Where members wait for each other, unseen by the model but for the waiting.
    pub struct Place {
        size: u64,
        come: AtomicU64,
        threads: Mutex<BTreeMap<usize, Thread>>,
    }

    impl Place {
        pub fn new(size: usize) -> Self {
            Self {
                size: size as u64,
                come: AtomicU64::new(0),
                threads: Mutex::default(),
            }
        }

        /// Comes for the `turn`-th time (from 1) and waits for the others.
        pub fn meet(&self, rank: usize, turn: u64) {
            if turn == 1 {
                self.threads().insert(rank, current());
            }
            self.come.fetch_add(1, Ordering::Relaxed);
            while self.come.load(Ordering::Relaxed) < self.size * turn {
                yield_now();
            }
        }

        /// Lets what this member did happen before what the others do next: unparking does that, and is
        /// no operation that the model would have to reorder.
        pub fn share(&self) {
            self.threads().values().for_each(Thread::unpark);
        }

        fn threads(&self) -> MutexGuard<'_, BTreeMap<usize, Thread>> {
            self.threads.lock().expect("no panic under this lock")
        }
    }
}

/// A host thread by itself, on the machine's clock.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug)]
pub struct Clock(std::time::Instant);

#[cfg(not(loom))]
impl Default for Clock {
    /// A clock that starts now.
    fn default() -> Self {
        Self(std::time::Instant::now())
    }
}

#[cfg(not(loom))]
impl Here for Clock {
    fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    fn pause(&self, turn: u32) {
        if turn < 16 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    fn together<A: Act>(&self, _key: u64, act: A) -> A::Output {
        act.act(&Alone)
    }
}

/// One thread under loom, on a clock that moves with each look.
#[cfg(loom)]
#[derive(Default)]
pub struct Looks(Cell<u64>);

#[cfg(loom)]
impl Here for Looks {
    fn now_ns(&self) -> u64 {
        self.0.replace(self.0.get() + 1)
    }

    fn pause(&self, _turn: u32) {
        loom::thread::yield_now();
    }

    fn together<A: Act>(&self, _key: u64, act: A) -> A::Output {
        act.act(&Alone)
    }
}

/// One thread on virtual time: each pause is a nanosecond, in which `work` happens.
pub struct Paused<F> {
    now_ns: Cell<u64>,
    work: F,
}

impl<F: Fn()> Paused<F> {
    /// Starts at 0.
    pub fn new(work: F) -> Self {
        Self {
            now_ns: Cell::new(0),
            work,
        }
    }
}

impl<F: Fn()> Here for Paused<F> {
    /// Looking at the clock takes a nanosecond, too: loops without pauses end.
    fn now_ns(&self) -> u64 {
        self.now_ns.set(self.now_ns.get() + 1);
        self.now_ns.get()
    }

    fn pause(&self, _turn: u32) {
        self.now_ns.set(self.now_ns.get() + 1);
        (self.work)();
    }

    fn together<A: Act>(&self, _key: u64, act: A) -> A::Output {
        act.act(&Alone)
    }
}
