//! Options of the comparison of data paths.

use std::path::PathBuf;

/// Workload of the measurement.
#[derive(Clone, Debug)]
pub struct PathsJob {
    /// The file, or block device.
    pub file: PathBuf,
    /// Largest number of bytes of the file that are used, from its start on.
    pub bytes: u64,
    /// GPU of the destination memory; host memory when missing.
    pub gpu: Option<u32>,
    /// Bytes of sequential reads, one case each.
    pub sizes: Vec<u64>,
    /// The most bytes of one run.
    pub run_bytes: u64,
    /// Reads of a batch.
    pub batch: usize,
    /// Number of threads of the paths that use the CPU.
    pub threads: usize,
    /// Runs of each; the median counts.
    pub runs: usize,
    /// Seed of random places.
    pub seed: u64,
    /// Writes the file's content to the device where that has other bytes.
    pub lay_out: bool,
}

impl PathsJob {
    /// Reads of 4 KiB to 64 MiB in the first GiB, 5 runs of 256 MiB, batches of 32, a thread for each processor up to 16.
    pub fn new(file: PathBuf) -> Self {
        Self {
            file,
            bytes: 1 << 30,
            gpu: None,
            sizes: (0..8).map(|step| 4096 << (2 * step)).collect(),
            run_bytes: 256 << 20,
            batch: 32,
            threads: std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(16),
            runs: 5,
            seed: 1,
            lay_out: false,
        }
    }
}
