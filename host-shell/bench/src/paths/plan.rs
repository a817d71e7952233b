//! Plan of reads: parts of the file, and the number of reads together.

use super::job::PathsJob;
use nvme_units::SplitMix;
use std::ops::Range;

/// Bytes of a read at a random place.
const SMALL: usize = 4096;
/// Batches of a run.
const BATCHES: usize = 200;

/// Reads of one size. Read `i` goes to byte `i * bytes` of the destination.
pub(super) struct ReadPlan {
    pub pattern: &'static str,
    /// Bytes of each read.
    pub bytes: usize,
    /// Offsets of the reads: multiples of `bytes`.
    pub offsets: Vec<u64>,
    /// Number of reads that are requested together. All of them arrive before the next are requested.
    pub at_once: usize,
}

impl ReadPlan {
    /// Returns all plans of `job` over the first `file_bytes` bytes of its file.
    pub fn all(job: &PathsJob, file_bytes: u64) -> Vec<Self> {
        let run = job.run_bytes.min(file_bytes);
        let sequential = |bytes: &u64| {
            let count = (run / bytes) as usize;
            Self {
                pattern: "sequential",
                bytes: *bytes as usize,
                offsets: (0..count as u64).map(|index| index * bytes).collect(),
                at_once: count,
            }
        };
        let sizes = job.sizes.iter().filter(|bytes| **bytes <= run);
        let mut plans: Vec<Self> = sizes.map(sequential).collect();
        let random = |pattern, count: usize, at_once: usize| {
            let mut random = SplitMix::new(job.seed);
            let mut place = || random.below(file_bytes / SMALL as u64) * SMALL as u64;
            Self {
                pattern,
                bytes: SMALL,
                offsets: (0..count).map(|_| place()).collect(),
                at_once,
            }
        };
        let most = run as usize / SMALL;
        plans.push(random("random", most, most));
        let batch = job.batch.min(most);
        plans.push(random("batch", most / batch.max(1) * batch, batch).cut(BATCHES));
        plans
    }

    /// Returns the plan with only its first `groups` groups.
    fn cut(mut self, groups: usize) -> Self {
        self.offsets.truncate(groups * self.at_once);
        self
    }

    /// Returns the number of bytes of all reads.
    pub fn len(&self) -> usize {
        self.offsets.len() * self.bytes
    }

    /// True if there are reads that wait for earlier ones.
    pub fn is_in_batches(&self) -> bool {
        self.at_once < self.offsets.len()
    }

    /// Returns the groups of reads that are requested together.
    pub fn groups(&self) -> impl Iterator<Item = Range<usize>> {
        let count = self.offsets.len();
        let groups = (0..count).step_by(self.at_once.max(1));
        groups.map(move |first| first..(first + self.at_once).min(count))
    }

    /// Returns the ranges of the destination for each of `threads` threads: one range for all if there are batches,
    /// since starting a thread takes longer than a batch.
    pub fn shares(&self, threads: usize) -> Vec<Range<usize>> {
        let all = self.len();
        let threads = if self.is_in_batches() { 1 } else { threads };
        let share = all.div_ceil(threads.max(1)).next_multiple_of(SMALL);
        let starts = (0..all).step_by(share.max(SMALL));
        starts
            .map(|start| start..(start + share).min(all))
            .collect()
    }

    /// Returns the parts of `share` that are asked for together.
    pub fn parts(&self, share: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let step = (self.at_once * self.bytes).max(1);
        let starts = share.clone().step_by(step);
        starts.map(move |start| start..(start + step).min(share.end))
    }

    /// Returns the source of byte `at` of the destination, and the number of contiguous bytes from there on.
    pub fn source(&self, at: usize) -> (u64, usize) {
        let within = at % self.bytes;
        let offset = self.offsets[at / self.bytes] + within as u64;
        (offset, self.bytes - within)
    }

    /// Returns the number of bytes of `have` that differ from the file, whose content is `content`.
    pub fn wrong_bytes(&self, have: &[u8], content: &[u8]) -> usize {
        let reads = have.chunks(self.bytes).zip(&self.offsets);
        reads
            .map(|(have, offset)| {
                let want = &content[*offset as usize..][..self.bytes];
                match have == want {
                    true => 0,
                    false => have.iter().zip(want).filter(|(a, b)| a != b).count(),
                }
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> PathsJob {
        PathsJob {
            sizes: vec![4096, 65_536, 1 << 20],
            run_bytes: 256 << 10,
            batch: 7,
            ..PathsJob::new("unused".into())
        }
    }

    #[test]
    fn every_size_that_fits_is_swept_and_small_reads_are_random() {
        let plans = ReadPlan::all(&job(), 1 << 20);
        let shape = |plan: &ReadPlan| (plan.pattern, plan.bytes, plan.offsets.len(), plan.at_once);
        assert_eq!(
            plans.iter().map(shape).collect::<Vec<_>>(),
            [
                ("sequential", 4096, 64, 64),
                ("sequential", 65_536, 4, 4),
                ("random", 4096, 64, 64),
                ("batch", 4096, 63, 7),
            ]
        );
        let mut far = plans[2].offsets.iter();
        assert!(far.any(|offset| *offset >= 256 << 10), "of the whole file");
        assert!(
            plans
                .iter()
                .all(|plan| plan.offsets.iter().all(|at| at % plan.bytes as u64 == 0))
        );
    }

    #[test]
    fn shares_and_parts_cover_every_byte_once() {
        for plan in ReadPlan::all(&job(), 1 << 20) {
            for threads in [1, 3, 100] {
                let mut at = 0;
                for share in plan.shares(threads) {
                    for part in plan.parts(share) {
                        assert!(part.start == at && part.end > at);
                        assert!(part.len() <= plan.at_once * plan.bytes);
                        at = part.end;
                    }
                }
                assert_eq!(at, plan.len());
            }
            let reads: usize = plan.groups().map(|group| group.len()).sum();
            assert_eq!(reads, plan.offsets.len());
        }
    }

    #[test]
    fn wrong_bytes_are_counted() {
        let content: Vec<u8> = (0..1 << 20).map(|at: usize| (at / 4096) as u8).collect();
        let plan = &ReadPlan::all(&job(), 1 << 20)[3];
        let mut have = Vec::new();
        for offset in &plan.offsets {
            have.extend_from_slice(&content[*offset as usize..][..4096]);
        }
        assert_eq!(plan.wrong_bytes(&have, &content), 0);
        have[5000] ^= 1;
        have[9000] ^= 1;
        assert_eq!(plan.wrong_bytes(&have, &content), 2);
    }
}
