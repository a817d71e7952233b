//! Gathers in halves on a GPU: submitted by one call, finished by another one.
// UNSAFETY: the GPU uses memory by address; its owners are kept until the gather has ended.
#![allow(unsafe_code)]

use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::left::{self, BufferedTransfer};
use crate::process;
use crate::store::PyStore;
use crate::view::PyView;
use nvme_host::ProcessMark;
use nvme_host::cuda::{GatherTarget, PendingRows};
use nvme_host::lock::lock;
use nvme_host::store::{BegunGather, RowConversion};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// A gather on a GPU whose second half is to come.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct BegunRead {
    pub process: ProcessMark,
    pub store: Py<PyStore>,
    pub flights: Arc<LaunchedTransfers>,
    pub count: u64,
    /// Bytes of a row that comes out.
    pub row_bytes: u64,
    pub widen: Option<RowConversion>,
    /// Owner of the scales in memory of a GPU.
    pub scales: Option<Py<PyView>>,
    pub report: FailureReport,
    pub state: Mutex<BegunState>,
}

/// The gather, until it is given up, and the owner of its ids.
pub struct BegunState {
    pub gather: Option<BegunGather>,
    pub ids: Option<Py<PyAny>>,
}

#[pymethods]
impl BegunRead {
    /// Puts the second half into `stream`; addresses are the GPU's. `buffers` is kept until it has ended, unless it is
    /// captured, and so are the ids.
    fn finish(
        &self,
        py: Python<'_>,
        out: u64,
        status: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        process::check(self.process, "gather")?;
        self.flights.reap();
        self.flights.check()?;
        let store = self.store.get().get()?;
        let target = GatherTarget {
            out,
            out_stride: self.row_bytes,
            status,
        };
        let ids = lock(&self.state).ids.as_ref().map(|ids| ids.clone_ref(py));
        let scales = self.scales.as_ref().map(|scales| scales.clone_ref(py));
        let buffers = (ids, buffers, scales)
            .into_pyobject(py)?
            .into_any()
            .unbind();
        let bytes = self.count.saturating_mul(self.row_bytes);
        let what = ("gather", self.count, bytes);
        self.flights
            .launch(py, store, what, Some(buffers), self.report, || {
                let mut state = lock(&self.state);
                let gather = state.gather.as_mut();
                let gather = gather.ok_or_else(nvme_host::cuda::BegunPoint::finished_twice)?;
                // SAFETY: the addresses are of the buffers, which are kept until the gather has ended; those that a graph
                // uses are its user's to keep.
                unsafe {
                    match &self.widen {
                        Some(widen) => gather.finish_as(&target, widen.clone(), stream),
                        None => gather.finish(&target, stream),
                    }
                }
            })
    }

    /// True if the first half has submitted the reads.
    #[getter]
    fn submits(&self) -> bool {
        let state = lock(&self.state);
        state.gather.as_ref().is_some_and(BegunGather::submits)
    }
}

/// The ids of a gather that was given up, until nothing reads them any more.
struct LeftIds {
    pending: PendingRows,
    #[expect(dead_code, reason = "kept until the gather has ended")]
    ids: Option<Py<PyAny>>,
}

impl BufferedTransfer for LeftIds {
    fn is_done(&self) -> bool {
        self.pending.is_done()
    }
}

impl Drop for BegunRead {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let (gather, ids) = (state.gather.take(), state.ids.take());
        if self.process != ProcessMark::here() {
            // The parent's.
            std::mem::forget((gather, ids));
            return;
        }
        let Some(gather) = gather.filter(|gather| !gather.is_finished()) else {
            return;
        };
        match gather.cancel() {
            Ok(pending) => left::keep(LeftIds { pending, ids }),
            // The driver takes no launches any more: whether the ids are used is not known.
            Err(_) => std::mem::forget(ids),
        }
    }
}
