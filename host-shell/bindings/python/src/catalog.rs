//! Long operations that write to a store or verify its content: imports of tensor files, and indexes of
//! vectors.

use crate::error::ExceptionParts;
use crate::pool::PoolJob;
use crate::store::PyStore;
use crate::wait;
use nvme_host::files::{check_apart, replace};
use nvme_host::lock::lock;
use nvme_host::{Catalog, Manifest};
use pyo3::prelude::*;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// State of the work, shared by its thread and Python.
#[derive(Default)]
pub struct ImportState {
    done: AtomicU64,
    total: AtomicU64,
    is_cancelled: AtomicBool,
    found: Mutex<Option<String>>,
}

impl ImportState {
    /// Records the progress; `Break` when the work was cancelled.
    pub fn progress(&self, done: u64, total: u64) -> ControlFlow<()> {
        self.total.store(total, Ordering::Relaxed);
        self.done.store(done, Ordering::Relaxed);
        match self.is_cancelled.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

/// An import, or a verification of one, on a thread of the pool.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Import")]
pub struct PyImport {
    job: Arc<PoolJob>,
    shared: Arc<ImportState>,
}

impl PyImport {
    /// Runs `work`, and keeps its result as JSON.
    pub fn start<T: Serialize>(
        work: impl FnOnce(&ImportState) -> nvme_host::Result<T> + Send + 'static,
    ) -> PyResult<Self> {
        let shared = Arc::new(ImportState::default());
        let of_job = Arc::clone(&shared);
        let job = PoolJob::start(move || {
            let found = serde_json::to_string(&work(&of_job)?);
            let found =
                found.map_err(|error| ExceptionParts::usage(error.to_string(), "report it"))?;
            *lock(&of_job.found) = Some(found);
            Ok(())
        })?;
        Ok(Self { job, shared })
    }
}

#[pymethods]
impl PyImport {
    /// Writes the file at `path` to the store from byte `offset` on.
    #[staticmethod]
    fn of_file(store: &PyStore, path: PathBuf, offset: u64, verify: bool) -> PyResult<Self> {
        let store = store.get()?;
        Self::start(move |shared| {
            Catalog::import(&store, &path, offset, verify, &mut |done, total| {
                shared.progress(done, total)
            })
        })
    }

    /// Hashes the chunks of the file at `path`, and writes them to the file at `out`.
    #[staticmethod]
    fn of_manifest(path: PathBuf, out: PathBuf) -> PyResult<Self> {
        Self::start(move |shared| {
            check_apart(&out, &[path.to_string_lossy()])?;
            let made = Manifest::of_file(&path, &mut |done, total| shared.progress(done, total))?;
            replace(&out, made.to_json().as_bytes())?;
            Ok(made.bytes())
        })
    }

    /// Looks at a file that lies in the store from byte `offset` on, and has `nbytes` bytes if that is known.
    #[staticmethod]
    fn of_store(store: &PyStore, offset: u64, nbytes: Option<u64>) -> PyResult<Self> {
        let store = store.get()?;
        Self::start(move |_| match nbytes {
            None => Catalog::of_store(&store, offset),
            Some(nbytes) => Catalog::of_range(&store, offset, nbytes),
        })
    }

    /// Returns the work done and the work in all: bytes, or vectors.
    fn progress(&self) -> (u64, u64) {
        let done = self.shared.done.load(Ordering::Relaxed);
        (done, self.shared.total.load(Ordering::Relaxed))
    }

    /// Ends the work after the piece under way.
    fn cancel(&self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits `timeout` seconds at most, or without a limit; returns True if it has ended. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.job.check_process()?;
        let limit = wait::seconds(timeout)?;
        wait::until(py, limit, |slice| self.job.wait(slice))
    }

    /// Returns the result as JSON, once it has ended. Raises its error.
    fn found(&self) -> PyResult<String> {
        self.job.result()?;
        let found = lock(&self.shared.found).clone();
        found.ok_or_else(|| ExceptionParts::usage("the import has not ended", "wait for it").into())
    }
}
