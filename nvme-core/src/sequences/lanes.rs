//! Host threads as the members of a group; a meeting is recorded as `sync`.

use crate::group::{GroupVote, ThreadGroup};
use crate::sync::{Order, Scope, record};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::vec::Vec;

/// The shared state of a group's members.
struct GroupMeeting {
    values: Vec<AtomicU64>,
    /// Arrivals so far, and a mark that a member has panicked.
    arrived: Mutex<(u64, bool)>,
    changed: Condvar,
}

/// One member.
#[derive(Clone, Copy)]
pub(super) struct GroupLane<'m> {
    all: &'m GroupMeeting,
    rank: usize,
}

impl<'m> GroupLane<'m> {
    /// Runs `work` in a thread for each of `size` members and returns their results.
    pub fn run<R: Send>(size: usize, work: impl Fn(GroupLane<'_>) -> R + Sync) -> Vec<R> {
        let all = GroupMeeting {
            values: (0..size).map(|_| AtomicU64::new(0)).collect(),
            arrived: Mutex::default(),
            changed: Condvar::new(),
        };
        let (all, work) = (&all, &work);
        std::thread::scope(|scope| {
            let lane = |rank| {
                scope.spawn(move || {
                    let _leaving = LeavingLane(all);
                    work(GroupLane { all, rank })
                })
            };
            let lanes: Vec<_> = (0..size).map(lane).collect();
            let ended = lanes.into_iter().map(|lane| lane.join());
            ended.map(|end| end.expect("no lane panics")).collect()
        })
    }

    /// Waits for every member, unrecorded.
    pub fn meet(&self) {
        let all = self.all;
        let size = all.values.len() as u64;
        let mut arrived = all.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let full = (arrived.0 / size + 1) * size;
        arrived.0 += 1;
        all.changed.notify_all();
        while arrived.0 < full && !arrived.1 {
            arrived = all
                .changed
                .wait(arrived)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let broken = arrived.1;
        drop(arrived);
        assert!(!broken, "another lane has panicked");
    }

    /// Exchanges every member's value.
    fn exchange(&self, value: u64) -> Vec<u64> {
        self.all.values[self.rank].store(value, Ordering::Relaxed);
        self.meet();
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let values = self.all.values.iter().map(load).collect();
        self.meet();
        values
    }
}

/// Records that a lane has panicked, so that the others do not wait for it.
struct LeavingLane<'m>(&'m GroupMeeting);

impl Drop for LeavingLane<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let arrived = self.0.arrived.lock();
            arrived.unwrap_or_else(PoisonError::into_inner).1 = true;
            self.0.changed.notify_all();
        }
    }
}

impl ThreadGroup for GroupLane<'_> {
    fn size(&self) -> u32 {
        self.all.values.len() as u32
    }

    fn rank(&self) -> u32 {
        self.rank as u32
    }

    fn sync(&self) {
        record::note("sync", Order::AcqRel, Scope::Cta, self.all);
        self.meet();
    }

    fn vote(&self, mine: bool) -> GroupVote {
        let votes = self.exchange(u64::from(mine));
        let yes = |votes: &[u64]| votes.iter().sum::<u64>() as u32;
        GroupVote {
            total: yes(&votes),
            before: yes(&votes[..self.rank]),
            leading: votes.iter().take_while(|vote| **vote == 1).count() as u32,
        }
    }

    fn broadcast(&self, value: u32) -> u32 {
        self.exchange(u64::from(value))[0] as u32
    }

    fn tiles(&self) -> bool {
        self.size().is_multiple_of(8)
    }

    fn of_tile(&self, value: u32, from: u32) -> u32 {
        self.exchange(u64::from(value))[self.rank & !7 | from as usize] as u32
    }

    fn swap(&self, value: u64, mask: u32) -> u64 {
        self.exchange(value)[self.rank ^ mask as usize]
    }
}
