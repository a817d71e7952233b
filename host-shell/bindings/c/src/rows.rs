//! Rows by ids in memory of the caller, moved by the CPU or in a stream of the GPU. Every address is checked
//! before anything is launched, because a wrong one would end the whole process's use of the GPU.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, check_optional, give};
use crate::memory::{CallLocation, CallMemory, place};
use crate::opened::{OpenTable, OpenedStore};
use crate::pending::{self, OperationReport, PendingHandle, RowsReport};
use crate::status::CallFailure;
use crate::transfer::nvme_gpu_stream;
use nvme_host::Table;
use nvme_host::store::{DuplicateIds, RowConversion, RowElement, RowIds, RowReport};
use std::ffi::c_void;

/// Ids, rows and row status of a call, in memory of the caller.
#[derive(Clone)]
pub struct CallRows {
    ids: CallMemory,
    is_wide: bool,
    count: u64,
    rows: CallMemory,
    row_bytes: u64,
    stride: u64,
    status: Option<CallMemory>,
    /// Conversion of the elements in a gather; `row_bytes` are those of a converted row.
    pub widen: Option<RowConversion>,
}

impl CallRows {
    /// # Safety
    /// The caller fulfils the contract in the header for the pointers.
    pub unsafe fn new(
        row_bytes: u64,
        (ids, is_wide, count): (*const c_void, bool, u64),
        (rows, stride): (*const c_void, u64),
        row_status: *mut i32,
    ) -> Answer<Self> {
        let stride = match stride {
            0 => row_bytes,
            stride if stride < row_bytes => {
                return Err(CallFailure::usage(
                    format!(
                        "the stride of {stride} bytes is shorter than a row of {row_bytes} bytes"
                    ),
                    "use a stride of 0 (rows without gaps), or one that a row fits into",
                ));
            }
            stride => stride,
        };
        let before_last = count.saturating_sub(1).checked_mul(stride);
        let bytes = before_last
            .and_then(|bytes| bytes.checked_add(row_bytes.min(count.saturating_mul(row_bytes))));
        let bytes = bytes.unwrap_or(u64::MAX);
        // SAFETY: the caller's.
        unsafe {
            Ok(Self {
                ids: CallMemory::elements(ids, count, if is_wide { 8 } else { 4 }, "ids")?,
                is_wide,
                count,
                rows: CallMemory::elements(rows, bytes, 1, "rows")?,
                row_bytes,
                stride,
                status: match row_status.is_null() {
                    true => None,
                    false => Some(CallMemory::elements(row_status, count, 4, "row_status")?),
                },
                widen: None,
            })
        }
    }

    /// Creates the rows of the first half of a gather, whose places are not known yet.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[cfg(feature = "cuda")]
    pub unsafe fn of_ids(row_bytes: u64, ids: (*const c_void, bool, u64)) -> Answer<Self> {
        let (start, is_wide, count) = ids;
        // SAFETY: the caller's; no byte lies at the place of the rows.
        unsafe {
            Ok(Self {
                ids: CallMemory::elements(start, count, if is_wide { 8 } else { 4 }, "ids")?,
                is_wide,
                count,
                rows: CallMemory::elements(std::ptr::dangling::<u8>(), 0, 1, "rows")?,
                row_bytes,
                stride: row_bytes,
                status: None,
                widen: None,
            })
        }
    }

    /// Returns the ids, of a gather in halves.
    #[cfg(feature = "cuda")]
    pub fn gather_ids(&self) -> nvme_host::cuda::GatherIds {
        nvme_host::cuda::GatherIds {
            ids: self.ids.address(),
            wide_ids: self.is_wide,
            count: self.count,
        }
    }

    /// Returns the places of rows and status, of a gather in halves.
    #[cfg(feature = "cuda")]
    pub fn gather_target(&self) -> nvme_host::cuda::GatherTarget {
        nvme_host::cuda::GatherTarget {
            out: self.rows.address(),
            out_stride: self.stride,
            status: self.status.map_or(0, |status| status.address()),
        }
    }

    /// # Safety
    /// The ids are there, in host memory.
    unsafe fn ids(&self) -> Vec<i64> {
        // SAFETY: the caller's.
        let bytes = unsafe { self.ids.bytes() };
        match self.is_wide {
            true => bytes
                .as_chunks()
                .0
                .iter()
                .map(|one| i64::from_ne_bytes(*one))
                .collect(),
            false => bytes
                .as_chunks()
                .0
                .iter()
                .map(|one| i32::from_ne_bytes(*one).into())
                .collect(),
        }
    }

