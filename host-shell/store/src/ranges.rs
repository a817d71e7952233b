//! Locks on ranges of bytes: writers of overlapping blocks wait for each other.
//!
//! Invariant: the ranges that are held never overlap. All ranges of one call are taken together or not at all,
//! so calls cannot wait for each other in a circle.

use nvme_driver::lock::lock;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

/// The ranges that are being written.
#[derive(Default)]
pub(crate) struct RangeLocks {
    /// Start and end of each.
    held: Mutex<BTreeMap<u64, u64>>,
    released: Condvar,
}

/// Ranges that are held until this is dropped.
pub(crate) struct LockedRanges<'a> {
    locks: &'a RangeLocks,
    ranges: Vec<Range<u64>>,
}

impl RangeLocks {
    /// Waits until none of `ranges` overlaps one that is held, then holds them. `ranges` do not overlap each other.
    pub fn hold(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> LockedRanges<'_> {
        let ranges: Vec<Range<u64>> = ranges.into_iter().collect();
        let mut held = lock(&self.held);
        while ranges.iter().any(|range| overlaps(&held, range)) {
            held = self
                .released
                .wait(held)
                .unwrap_or_else(PoisonError::into_inner);
        }
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            held.insert(range.start, range.end);
        }
        drop(held);
        LockedRanges {
            locks: self,
            ranges,
        }
    }
}

fn overlaps(held: &BTreeMap<u64, u64>, range: &Range<u64>) -> bool {
    let before = held.range(..range.end).next_back();
    !range.is_empty() && before.is_some_and(|(_, end)| *end > range.start)
}

impl Drop for LockedRanges<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.locks.held);
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            held.remove(&range.start);
        }
        drop(held);
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::iter::once;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    #[test]
    fn ranges_overlap_where_they_share_a_byte() {
        let held = BTreeMap::from([(10, 20), (30, 40)]);
        for (range, expected) in [
            (0..10, false),
            (0..11, true),
            (19..20, true),
            (20..30, false),
            (20..31, true),
            (15..15, false),
            (40..50, false),
            (0..100, true),
        ] {
            assert_eq!(overlaps(&held, &range), expected, "{range:?}");
        }
    }

    #[test]
    fn an_overlapping_range_waits_for_the_one_that_is_held() {
        let locks = RangeLocks::default();
        let step = AtomicU32::new(0);
        let first = locks.hold([0..8, 16..24]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _second = locks.hold([8..16, 20..21]);
                assert_eq!(step.load(Ordering::SeqCst), 1);
            });
            // One that does not overlap does not wait.
            drop(locks.hold(once(24..30)));
            std::thread::sleep(Duration::from_millis(20));
            step.store(1, Ordering::SeqCst);
            drop(first);
        });
        assert!(lock(&locks.held).is_empty());
    }
}
