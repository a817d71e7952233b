//! Tables: rows by ids, by the CPU or by the GPU. Each call checks ids, shapes and memory first, then starts one
//! transfer that keeps its arrays alive until it has ended.
// UNSAFETY: threads of the pool and the GPU use memory by address; its owners are kept until they have ended.
#![allow(unsafe_code)]

use crate::begun::{BegunRead, BegunState};
use crate::dtypes::{element, scale_format};
use crate::error::ExceptionParts;
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{Open, PyStore};
use crate::view::{MemoryPiece, PyView};
use nvme_host::ProcessMark;
use nvme_host::cuda::{GatherIds, RowRequest};
use nvme_host::store::{
    DuplicateIds, FailedContent, RowConversion, RowElement, RowIds, RowReport, RowScales,
    RowWidening, ScaleFactor, ScaleFormat, ScaleMemory, TableRanges,
};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// Ids in memory of the host, as slices want them.
enum OwnedIds {
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl OwnedIds {
    /// # Safety
    /// The memory is valid for the length of the call.
    unsafe fn copy(memory: MemoryPiece, is_wide: bool) -> Self {
        // SAFETY: the caller's.
        let bytes = unsafe { memory.slice() };
        match is_wide {
            true => Self::I64(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|one| i64::from_le_bytes(*one))
                    .collect(),
            ),
            false => Self::I32(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|one| i32::from_le_bytes(*one))
                    .collect(),
            ),
        }
    }

    fn get(&self) -> RowIds<'_> {
        match self {
            Self::I32(ids) => RowIds::I32(ids),
            Self::I64(ids) => RowIds::I64(ids),
        }
    }
}

/// Operation on rows in host memory.
enum RowsOperation {
    Gather,
    Scatter(DuplicateIds),
    Add(RowElement),
}

/// Rows of one size in a store.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Table")]
pub struct PyTable {
    store: Py<PyStore>,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    /// Ranges of a table that lies in several.
    ranges: Option<TableRanges>,
    /// Conversion of the elements in a gather, and the bytes of a converted row.
    widen: Option<(RowConversion, u64)>,
    /// Owner of the scales in memory of a GPU.
    scales: Option<Py<PyView>>,
    /// Content of rows that a gather cannot read, and whether they are an error.
    failed: (FailedContent, FailureReport),
    /// The table with its cache of rows in GPU memory.
    cached: Option<Arc<OnStore<nvme_host::Table>>>,
    flights: Arc<LaunchedTransfers>,
}

impl PyTable {
    /// # Errors
    /// For converted rows: stored bytes cannot be computed from them.
    fn check_stored(&self) -> Result<(), ExceptionParts> {
        match self.widen {
            None => Ok(()),
            Some(_) => Err(ExceptionParts::usage(
                "rows that come out wider than they are stored are not written",
                "write through a table of the stored dtype, or write_from",
            )),
        }
    }

    /// Returns the bytes of a gathered row.
    fn out_bytes(&self) -> u64 {
        self.widen
            .as_ref()
            .map_or(self.row_bytes, |(_, bytes)| *bytes)
    }

