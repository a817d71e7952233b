//! Searches whose reads are submitted by threads of the CPU: the reference for the kernel, and the side that
//! measurements compare it with.

use super::index::VectorIndex;
use super::{SearchAnswers, SearchParameters};
use nvme_compute_kernel::search::walk::GraphWalk;
use nvme_driver::{Error, Result};
use nvme_store::{StoreTransfer, status};
use rayon::prelude::*;

/// Division of queries among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, at least 1.
    pub threads: usize,
    /// Number of queries that a thread has in progress, with all their reads in one batch; at least 1.
    pub together: usize,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            threads: 8,
            together: 16,
        }
    }
}

/// A query under way.
struct HostQuery<'q> {
    walk: std::result::Result<GraphWalk<'q>, i32>,
    /// Nodes that are being read.
    asked: Vec<u32>,
    code: i32,
}

impl VectorIndex {
    /// Finds the nearest vectors of `queries`, one query after the other, by threads of the CPU: the results are the
    /// kernel's, bit by bit. A query fails only for its own reads.
    ///
    /// # Errors
    /// [`Error::Usage`] for parameters out of their range, and for numbers that are no whole queries;
    /// [`Error::System`] when no thread can be started.
    pub fn search(
        &self,
        queries: &[f32],
        parameters: SearchParameters,
        options: CpuOptions,
    ) -> Result<SearchAnswers> {
        parameters.check()?;
        let count = self.queries(queries.len())?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1));
        let pool = pool.build().map_err(|why| Error::System {
            call: "starting the threads of a search",
            source: std::io::Error::other(why),
        })?;
        let header = self.header();
        let queries = header
            .metric
            .of_queries(queries, header.source.elements as usize);
        let elements = header.elements() as usize;
        let groups = queries.par_chunks(options.together.max(1) * elements);
        let run = || groups.map(|group| self.group(group, parameters)).collect();
        let groups: Vec<SearchAnswers> = pool.install(run);
        let results = count * parameters.results as usize;
        let mut all = SearchAnswers {
            ids: Vec::with_capacity(results),
            distances: Vec::with_capacity(results),
            codes: Vec::with_capacity(count),
            reads: Vec::with_capacity(count),
        };
        for group in groups {
            all.ids.extend(group.ids);
            all.distances.extend(group.distances);
            all.codes.extend(group.codes);
            all.reads.extend(group.reads);
        }
        Ok(all)
    }

    fn group(&self, queries: &[f32], parameters: SearchParameters) -> SearchAnswers {
        let header = self.header();
        let elements = header.elements() as usize;
        let wanted = (parameters.list, parameters.results);
        let begin = |query| {
            let walk = GraphWalk::new(self.quantised(), query, header.entry, wanted);
            HostQuery {
                code: walk.as_ref().err().copied().unwrap_or(status::OK),
                walk,
                asked: Vec::new(),
            }
        };
        let mut all: Vec<HostQuery<'_>> = queries.chunks_exact(elements).map(begin).collect();
        let mut bytes = Vec::new();
        while self.round(&mut all, parameters.beam, &mut bytes) {}
        let mut answers = SearchAnswers::default();
        for query in &all {
            let walk = query.walk.as_ref().ok();
            let found = walk.filter(|_| query.code == status::OK);
            let found = found.into_iter().flat_map(GraphWalk::results);
            let found = found.map(|(id, far)| (i64::from(id), far));
            let all = found.chain(std::iter::repeat((-1, f32::INFINITY)));
            for (id, far) in all.take(parameters.results as usize) {
                answers.ids.push(id);
                answers.distances.push(far);
            }
            answers.codes.push(query.code);
            answers.reads.push(walk.map_or(0, |walk| walk.reads));
        }
        answers
    }

    /// Reads the next nodes of all queries, with all reads in flight together; returns whether there were any.
    fn round(&self, all: &mut [HostQuery<'_>], beam: u32, bytes: &mut Vec<u8>) -> bool {
        for query in &mut *all {
            query.asked = match &mut query.walk {
                Ok(walk) if query.code == status::OK => walk.next(beam),
                _ => Vec::new(),
            };
        }
        let asked: Vec<u32> = all.iter().flat_map(|query| query.asked.clone()).collect();
        let node_bytes = self.header().node_bytes() as usize;
        bytes.resize(asked.len() * node_bytes, 0);
        let nodes = bytes.chunks_exact_mut(node_bytes);
        let reads = nodes.zip(&asked);
        let mut reads: Vec<StoreTransfer<'_>> = reads
            .map(|(node, id)| StoreTransfer::Read(self.node_at(*id), node))
            .collect();
        let ended = self.store.transfer_all(&mut reads);
        let mut nodes = bytes.chunks_exact(node_bytes).zip(ended);
        let mut words = vec![0; node_bytes / 4];
        for query in &mut *all {
            let Ok(walk) = &mut query.walk else { continue };
            for id in &query.asked {
                let Some((node, ended)) = nodes.next() else {
                    break;
                };
                for (word, bytes) in words.iter_mut().zip(node.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*bytes);
                }
                if query.code != status::OK {
                    continue;
                }
                query.code = match ended {
                    Err(error) => status::of_error(&error),
                    Ok(()) => walk.take(*id, &words).err().unwrap_or(status::OK),
                };
            }
        }
        !asked.is_empty()
    }
}
