//! Indexes of vectors on a store: made, opened and searched, by threads of the host or by a GPU. The index is not
//! trusted: its header is checked when it is opened, and each node when it is read.
// UNSAFETY: queries and answers are memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use crate::catalog::PyImport;
use crate::error::ExceptionParts;
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::PyStore;
use crate::view::{MemoryPiece, PyView};
use crate::wait;
use nvme_host::Error;
use nvme_search::{
    self, BuildOptions, BuildPhase, CpuOptions, ElementType, GpuSearch, IndexHeader, SearchAnswers,
    SearchParameters, SearchRequest, VectorIndex, VectorMetric, VectorSet, VectorSource,
};
use pyo3::prelude::*;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Memory for answers: ids, distances, codes, and counts of reads.
type Places = (Py<PyView>, Py<PyView>, Py<PyView>, Py<PyView>);

/// Addresses of the same on a GPU.
type Addresses = (u64, u64, u64, u64);

/// Results of a query, candidates, and nodes that are read at a time.
type Given = (u32, u32, u32);

fn parameters((results, list, beam): Given) -> SearchParameters {
    SearchParameters {
        list,
        beam,
        results,
    }
}

/// The type that Python's side names `name`.
fn element(name: &str) -> PyResult<ElementType> {
    let found = ElementType::of_name(name);
    Ok(found.ok_or_else(|| {
        let cause = format!("no vectors have elements of the type '{name}'");
        ExceptionParts::usage(cause, "use float32, float16, bfloat16, int8 or uint8")
    })?)
}

/// Copies numbers from host memory, as `f32`.
///
/// # Safety
/// As [`MemoryPiece::slice`].
unsafe fn floats(memory: MemoryPiece, element: ElementType) -> Vec<f32> {
    // SAFETY: the caller's.
    let bytes = unsafe { memory.slice() };
    let mut numbers = Vec::with_capacity(bytes.len() / element.bytes());
    element.widen(bytes, &mut numbers);
    numbers
}

/// Builds an index of `vectors`, of `elements` elements each, which is written to `store` from byte `offset`
/// on. `shape` is the most neighbours of a node, candidates of a search, and elements that a byte stands for;
/// `names` are those of the metric and of the elements' type.
#[pyfunction]
pub fn build_index(
    py: Python<'_>,
    store: &PyStore,
    offset: u64,
    vectors: Py<PyView>,
    elements: u32,
    shape: (u32, u32, u32),
    names: (&str, &str),
) -> PyResult<PyImport> {
    let (metric, element) = (names.0, element(names.1)?);
    let metric = VectorMetric::of_name(metric).ok_or_else(|| {
        let cause = format!("no metric is called '{metric}'");
        ExceptionParts::usage(cause, "use 'euclidean', 'cosine' or 'inner_product'")
    })?;
    let store = store.get()?;
    let memory = vectors.get().of_host("vectors", false)?;
    // SAFETY: the view is kept until this returns.
    let numbers = py.detach(|| unsafe { floats(memory, element) });
    PyImport::start(move |shared| {
        let vectors = VectorSet::new(elements, numbers)?;
        let source = VectorSource::given(&vectors);
        let options = BuildOptions {
            degree: shape.0,
            list: shape.1,
            sub_elements: shape.2,
            metric,
        };
        let count = u64::from(source.count);
        let header =
            nvme_search::build(&store, offset, (source, &vectors), options, &mut |step| {
                let done = match step {
                    BuildPhase::Graph(inserted) => inserted,
                    BuildPhase::Write(written) => count + written,
                };
                match shared.progress(done, 2 * count) {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => Err(Error::Interrupted),
                }
            })?;
        Ok(about(&header))
    })
}

fn about(header: &IndexHeader) -> serde_json::Value {
    serde_json::json!({
        "count": header.source.count,
        "dim": header.source.elements,
        "metric": header.metric.name(),
        "longest": header.longest,
        "degree": header.degree,
        "sub_dim": header.sub_elements,
        "bytes": header.bytes_of_index(),
        "memory_bytes": header.centroids_bytes() + header.codes_bytes(),
    })
}

struct OpenIndex {
    index: VectorIndex,
    /// Set for a store with a GPU whose kernels submit the reads.
    by_gpu: Option<GpuSearch>,
}

/// An index on a store.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct SearchIndex {
    opened: OnStore<Arc<OpenIndex>>,
    flights: Arc<LaunchedTransfers>,
}