    /// Returns `buffers` with the owner of the scales, which the gather uses as long.
    fn with_scales(
        &self,
        py: Python<'_>,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        match &self.scales {
            None => Ok(buffers),
            Some(scales) => {
                let held = (buffers, scales.clone_ref(py)).into_pyobject(py)?;
                Ok(Some(held.into_any().unbind()))
            }
        }
    }

    fn cloned(&self, py: Python<'_>) -> Self {
        Self {
            store: self.store.clone_ref(py),
            ranges: self.ranges.clone(),
            flights: Arc::clone(&self.flights),
            widen: self.widen.clone(),
            scales: self.scales.as_ref().map(|scales| scales.clone_ref(py)),
            cached: self.cached.clone(),
            ..*self
        }
    }

    fn get(&self) -> Result<(Open, nvme_host::Table), ExceptionParts> {
        let store = self.store.get().get()?;
        let table = match (&self.cached, &self.ranges) {
            (Some(cached), _) => cached.get()?,
            (None, Some(ranges)) => store.table_of(ranges)?,
            (None, None) => store.table(self.offset, self.rows, self.row_bytes)?,
        };
        Ok((store, table.with_failed_rows(self.failed.0)))
    }

    fn run(
        &self,
        ids: Py<PyView>,
        rows: Py<PyView>,
        status: Option<Py<PyView>>,
        wide: bool,
        what: RowsOperation,
    ) -> PyResult<PyOperation> {
        let (store, table) = self.get()?;
        let is_gather = matches!(what, RowsOperation::Gather);
        if !is_gather {
            self.check_stored()?;
        }
        let widen = self.widen.as_ref().map(|(widen, _)| widen.clone());
        let only_counts = is_gather && self.failed.1 == FailureReport::Counted;
        let of_ids = ids.get().of_host("ids", false)?;
        let name = if is_gather { "out" } else { "the source" };
        let of_rows = rows.get().of_host(name, is_gather)?;
        let of_status = status
            .as_ref()
            .map(|view| view.get().of_host("status", true));
        let of_status = of_status.transpose()?;
        let count = of_ids.bytes / if wide { 8 } else { 4 };
        if of_status.is_some_and(|memory| memory.bytes != count * 4) {
            let cause = format!("status has another length than {count} rows of 4 bytes");
            return Err(ExceptionParts::usage(cause, "give an int32 for each id").into());
        }
        if is_gather && of_rows.overlaps(of_ids)
            || of_status.is_some_and(|one| one.overlaps(of_ids) || one.overlaps(of_rows))
        {
            let remedy = "use separate memory for each";
            return Err(ExceptionParts::usage("ids, rows or status share memory", remedy).into());
        }
        let mut buffers = vec![ids, rows];
        buffers.extend(status);
        PyOperation::start(buffers, move || {
            let _store = store;
            // SAFETY: the views are kept until this ended.
            let ids = unsafe { OwnedIds::copy(of_ids, wide) };
            let mut codes = vec![0; if of_status.is_some() { count } else { 0 }];
            let places = of_status.is_some().then_some(&mut codes[..]);
            let (report, word) = match what {
                RowsOperation::Gather => {
                    // SAFETY: as above; ids and status lie elsewhere.
                    let out = unsafe { of_rows.slice_mut() };
                    let report = match widen {
                        Some(widen) => table.gather_as(ids.get(), widen, out, places)?,
                        None => table.gather(ids.get(), out, places)?,
                    };
                    (report, "gather")
                }
                RowsOperation::Scatter(duplicates) => (
                    // SAFETY: as above.
                    table.scatter(ids.get(), unsafe { of_rows.slice() }, duplicates, places)?,
                    "scatter",
                ),
                RowsOperation::Add(element) => (
                    // SAFETY: as above.
                    table.scatter_add(ids.get(), unsafe { of_rows.slice() }, element, places)?,
                    "scatter_add",
                ),
            };
            if let Some(memory) = of_status {
                // SAFETY: as above.
                let bytes = unsafe { memory.slice_mut() };
                for (to, code) in bytes.as_chunks_mut().0.iter_mut().zip(&codes) {
                    *to = code.to_le_bytes();
                }
            }
            if only_counts {
                return Ok(());
            }
            verdict(report, word)
        })
    }
}

/// Returns where the scales in `view` lie: memory of the host is copied, that of a GPU has an owner.
fn scale_memory(
    view: &Py<PyView>,
    py: Python<'_>,
) -> Result<(ScaleMemory, Option<Py<PyView>>), ExceptionParts> {
    if let Ok(of_host) = view.get().of_host("the scales", false) {
        // SAFETY: the view keeps the memory, which is copied here.
        let bytes = unsafe { of_host.slice() };
        return Ok((ScaleMemory::Host(bytes.into()), None));
    }
    let of_gpu = view.get().memory();
    let memory = ScaleMemory::Gpu {
        address: of_gpu.address,
        bytes: of_gpu.bytes as u64,
    };
    Ok((memory, Some(view.clone_ref(py))))
}

