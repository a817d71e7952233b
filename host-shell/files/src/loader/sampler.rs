//! Batches of rows: shuffled by a seeded permutation that is computed and not stored, and divided among the
//! processes of a distributed training, so that all of them agree without communication.

use nvme_driver::error::{Error, Result};
use nvme_units::SplitMix;
use std::ops::Range;

/// Rounds of the permutation.
const ROUNDS: u64 = 8;

/// The rows of each batch of each epoch, worked out from their numbers alone: any epoch, any batch, on any machine.
///
/// Position `p` of an epoch has row `permutation(p mod rows)`. Of `world` processes, process `rank` has the positions
/// `rank`, `rank + world`, and so on, as in `torch.utils.data.DistributedSampler`. Each process has the same number of
/// positions: the first positions are repeated at the end, or the last ones are dropped.
///
/// The permutation is a Feistel network of 8 rounds over the smallest even number of bits that holds the rows; a number
/// that is no row is permuted again. Its round function is the finalizer of SplitMix64 over the half, keyed by seed,
/// epoch and round.
///
/// ```
/// use nvme_files::loader::{BatchSampler, ShuffleOrder};
///
/// # fn main() -> nvme_driver::Result<()> {
/// let sampler = BatchSampler::new(10, 4, ShuffleOrder::Seed(7))?;
/// let mut rows: Vec<u64> = (0..sampler.batches()).flat_map(|batch| sampler.batch(0, batch)).collect();
/// assert_ne!(rows, (0..10).collect::<Vec<_>>());
/// rows.sort_unstable();
/// assert_eq!(rows, (0..10).collect::<Vec<_>>());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSampler {
    rows: u64,
    batch: u64,
    shuffle: ShuffleOrder,
    rank: u64,
    world: u64,
    drops_uneven: bool,
    drops_last: bool,
}

/// Order of the rows of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShuffleOrder {
    /// Rows keep their order.
    Off,
    /// A different order in each epoch, derived from this seed.
    Seed(u64),
}

impl BatchSampler {
    /// Batches of `batch` of `rows` rows, for one process.
    ///
    /// # Errors
    /// [`Error::Usage`] for batches without rows.
    pub fn new(rows: u64, batch: u64, shuffle: ShuffleOrder) -> Result<Self> {
        if batch == 0 {
            return Err(Error::usage("a batch has 0 rows", "use 1 or more"));
        }
        Ok(Self {
            rows,
            batch,
            shuffle,
            rank: 0,
            world: 1,
            drops_uneven: false,
            drops_last: false,
        })
    }

    /// Returns the part of process `rank` of `world`. Rows that cannot be divided evenly are dropped with
    /// `drops_uneven`; without it the first rows are repeated.
    ///
    /// # Errors
    /// [`Error::Usage`] for a rank that is not below `world`.
    pub fn shard(self, rank: u64, world: u64, drops_uneven: bool) -> Result<Self> {
        if rank >= world {
            return Err(Error::usage(
                format!("rank {rank} does not exist among {world} processes"),
                "use ranks from 0 to the number of processes - 1",
            ));
        }
        Ok(Self {
            rank,
            world,
            drops_uneven,
            ..self
        })
    }

    /// Leaves out the last batch of an epoch if it is shorter than the others.
    pub fn without_short_batch(self) -> Self {
        Self {
            drops_last: true,
            ..self
        }
    }

    /// Returns the number of rows of this process in an epoch.
    pub fn samples(&self) -> u64 {
        match self.drops_uneven {
            true => self.rows / self.world,
            false => self.rows.div_ceil(self.world),
        }
    }

    /// Returns the number of batches of this process in an epoch.
    pub fn batches(&self) -> u64 {
        match self.drops_last {
            true => self.samples() / self.batch,
            false => self.samples().div_ceil(self.batch),
        }
    }

    /// Returns the rows of batch `batch` of epoch `epoch`; none past the end.
    pub fn batch(&self, epoch: u64, batch: u64) -> Vec<u64> {
        self.batch_rows(epoch, batch).collect()
    }

    /// Returns the number of rows of batch `batch`; 0 past the end.
    pub fn batch_len(&self, batch: u64) -> u64 {
        let samples = self.samples_of(batch);
        samples.end - samples.start
    }

    /// Returns the rows of [`batch`](Self::batch) one by one, for batches that may be larger than memory.
    pub fn batch_rows(&self, epoch: u64, batch: u64) -> impl Iterator<Item = u64> {
        let positions = self
            .samples_of(batch)
            .map(|sample| sample * self.world + self.rank);
        positions.map(move |position| self.row(epoch, position))
    }

    fn samples_of(&self, batch: u64) -> Range<u64> {
        if batch >= self.batches() {
            return 0..0;
        }
        let first = batch * self.batch;
        first..first.saturating_add(self.batch).min(self.samples())
    }

    fn row(&self, epoch: u64, position: u64) -> u64 {
        let position = position % self.rows;
        match self.shuffle {
            ShuffleOrder::Off => position,
            ShuffleOrder::Seed(seed) => permuted(position, self.rows, mixed(mixed(seed) ^ epoch)),
        }
    }
}

fn mixed(value: u64) -> u64 {
    SplitMix::new(value).next_word()
}

