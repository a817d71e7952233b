//! Lines of a cache of rows: lookups that find a line, and the state that they leave.

use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::row_cache::{RowCache, WAYS, epoch};
use std::collections::HashMap;

struct Words(Vec<AtomicU32>, Vec<AtomicU64>, Vec<AtomicU64>);

impl Words {
    fn new() -> Self {
        Self(
            (0..WAYS).map(|_| AtomicU32::new(0)).collect(),
            (0..WAYS).map(|_| AtomicU64::new(0)).collect(),
            (0..WAYS).map(|_| AtomicU64::new(0)).collect(),
        )
    }

    fn cache(&self) -> RowCache<'_> {
        RowCache::new(&self.0, &self.1, &self.2).expect("a set")
    }

    fn put(&self, id: u64, epoch: u64) -> usize {
        let cache = self.cache();
        let line = cache.claim(id, epoch, 0).expect("a line is free");
        cache.publish(line, id, epoch);
        line.index() as usize
    }

    fn state(&self, line: usize) -> u32 {
        self.0[line].load(Order::Relaxed, Scope::Gpu)
    }

    /// Bits of lines that are filled or pinned.
    fn in_use(&self) -> u32 {
        let bits = self
            .0
            .iter()
            .map(|word| word.load(Order::Relaxed, Scope::Gpu));
        bits.fold(0, |all, word| all | word & 0x3FFD)
    }
}

/// Returns two ids whose lines have the same check bits, in the only set.
fn two_alike() -> (u64, u64) {
    let mut seen = HashMap::new();
    for id in 0.. {
        let words = Words::new();
        let line = words.put(id, 0);
        if let Some(other) = seen.insert(words.state(line) >> 14, id) {
            return (other, id);
        }
    }
    unreachable!("there are fewer check bits than ids")
}

#[test]
fn a_row_of_equal_set_and_check_bits_is_another_row() {
    let (one, two) = two_alike();
    let words = Words::new();
    let cache = words.cache();
    words.put(one, 3);
    assert_eq!(
        cache.find(two, 3),
        None,
        "{two} is found in the line of {one}"
    );
    assert_eq!(
        words.in_use(),
        0,
        "a line that was looked at is pinned no more"
    );
    let line = words.put(two, 3);
    let found = cache.find(two, 3).expect("it is there now");
    assert_eq!(found.index() as usize, line);
    cache.release(found);
    assert_eq!(words.in_use(), 0);
}

#[test]
fn a_row_of_another_epoch_leaves_no_pin() {
    let words = Words::new();
    words.put(7, 3);
    for _ in 0..3 {
        assert_eq!(words.cache().find(7, 4), None);
    }
    assert_eq!(words.in_use(), 0);
    assert!(
        words.cache().claim(7, 4, 0).is_some(),
        "a line that nothing pins"
    );
}

/// Reads that began before a write of either side, and after it, are of two epochs.
#[test]
fn a_write_of_the_host_and_one_of_the_gpu_begin_an_epoch() {
    for (host, gpu) in [
        (0, 0),
        (5, 9),
        (u32::MAX.into(), 0),
        (0, u32::MAX.into()),
        (u64::MAX, 0),
        (0, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        let before = epoch(host, gpu);
        assert_ne!(before, epoch(host.wrapping_add(1), gpu), "{host} {gpu}");
        assert_ne!(before, epoch(host, gpu.wrapping_add(1)), "{host} {gpu}");
    }
}
