//! Order of blocks, choice of reads and writes, and the content of written blocks.

pub use nvme_units::SplitMix;
use nvme_units::mix;

/// Order of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessPattern {
    /// Ascending over all queues together, from the start again at the end.
    Sequential,
    /// Uniform over the span.
    Random,
}

/// One command to issue: its unit of the span, and whether it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedAccess {
    /// Index of the command-sized unit.
    pub unit: u64,
    /// Read, or write.
    pub read: bool,
}

/// The stream of one queue.
pub(crate) struct AccessStream {
    rng: SplitMix,
    pattern: AccessPattern,
    read_percent: u8,
    units: u64,
}

impl AccessStream {
    pub fn new(pattern: AccessPattern, read_percent: u8, units: u64, seed: u64) -> Self {
        Self {
            rng: SplitMix::new(mix(seed)),
            pattern,
            read_percent,
            units,
        }
    }

    /// Returns the access with number `sequence` over all queues.
    #[inline]
    pub fn next(&mut self, sequence: u64) -> PlannedAccess {
        let unit = match self.pattern {
            AccessPattern::Sequential => sequence % self.units,
            AccessPattern::Random => self.rng.below(self.units),
        };
        let read = match self.read_percent {
            100 => true,
            0 => false,
            percent => self.rng.below(100) < u64::from(percent),
        };
        PlannedAccess { unit, read }
    }
}

/// Seed of the data of a unit: no other run, no other unit and no earlier write of the unit has the same data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitStamp {
    /// A number of the run.
    pub run: u64,
    pub unit: u64,
    pub generation: u8,
}

impl UnitStamp {
    fn words(self) -> SplitMix {
        let unit = mix(self.run ^ mix(self.unit));
        SplitMix::new(mix(unit.wrapping_add(self.generation.into())))
    }

    /// Fills a unit with its data.
    pub fn fill(self, bytes: &mut [u8]) {
        self.words().fill(bytes);
    }

    /// Returns the first byte at which `bytes` differs from the content that [`Self::fill`] writes.
    pub fn first_difference(self, bytes: &[u8]) -> Option<usize> {
        let mut words = self.words();
        let mut at = 0;
        for chunk in bytes.chunks(8) {
            let word = words.next_word().to_le_bytes();
            let mut pairs = chunk.iter().zip(word);
            if let Some(wrong) = pairs.position(|(have, want)| *have != want) {
                return Some(at + wrong);
            }
            at += chunk.len();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_wraps_at_the_end_of_the_span() {
        let mut stream = AccessStream::new(AccessPattern::Sequential, 100, 3, 1);
        let units: Vec<u64> = (0..7).map(|n| stream.next(n).unit).collect();
        assert_eq!(units, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn random_stays_inside_and_reaches_everything() {
        let mut stream = AccessStream::new(AccessPattern::Random, 100, 10, 1);
        let mut seen = [false; 10];
        for n in 0..1000 {
            seen[stream.next(n).unit as usize] = true;
        }
        assert_eq!(seen, [true; 10]);
    }

    #[test]
    fn the_mix_is_close_to_what_was_asked() {
        let mut stream = AccessStream::new(AccessPattern::Random, 70, 100, 5);
        let reads = (0..10_000).filter(|n| stream.next(*n).read).count();
        assert!((6_700..7_300).contains(&reads), "{reads}");
    }

    #[test]
    fn a_stamp_is_recognised_and_a_flipped_bit_found() {
        let stamp = UnitStamp {
            run: 7,
            unit: 42,
            generation: 1,
        };
        for len in [1, 8, 512, 515] {
            let mut bytes = vec![0; len];
            stamp.fill(&mut bytes);
            assert_eq!(stamp.first_difference(&bytes), None);
            for other in [
                UnitStamp { run: 8, ..stamp },
                UnitStamp { unit: 43, ..stamp },
                UnitStamp {
                    generation: 2,
                    ..stamp
                },
            ] {
                assert!(other.first_difference(&bytes).is_some(), "{other:?}");
            }
            bytes[len - 1] ^= 0x10;
            assert_eq!(stamp.first_difference(&bytes), Some(len - 1));
        }
    }
}