    fn is_dense(&self) -> bool {
        self.stride == self.row_bytes
    }

    /// Runs `gather` over ids, contiguous rows and status, and then copies the rows to their strided places.
    ///
    /// # Safety
    /// All memory is valid host memory, and used by nothing else.
    unsafe fn gather(&self, table: &Table) -> OperationReport {
        // SAFETY: the caller's.
        let (ids, out) = unsafe { (self.ids(), self.rows.bytes_mut()) };
        let mut status = vec![0; ids.len()];
        let mut gather = |out: &mut [u8]| match &self.widen {
            Some(widen) => {
                table.gather_as((&ids[..]).into(), widen.clone(), out, Some(&mut status))
            }
            None => table.gather((&ids[..]).into(), out, Some(&mut status)),
        };
        let result = match self.is_dense() {
            true => gather(out),
            false => {
                let row = self.row_bytes as usize;
                let mut dense = vec![0; row * ids.len()];
                let result = gather(&mut dense);
                if result.is_ok() {
                    let places = out.chunks_mut(self.stride as usize);
                    for (from, to) in dense.chunks_exact(row).zip(places) {
                        to[..row].copy_from_slice(from);
                    }
                }
                result
            }
        };
        // SAFETY: the caller's.
        unsafe { self.report(result, &status) }
    }

    /// Runs `change` over ids, contiguous rows and status.
    ///
    /// # Safety
    /// All memory is valid host memory, and changed by nothing else.
    unsafe fn change(
        &self,
        change: impl FnOnce(RowIds<'_>, &[u8], &mut [i32]) -> nvme_host::Result<RowReport>,
    ) -> OperationReport {
        // SAFETY: the caller's.
        let (ids, rows) = unsafe { (self.ids(), self.rows.bytes()) };
        let mut status = vec![0; ids.len()];
        let result = match self.is_dense() {
            true => change((&ids[..]).into(), rows, &mut status),
            false => {
                let row = self.row_bytes as usize;
                let places = rows.chunks(self.stride as usize);
                let dense: Vec<u8> = places.flat_map(|place| &place[..row]).copied().collect();
                change((&ids[..]).into(), &dense, &mut status)
            }
        };
        // SAFETY: the caller's.
        unsafe { self.report(result, &status) }
    }

    /// Copies the status of each row out, unless the call was refused.
    ///
    /// # Safety
    /// The memory for it is there, and used by nothing else.
    unsafe fn report(
        &self,
        result: nvme_host::Result<RowReport>,
        status: &[i32],
    ) -> OperationReport {
        let report = match result {
            Ok(report) => report,
            Err(error) => return CallFailure::from(error).into(),
        };
        if let Some(out) = self.status {
            // SAFETY: the caller's.
            let (places, _) = unsafe { out.bytes_mut() }.as_chunks_mut();
            for (to, from) in places.iter_mut().zip(status) {
                *to = from.to_ne_bytes();
            }
        }
        OperationReport::of_rows(report)
    }

    /// Returns the location of the rows. Ids and status of rows in host memory have to lie there, too; for
    /// other rows the launch checks them.
    fn place(&self, opened: &OpenedStore) -> Answer<CallLocation> {
        if self.count == 0 {
            return Ok(CallLocation::Host);
        }
        if place(opened, &self.rows, "rows")? == CallLocation::Gpu {
            return Ok(CallLocation::Gpu);
        }
        for (memory, name) in [(Some(self.ids), "ids"), (self.status, "row_status")] {
            if let Some(memory) = memory
                && place(opened, &memory, name)? == CallLocation::Gpu
            {
                return Err(CallFailure::usage(
                    format!("{name} lies in GPU memory and the rows do not"),
                    "have both in GPU memory, or both in host memory",
                ));
            }
        }
        Ok(CallLocation::Host)
    }
}

/// Operation on the CPU: a gather, a scatter or a scatter-add.
#[derive(Clone, Copy)]
pub enum RowVerb {
    Gather,
    Scatter(DuplicateIds),
    ScatterAdd(RowElement),
}

impl RowVerb {
    /// # Safety
    /// The memory of `rows` is there, in host memory, and used by nothing else.
    unsafe fn run(self, table: &Table, rows: &CallRows) -> OperationReport {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::Gather => rows.gather(table),
                Self::Scatter(duplicates) => rows.change(|ids, bytes, status| {
                    table.scatter(ids, bytes, duplicates, Some(status))
                }),
                Self::ScatterAdd(element) => rows.change(|ids, bytes, status| {
                    table.scatter_add(ids, bytes, element, Some(status))
                }),
            }
        }
    }
}

