//! Lines of a row cache under loom: readers copy out of a line, fillers copy into it, and writes make it stale.

use loom::cell::UnsafeCell;
use loom::thread;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::row_cache::{RowCache, WAYS, WRITE_WORDS, WriteCounts, epoch, write_copy};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

/// One set in which a single line is free: the other lines are pinned for good.
struct Set {
    states: Vec<AtomicU32>,
    ids: Vec<AtomicU64>,
    epochs: Vec<AtomicU64>,
    /// The bytes of the line: two halves, which a filler stores one after the other.
    halves: [AtomicU64; 2],
    /// Read beside each load of the halves, written beside each store: the model fails when the two race.
    bytes: UnsafeCell<()>,
    /// The drive's row: a bit for each write.
    drive: AtomicU32,
    /// Number of ended writes, of the host and of the GPU.
    by_host: Vec<AtomicU64>,
    by_gpu: AtomicU32,
}

impl Set {
    fn new() -> Self {
        // Such a reader never unpins, so these lines are never claimed.
        let pinned = 4;
        Self {
            states: (0..WAYS as u32)
                .map(|way| AtomicU32::new(if way == 0 { 0 } else { pinned }))
                .collect(),
            ids: (0..WAYS).map(|_| AtomicU64::new(0)).collect(),
            epochs: (0..WAYS).map(|_| AtomicU64::new(0)).collect(),
            halves: [AtomicU64::new(0), AtomicU64::new(0)],
            bytes: UnsafeCell::new(()),
            drive: AtomicU32::new(0),
            by_host: (0..WRITE_WORDS).map(|_| AtomicU64::new(0)).collect(),
            by_gpu: AtomicU32::new(0),
        }
    }

    fn cache(&self) -> RowCache<'_> {
        RowCache::new(&self.states, &self.ids, &self.epochs).unwrap()
    }

    /// Counts a write of the host that has ended.
    fn wrote(&self) {
        WriteCounts::new(&self.by_host).unwrap().ended();
    }

    /// Returns the epoch of a gather of group `group`.
    fn epoch(&self, group: u32) -> u64 {
        epoch(
            self.by_host[write_copy(group)].load(Order::Acquire, Scope::Sys),
            self.by_gpu.load(Order::Acquire, Scope::Gpu).into(),
        )
    }

    /// Gathers row `id`, whose bytes on the drive are `row`: from the line, or from the drive and then into the line.
    fn gather(&self, id: u64, row: impl Fn() -> u64) -> u64 {
        self.gather_as(0, id, row)
    }

    /// Does the same as group `group`.
    fn gather_as(&self, group: u32, id: u64, row: impl Fn() -> u64) -> u64 {
        let epoch = self.epoch(group);
        let cache = self.cache();
        if let Some(line) = cache.find(id, epoch) {
            self.bytes.with(|_| ());
            let halves = [0, 1].map(|half| self.halves[half].load(Order::Relaxed, Scope::Gpu));
            cache.release(line);
            assert_eq!(halves[0], halves[1], "half of a row");
            return halves[0];
        }
        let row = row();
        if let Some(line) = cache.claim(id, epoch, 0) {
            self.fill(row);
            cache.publish(line, id, epoch);
        }
        row
    }

    /// Does the same with a line that is claimed before the row is read; `None` if the read fails.
    fn gather_early(&self, id: u64, row: impl Fn() -> Option<u64>) -> Option<u64> {
        let epoch = self.epoch(0);
        let claimed = self.cache().claim(id, epoch, 0);
        let row = row();
        match (claimed, row) {
            (Some(line), Some(row)) => {
                self.fill(row);
                self.cache().publish(line, id, epoch);
            }
            (Some(line), None) => self.cache().abandon(line),
            (None, _) => {}
        }
        row
    }

    fn fill(&self, row: u64) {
        self.bytes.with_mut(|_| ());
        for half in &self.halves {
            half.store(row, Order::Relaxed, Scope::Gpu);
        }
    }
}

#[test]
fn gathers_of_two_rows_share_a_line() {
    check(
        "a row out of the cache is the row that was asked for, whole",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            let other = set.clone();
            let group = thread::spawn(move || {
                for id in [22, 11] {
                    assert_eq!(other.gather(id, || id * 100), id * 100);
                }
            });
            for _ in 0..2 {
                assert_eq!(set.gather(11, || 1100), 1100);
            }
            group.join().unwrap();
        },
    );
}

