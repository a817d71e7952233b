//! Tables: rows by ids.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, put, value};
use crate::opened::{OpenTable, StoreHandle, TABLES, TableHandle, opened};
use crate::pending::{PendingHandle, RowsReport};
use crate::rows::{CallRows, RowVerb, later, now};
use crate::status::{CallFailure, nvme_gpu_status};
use crate::transfer::nvme_gpu_stream;
use nvme_host::store::{DuplicateIds, RowElement};
use std::ffi::c_void;
use std::sync::Arc;

/// Elements of nvme_gpu_scatter_add(): IEEE 754 binary32.
pub const NVME_GPU_ADD_F32: u32 = 1;
/// Elements of nvme_gpu_scatter_add(): IEEE 754 binary16, summed as binary32.
pub const NVME_GPU_ADD_F16: u32 = 2;
/// Elements of nvme_gpu_scatter_add(): bfloat16, summed as binary32.
pub const NVME_GPU_ADD_BF16: u32 = 3;
/// Elements of nvme_gpu_scatter_add(): int32_t; sums wrap.
pub const NVME_GPU_ADD_I32: u32 = 4;

/// nvme_gpu_scatter(): the last of several rows with the same id is written.
pub const NVME_GPU_DUPLICATES_LAST: u32 = 0;
/// nvme_gpu_scatter(): an id that comes twice is NVME_GPU_ERROR_USAGE, and nothing is written.
pub const NVME_GPU_DUPLICATES_ERROR: u32 = 1;

/// Opens a table: `rows` rows of `row_bytes` bytes (1 and more), from byte `offset` of the store on. On success
/// `*table` is a handle for nvme_gpu_table_close(), else NULL. Errors: NVME_GPU_ERROR_USAGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_open(
    store: *mut StoreHandle,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    table: *mut *mut TableHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(table, std::ptr::null_mut(), "table") }?;
        let opened = self::opened(store)?;
        let of_store = opened.store.table(offset, rows, row_bytes)?;
        let open = OpenTable {
            store: store.addr(),
            opened,
            table: of_store,
        };
        let handle: *mut TableHandle = TABLES.open(Arc::new(open));
        // A store that was closed meanwhile has taken its tables with it, but for this one.
        if let Err(failure) = self::opened(store) {
            drop(TABLES.close(handle));
            return Err(failure);
        }
        // SAFETY: written once already.
        unsafe { put(table, handle, "table") }
    })
}

/// Closes a table; its operations continue. NULL and a closed handle are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_close(table: *mut TableHandle) {
    value((), || {
        drop(TABLES.close(table));
        Ok(())
    });
}

/// Returns the number of rows; 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_rows(table: *const TableHandle) -> u64 {
    value(0, || Ok(TABLES.get(table, "table")?.table.rows()))
}

/// Returns the number of bytes of a row; 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_row_bytes(table: *const TableHandle) -> u64 {
    value(0, || Ok(TABLES.get(table, "table")?.table.row_bytes()))
}

/// Copies row `ids[i]` of the table to place `i` of `out`, for every `i`, and waits.
///
/// `ids` are `count` int32_t (NVME_GPU_I32) or int64_t (NVME_GPU_I64); they may repeat. `out_stride` is the
/// distance of two rows in `out` in bytes; 0 selects rows without gaps. `row_status` is NULL or has `count`
/// elements: 0, the controller's status, or NVME_GPU_ROW_... `report` is NULL or written.
///
/// All lie in host memory, or all in memory of the store's GPU: then the gather runs in `stream` after the work
/// before it, and the GPU itself submits the reads of a drive; a host thread reads rows of a file or a stripe.
/// Ids and row status may also be in registered host memory.
///
/// A row that was not read is zero in `out`, and has its status; the others are right. Returns the status of
/// the first row that failed. Errors: NVME_GPU_ERROR_USAGE before anything is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                out,
                out_stride,
                row_status,
            )?;
            now(&open, RowVerb::Gather, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_gather(), and returns at once. With GPU memory it is a part of `stream`, which may be captured:
/// a graph gathers by the contents of `ids` at the time of its launch. No call is made that waits for the GPU.
/// With host memory threads of the library gather. All memory must stay valid until the end; `pending` is as in
/// nvme_gpu_pread_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                out,
                out_stride,
                row_status,
            )?;
            later(&open, RowVerb::Gather, rows, stream, pending)
        }
    })
}

fn duplicates(number: u32) -> Answer<DuplicateIds> {
    match number {
        NVME_GPU_DUPLICATES_LAST => Ok(DuplicateIds::Last),
        NVME_GPU_DUPLICATES_ERROR => Ok(DuplicateIds::Error),
        other => Err(CallFailure::usage(
            format!("the rule {other} for duplicate ids is unknown"),
            "use NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR",
        )),
    }
}

/// Writes place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. Bytes beside the rows do not
/// change. `duplicates` is NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR (host memory); the rest is as in
/// nvme_gpu_gather().
///
/// Rows in GPU memory are written in the order of the stream: by the GPU itself where offset and length of the table's
/// rows are multiples of a block of one drive, else by a host thread. The GPU takes no lock: two writers of one row
/// are ordered by a stream or by waiting. A call on host memory that writes a part of such a row at the same time, or
/// adds to it, may put the rest of the row back to what it was.
///
/// With host memory all ids are judged first: with one out of range nothing is written, and the other rows have the
/// status NVME_GPU_ROW_NOT_RUN. A row that failed later may have been written in part. Durable after nvme_gpu_flush().
/// Errors: NVME_GPU_ERROR_USAGE, also
/// for a store that is for reading only, before anything is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    duplicates: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = RowVerb::Scatter(self::duplicates(duplicates)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            now(&open, verb, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_scatter(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    duplicates: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = RowVerb::Scatter(self::duplicates(duplicates)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            later(&open, verb, rows, stream, pending)
        }
    })
}

fn element(number: u32) -> Answer<RowElement> {
    match number {
        NVME_GPU_ADD_F32 => Ok(RowElement::F32),
        NVME_GPU_ADD_F16 => Ok(RowElement::F16),
        NVME_GPU_ADD_BF16 => Ok(RowElement::Bf16),
        NVME_GPU_ADD_I32 => Ok(RowElement::I32),
        other => Err(CallFailure::usage(
            format!("the element type {other} is unknown"),
            "use NVME_GPU_ADD_F32, _F16, _BF16 or _I32",
        )),
    }
}

/// Adds place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. `element` is NVME_GPU_ADD_F32,
/// _F16, _BF16 or _I32, little-endian. Rows with the same id are summed in the order of `ids`; additions of several
/// threads through one store are all counted. The rest is as in nvme_gpu_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    element: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = RowVerb::ScatterAdd(self::element(element)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            now(&open, verb, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_scatter_add(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    element: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = RowVerb::ScatterAdd(self::element(element)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = CallRows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            later(&open, verb, rows, stream, pending)
        }
    })
}
