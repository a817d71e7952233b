//! Batches of ids with an exact cache hit rate.

use nvme_units::SplitMix;
use std::collections::HashMap;

/// Batches that follow on each other, of different rows, and those of the rows that are in the cache before the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BatchSeries {
    /// All requested rows, in the order of their requests.
    pub ids: Vec<i64>,
    /// Rows that are read before the batch, so that they are in the cache.
    pub hot: Vec<i64>,
    /// Rows of a batch.
    pub count: usize,
}

impl BatchSeries {
    /// Returns the number of rows that all batches over a table of `rows` rows can have.
    pub fn most(rows: u64) -> u64 {
        rows / 2
    }

    /// Draws `batches` batches of `count` rows of a table of `rows`; `percent` % of each are hot. The same seed
    /// draws the same batches. `None` for more than [`most`](Self::most).
    ///
    /// All ids are even, so that no command reads two requested rows.
    pub fn draw(rows: u64, (batches, count): (u64, u64), percent: u32, seed: u64) -> Option<Self> {
        let most = Self::most(rows);
        if batches * count > most {
            return None;
        }
        let mut random = SplitMix::new(seed);
        // The first steps of a Fisher-Yates shuffle of all even rows; only moved elements are stored.
        let mut moved = HashMap::new();
        let mut ids = Vec::with_capacity((batches * count) as usize);
        for at in 0..batches * count {
            let other = at + random.below(most - at);
            let here = moved.get(&at).copied().unwrap_or(at);
            let there = moved.insert(other, here).unwrap_or(other);
            ids.push((2 * there) as i64);
        }
        let (count, hits) = (count as usize, (count * u64::from(percent) / 100) as usize);
        let mut hot = Vec::new();
        for batch in ids.chunks_mut(count.max(1)) {
            hot.extend_from_slice(&batch[..hits]);
            for at in (1..batch.len()).rev() {
                batch.swap(at, random.below(at as u64 + 1) as usize);
            }
        }
        Some(Self { ids, hot, count })
    }

    /// Returns the number of batches.
    pub fn batches(&self) -> usize {
        self.ids.len() / self.count.max(1)
    }

    /// Returns the number of rows that are not in the cache.
    pub fn misses(&self) -> u64 {
        (self.ids.len() - self.hot.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_batch_has_other_rows_and_as_many_hits_as_asked_for() {
        for (rows, batches, count, percent, hits) in [
            (200, 1, 100, 50, 50),
            (1000, 10, 32, 95, 30),
            (64, 1, 32, 0, 0),
            (64, 3, 1, 100, 1),
        ] {
            let train = BatchSeries::draw(rows, (batches, count), percent, 7).unwrap();
            let all: HashSet<i64> = train.ids.iter().copied().collect();
            assert_eq!(all.len() as u64, batches * count);
            assert!(
                all.iter()
                    .all(|id| id % 2 == 0 && (0..rows as i64).contains(id))
            );
            let hot: HashSet<i64> = train.hot.iter().copied().collect();
            for batch in train.ids.chunks(count as usize) {
                assert_eq!(batch.iter().filter(|id| hot.contains(id)).count(), hits);
            }
            assert_eq!(train.misses(), batches * (count - hits as u64));
            assert_eq!(train.batches() as u64, batches);
            assert_eq!(
                BatchSeries::draw(rows, (batches, count), percent, 7),
                Some(train)
            );
        }
        assert_eq!(BatchSeries::draw(64, (3, 11), 0, 1), None);
    }

    #[test]
    fn hits_lie_anywhere_in_a_batch() {
        let train = BatchSeries::draw(4000, (2, 1000), 50, 3).unwrap();
        let hot: HashSet<i64> = train.hot.iter().copied().collect();
        let half = |ids: &[i64]| ids.iter().filter(|id| hot.contains(id)).count();
        assert!((200..300).contains(&half(&train.ids[..500])));
    }
}