#[test]
fn a_line_that_is_claimed_before_the_read_holds_the_row_or_nothing() {
    check(
        "a row out of a line that others claim early, and give back, is the row that was asked for",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            let other = set.clone();
            let group = thread::spawn(move || {
                assert_eq!(other.gather_early(22, || None), None);
                assert_eq!(other.gather_early(11, || Some(1100)), Some(1100));
            });
            for id in [11, 22] {
                assert_eq!(set.gather(id, || id * 100), id * 100);
            }
            group.join().unwrap();
        },
    );
}

#[test]
fn a_gather_after_a_write_sees_it() {
    check(
        "a gather that begins after a write has returned gives what was written",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            let of_drive = |set: &Set| u64::from(set.drive.load(Order::Acquire, Scope::Sys));
            let other = set.clone();
            let group = thread::spawn(move || {
                let row = other.gather(5, || of_drive(&other));
                assert!(row == 0 || row == 1);
            });
            set.drive.store(1, Order::Release, Scope::Sys);
            set.wrote();
            for _ in 0..2 {
                assert_eq!(set.gather(5, || of_drive(&set)), 1);
            }
            group.join().unwrap();
        },
    );
}

#[test]
fn an_early_claim_beside_a_write_leaves_no_old_row() {
    check(
        "a row that was claimed before a write, and read before it, is stale after it",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            let of_drive = |set: &Set| u64::from(set.drive.load(Order::Acquire, Scope::Sys));
            let other = set.clone();
            let group = thread::spawn(move || {
                let row = other.gather_early(5, || Some(of_drive(&other)));
                assert!(matches!(row, Some(0 | 1)));
            });
            set.drive.store(1, Order::Release, Scope::Sys);
            set.wrote();
            for _ in 0..2 {
                assert_eq!(set.gather(5, || of_drive(&set)), 1);
            }
            group.join().unwrap();
        },
    );
}

/// A write of the host and one of the GPU have no order but the one in which the drive carries them out.
#[test]
fn a_gather_sees_the_write_before_it_whichever_side_wrote() {
    check(
        "a gather that begins after a write has ended gives what was written, beside a write of the other side",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            // A drive carries out commands one after the other. A read, modelled as an atomic operation that changes
            // nothing, sees the newest write; a thread that waits for a command is ordered after everything before it.
            let of_drive = |set: &Set| u64::from(set.drive.fetch_or(0, Order::AcqRel, Scope::Sys));
            let (host, gpu) = (set.clone(), set.clone());
            let by_host = thread::spawn(move || {
                host.drive.fetch_or(1, Order::AcqRel, Scope::Sys);
                host.wrote();
                assert_eq!(host.gather(5, || of_drive(&host)) & 1, 1);
            });
            let by_gpu = thread::spawn(move || {
                gpu.drive.fetch_or(2, Order::AcqRel, Scope::Sys);
                gpu.by_gpu.fetch_add(1, Order::Release, Scope::Gpu);
                assert_eq!(gpu.gather(5, || of_drive(&gpu)) & 2, 2);
            });
            by_host.join().unwrap();
            by_gpu.join().unwrap();
        },
    );
}

/// The counts of two writers come to the copies in any order.
#[test]
fn groups_that_look_at_different_copies_see_each_write_that_has_ended() {
    check(
        "a gather that begins after a write of the host gives what was written, whichever copy of the count it loads",
        Bound::Preemptions(2),
        || {
            let set = Arc::new(Set::new());
            let of_drive = |set: &Set| u64::from(set.drive.fetch_or(0, Order::AcqRel, Scope::Sys));
            let writers = [0, 1].map(|group: u32| {
                let set = set.clone();
                thread::spawn(move || {
                    set.drive.fetch_or(1 << group, Order::AcqRel, Scope::Sys);
                    set.wrote();
                    let row = set.gather_as(group, 5, || of_drive(&set));
                    assert_ne!(row & 1 << group, 0);
                })
            });
            for writer in writers {
                writer.join().unwrap();
            }
            assert_eq!(set.gather_as(0, 5, || of_drive(&set)), 3);
        },
    );
}
