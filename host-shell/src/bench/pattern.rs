//! Which block comes next, read or write, and what a written block holds.

pub use nvme_units::SplitMix;
use nvme_units::mix;
use std::sync::atomic::{AtomicU64, Ordering};

/// Order of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Ascending over all queues together, from the start again at the end.
    Sequential,
    /// Uniform over the span.
    Random,
}

/// One command to issue: which unit of the span, and whether it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Index of the command-sized unit.
    pub unit: u64,
    /// Read, or write.
    pub read: bool,
}

/// The stream of one queue.
pub(crate) struct Stream {
    rng: SplitMix,
    pattern: Pattern,
    read_percent: u8,
    units: u64,
}

impl Stream {
    pub fn new(pattern: Pattern, read_percent: u8, units: u64, seed: u64) -> Self {
        Self {
            rng: SplitMix::new(mix(seed)),
            pattern,
            read_percent,
            units,
        }
    }

    /// The access with number `sequence` over all queues.
    #[inline]
    pub fn next(&mut self, sequence: u64) -> Access {
        let unit = match self.pattern {
            Pattern::Sequential => sequence % self.units,
            Pattern::Random => self.rng.below(self.units),
        };
        let read = match self.read_percent {
            100 => true,
            0 => false,
            percent => self.rng.below(100) < u64::from(percent),
        };
        Access { unit, read }
    }
}

/// Fills a unit with data that only this unit and seed give.
pub(crate) fn stamp(seed: u64, unit: u64, bytes: &mut [u8]) {
    SplitMix::new(mix(seed ^ mix(unit))).fill(bytes);
}

/// The first byte at which `bytes` is not what [`stamp`] writes.
pub(crate) fn first_difference(seed: u64, unit: u64, bytes: &[u8]) -> Option<usize> {
    let mut rng = SplitMix::new(mix(seed ^ mix(unit)));
    let mut at = 0;
    for chunk in bytes.chunks(8) {
        let word = rng.next_word().to_le_bytes();
        if let Some(wrong) = chunk
            .iter()
            .zip(word)
            .position(|(have, want)| *have != want)
        {
            return Some(at + wrong);
        }
        at += chunk.len();
    }
    None
}

/// Which units hold stamped data: one bit each.
pub(crate) struct Written {
    words: Vec<AtomicU64>,
    units: u64,
}

impl Written {
    pub fn new(units: u64) -> Self {
        Self {
            words: (0..units.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            units,
        }
    }

    /// Set once the write has completed. Release: pairs with `contains`, on another queue's thread.
    pub fn insert(&self, unit: u64) {
        if let Some(word) = self.words.get((unit / 64) as usize) {
            word.fetch_or(1 << (unit % 64), Ordering::Release);
        }
    }

    /// Acquire: pairs with `insert`.
    pub fn contains(&self, unit: u64) -> bool {
        self.words
            .get((unit / 64) as usize)
            .is_some_and(|word| word.load(Ordering::Acquire) >> (unit % 64) & 1 == 1)
    }

    /// Cleared once the unit was read back.
    pub fn remove(&self, unit: u64) {
        if let Some(word) = self.words.get((unit / 64) as usize) {
            word.fetch_and(!(1 << (unit % 64)), Ordering::Relaxed);
        }
    }

    /// Every unit in it, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        (0..self.units).filter(|unit| self.contains(*unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_wraps_at_the_end_of_the_span() {
        let mut stream = Stream::new(Pattern::Sequential, 100, 3, 1);
        let units: Vec<u64> = (0..7).map(|n| stream.next(n).unit).collect();
        assert_eq!(units, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn random_stays_inside_and_reaches_everything() {
        let mut stream = Stream::new(Pattern::Random, 100, 10, 1);
        let mut seen = [false; 10];
        for n in 0..1000 {
            seen[stream.next(n).unit as usize] = true;
        }
        assert_eq!(seen, [true; 10]);
    }

    #[test]
    fn the_mix_is_close_to_what_was_asked() {
        let mut stream = Stream::new(Pattern::Random, 70, 100, 5);
        let reads = (0..10_000).filter(|n| stream.next(*n).read).count();
        assert!((6_700..7_300).contains(&reads), "{reads}");
    }

    #[test]
    fn a_stamp_is_recognised_and_a_flipped_bit_found() {
        for len in [1, 8, 512, 515] {
            let mut bytes = vec![0; len];
            stamp(7, 42, &mut bytes);
            assert_eq!(first_difference(7, 42, &bytes), None);
            assert!(first_difference(7, 43, &bytes).is_some());
            bytes[len - 1] ^= 0x10;
            assert_eq!(first_difference(7, 42, &bytes), Some(len - 1));
        }
    }

    #[test]
    fn written_units_are_listed_once() {
        let written = Written::new(130);
        for unit in [129, 0, 64, 64] {
            written.insert(unit);
        }
        assert_eq!(written.iter().collect::<Vec<_>>(), [0, 64, 129]);
        assert!(!written.contains(1) && !written.contains(1000));
        written.remove(64);
        written.remove(1000);
        assert_eq!(written.iter().collect::<Vec<_>>(), [0, 129]);
    }
}