/// Returns the ranges of `rows` rows of `row_bytes` bytes, each with its first byte and its length.
///
/// # Errors
/// As [`nvme_host::Store::ranges`], and for another number of rows.
fn ranges_of(
    py: Python<'_>,
    store: &Py<PyStore>,
    ranges: &[(u64, u64)],
    (rows, row_bytes): (u64, u64),
) -> Result<TableRanges, ExceptionParts> {
    let open = store.get().get()?;
    let of_range = |(first, bytes): &(u64, u64)| *first..first.saturating_add(*bytes);
    let ranges: Vec<_> = ranges.iter().map(of_range).collect();
    let found = py.detach(|| open.ranges(&ranges, row_bytes))?;
    if found.rows() != rows {
        let cause = format!("the ranges have {} rows, the shape {rows}", found.rows());
        return Err(ExceptionParts::usage(
            cause,
            "check the shape and the ranges",
        ));
    }
    Ok(found)
}

/// # Errors
/// The first row that failed.
fn verdict(report: RowReport, word: &str) -> Result<(), ExceptionParts> {
    let Some(first) = &report.first else {
        return Ok(());
    };
    let what = format!("{word} of {} rows", report.rows);
    let mut fault = ExceptionParts::row(
        first.status,
        first.row as u64,
        Some(first.id),
        &what,
        report.failed as u64,
    );
    if let Some(error) = &first.error {
        let of_command = ExceptionParts::of(error);
        fault.code = of_command.code;
        fault.cause = format!("{}: {}", fault.cause, of_command.cause);
        fault.remedy = of_command.remedy;
    }
    fault.errno = report.errno;
    Err(fault)
}

#[pymethods]
impl PyTable {
    #[new]
    #[pyo3(signature = (store, offset, rows, row_bytes, ranges=None))]
    fn new(
        py: Python<'_>,
        store: Py<PyStore>,
        offset: u64,
        rows: u64,
        row_bytes: u64,
        ranges: Option<Vec<(u64, u64)>>,
    ) -> PyResult<Self> {
        let of_store = |ranges: Vec<(u64, u64)>| ranges_of(py, &store, &ranges, (rows, row_bytes));
        let ranges = ranges.map(of_store).transpose()?;
        let table = Self {
            store,
            offset,
            rows,
            row_bytes,
            ranges,
            widen: None,
            scales: None,
            failed: (FailedContent::Zeros, FailureReport::Table),
            cached: None,
            flights: Arc::default(),
        };
        table.get()?;
        table.store.get().add_table(&table.flights);
        Ok(table)
    }

    /// Returns the same rows with a cache of `bytes` bytes in GPU memory, which tables made of it share.
    fn cached(&self, py: Python<'_>, bytes: u64) -> PyResult<Self> {
        let (store, table) = self.get()?;
        let made = py.detach(|| {
            let made = table.cached(bytes);
            drop(store);
            made
        });
        let made = made.map_err(ExceptionParts::from)?;
        let cached = OnStore::new(self.store.get(), "table with a cache", made);
        Ok(Self {
            cached: Some(Arc::new(cached)),
            ..self.cloned(py)
        })
    }

    /// Returns the same rows, whose elements of the dtype `stored` are converted to `dtype`.
    /// Failures are those of this table.
    fn widened(&self, py: Python<'_>, stored: &str, dtype: &str) -> PyResult<Self> {
        let widen = RowWidening::of_names(stored, dtype).map_err(ExceptionParts::from)?;
        let wide_bytes = widen
            .row_bytes(self.row_bytes)
            .map_err(ExceptionParts::from)?;
        Ok(Self {
            widen: Some((widen.into(), wide_bytes)),
            scales: None,
            ..self.cloned(py)
        })
    }

