//! Search for nearest vectors in a graph whose nodes lie on a drive.
//!
//! Here belong the graph, its index on a store and the searches. The search of one query is in
//! `nvme-compute-kernel`, since a kernel and the CPU run the same one.
//!
//! - [`build()`], [`NeighbourGraph`]: a graph of vectors as DiskANN has it (Vamana), made by threads of the CPU, and
//!   its index on a store.
//! - [`VectorIndex`]: an existing index: its part in memory, and searches by the CPU.
//! - `GpuSearch`: searches whose nodes a kernel reads from the drive.
//! - [`VectorFile`]: vectors in files of common formats.
//! - [`VectorSource`]: vectors of a generator, for tests and measurements; [`exact`]: their neighbours by exhaustive
//!   comparison.
//!
//! An index is a header, centroids and codes of the vectors (product quantisation), which lie in memory while it is
//! searched, and a node of 4 KiB or more for each vector, which is read when a search reaches it (docs/compute.md).

mod build;
mod by_cpu;
mod element;
pub mod exact;
mod file;
#[cfg(feature = "cuda")]
mod gpu;
mod graph;
mod header;
mod index;
mod metric;
mod quantise;
mod source;

pub use build::{BuildOptions, BuildPhase, build};
pub use by_cpu::CpuOptions;
pub use element::ElementType;
pub use file::{RawVectors, VectorFile};
#[cfg(feature = "cuda")]
pub use gpu::{GpuSearch, SearchRequest};
pub use graph::NeighbourGraph;
pub use header::{HEADER_BYTES, IndexHeader, checksum};
pub use index::VectorIndex;
pub use metric::VectorMetric;
pub use nvme_compute_kernel::search::{
    MOST_BEAM, MOST_DEGREE, MOST_ELEMENTS, MOST_LIST, MOST_RESULTS, code,
};
pub use source::{VectorDistribution, VectorSet, VectorSource};

use nvme_driver::{Error, Result};
use nvme_store::status;

/// Parameters of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchParameters {
    /// Number of candidates that are kept, 1 to [`MOST_LIST`]: more candidates find more vectors, and read more nodes.
    pub list: u32,
    /// Number of nodes of a query that are read at a time, 1 to [`MOST_BEAM`].
    pub beam: u32,
    /// Number of results of a query, 1 to [`MOST_RESULTS`].
    pub results: u32,
}

impl Default for SearchParameters {
    fn default() -> Self {
        Self {
            list: 64,
            beam: 4,
            results: 10,
        }
    }
}

impl SearchParameters {
    /// # Errors
    /// [`Error::Usage`] for a number out of its range, and for fewer candidates than results.
    pub fn check(&self) -> Result<()> {
        let is_one = |number: u32, most: u32| (1..=most).contains(&number);
        if is_one(self.list, MOST_LIST)
            && is_one(self.beam, MOST_BEAM)
            && is_one(self.results, MOST_RESULTS)
            && self.list >= self.results
        {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "{} results of {} candidates with {} nodes at a time exceed a limit of the search",
                self.results, self.list, self.beam
            ),
            format!(
                "use up to {MOST_RESULTS} results, as many candidates up to {MOST_LIST}, and 1 to {MOST_BEAM} nodes at \
                 a time"
            ),
        ))
    }
}

/// Results of queries, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SearchAnswers {
    /// The requested number of ids for each query, nearest first; -1 if there are fewer vectors.
    pub ids: Vec<i64>,
    /// The squared distance of each id; infinite for an id of -1.
    pub distances: Vec<f32>,
    /// Code of each query: 0, the status of a read (SCT << 8 | SC), or a number below 0; [`describe`] explains
    /// them.
    pub codes: Vec<i32>,
    /// Number of nodes that each query read.
    pub reads: Vec<u32>,
}

impl SearchAnswers {
    /// Returns the queries that failed, and the first of them with its code.
    pub fn failed(&self) -> Option<(usize, usize, i32)> {
        let mut failed = (0..).zip(&self.codes).filter(|(_, code)| **code != 0);
        let (first, code) = failed.next()?;
        Some((1 + failed.count(), first, *code))
    }

    /// Returns the number of nodes read for a query, on average.
    pub fn reads_per_query(&self) -> f64 {
        let all: u64 = self.reads.iter().map(|reads| u64::from(*reads)).sum();
        all as f64 / self.reads.len().max(1) as f64
    }

    /// Checks that every query has its results.
    ///
    /// # Errors
    /// [`Error::Device`] with the first query that failed, and why.
    pub fn check(&self) -> Result<()> {
        let Some((count, first, code)) = self.failed() else {
            return Ok(());
        };
        let (what, remedy) = describe(code);
        Err(Error::device(
            format!("query {first}: {what}; {count} queries have no results"),
            remedy,
        ))
    }
}

/// Describes a query's code, with the remedy.
pub fn describe(code: i32) -> (&'static str, &'static str) {
    match code {
        code::WRONG_NODE => (
            "Wrong Node",
            "the drive gave other bytes than the node asked for: build the index again, and check the drive",
        ),
        code::BAD_QUERY => ("Query Not Finite", "use finite numbers"),
        code => status::describe(code),
    }
}

#[cfg(test)]
mod tests;
