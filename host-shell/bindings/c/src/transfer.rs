//! Reads and writes of any range of bytes. Memory of a GPU goes the way of the store's GPU or of a host thread, by
//! the address alone, as the caller need not say where it lies.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call};
use crate::memory::{CallLocation, CallMemory, place};
use crate::opened::{OpenedStore, StoreHandle, opened};
use crate::pending::{self, OperationReport, PendingHandle};
use crate::status::{CallFailure, nvme_gpu_status};
use nvme_host::Store;
use std::ffi::c_void;

/// A stream of the GPU: a CUstream or cudaStream_t, or NULL for the default stream. Ignored for host memory.
#[allow(non_camel_case_types)]
pub type nvme_gpu_stream = *mut c_void;

/// # Errors
/// Usage for a range past the end: known before an operation starts.
pub fn check_range(opened: &OpenedStore, offset: u64, bytes: usize) -> Answer<()> {
    let len = opened.store.len();
    let end = offset.checked_add(bytes as u64);
    match end.is_some_and(|end| end <= len) {
        true => Ok(()),
        false => Err(CallFailure::usage(
            format!("{bytes} bytes from {offset} on end past the store, which has {len} bytes"),
            "ask for a range inside the store",
        )),
    }
}

/// Direction of a transfer.
#[derive(Clone, Copy)]
enum TransferMethod {
    Read,
    Write,
}

/// A read or write of a call.
#[derive(Clone, Copy)]
struct TransferRange {
    way: TransferMethod,
    data: CallMemory,
    bytes: usize,
    offset: u64,
}

impl TransferRange {
    /// # Safety
    /// The caller fulfils the contract in the header for `data`.
    unsafe fn new(
        opened: &OpenedStore,
        way: TransferMethod,
        data: *const c_void,
        bytes: usize,
        offset: u64,
    ) -> Answer<Self> {
        // SAFETY: the caller's.
        let data = unsafe { CallMemory::new(data, bytes, "data") }?;
        check_range(opened, offset, bytes)?;
        Ok(Self {
            way,
            data,
            bytes,
            offset,
        })
    }

    fn place(&self, opened: &OpenedStore) -> Answer<CallLocation> {
        match self.bytes {
            0 => Ok(CallLocation::Host),
            _ => place(opened, &self.data, "data"),
        }
    }

    /// # Safety
    /// The caller fulfils the contract in the header for `data`, which lies in host memory.
    unsafe fn run(&self, store: &Store) -> nvme_host::Result<()> {
        match self.way {
            // SAFETY: the caller's.
            TransferMethod::Read => store.read_at(self.offset, unsafe { self.data.bytes_mut() }),
            // SAFETY: the caller's.
            TransferMethod::Write => store.write_at(self.offset, unsafe { self.data.bytes() }),
        }
    }

    /// # Safety
    /// The caller fulfils the contract in the header for `data`, which lies in GPU memory.
    #[cfg(feature = "cuda")]
    unsafe fn launch(
        &self,
        store: &Store,
        stream: nvme_gpu_stream,
    ) -> Answer<nvme_host::cuda::PendingRows> {
        let (offset, bytes) = (self.offset, self.bytes as u64);
        let (at, stream) = (self.data.address(), stream.addr() as u64);
        // SAFETY: the caller's.
        let pending = unsafe {
            match self.way {
                TransferMethod::Read => store.read_on_gpu(offset, bytes, at, stream),
                TransferMethod::Write => store.write_from_gpu(offset, bytes, at, stream),
            }
        };
        Ok(pending?)
    }

    /// Executes the transfer and waits.
    ///
    /// # Safety
    /// The caller fulfils the contract in the header for `data`.
    unsafe fn now(&self, opened: &OpenedStore) -> Answer<()> {
        match self.place(opened)? {
            // SAFETY: the caller's.
            CallLocation::Host => Ok(unsafe { self.run(&opened.store) }?),
            #[cfg(feature = "cuda")]
            CallLocation::Gpu => {
                let (at, bytes) = (self.data.address(), self.bytes as u64);
                if matches!(self.way, TransferMethod::Read)
                    // SAFETY: the caller's.
                    && unsafe { opened.store.read_by_cufile(self.offset, bytes, at) }?
                {
                    return Ok(());
                }
                // SAFETY: the caller's.
                let under_way = unsafe { self.launch(&opened.store, std::ptr::null_mut()) }?;
                pending::wait_for_stream(opened, bytes, under_way)?.result()
            }
            #[cfg(not(feature = "cuda"))]
            CallLocation::Gpu => Err(CallFailure::usage(
                "an address lies in GPU memory, and this library was built without CUDA",
                "use host memory",
            )),
        }
    }

    /// Starts the transfer.
    ///
    /// # Safety
    /// The caller fulfils the contract in the header for `data`.
    unsafe fn later(
        self,
        opened: &OpenedStore,
        stream: nvme_gpu_stream,
        to: *mut *mut PendingHandle,
    ) -> Answer<()> {
        let _ = stream;
        match self.place(opened)? {
            // SAFETY: the caller's.
            CallLocation::Host => unsafe {
                pending::start(opened, to, move |store| {
                    OperationReport::from(self.run(store))
                })
            },
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's.
            CallLocation::Gpu => unsafe {
                pending::on_stream(to, self.launch(&opened.store, stream)?)
            },
            #[cfg(not(feature = "cuda"))]
            CallLocation::Gpu => Err(CallFailure::usage(
                "an address lies in GPU memory, and this library was built without CUDA",
                "use host memory",
            )),
        }
    }
}

/// Reads `bytes` bytes from byte `offset` on to `data`, in host memory or in memory of the store's GPU, and waits. Any
/// offset, length and alignment. With GPU memory it is ordered after the default stream.
///
/// Errors: NVME_GPU_ERROR_USAGE for a range past the end, before anything is sent. After another error `data` may have
/// changed in part. A read to GPU memory returns the status of its first part of 64 KiB that failed.
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
        unsafe {
            TransferRange::new(&opened, TransferMethod::Read, data, bytes, offset)?.now(&opened)
        }
    })
}

/// Writes `bytes` bytes at `data`, in host memory or in memory of the store's GPU, from byte `offset` on, and waits.
/// Durable after nvme_gpu_flush().
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
        unsafe {
            TransferRange::new(&opened, TransferMethod::Write, data, bytes, offset)?.now(&opened)
        }
    })
}

/// As nvme_gpu_pread(), and returns at once. With host memory threads of the library read, up to 16 operations
/// of a store at a time; with GPU memory it is a part of `stream`. `data` must stay valid, unused, until the
/// operation has ended.
///
/// `*pending` is a handle for nvme_gpu_pending_wait() and nvme_gpu_pending_free(); with NULL the operation has
/// no handle, and a failure is only counted (nvme_gpu_statistics.background_failures; host memory). An error
/// that is found before the start is returned here, and `*pending` is not written.
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
        let opened = opened(store)?;
        // SAFETY: as the header says.
        unsafe {
            TransferRange::new(&opened, TransferMethod::Read, data, bytes, offset)?
                .later(&opened, stream, pending)
        }
    })
}

/// As nvme_gpu_pwrite(), and returns at once: see nvme_gpu_pread_async(). Operations on host memory are not ordered:
/// wait for one before another that shall see its bytes. Those of one stream are.
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
        let opened = opened(store)?;
        // SAFETY: as the header says.
        unsafe {
            TransferRange::new(&opened, TransferMethod::Write, data, bytes, offset)?
                .later(&opened, stream, pending)
        }
    })
}
