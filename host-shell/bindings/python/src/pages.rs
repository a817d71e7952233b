//! Pages of keys and values by key: `nvme_kv` for Python. Reads and writes run on threads of the pool.
// UNSAFETY: threads of the pool use memory of views by address; the views are kept until they have ended.
#![allow(unsafe_code)]

use crate::error::ExceptionParts;
use crate::left;
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{Open, PyStore};
use crate::view::{MemoryPiece, PyView, check_apart};
use crate::wait;
use nvme_host::ProcessMark;
use nvme_host::StoreOptions;
use nvme_host::cuda::PageExtent;
use nvme_host::lock::lock;
use nvme_kv::on_gpu::{self, GpuPages, GpuWay, OwnWay, PagePieces};
use nvme_kv::{AreaRequest, ModelFingerprint, PageKey, StoreOutcome};
use nvme_kv_server::{AreaPins, OpenedArea, SharedPageStore, SharedRequest};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use serde_json::json;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time for an owner's answer beyond the drive's: a request may wait for those of other processes.
const OWNER_TIME: Duration = Duration::from_secs(10);

/// The pages of an area, and its way to memory of a GPU.
#[derive(Clone)]
struct AreaPages {
    area: OpenedArea<Open>,
    way: Arc<GpuWay>,
}

impl AreaPages {
    fn new(area: OpenedArea<Open>) -> Self {
        let way = Arc::new(GpuWay::new(left::keep_work));
        Self { area, way }
    }

    /// Returns the area and its way to memory of a GPU.
    ///
    /// # Errors
    /// For a shared area.
    fn own(&self) -> Result<OwnWay, ExceptionParts> {
        match &self.area {
            OpenedArea::Own(pages) => Ok((Arc::clone(pages), Arc::clone(&self.way))),
            OpenedArea::Shared(_) => Err(ExceptionParts::usage(
                "a page lies in memory of a GPU, and the area is shared",
                "use memory of the host here",
            )),
        }
    }

    /// Returns whether the GPU moves pages, and why.
    fn moved_by_gpu(&self) -> (bool, String) {
        match &self.area {
            OpenedArea::Own(pages) => on_gpu::way_of(pages.medium()),
            OpenedArea::Shared(_) => (
                false,
                "the area is shared: its owner moves pages".to_owned(),
            ),
        }
    }
}

/// Returns the number of an outcome, as Python names it.
fn number_of(outcome: StoreOutcome) -> usize {
    match outcome {
        StoreOutcome::Stored => 0,
        StoreOutcome::Present => 1,
        StoreOutcome::InProgress => 2,
        StoreOutcome::NoRoom => 3,
    }
}

type GpuViews = GpuPages<Arc<Vec<Py<PyView>>>>;

/// Pages of a call in memory of a GPU, in pieces of (address, bytes).
#[derive(FromPyObject)]
enum GivenPages {
    /// One page.
    Page(Vec<(u64, u64)>),
    /// Pages that are blocks: the distance of the blocks of each tensor with the pieces of block 0, the numbers of all
    /// blocks, and how many of them each page has.
    Blocks(BlockPart),
}

type BlockPart = (Vec<(u64, Vec<(u64, u64)>)>, Vec<u64>, Vec<usize>);

