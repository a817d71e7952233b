//! Searches whose nodes a GPU reads from a drive, without the CPU. A search returns before it runs and can be
//! captured; the limits of a warp's memory are checked before it is launched.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::index::VectorIndex;
use super::{SearchAnswers, SearchParameters, VectorMetric};
use nvme_compute_kernel::search::{CENTROIDS, SearchLaunch};
use nvme_compute_kernel::{SEARCH, kernel};
use nvme_cuda::{DeviceMemory, Gpu, KernelArgument, KernelFunction, Module, PendingRows, Stream};
use nvme_driver::{Error, Result};
use nvme_gpu_kernel::rows::BLOCK_WARPS;
use nvme_store::Table;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

/// Addresses of the memory of a launch, on the GPU of the store; each is a multiple of 4, `ids` of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchRequest {
    /// Address of the queries: for each, the `f32` that [`VectorMetric::of_queries`] makes,
    /// [`IndexHeader::elements`](super::IndexHeader::elements) of them.
    pub queries: u64,
    /// Number of queries, below 2^32.
    pub count: u64,
    /// Address that receives for each query the requested number of `i64`: [`SearchAnswers::ids`].
    pub ids: u64,
    /// Gets as many `f32`.
    pub distances: u64,
    /// Address that receives an `i32` for each query, its code.
    pub codes: u64,
    /// Address that receives a `u32` for each query, its number of reads.
    pub reads: u64,
}

/// An index whose centroids and codes lie on a GPU, and the kernel that searches it.
///
/// The memory is not freed when this is dropped: a launch in progress, or a graph, may still use it.
pub struct GpuSearch {
    module: Module,
    search: KernelFunction,
    nodes: Table,
    centroids: ManuallyDrop<DeviceMemory>,
    codes: ManuallyDrop<DeviceMemory>,
    /// Memory for the search state of each warp of each station.
    tables: ManuallyDrop<DeviceMemory>,
    words: SearchLaunch,
    /// Number of elements of a query before the metric's arithmetic.
    elements: usize,
    metric: VectorMetric,
    gpu: Arc<Gpu>,
}

impl GpuSearch {
    /// Loads the kernel and uploads the centroids and codes, once.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store that was opened without a GPU; [`Error::Environment`] without memory on the GPU;
    /// the errors of [`Module::of_image`].
    pub fn new(index: &VectorIndex) -> Result<Self> {
        let gpu = index.store.gpu().ok_or_else(|| {
            Error::usage("the store was opened without a GPU", "open it with one")
        })?;
        let header = index.header();
        let module = Module::of_image(gpu, &SEARCH)?;
        let upload = |bytes: &[u8]| -> Result<ManuallyDrop<DeviceMemory>> {
            let memory = DeviceMemory::new(gpu, bytes.len())?;
            memory.upload(0, bytes)?;
            Ok(ManuallyDrop::new(memory))
        };
        // No launch has more stations than the GPU has multiprocessors.
        let warps = u64::from(gpu.multiprocessors()? * BLOCK_WARPS);
        let tables = warps * header.code_bytes() * u64::from(CENTROIDS) * 4;
        let centroids = index.centroids.iter().flat_map(|x| x.to_le_bytes());
        let centroids = upload(&centroids.collect::<Vec<u8>>())?;
        let codes = upload(&index.codes)?;
        let tables = ManuallyDrop::new(DeviceMemory::new(gpu, tables as usize)?);
        let words = SearchLaunch {
            centroids: centroids.address(),
            codes: codes.address(),
            tables: tables.address(),
            elements: header.elements(),
            sub_elements: header.sub_elements,
            subspaces: header.elements().div_ceil(header.sub_elements),
            code_bytes: header.code_bytes() as u32,
            entry: header.entry,
            tag: header.tag,
            ..SearchLaunch::default()
        };
        Ok(Self {
            search: module.function(kernel::SEARCH)?,
            module,
            nodes: index.nodes()?,
            centroids,
            codes,
            tables,
            words,
            elements: header.source.elements as usize,
            metric: header.metric,
            gpu: Arc::clone(gpu),
        })
    }

