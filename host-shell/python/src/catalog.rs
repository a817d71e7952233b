//! Files of tensors onto a store, and what lies there.

use crate::error::Fault;
use crate::pool::{Job, lock};
use crate::store::Store;
use crate::wait;
use nvme_host::Catalog;
use pyo3::prelude::*;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Shared {
    done: AtomicU64,
    total: AtomicU64,
    is_cancelled: AtomicBool,
    catalog: Mutex<Option<Catalog>>,
}

/// An import, or a look at what was imported, on a thread of the pool.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Import {
    job: Arc<Job>,
    shared: Arc<Shared>,
}

impl Import {
    fn start(
        work: impl FnOnce(&Shared) -> nvme_host::Result<Catalog> + Send + 'static,
    ) -> PyResult<Self> {
        let shared = Arc::new(Shared::default());
        let of_job = Arc::clone(&shared);
        let job = Job::start(move || {
            let catalog = work(&of_job)?;
            *lock(&of_job.catalog) = Some(catalog);
            Ok(())
        })?;
        Ok(Self { job, shared })
    }
}

#[pymethods]
impl Import {
    /// Writes the file at `path` to the store from byte `offset` on.
    #[staticmethod]
    fn of_file(store: &Store, path: PathBuf, offset: u64, verify: bool) -> PyResult<Self> {
        let store = store.get()?;
        Self::start(move |shared| {
            Catalog::import(&store, &path, offset, verify, &mut |done, total| {
                shared.total.store(total, Ordering::Relaxed);
                shared.done.store(done, Ordering::Relaxed);
                match shared.is_cancelled.load(Ordering::Relaxed) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })
        })
    }

    /// Looks at a file that lies in the store from byte `offset` on.
    #[staticmethod]
    fn of_store(store: &Store, offset: u64) -> PyResult<Self> {
        let store = store.get()?;
        Self::start(move |_| Catalog::of_store(&store, offset))
    }

    /// Bytes done, and bytes in all.
    fn progress(&self) -> (u64, u64) {
        let done = self.shared.done.load(Ordering::Relaxed);
        (done, self.shared.total.load(Ordering::Relaxed))
    }

    /// It ends after the piece under way.
    fn cancel(&self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits `timeout` seconds at most, or without a limit; whether it has ended. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::seconds(timeout)?;
        wait::until(py, limit, |slice| self.job.wait(slice))
    }

    /// The catalog as JSON, once it has ended. Raises what went wrong.
    fn catalog(&self) -> PyResult<String> {
        self.job.result()?;
        let catalog = lock(&self.shared.catalog);
        let text = catalog.as_ref().map(serde_json::to_string);
        match text {
            Some(Ok(text)) => Ok(text),
            _ => Err(Fault::usage("the import has not ended", "wait for it").into()),
        }
    }
}
