//! Interface of the engines that read and multiply: the CPU, or a GPU.

use super::trace::PipelineTrace;
use nvme_host::Result;

/// Source of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixSource {
    /// The drive, by reads that the GPU submits.
    Gpu,
    /// The drive, read by threads of the CPU, with a copy to the GPU if that multiplies.
    Threads,
    /// A file, read by `pread` of threads, with a copy to the GPU if that multiplies.
    File,
    /// Pinned memory of the host, copied to the GPU.
    Pinned,
    /// Memory of the multiplying processor, without reads.
    Resident,
}

impl MatrixSource {
    /// Returns the name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu-reads",
            Self::Threads => "cpu-threads",
            Self::File => "file",
            Self::Pinned => "pinned",
            Self::Resident => "resident",
        }
    }
}

/// An engine that reads matrices into buffers and multiplies them. A batch is one matrix in one buffer: it is read,
/// multiplied and taken, in this order, and no other batch uses its buffer meanwhile.
pub(super) trait PipelineEngine {
    /// True if [`multiply`](Self::multiply) returns before the product is computed.
    fn is_ahead(&self) -> bool;

    /// Sets the vectors, concatenated. No batch is in progress.
    fn set_vectors(&mut self, x: &[f32]) -> Result<()>;

    /// Reads the vectors from the drive. No batch is in progress.
    fn read_vectors(&mut self) -> Result<()>;

    /// Begins to read a matrix. A read that fails is an error of [`take`](Self::take).
    fn read(&mut self, batch: u64, slot: u32, part: u32) -> Result<()>;

    /// Multiplies the matrix, once it has been read.
    fn multiply(&mut self, slot: u32) -> Result<()>;

    /// Waits for the product: for each vector, an element for each row. The result has no meaning if products are
    /// joined.
    fn take(&mut self, slot: u32) -> Result<Vec<f32>>;

    /// Makes the joined products the next vectors, each divided by the root of the mean of its squares. All batches have
    /// been multiplied.
    fn feed_back(&mut self) -> Result<()>;

    /// Returns the vectors.
    fn vectors(&mut self) -> Result<Vec<f32>>;

    /// Returns the spans since the last call.
    fn trace(&mut self) -> PipelineTrace;
}