/// Returns the pieces of all pages.
fn pieces_of(parts: Vec<GivenPages>) -> Result<PagePieces, ExceptionParts> {
    let mut pages = PagePieces::default();
    let extent = |(address, bytes)| PageExtent { address, bytes };
    let is_over =
        || ExceptionParts::usage("a block lies past the end of memory", "pass its number");
    for part in parts {
        let (tensors, blocks, counts) = match part {
            GivenPages::Page(pieces) => {
                pages.push(pieces.into_iter().map(extent));
                continue;
            }
            GivenPages::Blocks(blocks) => blocks,
        };
        let most = blocks.iter().max().copied().unwrap_or(0);
        for (step, pieces) in &tensors {
            let last = step.checked_mul(most).ok_or_else(is_over)?;
            let ends = pieces
                .iter()
                .map(|(address, bytes)| address.checked_add(*bytes)?.checked_add(last));
            if ends.into_iter().any(|end| end.is_none()) {
                return Err(is_over());
            }
        }
        let mut blocks = &blocks[..];
        for count in counts {
            let (some, rest) = blocks.split_at_checked(count).ok_or_else(is_over)?;
            blocks = rest;
            pages.push(some.iter().flat_map(|block| {
                tensors.iter().flat_map(move |(step, pieces)| {
                    let from = step * block;
                    let pieces = pieces.iter();
                    pieces.map(move |(address, bytes)| extent((address + from, *bytes)))
                })
            }));
        }
    }
    Ok(pages)
}

/// The texts of a fingerprint, in the order of its fields, without its two numbers.
type Texts = (String, String, String, String, String, String, String);

fn keys_of(keys: &[PyBackedBytes]) -> Result<Vec<PageKey>, ExceptionParts> {
    let one = |key: &PyBackedBytes| {
        let bytes = (**key).try_into().map_err(|_| {
            let cause = format!("a key has {} bytes, not {}", key.len(), PageKey::BYTES);
            ExceptionParts::usage(cause, "pass keys that PageStore.keys made")
        })?;
        Ok(PageKey::of_bytes(bytes))
    };
    keys.iter().map(one).collect()
}

/// The outcome of each page of an operation: a number, or the error.
#[pyclass(frozen, module = "nvme_gpu._native", name = "PageOutcomes")]
pub struct PyPageOutcomes(Arc<Mutex<Vec<Result<usize, ExceptionParts>>>>);

#[pymethods]
impl PyPageOutcomes {
    /// Returns, for each page, its number or the exception; nothing before the operation has ended.
    fn all(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let outcomes = lock(&self.0).clone();
        let one = |outcome| match outcome {
            Ok(number) => Ok(usize::into_pyobject(number, py)?.into_any().unbind()),
            Err(parts) => Ok(ExceptionParts::raise(parts, py).into_value(py).into_any()),
        };
        outcomes.into_iter().map(one).collect()
    }
}

/// Pages that stay in their places.
#[pyclass(frozen, module = "nvme_gpu._native", name = "PagePins")]
pub struct PyPagePins {
    process: ProcessMark,
    count: usize,
    pins: Mutex<Option<AreaPins<Open>>>,
}

#[pymethods]
impl PyPagePins {
    #[getter]
    fn count(&self) -> usize {
        self.count
    }

    fn release(&self) {
        let pins = lock(&self.pins).take();
        wait::drop_elsewhere(self.process, pins);
    }
}

impl Drop for PyPagePins {
    fn drop(&mut self) {
        self.release();
    }
}

/// An area of pages on a store.
#[pyclass(frozen, module = "nvme_gpu._native", name = "PageStore")]
pub struct PyPageStore {
    pages: OnStore<AreaPages>,
    formatted: Option<String>,
}

fn fingerprint_of(texts: Texts, (block_tokens, group): (u32, u32)) -> ModelFingerprint {
    let (model, revision, dtype, layout, parallel_rank, hash_algorithm, seed) = texts;
    ModelFingerprint {
        model,
        revision,
        dtype,
        layout,
        block_tokens,
        parallel_rank,
        group,
        hash_algorithm,
        seed,
    }
}

