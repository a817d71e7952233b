//! Pages of keys and values on a store: attention over them, and the choice of those that matter. Queries on
//! the host are answered by threads of the host, queries on a GPU by kernels that read the pages by
//! themselves.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, whole};
use super::matrix::without_gpu;
use crate::error::{ExceptionParts, OrRaise};
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::store::PyStore;
use crate::view::PyView;
use crate::wait;
use nvme_host::Error;
use nvme_host::lock::lock;
use nvme_models::choosing::{PageSelection, SelectionKernels};
use nvme_models::paged::{PagedKernels, PagedQueries};
use nvme_models::{KvShape, PageLimits, choosing};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Arc, Mutex};

/// Sequences, heads of queries, limit of the pages of a table, and true if each head of keys has a separate
/// table.
type Given = (u32, u32, u32, bool);

/// Pages of a head at most, and those at both ends that are kept in any case.
type Kept = (u32, u32, u32);

fn keep((pages, first, last): Kept) -> PageLimits {
    PageLimits { pages, first, last }
}

struct OpenPages {
    pages: nvme_models::KvStore,
    /// With a GPU.
    by_gpu: Option<(PagedKernels, SelectionKernels)>,
}

impl OpenPages {
    fn queries(&self, (sequences, heads, most_pages, per_head): Given) -> PagedQueries {
        PagedQueries {
            sequences,
            heads,
            most_pages,
            per_head,
            scale: 1.0,
            ..PagedQueries::default()
        }
    }
}

/// Pages of keys and values.
#[pyclass(frozen, module = "nvme_gpu._native", name = "KvPages")]
pub struct PyKvPages {
    opened: OnStore<Arc<OpenPages>>,
    flights: Arc<LaunchedTransfers>,
}

#[pymethods]
impl PyKvPages {
    /// Opens the pages. `shape` is heads, elements of a head, tokens of a page, and true for bf16.
    #[new]
    fn new(
        py: Python<'_>,
        store: &PyStore,
        offset: u64,
        pages: u64,
        shape: (u32, u32, u32, bool),
    ) -> PyResult<Self> {
        let open = store.get()?;
        let (kv_heads, head_elements, page_tokens, is_bf16) = shape;
        let shape = KvShape {
            kv_heads,
            head_elements,
            page_tokens,
            is_bf16,
        };
        let opened = wait::of(py, move || {
            let pages = nvme_models::KvStore::new(&open, offset, pages, shape)?;
            let load =
                |gpu| Ok::<_, Error>((PagedKernels::load(gpu)?, SelectionKernels::load(gpu)?));
            let by_gpu = open.gpu().map(load).transpose()?;
            Ok(Arc::new(OpenPages { pages, by_gpu }))
        })?;
        let flights = Arc::default();
        store.add_table(&flights);
        Ok(Self {
            opened: OnStore::new(store, "cache of keys and values", opened),
            flights,
        })
    }

