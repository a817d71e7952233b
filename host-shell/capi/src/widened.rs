//! Gathers that upcast or dequantise the elements of rows.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, text, value};
use crate::opened::{TABLES, TableHandle};
use crate::pending::{PendingHandle, RowsReport};
use crate::rows::{CallRows, RowVerb, later, now};
use crate::status::nvme_gpu_status;
use crate::transfer::nvme_gpu_stream;
use nvme_host::store::RowWidening;
use std::ffi::{c_char, c_void};

/// # Safety
/// The names are NULL or end with a 0.
unsafe fn widening(stored: *const c_char, dtype: *const c_char) -> Answer<RowWidening> {
    // SAFETY: the caller's.
    let (stored, dtype) = unsafe { (text(stored, "stored")?, text(dtype, "dtype")?) };
    Ok(RowWidening::of_names(stored, dtype)?)
}

/// Returns the number of bytes of a row of the table that nvme_gpu_gather_as() makes: the row has elements of
/// `stored`, which come out as `dtype`. 0 after an error, with nvme_gpu_last_error().
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

/// As nvme_gpu_gather(), and makes the elements wider on the way: they are stored as `stored` and come out as `dtype`,
/// in places of nvme_gpu_table_row_bytes_as() bytes. Only stored bytes are read.
///
/// `stored` is "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", or "q8_0", "q4_0", "q4_1" for GGUF's blocks of 32
/// elements; `dtype` is "float16" or "float32". The row has to be whole blocks. In memory of a GPU `out` and
/// `out_stride` are multiples of an element's bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_as(
    table: *mut TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
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
            let widen = widening(stored, dtype)?;
            let row_bytes = widen.row_bytes(open.table.row_bytes())?;
            let mut rows =
                CallRows::new(row_bytes, ids, id_type, count, out, out_stride, row_status)?;
            rows.widen = Some(widen);
            now(&open, RowVerb::Gather, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_gather_as(), and returns at once: see nvme_gpu_gather_async(). The names are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_as_async(
    table: *mut TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
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
            let widen = widening(stored, dtype)?;
            let row_bytes = widen.row_bytes(open.table.row_bytes())?;
            let mut rows =
                CallRows::new(row_bytes, ids, id_type, count, out, out_stride, row_status)?;
            rows.widen = Some(widen);
            later(&open, RowVerb::Gather, rows, stream, pending)
        }
    })
}