    /// Returns the same rows, where `columns` elements each share a scale of the dtype `dtype` in `memory`, and all of them
    /// `factor`, which multiplies the scales or `divides` them. Without memory the factor is the scale.
    fn scaled(
        &self,
        py: Python<'_>,
        stored: Option<(&str, u32, Py<PyView>)>,
        factor: f32,
        divides: bool,
    ) -> PyResult<Self> {
        let Some((conversion, wide_bytes)) = &self.widen else {
            let cause = "rows that come out as they are stored have no scales";
            return Err(ExceptionParts::usage(cause, "pass to=, the dtype of scaled rows").into());
        };
        let factor = match divides {
            true => ScaleFactor::Over(factor),
            false => ScaleFactor::Times(factor),
        };
        let (scales, owner) = match stored {
            None => {
                let none = ScaleMemory::Nowhere;
                (RowScales::new(ScaleFormat::F32, 1, factor, none), None)
            }
            Some((dtype, columns, view)) => {
                let (memory, owner) = scale_memory(&view, py)?;
                let scales = RowScales::new(scale_format(dtype)?, columns, factor, memory);
                (scales, owner)
            }
        };
        let conversion = RowConversion {
            widen: conversion.widen,
            scales: Some(Arc::new(scales.map_err(ExceptionParts::from)?)),
        };
        conversion
            .row_bytes(self.rows, self.row_bytes)
            .map_err(ExceptionParts::from)?;
        Ok(Self {
            widen: Some((conversion, *wide_bytes)),
            scales: owner,
            ..self.cloned(py)
        })
    }

    /// Returns the same rows with another treatment of those that a gather cannot read: they are an error or none, and
    /// become zeros, or with `nan_of`, the dtype of the stored rows, NaN.
    #[pyo3(signature = (is_error, nan_of=None))]
    fn with_failed_rows(
        &self,
        py: Python<'_>,
        is_error: bool,
        nan_of: Option<&str>,
    ) -> PyResult<Self> {
        let content = match nan_of {
            Some(dtype) => FailedContent::nan_of(dtype).map_err(ExceptionParts::from)?,
            None => FailedContent::Zeros,
        };
        let report = match is_error {
            true => FailureReport::Table,
            false => FailureReport::Counted,
        };
        Ok(Self {
            failed: (content, report),
            ..self.cloned(py)
        })
    }

    fn gather(
        &self,
        ids: Py<PyView>,
        wide: bool,
        out: Py<PyView>,
        status: Option<Py<PyView>>,
    ) -> PyResult<PyOperation> {
        self.run(ids, out, status, wide, RowsOperation::Gather)
    }

    fn scatter(
        &self,
        ids: Py<PyView>,
        wide: bool,
        source: Py<PyView>,
        status: Option<Py<PyView>>,
        unique: bool,
    ) -> PyResult<PyOperation> {
        let duplicates = match unique {
            true => DuplicateIds::Error,
            false => DuplicateIds::Last,
        };
        self.run(
            ids,
            source,
            status,
            wide,
            RowsOperation::Scatter(duplicates),
        )
    }

    fn scatter_add(
        &self,
        ids: Py<PyView>,
        wide: bool,
        source: Py<PyView>,
        status: Option<Py<PyView>>,
        dtype: &str,
    ) -> PyResult<PyOperation> {
        let element = element(dtype)?;
        self.run(ids, source, status, wide, RowsOperation::Add(element))
    }

