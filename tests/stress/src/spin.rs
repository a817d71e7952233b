//! A team of threads that spin for each other, as the lanes of a block do.
//!
//! Votes and broadcasts are relaxed and order nothing; only `sync` does.

use nvme_core::group::{Group, Vote};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Looks before a thread lets others run.
const SPINS: u32 = if cfg!(tsan) { 8 } else { 200 };

/// One member. `READS` completions at once, as [`Group::READS`] says.
pub struct Spin<const READS: u32> {
    all: Arc<Meeting>,
    rank: usize,
    turn: Cell<u64>,
}

struct Meeting {
    /// What each member brings to an exchange; the next exchange uses the other row.
    values: [Vec<AtomicU64>; 2],
    come: AtomicU64,
    broken: AtomicBool,
}

impl<const READS: u32> Spin<READS> {
    /// The members of a team of `size`, in the order of their ranks.
    pub fn of(size: usize) -> Vec<Self> {
        let row = || (0..size).map(|_| AtomicU64::new(0)).collect();
        let all = Arc::new(Meeting {
            values: [row(), row()],
            come: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        });
        // The sanitizer does not see how the last of several owners is found: nobody ends it there.
        #[cfg(tsan)]
        std::mem::forget(all.clone());
        let member = |rank| Self {
            all: all.clone(),
            rank,
            turn: Cell::new(0),
        };
        (0..size).map(member).collect()
    }

    fn exchange(&self, value: u64, orders: bool) -> &[AtomicU64] {
        let turn = self.turn.get();
        self.turn.set(turn + 1);
        let (release, acquire) = match orders {
            true => (Ordering::Release, Ordering::Acquire),
            false => (Ordering::Relaxed, Ordering::Relaxed),
        };
        let all = &self.all;
        let row = &all.values[turn as usize % 2];
        row[self.rank].store(value, Ordering::Relaxed);
        // Release: pairs with the load below by every other member.
        all.come.fetch_add(1, release);
        let everybody = row.len() as u64 * (turn + 1);
        let mut looks = 0;
        // Acquire: what the others did before they came.
        while all.come.load(acquire) < everybody {
            looks += 1;
            match looks % SPINS {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
            assert!(
                !all.broken.load(Ordering::Relaxed),
                "another member has panicked"
            );
        }
        row
    }

    fn value_of(&self, value: u64, rank: usize) -> u64 {
        self.exchange(value, false)[rank].load(Ordering::Relaxed)
    }
}

impl<const READS: u32> Drop for Spin<READS> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.all.broken.store(true, Ordering::Relaxed);
        }
    }
}

impl<const READS: u32> Group for &Spin<READS> {
    const READS: u32 = READS;

    fn size(&self) -> u32 {
        self.all.values[0].len() as u32
    }

    fn rank(&self) -> u32 {
        self.rank as u32
    }

    #[track_caller]
    fn sync(&self) {
        #[cfg(tsan)]
        let orders = {
            use nvme_core::sync::{Order, at_site};
            // A mutation test takes that away.
            at_site(Order::AcqRel) == Order::AcqRel
        };
        #[cfg(not(tsan))]
        let orders = true;
        self.exchange(0, orders);
    }

    fn vote(&self, mine: bool) -> Vote {
        let mut vote = Vote {
            total: 0,
            before: 0,
            leading: 0,
        };
        for (rank, value) in (0..).zip(self.exchange(u64::from(mine), false)) {
            let yes = value.load(Ordering::Relaxed) as u32;
            vote.leading += yes & u32::from(vote.leading == rank);
            vote.before += yes & u32::from(rank < self.rank as u32);
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