/// Enqueues `verb` in a stream of the GPU.
///
/// # Safety
/// The caller fulfils the contract in the header for the pointers.
#[cfg(feature = "cuda")]
unsafe fn launch(
    open: &OpenTable,
    verb: RowVerb,
    rows: &CallRows,
    stream: nvme_gpu_stream,
) -> Answer<nvme_host::cuda::PendingRows> {
    if matches!(verb, RowVerb::Scatter(DuplicateIds::Error)) {
        return Err(CallFailure::usage(
            "the ids lie in GPU memory: whether one comes twice is not known before the stream runs",
            "use NVME_GPU_DUPLICATES_LAST",
        ));
    }
    let request = nvme_host::cuda::RowRequest {
        ids: rows.ids.address(),
        wide_ids: rows.is_wide,
        count: rows.count,
        out: rows.rows.address(),
        out_stride: rows.stride,
        status: rows.status.map_or(0, |status| status.address()),
    };
    let (table, stream) = (&open.table, stream.addr() as u64);
    // SAFETY: the caller's.
    let pending = unsafe {
        match verb {
            RowVerb::Gather => match &rows.widen {
                Some(widen) => table.gather_as_on_gpu(&request, widen.clone(), stream),
                None => table.gather_on_gpu(&request, stream),
            },
            RowVerb::Scatter(_) => table.scatter_on_gpu(&request, stream),
            RowVerb::ScatterAdd(element) => table.scatter_add_on_gpu(&request, element, stream),
        }
    };
    Ok(pending?)
}

/// Runs `verb` and waits for it.
///
/// # Safety
/// The caller fulfils the contract in the header for the pointers.
pub unsafe fn now(
    open: &OpenTable,
    verb: RowVerb,
    rows: &CallRows,
    stream: nvme_gpu_stream,
    report: *mut RowsReport,
) -> Answer<()> {
    // SAFETY: the caller's.
    unsafe { check_optional(report) }?;
    let outcome = match rows.place(&open.opened)? {
        // SAFETY: the caller's.
        CallLocation::Host => unsafe { verb.run(&open.table, rows) },
        #[cfg(feature = "cuda")]
        CallLocation::Gpu => {
            pending::check_not_captured(&open.opened, stream)?;
            let bytes = rows.count.saturating_mul(rows.stride);
            // SAFETY: the caller's.
            let under_way = unsafe { launch(open, verb, rows, stream) }?;
            pending::wait_for_stream(&open.opened, bytes, under_way)?
        }
        #[cfg(not(feature = "cuda"))]
        CallLocation::Gpu => {
            return Err(CallFailure::usage(
                "an address lies in GPU memory, and this library was built without CUDA",
                "use host memory",
            ));
        }
    };
    let _ = stream;
    if !report.is_null() {
        // SAFETY: the caller's.
        unsafe { give(report, &outcome.report) }?;
    }
    outcome.result()
}

/// Starts `verb`.
///
/// # Safety
/// The caller fulfils the contract in the header for the pointers.
pub unsafe fn later(
    open: &OpenTable,
    verb: RowVerb,
    rows: CallRows,
    stream: nvme_gpu_stream,
    to: *mut *mut PendingHandle,
) -> Answer<()> {
    if rows.count == 0 {
        // SAFETY: the caller's.
        return unsafe { pending::nothing(to) };
    }
    let _ = stream;
    match rows.place(&open.opened)? {
        // SAFETY: the caller's.
        CallLocation::Host => unsafe {
            pending::start_rows(&open.opened, &open.table, to, move |table| {
                verb.run(table, &rows)
            })
        },
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's.
        CallLocation::Gpu => unsafe { pending::on_stream(to, launch(open, verb, &rows, stream)?) },
        #[cfg(not(feature = "cuda"))]
        CallLocation::Gpu => Err(CallFailure::usage(
            "an address lies in GPU memory, and this library was built without CUDA",
            "use host memory",
        )),
    }
}
