//! The names of the pipelines.

/// A pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineName {
    /// A matrix and the vectors are read from the drive and multiplied.
    DirectNvmeToMatMul,
    /// Some batches are read while others are multiplied.
    StreamedBatchProcessing,
    /// A product is fed back as the next vector: each iteration reads the whole matrix again.
    IterativeComputation,
    /// The same batches from several sources.
    DataSourceComparison,
    /// Batches run for a given time, even if the device fails meanwhile.
    ContinuousProcessing,
}

impl PipelineName {
    /// All pipelines.
    pub const ALL: [Self; 5] = [
        Self::DirectNvmeToMatMul,
        Self::StreamedBatchProcessing,
        Self::IterativeComputation,
        Self::DataSourceComparison,
        Self::ContinuousProcessing,
    ];

    /// Returns the name that the command line uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::DirectNvmeToMatMul => "direct-nvme-to-matmul",
            Self::StreamedBatchProcessing => "streamed-batch-processing",
            Self::IterativeComputation => "iterative-computation",
            Self::DataSourceComparison => "data-source-comparison",
            Self::ContinuousProcessing => "continuous-processing",
        }
    }

    /// Returns the name in one word.
    pub fn in_one_word(self) -> &'static str {
        match self {
            Self::DirectNvmeToMatMul => "DirectNVMeToMatMul",
            Self::StreamedBatchProcessing => "StreamedBatchProcessing",
            Self::IterativeComputation => "IterativeComputation",
            Self::DataSourceComparison => "DataSourceComparison",
            Self::ContinuousProcessing => "ContinuousProcessing",
        }
    }
}