    /// Computes attention by threads of the host. `tables` are numbers of pages and how many of them count,
    /// `tail` pages in memory and how many tokens of each count.
    #[pyo3(signature = (given, queries, tables, scale, out, tail=None))]
    fn attend(
        &self,
        given: Given,
        queries: Py<PyView>,
        tables: (Py<PyView>, Py<PyView>),
        scale: f32,
        out: Py<PyView>,
        tail: Option<(Py<PyView>, Py<PyView>)>,
    ) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let mut call = HostCall::default();
        let queries = call.input::<f32>(queries, "queries")?;
        let table = call.input::<i32>(tables.0, "table")?;
        let counts = call.input::<i32>(tables.1, "counts")?;
        let out = call.output::<f32>(out, "out")?;
        let tail = match tail {
            None => None,
            Some((pages, counts)) => Some((
                call.input::<u8>(pages, "tail")?,
                call.input::<i32>(counts, "tail_counts")?,
            )),
        };
        call.start(move || {
            let (tail, tail_counts) = match &tail {
                // SAFETY: inside of the call, once each, as all below.
                Some((pages, counts)) => unsafe { (pages.get(), counts.get()) },
                None => (&[][..], &[][..]),
            };
            let work = HostInput {
                opened: &opened,
                given,
                // SAFETY: as above.
                queries: unsafe { queries.get() },
                // SAFETY: as above.
                table: unsafe { table.get() },
                // SAFETY: as above.
                counts: unsafe { counts.get() },
                tail,
                tail_counts,
            };
            // SAFETY: as above.
            work.attend(scale, unsafe { out.get() })
        })
    }

    /// Returns the number of bytes of memory of the GPU that attention needs meanwhile.
    fn workspace_bytes(&self, given: Given) -> PyResult<u64> {
        let opened = self.opened.get()?;
        Ok(PagedKernels::workspace_bytes(
            &opened.pages,
            &opened.queries(given),
        ))
    }

    /// Puts attention into `stream` of the store's GPU. The addresses of queries, table, counts, tail and its counts,
    /// results and a workspace.
    #[pyo3(signature = (given, addresses, scale, stream, buffers=None))]
    fn attend_on_gpu(
        &self,
        py: Python<'_>,
        given: Given,
        addresses: (u64, u64, u64, u64, u64, u64, u64),
        scale: f32,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let queries = addressed(&opened, given, addresses, scale);
        let heads = u64::from(given.0) * u64::from(opened.pages.shape().kv_heads);
        let store = Arc::clone(opened.pages.store());
        let what = ("attention", heads, store.len());
        self.flights
            .launch(py, store, what, buffers, FailureReport::Table, || {
                let (attending, _) = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
                // SAFETY: Python keeps the tensors in the order of the stream, or until the reads have ended.
                unsafe { attending.attend(&opened.pages, &queries, stream) }
            })
    }

    /// Selects pages by threads of the host: for each head of keys, the numbers of pages and their count.
    fn choose(
        &self,
        given: Given,
        queries: Py<PyView>,
        tables: (Py<PyView>, Py<PyView>),
        summaries: &PySummaries,
        kept: Kept,
        out: (Py<PyView>, Py<PyView>),
    ) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let summaries = summaries.of_host()?;
        let mut call = HostCall::default();
        let queries = call.input::<f32>(queries, "queries")?;
        let table = call.input::<i32>(tables.0, "table")?;
        let counts = call.input::<i32>(tables.1, "counts")?;
        let chosen = call.output::<i32>(out.0, "the chosen pages")?;
        let chosen_counts = call.output::<i32>(out.1, "their counts")?;
        call.start(move || {
            // SAFETY: inside of the call, once each.
            let work = unsafe {
                HostInput {
                    opened: &opened,
                    given,
                    queries: queries.get(),
                    table: table.get(),
                    counts: counts.get(),
                    tail: &[],
                    tail_counts: &[],
                }
            };
            // SAFETY: as above.
            let (chosen, counts) = unsafe { (chosen.get(), chosen_counts.get()) };
            let summaries = lock(&summaries);
            work.choose(&summaries, keep(kept), chosen, counts)
        })
    }

    /// Returns the words of 32 bits of memory of the GPU that a choice needs, and where in them the chosen
    /// pages and their counts lie.
    fn choice_words(&self, given: Given, kept: Kept) -> PyResult<(u64, u64, u64)> {
        let opened = self.opened.get()?;
        let queries = opened.queries(given);
        let rows = u64::from(given.0) * u64::from(opened.pages.shape().kv_heads);
        let words = SelectionKernels::workspace_bytes(&opened.pages, &queries, keep(kept)) / 4;
        let counts = words.saturating_sub(rows);
        Ok((words, rows * u64::from(given.2), counts))
    }

    /// Puts the choice of pages into `stream`. The addresses of queries, table, counts and a workspace.
    fn choose_on_gpu(
        &self,
        py: Python<'_>,
        given: Given,
        addresses: (u64, u64, u64, u64),
        summaries: &PySummaries,
        kept: Kept,
        stream: u64,
    ) -> PyResult<()> {
        let opened = self.opened.get()?;
        let summaries = summaries.of_gpu()?;
        let (queries, table, counts, workspace) = addresses;
        let named = (queries, table, counts, 0, 0, queries, workspace);
        let queries = addressed(&opened, given, named, 1.0);
        py.detach(|| {
            let (_, choosing) = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
            let choice = PageSelection {
                summaries,
                keep: keep(kept),
                workspace,
            };
            // SAFETY: as for attention; Python keeps the summaries.
            unsafe { choosing.choose(&opened.pages, &queries, &choice, stream) }
        })
        .or_raise()?;
        Ok(())
    }

    /// Waits for attention on the GPU that was launched before, and raises the first failure that was not raised yet.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.opened.get()?;
        self.flights.wait(py, timeout)
    }

    fn close(&self) {
        self.opened.close();
    }
}

