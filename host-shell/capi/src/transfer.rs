//! Reads and writes of any range of bytes.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call};
use crate::memory::{Lent, Where, place};
use crate::pending::{self, Outcome, PendingHandle};
use crate::status::{Failure, nvme_gpu_status};
use crate::store::{Opened, StoreHandle, opened};
use std::ffi::c_void;

/// A stream of the GPU: a CUstream or cudaStream_t, or NULL for the default stream. Ignored for host memory.
#[allow(non_camel_case_types)]
pub type nvme_gpu_stream = *mut c_void;

/// # Errors
/// Usage for a range past the end: known before an operation starts.
pub fn check_range(opened: &Opened, offset: u64, bytes: usize) -> Answer<()> {
    let len = opened.store.len();
    let end = offset.checked_add(bytes as u64);
    match end.is_some_and(|end| end <= len) {
        true => Ok(()),
        false => Err(Failure::usage(
            format!("{bytes} bytes from {offset} on end past the store, which has {len} bytes"),
            "ask for a range inside the store",
        )),
    }
}

/// # Errors
/// Usage for GPU memory.
pub fn on_host(opened: &Opened, memory: &Lent, what: &str) -> Answer<()> {
    match place(opened, memory, what)? {
        Where::Host => Ok(()),
        Where::Gpu => Err(Failure::usage(
            format!("{what} lies in GPU memory, which this version reads and writes by rows only"),
            "gather into it, or use host memory and copy",
        )),
    }
}

/// Reads `bytes` bytes from byte `offset` on into host memory at `data`. Any offset, length and alignment.
///
/// Errors: NVME_GPU_ERROR_USAGE for a range past the end and for GPU memory, before anything is sent. After another
/// error `data` may have changed in part.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pread(
    store: *mut StoreHandle,
    data: *mut c_void,
    bytes: usize,
    offset: u64,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let data = unsafe { Lent::new(data, bytes, "data") }?;
        check_range(&opened, offset, bytes)?;
        on_host(&opened, &data, "data")?;
        // SAFETY: as the header says.
        Ok(opened.store.read_at(offset, unsafe { data.bytes_mut() })?)
    })
}

/// Writes `bytes` bytes at `data`, in host memory, from byte `offset` on. Durable after nvme_gpu_flush().
///
/// Errors: as nvme_gpu_pread(), and NVME_GPU_ERROR_USAGE for a store that is for reading only. After another error
/// some blocks may have been written; bytes outside the range have not changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pwrite(
    store: *mut StoreHandle,
    data: *const c_void,
    bytes: usize,
    offset: u64,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let data = unsafe { Lent::new(data, bytes, "data") }?;
        check_range(&opened, offset, bytes)?;
        on_host(&opened, &data, "data")?;
        // SAFETY: as the header says.
        Ok(opened.store.write_at(offset, unsafe { data.bytes() })?)
    })
}

/// As nvme_gpu_pread(), and returns at once: threads of the library read, up to 16 operations of a store at a time.
/// `data` must stay, unused, until the operation has ended.
///
/// `*pending` is a handle for nvme_gpu_pending_wait() and nvme_gpu_pending_free(); with NULL the operation is let go,
/// and a failure is only counted (nvme_gpu_statistics.background_failures). What is known to be wrong at once is
/// returned here, and `*pending` is not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pread_async(
    store: *mut StoreHandle,
    data: *mut c_void,
    bytes: usize,
    offset: u64,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let _ = stream;
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let data = unsafe { Lent::new(data, bytes, "data") }?;
        check_range(&opened, offset, bytes)?;
        on_host(&opened, &data, "data")?;
        // SAFETY: as the header says: the memory stays until the end, and is not used meanwhile.
        let job = move |store: &nvme_host::Store| {
            Outcome::from(store.read_at(offset, unsafe { data.bytes_mut() }))
        };
        // SAFETY: as the header says.
        unsafe { pending::start(&opened, pending, job) }
    })
}

/// As nvme_gpu_pwrite(), and returns at once: see nvme_gpu_pread_async(). Operations of a store are not ordered: wait
/// for one before another that shall see its bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pwrite_async(
    store: *mut StoreHandle,
    data: *const c_void,
    bytes: usize,
    offset: u64,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let _ = stream;
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let data = unsafe { Lent::new(data, bytes, "data") }?;
        check_range(&opened, offset, bytes)?;
        on_host(&opened, &data, "data")?;
        // SAFETY: as the header says: the memory stays until the end, and is not written meanwhile.
        let job = move |store: &nvme_host::Store| {
            Outcome::from(store.write_at(offset, unsafe { data.bytes() }))
        };
        // SAFETY: as the header says.
        unsafe { pending::start(&opened, pending, job) }
    })
}
