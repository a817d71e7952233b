//! Groups of host threads, which replace the lanes of a warp: one thread for each lane.
//!
//! As on a GPU, votes and broadcasts order no memory where a test could observe it: loom's models do not see them, nor
//! does ThreadSanitizer. Only `sync` makes one member's actions visible to the others.

mod place;
#[cfg(loom)]
mod turns;

use nvme_core::group::{ExecContext, GroupOp, GroupVote, LoneThread, ThreadGroup};
use place::Place;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
pub use turns::in_turns;

/// Members that sleep while they wait.
#[cfg(not(loom))]
pub type Team = Member<place::Waits, 1>;
/// Members whose waiting is no part of the model.
#[cfg(loom)]
pub type Team = Member<place::Unseen, 1>;
/// Members that spin while they wait, for tests of memory order and speed.
#[cfg(not(loom))]
pub type Spin<const READS: u32> = Member<place::Spins, READS>;

/// One member of a team; [`Member::of`] makes all members at once. A clone is the same member. It takes `READS`
/// completions at once, as [`ThreadGroup::READS`] says.
pub struct Member<P: Place, const READS: u32> {
    all: Arc<Meeting<P>>,
    rank: usize,
    /// Exchanges so far.
    turn: Arc<AtomicU64>,
}

struct Meeting<P> {
    /// The values that members pass in an exchange; the next exchange uses the other row.
    values: [Vec<AtomicU64>; 2],
    place: P,
}

impl<P: Place, const READS: u32> Member<P, READS> {
    /// Returns the members of a team of `size`, in the order of their ranks.
    pub fn of(size: usize) -> Vec<Self> {
        assert!(READS == 1 || size == 1, "only a lone member reads several");
        let row = || (0..size).map(|_| AtomicU64::new(0)).collect();
        let all = Arc::new(Meeting {
            values: [row(), row()],
            place: P::new(size),
        });
        // The sanitizer does not see how the last of several owners is found, so the last owner does not free the
        // meeting.
        #[cfg(tsan)]
        std::mem::forget(all.clone());
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
    /// If a member panics; the others do not wait for it.
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

    /// Exchanges a value: returns the values of all members, once all have passed one.
    fn exchange(&self, value: u64, orders: bool) -> &[AtomicU64] {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn + 1, Ordering::Relaxed);
        let row = &self.all.values[turn as usize % 2];
        row[self.rank].store(value, Ordering::Relaxed);
        self.all.place.meet(self.rank, orders);
        row
    }

    fn value_of(&self, value: u64, rank: usize) -> u64 {
        self.exchange(value, false)[rank].load(Ordering::Relaxed)
    }
}

impl<P: Place, const READS: u32> Clone for Member<P, READS> {
    fn clone(&self) -> Self {
        Self {
            all: self.all.clone(),
            rank: self.rank,
            turn: self.turn.clone(),
        }
    }
}

impl<P: Place, const READS: u32> Drop for Member<P, READS> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.all.place.leave();
        }
    }
}

/// Returns whether `sync` orders memory at the caller's line: a mutation test turns that off.
#[track_caller]
fn orders() -> bool {
    #[cfg(any(loom, tsan))]
    {
        use nvme_core::sync::{Order, at_site};
        at_site(Order::Release) == Order::Release
    }
    #[cfg(not(any(loom, tsan)))]
    true
}

impl<P: Place, const READS: u32> ThreadGroup for Member<P, READS> {
    const MOST: u32 = if READS == 1 { u32::MAX } else { 1 };
    const READS: u32 = READS;

    fn size(&self) -> u32 {
        self.all.values[0].len() as u32
    }

    fn rank(&self) -> u32 {
        self.rank as u32
    }

    #[track_caller]
    fn sync(&self) {
        self.exchange(0, orders());
    }

    fn vote(&self, mine: bool) -> GroupVote {
        let mut vote = GroupVote {
            total: 0,
            before: 0,
            leading: 0,
        };
        for (rank, value) in (0..).zip(self.exchange(u64::from(mine), false)) {
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

    fn tiles(&self) -> bool {
        self.size().is_multiple_of(8)
    }

    fn of_tile(&self, value: u32, from: u32) -> u32 {
        self.value_of(u64::from(value), self.rank & !7 | from as usize) as u32
    }

    fn swap(&self, value: u64, mask: u32) -> u64 {
        self.value_of(value, self.rank ^ mask as usize)
    }
}

/// A host thread by itself, on the machine's clock.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug)]
pub struct Clock(std::time::Instant);

#[cfg(not(loom))]
impl Default for Clock {
    /// Returns a clock that starts now.
    fn default() -> Self {
        Self(std::time::Instant::now())
    }
}

#[cfg(not(loom))]
impl ExecContext for Clock {
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

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

/// The context of one thread under loom, with a clock that advances with each look.
#[cfg(loom)]
#[derive(Default)]
pub struct Looks(Cell<u64>);

#[cfg(loom)]
impl ExecContext for Looks {
    fn now_ns(&self) -> u64 {
        self.0.replace(self.0.get() + 1)
    }

    fn pause(&self, _turn: u32) {
        nvme_core::sync::spin();
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

/// The context of one thread in virtual time: each pause is a nanosecond, in which `work` happens.
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

impl<F: Fn()> ExecContext for Paused<F> {
    /// A look at the clock takes a nanosecond, too, so that loops without pauses end.
    fn now_ns(&self) -> u64 {
        self.now_ns.set(self.now_ns.get() + 1);
        self.now_ns.get()
    }

    fn pause(&self, _turn: u32) {
        self.now_ns.set(self.now_ns.get() + 1);
        (self.work)();
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

/// The members of a team in step, each with its own clock.
pub struct InStep<'t, G, C>(pub &'t G, pub C);

impl<G: ThreadGroup, C: ExecContext> ExecContext for InStep<'_, G, C> {
    fn now_ns(&self) -> u64 {
        self.1.now_ns()
    }

    fn pause(&self, turn: u32) {
        self.1.pause(turn);
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(self.0)
    }
}