fn addressed(
    opened: &OpenPages,
    given: Given,
    addresses: (u64, u64, u64, u64, u64, u64, u64),
    scale: f32,
) -> PagedQueries {
    let (queries, pages, counts, tail, tail_counts, y, workspace) = addresses;
    PagedQueries {
        queries,
        pages,
        counts,
        tail,
        tail_counts,
        y,
        workspace,
        scale,
        ..opened.queries(given)
    }
}

/// Input of a computation by threads of the host.
struct HostInput<'a> {
    opened: &'a OpenPages,
    given: Given,
    queries: &'a [f32],
    table: &'a [i32],
    counts: &'a [i32],
    tail: &'a [u8],
    tail_counts: &'a [i32],
}

impl HostInput<'_> {
    /// # Errors
    /// For lengths that do not fit.
    fn check(&self) -> nvme_host::Result<()> {
        let (sequences, heads, most_pages, per_head) = self.given;
        let shape = self.opened.pages.shape();
        let lists = sequences as usize * if per_head { shape.kv_heads as usize } else { 1 };
        let numbers = heads as usize * shape.head_elements as usize * sequences as usize;
        let fits = self.queries.len() == numbers
            && self.table.len() == lists * most_pages as usize
            && self.counts.len() == lists
            && heads.is_multiple_of(shape.kv_heads)
            && heads > 0;
        if !fits {
            return Err(Error::usage(
                "queries and tables whose lengths do not fit",
                "give a query for each head, a multiple of those of keys, and a table for each",
            ));
        }
        whole("counts", self.counts, most_pages)?;
        whole("tail_counts", self.tail_counts, shape.page_tokens)?;
        Ok(())
    }

    /// Returns the queries that share head `kv_head` of the keys of `sequence`, and their pages.
    fn head(&self, sequence: usize, kv_head: usize) -> (&[f32], Vec<u32>) {
        let (_, heads, most_pages, per_head) = self.given;
        let shape = self.opened.pages.shape();
        let group = (heads / shape.kv_heads) as usize * shape.head_elements as usize;
        let row = sequence * shape.kv_heads as usize + kv_head;
        let queries = &self.queries[row * group..][..group];
        let list = if per_head { row } else { sequence };
        let table = &self.table[list * most_pages as usize..][..most_pages as usize];
        let count = (self.counts[list].cast_unsigned()).min(most_pages);
        let pages = table[..count as usize]
            .iter()
            .map(|page| page.cast_unsigned());
        (queries, pages.collect())
    }

    /// Computes the attention of each head; results of heads whose pages could not all be read are
    /// NaN.
    ///
    /// # Errors
    /// The first of these.
    fn attend(&self, scale: f32, out: &mut [f32]) -> nvme_host::Result<()> {
        self.check()?;
        let (sequences, heads, ..) = self.given;
        let shape = self.opened.pages.shape();
        let elements = shape.head_elements as usize;
        let group = (heads / shape.kv_heads) as usize * elements;
        let page = shape.page_bytes() as usize;
        let tails = if self.tail.is_empty() {
            0
        } else {
            sequences as usize
        };
        let fits = out.len() == self.queries.len()
            && self.tail.len() == tails * page
            && self.tail_counts.len() == tails;
        if !fits {
            let cause = "results or tails whose lengths do not fit";
            return Err(Error::usage(
                cause,
                "give as many as queries, and as sequences",
            ));
        }
        let failed = Mutex::new(None);
        let one = |row: usize, out: &mut [f32]| {
            let (sequence, kv_head) =
                (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
            let (queries, ids) = self.head(sequence, kv_head);
            let queries: Vec<Vec<f32>> = queries.chunks(elements).map(<[f32]>::to_vec).collect();
            let tail = match self.tail_counts.get(sequence) {
                Some(count) => (&self.tail[sequence * page..][..page], count.cast_unsigned()),
                None => (&[][..], 0),
            };
            let pages = &self.opened.pages;
            match pages.attend(&queries, &ids, kv_head as u32, tail, scale) {
                Ok(found) => {
                    let places = out.chunks_mut(elements).zip(found);
                    places.for_each(|(place, found)| place.copy_from_slice(&found));
                }
                Err(error) => {
                    out.fill(f32::NAN);
                    let mut failed = lock(&failed);
                    if failed.as_ref().is_none_or(|(before, _)| row < *before) {
                        *failed = Some((row, error));
                    }
                }
            }
        };
        super::threads::each_chunk(out, group, one);
        let failed = lock(&failed).take();
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }

    /// # Errors
    /// For lengths that do not fit, and those of [`PageLimits::check`].
    fn choose(
        &self,
        summaries: &[u8],
        keep: PageLimits,
        chosen: &mut [i32],
        counts: &mut [i32],
    ) -> nvme_host::Result<()> {
        self.check()?;
        let (sequences, _, most_pages, _) = self.given;
        let shape = self.opened.pages.shape();
        let rows = (sequences * shape.kv_heads) as usize;
        let most = keep.pages.min(most_pages) as usize;
        if chosen.len() != rows * most || counts.len() != rows {
            let cause = "places for chosen pages whose lengths do not fit";
            return Err(Error::usage(cause, "give a place for each page of a head"));
        }
        for row in 0..rows {
            let (kv_head, sequence) =
                (row % shape.kv_heads as usize, row / shape.kv_heads as usize);
            let (queries, ids) = self.head(sequence, kv_head);
            let queries: Vec<&[f32]> = queries.chunks(shape.head_elements as usize).collect();
            let pages = &self.opened.pages;
            let found = pages.choose(&queries, &ids, kv_head as u32, summaries, keep)?;
            counts[row] = found.len() as i32;
            let places = chosen[row * most..][..most].iter_mut();
            let numbers = found.iter().map(|page| page.cast_signed());
            places
                .zip(numbers)
                .for_each(|(place, number)| *place = number);
        }
        Ok(())
    }
}

