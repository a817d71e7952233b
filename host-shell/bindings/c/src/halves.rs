//! Gathers in halves: one call submits the reads of rows in a stream, another one waits for them in a stream.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{call, put, value};
use crate::handles::OpenHandles;
use crate::opened::{TABLES, TableHandle};
use crate::pending::PendingHandle;
use crate::request::{RowUse, TableRequest};
#[cfg(feature = "cuda")]
use crate::rows::CallRows;
use crate::status::nvme_gpu_status;
use nvme_host::lock::lock;
use std::sync::{Arc, Mutex};

/// A gather whose second half is to come. Opaque; independent of the handles of its table and store.
pub struct BegunHandle {
    _opaque: [u8; 0],
}

/// Object of a handle.
#[cfg(feature = "cuda")]
struct OpenGather {
    begun: nvme_host::store::BegunGather,
    row_bytes: u64,
    ids: TableRequest,
}

/// Object of a handle: nothing begins without a GPU.
#[cfg(not(feature = "cuda"))]
type OpenGather = std::convert::Infallible;

// SAFETY: the pointers in it are addresses, which are not followed here.
#[cfg(feature = "cuda")]
unsafe impl Send for OpenGather {}

static BEGUN: OpenHandles<Arc<Mutex<OpenGather>>> = OpenHandles::new();

/// Begins a gather of rows on the store's GPU: puts a launch into the stream that submits the reads and leaves the GPU.
/// Work that comes after it in the stream has the GPU to itself while the drive works; nvme_gpu_gather_finish() waits for
/// the reads and copies the rows. Of the request `ids`, `count`, `id_type` and `stream` are used. On success `*begun` is
/// a handle for nvme_gpu_begun_free(), else NULL.
///
/// This is for few rows of one drive in units of 4 bytes (768 rows of 256 bytes, by default): the second half reads all
/// other rows by itself, and those that are begun while other gathers hold the queues. The ids stay as they are until the
/// second half has ended. The stream may be captured; then both halves have to be in one capture.
/// Errors: NVME_GPU_ERROR_USAGE, also for a store without a GPU; NVME_GPU_ERROR_ENVIRONMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_begin(
    table: *mut TableHandle,
    request: *const TableRequest,
    begun: *mut *mut BegunHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        let request = unsafe {
            put(begun, std::ptr::null_mut(), "begun")?;
            TableRequest::of(request, RowUse::Begin)?
        };
        let open = TABLES.get(table, "table")?;
        let gather = begin(&open, request)?;
        // SAFETY: written once already.
        unsafe { put(begun, BEGUN.open(Arc::new(Mutex::new(gather))), "begun") }
    })
}

#[cfg(feature = "cuda")]
fn begin(
    open: &crate::opened::OpenTable,
    request: TableRequest,
) -> crate::border::Answer<OpenGather> {
    let row_bytes = open.table.row_bytes();
    // SAFETY: as the header says; of the rows nothing is known yet, and no bytes are asked for.
    let rows = unsafe { CallRows::of_ids(row_bytes, request.ids()?) }?;
    // SAFETY: as the header says.
    let begun = unsafe {
        open.table
            .begin_on_gpu(&rows.gather_ids(), request.stream.addr() as u64)
    }?;
    Ok(OpenGather {
        begun,
        row_bytes,
        ids: request,
    })
}

#[cfg(not(feature = "cuda"))]
fn begin(_: &crate::opened::OpenTable, _: TableRequest) -> crate::border::Answer<OpenGather> {
    let failure = crate::status::CallFailure::usage(
        "this library was built without CUDA",
        "use nvme_gpu_gather",
    );
    Err(failure)
}

/// Finishes a gather: puts a launch into a stream that waits for the reads, copies the rows and stores their status. It
/// comes after the first half, whichever stream that is in. Of the request `out`, `stride`, `row_status` and `stream` are
/// used; `out` and `stride` are multiples of 4 in memory of the store's GPU. Returns at once; `pending` is as in
/// nvme_gpu_gather_async().
///
/// A read has its deadline from the time when it was submitted. A recovery, or nvme_gpu_close(), between the halves fails
/// the rows: they are zero, with the status NVME_GPU_ROW_GONE. The handle stays open; it is finished once.
/// Errors: NVME_GPU_ERROR_USAGE, also for a second call, and where one half is captured in a graph and the other is not in
/// the same capture; the gather can be finished still, except for the first of these.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_finish(
    begun: *mut BegunHandle,
    request: *const TableRequest,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        let request = unsafe { TableRequest::of(request, RowUse::Finish) }?;
        let gather = BEGUN.get(begun, "begun gather")?;
        let mut gather = lock(&gather);
        // SAFETY: as the header says.
        unsafe { finish(&mut gather, request, pending) }
    })
}

/// # Safety
/// As nvme_gpu_gather_finish() in the header.
#[cfg(feature = "cuda")]
unsafe fn finish(
    gather: &mut OpenGather,
    request: TableRequest,
    pending: *mut *mut PendingHandle,
) -> crate::border::Answer<()> {
    let places = (request.out.cast_const(), request.stride);
    // SAFETY: as the header says.
    unsafe {
        let ids = gather.ids.ids()?;
        let rows = CallRows::new(gather.row_bytes, ids, places, request.row_status)?;
        let ended = gather
            .begun
            .finish(&rows.gather_target(), request.stream.addr() as u64)?;
        crate::pending::on_stream(pending, ended)
    }
}

/// # Safety
/// As above.
#[cfg(not(feature = "cuda"))]
unsafe fn finish(
    _: &mut OpenGather,
    _: TableRequest,
    _: *mut *mut PendingHandle,
) -> crate::border::Answer<()> {
    Ok(())
}

/// Frees the handle of a gather. One that was not finished releases what it holds, and the program does not wait for it.
/// NULL and a handle that was freed are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_begun_free(begun: *mut BegunHandle) {
    value((), || {
        drop(BEGUN.close(begun));
        Ok(())
    });
}
