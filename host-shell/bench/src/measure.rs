//! Parts that the benchmarks of CPU and GPU share: cases of gathers, ids of rows, and the median.

use nvme_driver::error::{Error, Result};
use nvme_units::SplitMix;
use std::sync::Barrier;
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// The table that rows are gathered from, and the cases that are measured.
#[derive(Clone, Debug)]
pub struct GatherCases {
    /// Bytes of the table: from the start of the namespace or store on, which is overwritten.
    pub table_bytes: u64,
    /// Bytes of a row, one case each; for a GPU multiples of 8.
    pub row_bytes: Vec<u32>,
    /// Number of rows of each gather; 0 for a number that makes a run long enough.
    pub rows: u64,
    /// Runs of each; the median counts.
    pub runs: usize,
    /// Seed of the table and of the ids.
    pub seed: u64,
    /// Ids by Zipf's law with exponent 0.99 instead of uniform ones.
    pub zipf: bool,
}

impl GatherCases {
    /// Checks the sizes of rows before the table is written.
    ///
    /// # Errors
    /// [`Error::Usage`] for a row that is longer than the table.
    pub(crate) fn check_rows(&self) -> Result<()> {
        let table = self.table_bytes;
        let mut rows = self.row_bytes.iter().map(|bytes| u64::from(*bytes));
        match rows.find(|bytes| *bytes == 0 || *bytes > table) {
            None => Ok(()),
            Some(bytes) => Err(Error::usage(
                format!("a row of {bytes} bytes does not lie in a table of {table} bytes"),
                "use shorter rows, or a larger table",
            )),
        }
    }
}

/// Measures the seconds of all of `jobs`, a thread for each, from the moment when every thread has
/// started.
///
/// # Errors
/// The error of a job that fails.
pub(crate) fn side_by_side<J: FnOnce() -> Result<()> + Send>(jobs: Vec<J>) -> Result<f64> {
    let all_there = Barrier::new(jobs.len());
    std::thread::scope(|scope| {
        let start = |job: J| {
            let all_there = &all_there;
            scope.spawn(move || {
                all_there.wait();
                let begin = Instant::now();
                job().map(|()| (begin, Instant::now()))
            })
        };
        let threads: Vec<_> = jobs.into_iter().map(start).collect();
        let ended = |thread: ScopedJoinHandle<'_, Result<(Instant, Instant)>>| {
            let panicked = |_| Err(Error::internal("a thread of the benchmark panicked"));
            thread.join().unwrap_or_else(panicked)
        };
        let times = threads.into_iter().map(ended).collect::<Result<Vec<_>>>()?;
        let begin = times.iter().map(|time| time.0).min();
        let end = times.iter().map(|time| time.1).max();
        Ok(begin
            .zip(end)
            .map_or(0.0, |(begin, end)| (end - begin).as_secs_f64()))
    })
}

/// Returns the middle one of an odd number of values; 0 without any.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Returns the positions where the polyline through `points`, which are in order, passes the height `at`.
pub fn crossings(points: &[(f64, f64)], at: f64) -> Vec<f64> {
    let passes = |pair: &[(f64, f64)]| {
        let [(x0, y0), (x1, y1)] = *pair else {
            return None;
        };
        ((y0 < at) != (y1 < at)).then(|| x0 + (x1 - x0) * (at - y0) / (y1 - y0))
    };
    points.windows(2).filter_map(passes).collect()
}

/// Generator of row ids.
#[derive(Clone, Debug)]
pub(crate) struct IdGenerator {
    rows: u64,
    /// Sums of the weights of the ranks; empty for uniform ids.
    ranks: Vec<f64>,
}

impl IdGenerator {
    /// Creates the ids of a table of `rows` rows; `zipf` is Zipf's law with exponent 0.99.
    pub fn new(rows: u64, zipf: bool) -> Self {
        let mut sum = 0.0;
        let weights = (1..=if zipf { rows } else { 0 }).map(|rank| (rank as f64).powf(-0.99));
        let ranks = weights.map(|weight| {
            sum += weight;
            sum
        });
        Self {
            rows,
            ranks: ranks.collect(),
        }
    }

    /// Returns the name of the ids' distribution, for reports.
    pub fn law(&self) -> &'static str {
        match self.ranks.is_empty() {
            true => "uniform",
            false => "zipf_0.99",
        }
    }

    /// Draws `count` ids; the same seed draws the same ids.
    pub fn draw(&self, count: u64, seed: u64) -> Vec<i64> {
        let mut random = SplitMix::new(seed);
        let id = |_| {
            let Some(total) = self.ranks.last() else {
                return random.below(self.rows) as i64;
            };
            let at = (random.next_word() >> 11) as f64 / (1u64 << 53) as f64 * total;
            let rank = self.ranks.partition_point(|sum| *sum < at) as u64;
            // Rows that are read often lie anywhere: the multiplier is a prime.
            (rank.wrapping_mul(2_654_435_761) % self.rows) as i64
        };
        (0..count).map(id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_not_moved_by_an_outlier() {
        assert_eq!(median(&[5.0, 1.0, 4.0, 100.0, 3.0]), 4.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn a_line_passes_a_height_where_it_goes_up_or_down() {
        let line = [(0.0, 0.5), (50.0, 1.5), (75.0, 1.0), (95.0, 0.5)];
        assert_eq!(crossings(&line, 1.0), [25.0, 75.0]);
        assert_eq!(crossings(&line, 3.0), [] as [f64; 0]);
        assert_eq!(crossings(&line[..1], 0.5), [] as [f64; 0]);
    }

    #[test]
    fn jobs_side_by_side_take_as_long_as_the_longest() {
        let sleep = |ms| {
            move || {
                std::thread::sleep(std::time::Duration::from_millis(ms));
                Ok(())
            }
        };
        let seconds = side_by_side(vec![sleep(30), sleep(1)]).unwrap();
        assert!(seconds >= 0.03, "{seconds}");
        let failing = || Err(Error::internal("no"));
        assert!(side_by_side(vec![failing]).is_err());
    }

    #[test]
    fn ids_are_rows_and_few_of_them_are_frequent_by_zipfs_law() {
        for zipf in [false, true] {
            let ids = IdGenerator::new(1000, zipf).draw(20_000, 7);
            assert!(ids.iter().all(|id| (0..1000).contains(id)));
            let mut counts = vec![0; 1000];
            ids.iter().for_each(|id| counts[*id as usize] += 1);
            counts.sort_unstable();
            let tenth: u32 = counts[900..].iter().sum();
            // A tenth of the rows: 10 % of uniform ids, about 68 % by Zipf's law.
            let expected = if zipf { 12_000..15_000 } else { 2_000..3_500 };
            assert!(expected.contains(&tenth), "{zipf} {tenth}");
        }
        assert_eq!(
            IdGenerator::new(10, true).draw(5, 3),
            IdGenerator::new(10, true).draw(5, 3)
        );
    }
}