/// Summaries of the pages, in memory of the host or of the store's GPU. No page has one at first.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Summaries")]
pub struct PySummaries {
    opened: OnStore<Arc<OpenPages>>,
    memory: InputPlace,
}

enum InputPlace {
    Host(Arc<Mutex<Vec<u8>>>),
    Gpu(OfProcess<Arc<choosing::PageSummaries>>),
}

impl PySummaries {
    fn of_host(&self) -> PyResult<Arc<Mutex<Vec<u8>>>> {
        match &self.memory {
            InputPlace::Host(bytes) => Ok(Arc::clone(bytes)),
            InputPlace::Gpu(_) => Err(ExceptionParts::usage(
                "the summaries lie in GPU memory, and the queries in host memory",
                "use pages.summaries(device='cpu'), or queries on the GPU",
            )
            .into()),
        }
    }

    fn of_gpu(&self) -> PyResult<&choosing::PageSummaries> {
        match &self.memory {
            InputPlace::Gpu(summaries) => Ok(summaries.get()?),
            InputPlace::Host(_) => Err(ExceptionParts::usage(
                "the summaries lie in host memory, and the queries on a GPU",
                "use pages.summaries() of a store with a GPU, or queries in memory of the host",
            )
            .into()),
        }
    }
}

#[pymethods]
impl PySummaries {
    #[new]
    fn new(py: Python<'_>, store: &PyStore, pages: &PyKvPages, on_gpu: bool) -> PyResult<Self> {
        let opened = pages.opened.get()?;
        let memory = match on_gpu {
            true => {
                let gpu = store.gpu()?;
                let of_opened = Arc::clone(&opened);
                let made = wait::of(py, move || {
                    Ok(Arc::new(choosing::PageSummaries::new(
                        &gpu,
                        &of_opened.pages,
                    )?))
                })?;
                InputPlace::Gpu(OfProcess::new("set of summaries", made))
            }
            false => {
                let shape = opened.pages.shape();
                let count = opened.pages.table().rows();
                let bytes = count.saturating_mul(shape.summary_bytes());
                let mut memory = Vec::new();
                let refused =
                    |_| pyo3::exceptions::PyMemoryError::new_err(format!("{bytes} bytes"));
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                memory.try_reserve_exact(bytes).map_err(refused)?;
                py.detach(|| memory.resize(bytes, 0xFF));
                InputPlace::Host(Arc::new(Mutex::new(memory)))
            }
        };
        Ok(Self {
            opened: OnStore::new(store, "cache of keys and values", opened),
            memory,
        })
    }