#[pymethods]
impl PyPageStore {
    /// Opens the area of `bytes` bytes from byte `offset` on, for pages of up to `page_bytes` bytes. `create` is
    /// "auto", "never" or "always".
    #[new]
    fn new(
        py: Python<'_>,
        store: &PyStore,
        area: (u64, Option<u64>, u32),
        texts: Texts,
        numbers: (u32, u32),
        create: String,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let (offset, bytes, page_bytes) = area;
        let request = AreaRequest {
            offset,
            bytes: bytes.unwrap_or_else(|| open.len().saturating_sub(offset)),
            page_bytes,
            fingerprint: fingerprint_of(texts, numbers),
        };
        let (pages, formatted) = wait::of(py, move || match create.as_str() {
            "never" => Ok((nvme_kv::PageStore::open(open, &request)?, None)),
            "always" => {
                let cause = "create is 'always'".to_owned();
                Ok((nvme_kv::PageStore::format(open, &request)?, Some(cause)))
            }
            _ => {
                let (pages, cause) = nvme_kv::PageStore::open_or_format(open, &request)?;
                Ok((pages, cause.map(|cause| cause.to_string())))
            }
        })?;
        Ok(Self {
            pages: OnStore::new(
                store,
                "page store",
                AreaPages::new(OpenedArea::Own(Arc::new(pages))),
            ),
            formatted,
        })
    }

    /// Opens an area that processes share, as its owner, which opens `device`, or as a client of the owner. `create` is
    /// "auto" or "never". `options` are `allow_write`, `queues`, `depth` and `timeout_ms` of the device.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "options of Python")]
    fn shared(
        py: Python<'_>,
        device: String,
        area: (u64, Option<u64>, u32),
        texts: Texts,
        numbers: (u32, u32),
        create: String,
        directory: Option<PathBuf>,
        options: (bool, u32, u32, u64),
    ) -> PyResult<Self> {
        let (offset, bytes, page_bytes) = area;
        let (allow_write, queues, depth, timeout_ms) = options;
        let timeout = Duration::from_millis(timeout_ms);
        let options = StoreOptions {
            allow_write,
            queues,
            depth,
            timeout,
            ..StoreOptions::default()
        };
        let request = SharedRequest {
            device: device.clone(),
            offset,
            bytes,
            page_bytes,
            fingerprint: fingerprint_of(texts, numbers),
            may_format: create == "auto",
            directory,
            timeout: timeout.saturating_add(OWNER_TIME),
        };
        let open = move || Ok(Arc::new(nvme_host::Store::open(&device, &options)?));
        let pages = wait::of(py, move || Ok(SharedPageStore::open(request, open)?))?;
        Ok(Self {
            formatted: pages.formatted(),
            pages: OnStore::alone(
                "page store",
                AreaPages::new(OpenedArea::Shared(Arc::new(pages))),
            ),
        })
    }

    fn close(&self) {
        self.pages.close();
    }

    /// Returns why the area was formatted when it was opened; None if it was not.
    #[getter]
    fn formatted(&self) -> Option<&str> {
        self.formatted.as_deref()
    }

    /// Returns the keys of part `part` of the blocks that the caller knows by `hashes`.
    fn keys(&self, hashes: Vec<PyBackedBytes>, part: u32) -> PyResult<Vec<Vec<u8>>> {
        let pages = self.pages.get()?;
        let key = |hash: &PyBackedBytes| pages.area.key(hash, part).as_bytes().to_vec();
        Ok(hashes.iter().map(key).collect())
    }

    fn contains(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        let (pages, keys) = (self.pages.get()?, keys_of(&keys)?);
        Ok(py.detach(|| {
            let lengths = pages.area.lengths(&keys).into_iter();
            lengths.map(|length| length.is_some()).collect()
        }))
    }