/// Returns the image of `value`, which is below `rows`, under the permutation of `0..rows` with this key.
fn permuted(value: u64, rows: u64, key: u64) -> u64 {
    let bits = u64::BITS - (rows - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut value = value;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            let keyed = mixed(right ^ mixed(key.wrapping_add(round)));
            (left, right) = (right, (left ^ keyed) & mask);
        }
        value = left << half | right;
        if value < rows {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(sampler: &BatchSampler, epoch: u64) -> Vec<u64> {
        let batches = 0..sampler.batches();
        batches
            .flat_map(|batch| sampler.batch(epoch, batch))
            .collect()
    }

    #[test]
    fn each_epoch_has_each_row_once_in_another_order() {
        for rows in [1, 2, 3, 5, 16, 17, 1000, 4097] {
            let sampler = BatchSampler::new(rows, 7, ShuffleOrder::Seed(42)).unwrap();
            let (first, second) = (epoch(&sampler, 0), epoch(&sampler, 1));
            for one in [&first, &second] {
                let mut sorted = one.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..rows).collect::<Vec<_>>());
            }
            assert!(rows < 16 || first != second);
        }
    }

    /// The same numbers on every platform and in every version: they are in the states that users have stored.
    #[test]
    fn the_permutation_stays_as_it_is() {
        let sampler = BatchSampler::new(10, 10, ShuffleOrder::Seed(7)).unwrap();
        assert_eq!(sampler.batch(0, 0), KNOWN[0]);
        assert_eq!(sampler.batch(1, 0), KNOWN[1]);
        let large = BatchSampler::new(u64::MAX / 3, 2, ShuffleOrder::Seed(7)).unwrap();
        assert_eq!(large.batch(5, 1_000_000), KNOWN_LARGE);
    }

    const KNOWN: [[u64; 10]; 2] = [
        [2, 7, 1, 3, 4, 0, 8, 5, 6, 9],
        [7, 2, 1, 9, 4, 0, 3, 5, 6, 8],
    ];
    const KNOWN_LARGE: [u64; 2] = [4647563527650625551, 6006188420853784004];

    #[test]
    fn a_shuffle_moves_rows_far_and_evenly() {
        let rows = 10_000;
        let sampler = BatchSampler::new(rows, rows, ShuffleOrder::Seed(1)).unwrap();
        let order = sampler.batch(0, 0);
        // In a random order neighbours are a third of the range apart, on average.
        let moved = order
            .iter()
            .zip(0..)
            .map(|(row, place)| row.abs_diff(place));
        let mean = moved.sum::<u64>() / rows;
        assert!((rows * 30 / 100..rows * 37 / 100).contains(&mean), "{mean}");
        let follow = order
            .windows(2)
            .filter(|pair| pair[1] == pair[0] + 1)
            .count();
        assert!(follow < 10, "{follow} rows follow the one before them");
        let lower = order[..5000].iter().filter(|row| **row < 5000).count();
        assert!((2350..2650).contains(&lower), "{lower}");
    }

    /// The expected numbers are those of torch.utils.data.DistributedSampler without its shuffle.
    #[test]
    fn processes_share_rows_as_torch_does() {
        let of = |rows, world, rank, drops| {
            let sampler = BatchSampler::new(rows, 100, ShuffleOrder::Off).unwrap();
            sampler.shard(rank, world, drops).unwrap().batch(0, 0)
        };
        assert_eq!(of(10, 4, 0, false), [0, 4, 8]);
        assert_eq!(of(10, 4, 2, false), [2, 6, 0]);
        assert_eq!(of(10, 4, 3, false), [3, 7, 1]);
        assert_eq!(of(10, 4, 3, true), [3, 7]);
        assert_eq!(of(2, 5, 4, false), [0]);
        assert!(of(2, 5, 4, true).is_empty() && of(0, 5, 4, false).is_empty());
        // Shuffled ones are a partition, too.
        let sampler = BatchSampler::new(12, 5, ShuffleOrder::Seed(3)).unwrap();
        let mut all: Vec<u64> = (0..4)
            .flat_map(|rank| epoch(&sampler.clone().shard(rank, 4, false).unwrap(), 9))
            .collect();
        all.sort_unstable();
        assert_eq!(all, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn the_last_batch_is_short_or_left_out() {
        let sampler = BatchSampler::new(10, 4, ShuffleOrder::Off).unwrap();
        assert_eq!((sampler.batches(), sampler.samples()), (3, 10));
        assert_eq!(sampler.batch(0, 2), [8, 9]);
        assert!(sampler.batch(0, 3).is_empty() && sampler.batch(0, u64::MAX).is_empty());
        assert_eq!([0, 2, 3].map(|batch| sampler.batch_len(batch)), [4, 2, 0]);
        let without = sampler.without_short_batch();
        assert_eq!((without.batches(), without.batch(0, 1).len()), (2, 4));
        assert!(without.batch(0, 2).is_empty());
        assert!(BatchSampler::new(10, 0, ShuffleOrder::Off).is_err());
        let sampler = BatchSampler::new(10, 1, ShuffleOrder::Off).unwrap();
        assert!(sampler.shard(2, 2, false).is_err());
    }

    /// No batch is empty except those past the end, and only the last one may be short.
    #[test]
    fn batches_are_full_but_the_last() {
        for (rows, world, batch) in [(10, 4, 2), (10, 4, 1), (11, 3, 3), (7, 2, 3), (3, 5, 1)] {
            for (drops, rank) in [(false, 0), (true, 0), (false, world - 1), (true, world - 1)] {
                let sampler = BatchSampler::new(rows, batch, ShuffleOrder::Off).unwrap();
                let sampler = sampler.shard(rank, world, drops).unwrap();
                let of = |number| sampler.batch(0, number).len() as u64;
                let lengths: Vec<u64> = (0..sampler.batches()).map(of).collect();
                let what = format!("{rows} {world} {batch} {drops} {rank}: {lengths:?}");
                assert_eq!(lengths.iter().sum::<u64>(), sampler.samples(), "{what}");
                let (last, others) = lengths.split_last().unwrap_or((&1, &[]));
                assert!((1..=batch).contains(last), "{what}");
                assert!(others.iter().all(|one| *one == batch), "{what}");
            }
        }
    }
}