    /// Makes those of `count` pages from `first` on, which are read from the store.
    fn read(&self, py: Python<'_>, first: u64, count: u64) -> PyResult<()> {
        let opened = self.opened.get()?;
        match &self.memory {
            InputPlace::Gpu(summaries) => {
                let summaries = Arc::clone(summaries.get()?);
                wait::of(py, move || {
                    Ok(summaries.read(&opened.pages, first, count)?)
                })
            }
            InputPlace::Host(bytes) => {
                let bytes = Arc::clone(bytes);
                wait::of(py, move || {
                    let found = opened.pages.summaries(first, count)?;
                    let at = (first * opened.pages.shape().summary_bytes()) as usize;
                    lock(&bytes)[at..][..found.len()].copy_from_slice(&found);
                    Ok(())
                })
            }
        }
    }

    /// Computes the summaries of the pages `ids`, whose bytes are given.
    fn update(&self, pages: Py<PyView>, ids: Py<PyView>) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let bytes = self.of_host()?;
        let mut call = HostCall::default();
        let pages = call.input::<u8>(pages, "pages")?;
        let ids = call.input::<i64>(ids, "ids")?;
        call.start(move || {
            // SAFETY: inside of the call.
            let (pages, ids) = unsafe { (pages.get(), ids.get()) };
            let shape = opened.pages.shape();
            let each = shape.summary_bytes() as usize;
            let mut bytes = lock(&bytes);
            let count = bytes.len() / each;
            let is_there = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < count);
            if let Some(id) = ids.iter().find(|id| !is_there(id)) {
                let cause = format!("there is no page {id}");
                return Err(Error::usage(
                    cause,
                    format!("use 0 to {}", count.saturating_sub(1)),
                ));
            }
            for (page, id) in pages.chunks_exact(shape.page_bytes() as usize).zip(ids) {
                let at = usize::try_from(*id)
                    .ok()
                    .and_then(|id| id.checked_mul(each));
                let place = at.and_then(|at| bytes.get_mut(at..)?.get_mut(..each));
                if let Some(place) = place {
                    place.copy_from_slice(&shape.summary(page));
                }
            }
            Ok(())
        })
    }

    /// Puts the making of those of `count` pages into `stream`: their bytes at `pages`, their numbers at `ids`.
    fn update_on_gpu(
        &self,
        py: Python<'_>,
        pages: u64,
        ids: u64,
        count: u64,
        stream: u64,
    ) -> PyResult<()> {
        let opened = self.opened.get()?;
        let summaries = self.of_gpu()?;
        py.detach(|| {
            let (_, choosing) = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
            // SAFETY: Python keeps the tensors in the order of the stream, and this object.
            unsafe { choosing.summarise(&opened.pages, summaries, (pages, ids, count), stream) }
        })
        .or_raise()?;
        Ok(())
    }

    /// Returns all of them, page after page.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.opened.get()?;
        let bytes = match &self.memory {
            InputPlace::Host(bytes) => {
                let bytes = Arc::clone(bytes);
                wait::of(py, move || Ok(lock(&bytes).clone()))?
            }
            InputPlace::Gpu(summaries) => {
                let summaries = Arc::clone(summaries.get()?);
                wait::of(py, move || Ok(summaries.bytes()?))?
            }
        };
        Ok(PyBytes::new(py, &bytes))
    }
}