    fn lengths(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<Vec<Option<u32>>> {
        let (pages, keys) = (self.pages.get()?, keys_of(&keys)?);
        Ok(py.detach(|| pages.area.lengths(&keys)))
    }

    fn touch(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<()> {
        let (pages, keys) = (self.pages.get()?, keys_of(&keys)?);
        py.detach(|| pages.area.touch(&keys));
        Ok(())
    }

    fn pin_prefix(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<PyPagePins> {
        let (pages, keys) = (self.pages.get()?, keys_of(&keys)?);
        let pins = py.detach(|| pages.area.pin_prefix(&keys));
        Ok(PyPagePins {
            process: ProcessMark::here(),
            count: pins.len(),
            pins: Mutex::new(Some(pins)),
        })
    }

    /// Stores the page of each key; numbers are those of [`OUTCOMES`].
    fn store(
        &self,
        keys: Vec<PyBackedBytes>,
        views: Vec<Py<PyView>>,
    ) -> PyResult<(PyOperation, PyPageOutcomes)> {
        let (pages, keys, pieces) = self.given(&keys, &views, false)?;
        start(views, move || {
            // SAFETY: the views are kept until this ended.
            let payloads = pieces.iter().map(|piece| unsafe { piece.slice() });
            let given: Vec<_> = keys.iter().copied().zip(payloads).collect();
            let stored = pages.area.store_all(&given).into_iter();
            let one = |outcome: nvme_kv::Result<StoreOutcome>| Ok(number_of(outcome?));
            stored.map(one).collect()
        })
    }

    /// Loads the page of each key; numbers are lengths in bytes.
    fn load(
        &self,
        keys: Vec<PyBackedBytes>,
        views: Vec<Py<PyView>>,
    ) -> PyResult<(PyOperation, PyPageOutcomes)> {
        let (pages, keys, pieces) = self.given(&keys, &views, true)?;
        check_apart(&pieces)?;
        start(views, move || {
            // SAFETY: the views are kept until this ended, and share no byte.
            let buffers = pieces.iter().map(|piece| unsafe { piece.slice_mut() });
            let mut given: Vec<_> = keys.iter().copied().zip(buffers).collect();
            let loaded = pages.area.load_all(&mut given).into_iter();
            loaded.map(|length| Ok(length?)).collect()
        })
    }

    /// Stores pages that lie in memory of a GPU, in pieces of (address, bytes); `views` keep the memory.
    fn store_on_gpu(
        &self,
        py: Python<'_>,
        keys: Vec<PyBackedBytes>,
        views: Vec<Py<PyView>>,
        pieces: Vec<GivenPages>,
        stream: u64,
    ) -> PyResult<(PyOperation, PyPageOutcomes)> {
        let (own, keys, pages) = self.given_on_gpu(py, &keys, &views, pieces)?;
        let job = py.detach(|| on_gpu::store(own, keys, pages, stream));
        let job = job.map_err(|error| ExceptionParts::of(&error))?;
        start(views, move || {
            job().into_iter().map(|one| Ok(number_of(one?))).collect()
        })
    }

    /// Loads pages into memory of a GPU, as [`store_on_gpu`](Self::store_on_gpu).
    fn load_on_gpu(
        &self,
        py: Python<'_>,
        keys: Vec<PyBackedBytes>,
        views: Vec<Py<PyView>>,
        pieces: Vec<GivenPages>,
        stream: u64,
    ) -> PyResult<(PyOperation, PyPageOutcomes)> {
        let (own, keys, pages) = self.given_on_gpu(py, &keys, &views, pieces)?;
        let all: Vec<MemoryPiece> = pages
            .pieces()
            .extents()
            .iter()
            .map(|piece| MemoryPiece {
                address: piece.address,
                bytes: piece.bytes as usize,
            })
            .collect();
        check_apart(&all)?;
        let job = py.detach(|| on_gpu::load(own, keys, pages, stream));
        let job = job.map_err(|error| ExceptionParts::of(&error))?;
        start(views, move || {
            job().into_iter().map(|one| Ok(one?)).collect()
        })
    }

    /// Returns whether the GPU moves pages in its memory, and why.
    fn way(&self) -> PyResult<(bool, String)> {
        Ok(self.pages.get()?.moved_by_gpu())
    }

    fn remove(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<usize> {
        let (pages, keys) = (self.pages.get()?, keys_of(&keys)?);
        wait::of(py, move || Ok(pages.area.remove(&keys)?))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let pages = self.pages.get()?;
        wait::of(py, move || Ok(pages.area.clear()?))
    }

    fn checkpoint(&self, py: Python<'_>) -> PyResult<()> {
        let pages = self.pages.get()?;
        wait::of(py, move || Ok(pages.area.checkpoint()?))
    }

    /// Returns the counts, and what opening found, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let pages = self.pages.get()?;
        let by_gpu = pages.way.moved();
        let (stats, found, role) = wait::of(py, move || {
            Ok((
                pages.area.stats()?,
                pages.area.area()?.1,
                pages.area.role()?,
            ))
        })?;
        let counts = json!({
            "pages": stats.pages,
            "capacity": stats.slots,
            "loaded": stats.loaded,
            "missed": stats.missed,
            "stored": stats.stored,
            "evicted": stats.evicted,
            "lost": stats.lost,
            "failed": stats.failed,
            "checkpoints": stats.checkpoints,
            "loaded_by_gpu": by_gpu.0,
            "stored_by_gpu": by_gpu.1,
            "recovered_pages": found.pages,
            "recovered_log_blocks": found.log_blocks,
            "damaged_checkpoints": u64::from(found.fell_back),
            "damaged_log_blocks": found.lost_blocks,
            "owner": u64::from(role.0),
            "epoch": role.1,
            "unanswered": role.2,
        });
        Ok(counts.to_string())
    }

    /// Returns the bytes of the area that its journal and its pages take, and the most bytes of a page.
    #[getter]
    fn sizes(&self, py: Python<'_>) -> PyResult<(u64, u32)> {
        let pages = self.pages.get()?;
        let (layout, _) = wait::of(py, move || Ok(pages.area.area()?))?;
        Ok((layout.end(), layout.page_bytes))
    }
}

impl PyPageStore {
    fn given(
        &self,
        keys: &[PyBackedBytes],
        views: &[Py<PyView>],
        is_written: bool,
    ) -> PyResult<(AreaPages, Vec<PageKey>, Vec<MemoryPiece>)> {
        if keys.len() != views.len() {
            let cause = format!("{} keys do not match {} buffers", keys.len(), views.len());
            return Err(PyValueError::new_err(cause));
        }
        let piece = |view: &Py<PyView>| view.get().of_host("a page", is_written);
        let pieces = views.iter().map(piece).collect::<Result<_, _>>()?;
        Ok((self.pages.get()?, keys_of(keys)?, pieces))
    }

    fn given_on_gpu(
        &self,
        py: Python<'_>,
        keys: &[PyBackedBytes],
        views: &[Py<PyView>],
        pieces: Vec<GivenPages>,
    ) -> PyResult<(OwnWay, Vec<PageKey>, GpuViews)> {
        let pieces = pieces_of(pieces)?;
        if keys.len() != pieces.len() {
            let cause = format!("{} keys do not match {} buffers", keys.len(), pieces.len());
            return Err(PyValueError::new_err(cause));
        }
        let views = Arc::new(views.iter().map(|view| view.clone_ref(py)).collect());
        // SAFETY: the views keep the memory until the operation has ended, or the process has.
        let pages = unsafe { GpuPages::new(pieces, views) };
        Ok((self.pages.get()?.own()?, keys_of(keys)?, pages))
    }
}

/// Runs `work` on a thread of the pool, which keeps `views` until it ended.
fn start(
    views: Vec<Py<PyView>>,
    work: impl FnOnce() -> Vec<Result<usize, ExceptionParts>> + Send + 'static,
) -> PyResult<(PyOperation, PyPageOutcomes)> {
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let of_work = Arc::clone(&outcomes);
    let operation = PyOperation::start(views, move || {
        *lock(&of_work) = work();
        Ok(())
    })?;
    Ok((operation, PyPageOutcomes(outcomes)))
}
