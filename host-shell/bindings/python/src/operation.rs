//! Transfers on threads of the pool.

use crate::error::ExceptionParts;
use crate::left::{self, BufferedTransfer};
use crate::pool::PoolJob;
use crate::view::PyView;
use crate::wait;
use nvme_host::lock::lock;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// A transfer on a thread of the pool.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Operation")]
pub struct PyOperation {
    job: Arc<PoolJob>,
    buffers: Mutex<Vec<Py<PyView>>>,
}

impl PyOperation {
    /// Runs `work`, which uses `buffers`, on a thread of the pool.
    pub fn start(
        buffers: Vec<Py<PyView>>,
        work: impl FnOnce() -> Result<(), ExceptionParts> + Send + 'static,
    ) -> PyResult<Self> {
        left::reap();
        let job = PoolJob::start(work)?;
        Ok(Self {
            job,
            buffers: Mutex::new(buffers),
        })
    }

    /// Returns the failure of its first row or query, where the others have ended as they should.
    ///
    /// # Errors
    /// The error of the whole call.
    pub fn failed_row(&self) -> Result<Option<ExceptionParts>, ExceptionParts> {
        match self.job.result() {
            Ok(()) => Ok(None),
            Err(fault) if fault.row.is_some() => Ok(Some(fault)),
            Err(fault) => Err(fault),
        }
    }
}

#[pymethods]
impl PyOperation {
    /// True if it has ended, with success or not.
    fn done(&self) -> PyResult<bool> {
        self.job.check_process()?;
        Ok(self.job.is_done())
    }

    /// Waits `timeout` seconds at most, or without a limit; returns True if it has ended. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.job.check_process()?;
        let limit = wait::seconds(timeout)?;
        let is_done = wait::until(py, limit, |slice| self.job.wait(slice))?;
        if is_done {
            // The buffers go when the GIL is held, which is now.
            let buffers = std::mem::take(&mut *lock(&self.buffers));
            drop(buffers);
        }
        Ok(is_done)
    }

    /// Raises the error of the whole call. Outcomes of single rows or queries are left to the caller's later
    /// query.
    fn check_whole(&self) -> PyResult<()> {
        self.failed_row()?;
        Ok(())
    }

    /// Raises the error, if it has ended with one.
    fn check(&self) -> PyResult<()> {
        Ok(self.job.result()?)
    }
}

impl Drop for PyOperation {
    fn drop(&mut self) {
        if !self.job.is_done() {
            left::keep(OrphanedOperation {
                job: Arc::clone(&self.job),
                buffers: std::mem::take(&mut *lock(&self.buffers)),
            });
        }
    }
}

struct OrphanedOperation {
    job: Arc<PoolJob>,
    #[expect(dead_code, reason = "kept until the job has ended")]
    buffers: Vec<Py<PyView>>,
}

impl BufferedTransfer for OrphanedOperation {
    fn is_done(&self) -> bool {
        self.job.is_done()
    }
}