    /// Registers and bytes of local memory of a thread, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.module.cost(self.search)
    }

    /// Returns the number of bytes of GPU memory that the index holds.
    pub fn memory_bytes(&self) -> usize {
        self.centroids.len() + self.codes.len() + self.tables.len()
    }

    /// Enqueues searches in `stream`, a `CUstream` of the store's GPU, and returns before they run. The stream may be
    /// captured.
    ///
    /// Rows of the [`PendingRows`] are queries: a failed query has only ids of -1, and its code is the reason. The
    /// results are those of [`VectorIndex::search`], bit by bit.
    ///
    /// # Safety
    /// The addresses of `request` are valid on the GPU until the searches have ended, and for as long as a graph that
    /// captured them may be launched; nothing else writes there meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for parameters out of their range, for addresses that are not aligned, and for a store whose reads
    /// the GPU does not submit itself; [`Error::Environment`] with the driver's answer.
    pub unsafe fn search(
        &self,
        request: &SearchRequest,
        parameters: SearchParameters,
        stream: u64,
    ) -> Result<PendingRows> {
        parameters.check()?;
        let elements = request.count.saturating_mul(self.words.elements.into());
        let results = request.count.saturating_mul(parameters.results.into());
        self.gpu.judge_apart(
            stream,
            &[
                KernelArgument::read("queries", request.queries, elements, 4),
                KernelArgument::written("ids", request.ids, results, 8),
                KernelArgument::written("distances", request.distances, results, 4),
                KernelArgument::written("codes", request.codes, request.count, 4),
                KernelArgument::written("reads", request.reads, request.count, 4),
            ],
        )?;
        let argument = |rows| SearchLaunch {
            rows,
            queries: request.queries,
            ids: request.ids,
            distances: request.distances,
            status: request.codes,
            reads: request.reads,
            list: parameters.list,
            beam: parameters.beam,
            results: parameters.results,
            ..self.words
        };
        let kernel = (&self.module, self.search);
        // SAFETY: the kernel takes one `SearchLaunch`; the kernel stays loaded, and the memory that it uses stays
        // allocated; the caller vouches for the addresses.
        unsafe {
            self.nodes
                .read_by_warps((request.count, parameters.beam), kernel, argument, stream)
        }
    }

    /// Searches with queries and answers in host memory: waits until the searches have ended,
    /// `limit` at most.
    ///
    /// # Errors
    /// As [`search`](Self::search); [`Error::Unfinished`] past the limit, and then the memory of the launch is kept.
    pub fn run(
        &self,
        queries: &[f32],
        parameters: SearchParameters,
        limit: Duration,
    ) -> Result<(SearchAnswers, Duration)> {
        let elements = self.elements;
        let count = queries.len() / elements;
        if count * elements != queries.len() {
            return Err(Error::usage(
                format!(
                    "{} numbers are no whole queries of {elements}",
                    queries.len()
                ),
                "use as many elements as the vectors of the index have",
            ));
        }
        let results = count * parameters.results as usize;
        let memory = |bytes: usize| {
            let memory = DeviceMemory::new(&self.gpu, bytes.max(8));
            memory.map(ManuallyDrop::new)
        };
        let queries = self.metric.of_queries(queries, elements);
        let bytes: Vec<u8> = queries.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut all = [
            memory(bytes.len())?,
            memory(results * 8)?,
            memory(results * 4)?,
            memory(count * 4)?,
            memory(count * 4)?,
        ];
        all[0].upload(0, &bytes)?;
        let [queries, ids, distances, codes, reads] = all.each_ref().map(|one| one.address());
        let request = SearchRequest {
            queries,
            count: count as u64,
            ids,
            distances,
            codes,
            reads,
        };
        let stream = Stream::new(&self.gpu)?;
        let begin = std::time::Instant::now();
        // SAFETY: the memory belongs to this call, which leaks it unless the searches have ended.
        let pending = unsafe { self.search(&request, parameters, stream.handle())? };
        pending.wait(limit)?;
        let took = begin.elapsed();
        let words = |memory: &DeviceMemory, bytes: usize| -> Result<Vec<u8>> {
            let mut all = vec![0; bytes];
            memory.download(0, &mut all)?;
            Ok(all)
        };
        let answers = SearchAnswers {
            ids: numbers(&words(&all[1], results * 8)?, i64::from_le_bytes),
            distances: numbers(&words(&all[2], results * 4)?, f32::from_le_bytes),
            codes: numbers(&words(&all[3], count * 4)?, i32::from_le_bytes),
            reads: numbers(&words(&all[4], count * 4)?, u32::from_le_bytes),
        };
        for memory in &mut all {
            // SAFETY: the searches have ended, and nothing uses the memory after this.
            unsafe { ManuallyDrop::drop(memory) };
        }
        Ok((answers, took))
    }
}

fn numbers<T, const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
    let words = bytes.as_chunks::<N>().0.iter();
    words.map(|word| of(*word)).collect()
}
