//! Tables: rows by ids.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, null, put, value};
use crate::memory::CallMemory;
use crate::opened::{OpenTable, StoreHandle, TABLES, TableHandle, open_in, opened};
use crate::pending::{PendingHandle, RowsReport};
use crate::request::{RowUse, TableRequest, widening};
use crate::rows::{later, now};
use crate::status::nvme_gpu_status;
use nvme_host::{Result, Store, Table};
use std::ffi::c_char;
use std::ops::Range;
use std::sync::Arc;

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
        let handle = open(store, |store| store.table(offset, rows, row_bytes))?;
        // SAFETY: written once already.
        unsafe { put(table, handle, "table") }
    })
}

/// A range of bytes of a store.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RangeOfStore {
    /// First byte in the store.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Opens a table whose rows of `row_bytes` bytes lie in `count` ranges, one range after the other: tensors of several
/// files, files in several extents. Rows begin at any byte, and may lie in several ranges; they are not written. `ranges`
/// is not used after the call. On success `*table` is a handle for nvme_gpu_table_close(), else NULL. Errors:
/// NVME_GPU_ERROR_USAGE for ranges that are not whole rows together, that overlap or that end past the store.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_open_ranges(
    store: *mut StoreHandle,
    ranges: *const RangeOfStore,
    count: usize,
    row_bytes: u64,
    table: *mut *mut TableHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(table, std::ptr::null_mut(), "table") }?;
        if ranges.is_null() && count != 0 {
            return Err(null("ranges"));
        }
        // SAFETY: as the header says.
        unsafe { CallMemory::elements(ranges, count as u64, size_of::<RangeOfStore>(), "ranges") }?;
        let of_range = |index| {
            // SAFETY: below `count`. Programs may pack their structures.
            let one = unsafe { ranges.add(index).read_unaligned() };
            one.offset..one.offset.saturating_add(one.bytes)
        };
        let ranges: Vec<Range<u64>> = (0..count).map(of_range).collect();
        let handle = open(store, |store| {
            store.table_of(&store.ranges(&ranges, row_bytes)?)
        })?;
        // SAFETY: written once already.
        unsafe { put(table, handle, "table") }
    })
}

/// Opens the table that `of_store` makes.
fn open(
    store: *mut StoreHandle,
    of_store: impl FnOnce(&Store) -> Result<Table>,
) -> Answer<*mut TableHandle> {
    let opened = self::opened(store)?;
    let table = of_store(&opened.store)?;
    let open = OpenTable {
        store: store.addr(),
        opened,
        table,
        scales: None,
    };
    open_in(&TABLES, store, Arc::new(open))
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

/// Returns the number of bytes of a row of the table that nvme_gpu_gather() makes with these names: the row
/// has elements of `stored`, which come out as `dtype`. 0 after an error, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_row_bytes_as(
    table: *const TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
) -> u64 {
    value(0, || {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        let widen = unsafe { widening(stored, dtype) }?;
        Ok(widen.row_bytes(open.table.row_bytes())?)
    })
}

/// Moves rows by a request of kind `of`, and waits.
///
/// # Safety
/// As nvme_gpu_gather() in the header.
unsafe fn run(
    of: RowUse,
    table: *mut TableHandle,
    request: *const TableRequest,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: the caller's.
        unsafe {
            let request = TableRequest::of(request, of)?;
            let (verb, rows) = request.rows(&open, of)?;
            now(&open, verb, &rows, request.stream, report)
        }
    })
}

/// Begins to move rows by a request of kind `of`.
///
/// # Safety
/// As nvme_gpu_gather_async() in the header.
unsafe fn start(
    of: RowUse,
    table: *mut TableHandle,
    request: *const TableRequest,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: the caller's.
        unsafe {
            let request = TableRequest::of(request, of)?;
            let (verb, rows) = request.rows(&open, of)?;
            later(&open, verb, rows, request.stream, pending)
        }
    })
}

/// Copies row `ids[i]` of the table to place `i` of `out`, for every `i`, and waits. With `stored` and `dtype` the elements
/// of the rows become wider on the way, and a place has nvme_gpu_table_row_bytes_as() bytes; only stored bytes are read.
/// `report` is NULL or written.
///
/// All memory of the request lies in host memory, or all in memory of the store's GPU: then the gather runs in `stream`
/// after the work before it, and the GPU itself submits the reads of a drive; a host thread reads rows of a file or a
/// stripe. Ids and row status may also be in registered host memory.
///
/// A row that was not read is zero in `out`, and has its status; the others are right. Returns the status of
/// the first row that failed. Errors: NVME_GPU_ERROR_USAGE before anything is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather(
    table: *mut TableHandle,
    request: *const TableRequest,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { run(RowUse::Gather, table, request, report) }
}

/// As nvme_gpu_gather(), and returns at once. With GPU memory it is a part of `stream`, which may be captured:
/// a graph gathers by the contents of `ids` at the time of its launch. No call is made that waits for the GPU.
/// With host memory threads of the library gather. The request and the names in it are copied; the memory that it names
/// must stay valid until the end; `pending` is as in nvme_gpu_pread_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_async(
    table: *mut TableHandle,
    request: *const TableRequest,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { start(RowUse::Gather, table, request, pending) }
}

/// Writes place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. Bytes beside the rows do not
/// change. The rest is as in nvme_gpu_gather().
///
/// Rows in GPU memory are written in the order of the stream: by the GPU itself where offset and length of the table's
/// rows are multiples of a block of one drive, else by a host thread. The GPU takes no lock: two writers of one row
/// are ordered by a stream or by waiting. A call on host memory that writes a part of such a row at the same time, or
/// adds to it, may put the rest of the row back to what it was.
///
/// With host memory all ids are judged first: with one out of range nothing is written, and the other rows have the
/// status NVME_GPU_ROW_NOT_RUN. A row that failed later may have been written in part. Durable after nvme_gpu_flush().
/// Errors: NVME_GPU_ERROR_USAGE, also for a store that is for reading only, before anything is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter(
    table: *mut TableHandle,
    request: *const TableRequest,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { run(RowUse::Scatter, table, request, report) }
}

/// As nvme_gpu_scatter(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_async(
    table: *mut TableHandle,
    request: *const TableRequest,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { start(RowUse::Scatter, table, request, pending) }
}

/// Adds place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. The elements are `element`,
/// little-endian. Rows with the same id are summed in the order of `ids`; additions of several threads through one store
/// are all counted. The rest is as in nvme_gpu_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add(
    table: *mut TableHandle,
    request: *const TableRequest,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { run(RowUse::Add, table, request, report) }
}

/// As nvme_gpu_scatter_add(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add_async(
    table: *mut TableHandle,
    request: *const TableRequest,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    // SAFETY: as the header says.
    unsafe { start(RowUse::Add, table, request, pending) }
}
