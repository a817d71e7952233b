//! Pipelines: matrices come from a drive, batch after batch, and are multiplied with vectors, by a GPU or by
//! the CPU.
//!
//! - [`PipelineName`]: the five pipelines. [`PipelineJob`]: sizes and durations. [`run`]: runs one pipeline;
//!   [`PipelineReport`]: its results.
//! - [`trace`]: spans of reads and products, and their overlap.
//!
//! Each product is compared with one that the CPU computes in `f64` from the same weights, which it generates and does
//! not read from the drive.

mod batches;
mod by_cpu;
#[cfg(feature = "cuda")]
mod by_gpu;
mod data;
mod engine;
mod names;
mod runs;
#[cfg(test)]
mod tests;
pub mod trace;

pub use engine::MatrixSource;
pub use names::PipelineName;
pub use runs::{ContinuousRun, PipelineReport, SourceRuns, run};

use nvme_formats::{StoredFormat, UNIT};
use nvme_host::{Error, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Alignment of the data on the drive: they begin and end at multiples of this number of bytes, so that whole blocks
/// are overwritten.
const PAGE: u64 = 4096;

/// Sizes of the matrices and vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineShape {
    /// Format of the matrices.
    pub stored: StoredFormat,
    /// Rows of a matrix.
    pub rows: u32,
    /// Number of columns of a matrix.
    pub columns: u32,
    /// Number of vectors that each matrix is multiplied with.
    pub vectors: u32,
    /// Number of matrices on the drive, which batches take in turn.
    pub parts: u32,
    /// Number of matrices in memory at a time.
    pub buffers: u32,
    /// The products of all matrices are one vector, of `parts * rows` elements.
    pub joined: bool,
}

impl PipelineShape {
    /// Checks the sizes; [`bytes`](Self::bytes) and its like are for sizes that pass.
    ///
    /// # Errors
    /// [`Error::Usage`] for sizes that are zero or no whole blocks of the format, and for more than 4 GiB a matrix.
    pub fn check(&self) -> Result<()> {
        let (elements, _) = self.stored.block();
        let row_bytes = self.stored.row_bytes(self.columns).unwrap_or(0);
        let counts = [
            self.rows,
            self.columns,
            self.vectors,
            self.parts,
            self.buffers,
        ];
        let is_long = row_bytes * u64::from(self.rows) > u64::from(u32::MAX);
        let unit = elements.max(UNIT);
        if counts.contains(&0) || row_bytes == 0 || !self.columns.is_multiple_of(unit) || is_long {
            return Err(Error::usage(
                format!(
                    "{} matrices of {} x {} {} with {} buffers and {} vectors do not make a pipeline: a count is 0, a matrix is \
                     longer than 4 GiB, or --columns is not a multiple of {unit}, the block of the format",
                    self.parts,
                    self.rows,
                    self.columns,
                    self.stored.name(),
                    self.buffers,
                    self.vectors
                ),
                format!("use a multiple of {unit} columns, 1 at least of each, and 4 GiB a matrix"),
            ));
        }
        let all = u64::from(self.rows) * u64::from(self.parts);
        match self.joined && all != u64::from(self.columns) {
            true => Err(Error::usage(
                format!(
                    "joined matrices have {all} rows together and {} columns, and these must be equal",
                    self.columns
                ),
                "use as many rows in all matrices as columns",
            )),
            false => Ok(()),
        }
    }

    fn row_bytes(&self) -> u64 {
        self.stored.row_bytes(self.columns).unwrap_or(0)
    }

    /// Returns the number of bytes of a matrix.
    pub fn part_bytes(&self) -> u64 {
        self.row_bytes() * u64::from(self.rows)
    }

    /// Returns the number of bytes from one matrix to the next on the drive.
    fn part_stride(&self) -> u64 {
        self.part_bytes().next_multiple_of(PAGE)
    }

    /// Returns the number of bytes of the drive that all data take.
    pub fn bytes(&self) -> u64 {
        let vectors = u64::from(self.vectors) * u64::from(self.columns) * 4;
        self.vectors_at() + vectors.next_multiple_of(PAGE)
    }

    /// Returns the offset of the vectors on the drive.
    fn vectors_at(&self) -> u64 {
        self.part_stride() * u64::from(self.parts)
    }

    /// Returns the number of elements of a product of one vector.
    fn product_rows(&self) -> u32 {
        match self.joined {
            true => self.rows * self.parts,
            false => self.rows,
        }
    }

    /// Returns the number of operations of a batch: a multiplication and an addition for each element and vector.
    fn operations(&self) -> f64 {
        2.0 * f64::from(self.rows) * f64::from(self.columns) * f64::from(self.vectors)
    }
}

/// A pipeline to run.
#[derive(Clone, Debug)]
pub struct PipelineJob {
    /// Pipeline to run.
    pub name: PipelineName,
    /// Sizes of the matrices and batches.
    pub shape: PipelineShape,
    /// Batches of a run; of an iterative computation how often the product is fed back.
    pub batches: u64,
    /// Runs of each source; the median counts.
    pub runs: usize,
    /// Duration of a continuous pipeline.
    pub runtime: Duration,
    /// Time for which a continuous pipeline retries a batch that failed.
    pub patience: Duration,
    /// Deadline of a batch.
    pub limit: Duration,
    /// Number of threads that read, if the CPU reads.
    pub readers: usize,
    /// Seed of weights and vectors.
    pub seed: u64,
    /// True if the drive already holds the matrices of that seed.
    pub keep: bool,
    /// A file that is made for the comparison of sources, and removed.
    pub file: Option<PathBuf>,
}