#[pymethods]
impl SearchIndex {
    #[new]
    fn new(py: Python<'_>, store: &PyStore, offset: u64) -> PyResult<Self> {
        let open = store.get()?;
        let opened = wait::of(py, move || {
            let index = VectorIndex::open(&open, offset)?;
            let by_gpu = open.gpu().map(|_| GpuSearch::new(&index)).transpose()?;
            Ok(Arc::new(OpenIndex { index, by_gpu }))
        })?;
        let flights = Arc::default();
        store.add_table(&flights);
        Ok(Self {
            opened: OnStore::new(store, "index", opened),
            flights,
        })
    }

    /// Returns the header of the index, as JSON.
    fn info(&self) -> PyResult<String> {
        Ok(about(self.opened.get()?.index.header()).to_string())
    }

    /// Finds the nearest vectors of `queries`, by `threads` threads of the host.
    fn search(
        &self,
        queries: Py<PyView>,
        out: Places,
        given: Given,
        threads: usize,
        element: &str,
    ) -> PyResult<PyOperation> {
        let element = self::element(element)?;
        let opened = self.opened.get()?;
        let (ids, distances, codes, reads) = out;
        let of_queries = queries.get().of_host("queries", false)?;
        let place = |view: &Py<PyView>| view.get().of_host("an answer", true);
        let places = [
            place(&ids)?,
            place(&distances)?,
            place(&codes)?,
            place(&reads)?,
        ];
        let elements = opened.index.header().source.elements as usize;
        let count = of_queries.bytes / element.bytes() / elements.max(1);
        let results = count.saturating_mul(given.0 as usize);
        let sizes = [
            results.saturating_mul(8),
            results.saturating_mul(4),
            count * 4,
            count * 4,
        ];
        if places
            .iter()
            .zip(sizes)
            .any(|(place, bytes)| place.bytes != bytes)
        {
            return Err(ExceptionParts::usage(
                "an array of answers has another size than the answers need",
                "report it",
            )
            .into());
        }
        PyOperation::start(vec![queries, ids, distances, codes, reads], move || {
            // SAFETY: the views are kept until this ended.
            let queries = unsafe { floats(of_queries, element) };
            let options = CpuOptions {
                threads,
                ..CpuOptions::default()
            };
            let answers = opened.index.search(&queries, parameters(given), options)?;
            let bytes: [Vec<u8>; 4] = [
                answers.ids.iter().flat_map(|x| x.to_le_bytes()).collect(),
                answers
                    .distances
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect(),
                answers.codes.iter().flat_map(|x| x.to_le_bytes()).collect(),
                answers.reads.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ];
            for (place, bytes) in places.iter().zip(&bytes) {
                // SAFETY: as above; no two of them are the same memory.
                unsafe { place.slice_mut() }.copy_from_slice(bytes);
            }
            fault(&answers, count)
        })
    }

    /// Puts searches into `stream` of the store's GPU; `queries` are an address and how
    /// many. `buffers` is kept until they have ended, unless they are captured.
    #[pyo3(signature = (queries, out, given, stream, buffers=None))]
    fn search_on_gpu(
        &self,
        py: Python<'_>,
        queries: (u64, u64),
        out: Addresses,
        given: Given,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let (queries, count) = queries;
        let (ids, distances, codes, reads) = out;
        let request = SearchRequest {
            queries,
            count,
            ids,
            distances,
            codes,
            reads,
        };
        let store = Arc::clone(opened.index.store());
        // Few of its nodes are read.
        let bytes = store.len();
        self.flights.launch(
            py,
            store,
            ("search", count, bytes),
            buffers,
            FailureReport::Table,
            || {
                let none =
                    || Error::usage("the store was opened without a GPU", "open it with gpu=0");
                let by_gpu = opened.by_gpu.as_ref().ok_or_else(none)?;
                // SAFETY: the addresses are of the buffers, which are kept until the searches have ended; those that a
                // graph uses are its user's to keep.
                unsafe { by_gpu.search(&request, parameters(given), stream) }
            },
        )
    }

    /// Waits for searches on the GPU that were launched before, and raises the first failure that was not raised yet.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.opened.get()?;
        self.flights.wait(py, timeout)
    }

    fn close(&self) {
        self.opened.close();
    }
}

/// Returns the error of the first query that failed.
fn fault(answers: &SearchAnswers, count: usize) -> Result<(), ExceptionParts> {
    match answers.failed() {
        None => Ok(()),
        Some((failed, first, code)) => {
            let what = format!("search of {count} queries");
            Err(ExceptionParts::query(
                code,
                first as u64,
                &what,
                failed as u64,
            ))
        }
    }
}