    /// Puts a gather into `stream` of the store's GPU; addresses are the GPU's. `buffers` is kept until it has
    /// ended, unless it is captured. Raises the first failure of those before that was not raised yet; not so with
    /// `apart`, whose own failure the operation's `check` alone raises.
    #[pyo3(signature = (ids, wide, count, out, status, stream, buffers=None, apart=false))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn gather_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        out: u64,
        status: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
        apart: bool,
    ) -> PyResult<GpuOperation> {
        let flights = &self.flights;
        flights.reap();
        if !apart {
            flights.check()?;
        }
        let (store, table) = self.get()?;
        let request = RowRequest {
            ids,
            wide_ids: wide,
            count,
            out,
            out_stride: self.out_bytes(),
            status,
        };
        let what = ("gather", count, count.saturating_mul(request.out_stride));
        let buffers = self.with_scales(py, buffers)?;
        let report = match apart {
            true => self.failed.1.apart(),
            false => self.failed.1,
        };
        flights.launch(py, store, what, buffers, report, || {
            // SAFETY: the addresses are of the buffers, which are kept until the gather has ended; those that a
            // graph uses are its user's to keep.
            unsafe {
                match &self.widen {
                    Some((widen, _)) => table.gather_as_on_gpu(&request, widen.clone(), stream),
                    None => table.gather_on_gpu(&request, stream),
                }
            }
        })
    }

    /// Puts the first half of a gather into `stream`, which submits the reads. `ids_owner` is kept until the second half has
    /// ended.
    fn begin_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        stream: u64,
        ids_owner: Option<Py<PyAny>>,
    ) -> PyResult<BegunRead> {
        let (store, table) = self.get()?;
        let ids = GatherIds {
            ids,
            wide_ids: wide,
            count,
        };
        let begun = py.detach(|| {
            let _store = store;
            // SAFETY: the addresses are of the buffers, which are kept until the gather has ended; those that a graph
            // uses are its user's to keep.
            unsafe { table.begin_on_gpu(&ids, stream) }
        });
        Ok(BegunRead {
            process: ProcessMark::here(),
            store: self.store.clone_ref(py),
            flights: Arc::clone(&self.flights),
            count,
            row_bytes: self.out_bytes(),
            widen: self.widen.as_ref().map(|(widen, _)| widen.clone()),
            scales: self.scales.as_ref().map(|scales| scales.clone_ref(py)),
            report: self.failed.1,
            state: Mutex::new(BegunState {
                gather: Some(begun.map_err(ExceptionParts::from)?),
                ids: ids_owner,
            }),
        })
    }

    /// Puts a scatter into `stream`, or with `dtype` an addition; as `gather_on_gpu`.
    #[pyo3(signature = (ids, wide, count, rows, status, stream, buffers=None, dtype=None, apart=false))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn change_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        rows: u64,
        status: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
        dtype: Option<&str>,
        apart: bool,
    ) -> PyResult<GpuOperation> {
        let flights = &self.flights;
        flights.reap();
        if !apart {
            flights.check()?;
        }
        let (store, table) = self.get()?;
        self.check_stored()?;
        let element = dtype.map(element).transpose()?;
        let request = RowRequest {
            ids,
            wide_ids: wide,
            count,
            out: rows,
            out_stride: self.row_bytes,
            status,
        };
        let word = if element.is_some() {
            "scatter_add"
        } else {
            "scatter"
        };
        let bytes = count.saturating_mul(self.row_bytes);
        let report = match apart {
            true => FailureReport::Apart,
            false => FailureReport::Table,
        };
        flights.launch(py, store, (word, count, bytes), buffers, report, || {
            // SAFETY: as for a gather.
            unsafe {
                match element {
                    Some(element) => table.scatter_add_on_gpu(&request, element, stream),
                    None => table.scatter_on_gpu(&request, stream),
                }
            }
        })
    }

    /// Waits for the gathers on the GPU that were launched before, and raises the first failure that was not raised
    /// yet; of captured ones, that of their last run that ended.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.store.get().get()?;
        self.flights.wait(py, timeout)
    }

    /// Keeps the failure of a row of `operation`, which has ended, for `check`. Raises the error of the whole
    /// call.
    fn keep_failure(&self, operation: &PyOperation) -> PyResult<()> {
        if let Some(fault) = operation.failed_row()? {
            self.flights.keep_failure(fault);
        }
        Ok(())
    }

    /// True if no gather is under way on the GPU.
    fn is_idle(&self) -> bool {
        self.flights.reap();
        self.flights.is_idle()
    }
}
