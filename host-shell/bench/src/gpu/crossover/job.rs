//! Options of the crossover measurement.

use super::ids::BatchSeries;
use nvme_core::spec::Nsid;
use nvme_cuda::RowsOptions;

/// Byte that overwrites the output before each read, so that a missing row cannot pass for a right one.
pub(super) const POISON: u8 = 0xA5;

/// Workload of the measurement.
#[derive(Clone, Debug)]
pub struct CrossoverJob {
    /// The GPU.
    pub gpu: u32,
    /// Namespace.
    pub nsid: Nsid,
    /// Bytes of the table, from the start of the namespace on, which is overwritten.
    pub table_bytes: u64,
    /// Bytes of a row.
    pub row_bytes: Vec<u32>,
    /// Rows of a batch.
    pub batches: Vec<u64>,
    /// Largest number of bytes of a batch: longer ones are cut to it.
    pub most_bytes: u64,
    /// Percent of a batch in the cache.
    pub hits: Vec<u32>,
    /// Walks from row to row at a time, each with rows of 4 KiB at most: one case each.
    pub walks: Vec<u32>,
    /// Number of rows of a walk, or fewer if all of them exceed `most_bytes`.
    pub hops: u32,
    /// Runs of each case; the median counts.
    pub runs: usize,
    /// Seed of the table and of the ids.
    pub seed: u64,
    /// Largest number of threads of the CPU that submit; 0 is one for each core.
    pub threads: u32,
    /// Queues and stations of the GPU.
    pub options: RowsOptions,
}

/// Returns the rows of the batches of a table of rows of `row_bytes` bytes: those that are too long are cut.
pub(super) fn batches(job: &CrossoverJob, row_bytes: u64) -> Vec<u64> {
    let most = BatchSeries::most(job.table_bytes / row_bytes).min(job.most_bytes / row_bytes);
    let mut counts: Vec<u64> = job.batches.iter().map(|count| *count.min(&most)).collect();
    counts.retain(|count| *count > 0);
    counts.dedup();
    counts
}
