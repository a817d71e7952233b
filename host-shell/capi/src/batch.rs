//! Many reads and writes in one call.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, null};
use crate::memory::{Lent, Where, place};
use crate::opened::{Opened, StoreHandle, opened};
use crate::pending::{self, Outcome, PendingHandle};
use crate::status::{Failure, NVME_GPU_OK, NVME_GPU_ROW_NOT_RUN, nvme_gpu_status};
use crate::transfer::{check_range, nvme_gpu_stream};
use nvme_host::Store;
use nvme_host::store::Transfer;
use std::ffi::c_void;

/// nvme_gpu_io.operation: read.
pub const NVME_GPU_READ: u32 = 0;
/// nvme_gpu_io.operation: write.
pub const NVME_GPU_WRITE: u32 = 1;

/// One read or write of a batch.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Io {
    /// NVME_GPU_READ or NVME_GPU_WRITE.
    pub operation: u32,
    /// Written at the end: NVME_GPU_OK, or why it failed.
    pub status: nvme_gpu_status,
    /// First byte in the store.
    pub offset: u64,
    /// How many.
    pub bytes: usize,
    /// Host memory; not changed by a write.
    pub data: *mut c_void,
}

/// # Errors
/// Usage for GPU memory.
fn on_host(opened: &Opened, memory: &Lent, what: &str) -> Answer<()> {
    match place(opened, memory, what)? {
        Where::Host => Ok(()),
        Where::Gpu => Err(Failure::usage(
            format!("{what} lies in GPU memory, which batches do not take"),
            "read it by nvme_gpu_pread_async, or gather rows",
        )),
    }
}

/// A batch on its way: the entries, where each status goes.
struct Batch {
    entries: Lent,
    ios: Vec<(bool, u64, Lent)>,
}

impl Batch {
    /// Checks all entries; nothing was done when one is refused.
    ///
    /// # Safety
    /// As the header says of `entries`.
    unsafe fn take(opened: &Opened, entries: *mut Io, count: usize) -> Answer<Self> {
        if entries.is_null() && count > 0 {
            return Err(null("ios"));
        }
        // SAFETY: the caller's.
        let lent = unsafe { Lent::elements(entries, count as u64, size_of::<Io>(), "ios") }?;
        let mut ios = Vec::new();
        for index in 0..count {
            let named = |failure: Failure| Failure {
                cause: format!("entry {index}: {}", failure.cause),
                ..failure
            };
            // SAFETY: below `count`.
            let io = unsafe { entries.add(index).read_unaligned() };
            let is_write = match io.operation {
                NVME_GPU_READ => false,
                NVME_GPU_WRITE => true,
                other => {
                    let cause = format!("operation {other}");
                    let remedy = "use NVME_GPU_READ or NVME_GPU_WRITE";
                    return Err(named(Failure::usage(cause, remedy)));
                }
            };
            // SAFETY: the caller's.
            let data = unsafe { Lent::new(io.data, io.bytes, "data") }.map_err(named)?;
            check_range(opened, io.offset, io.bytes).map_err(named)?;
            on_host(opened, &data, "data").map_err(named)?;
            ios.push((is_write, io.offset, data));
        }
        let batch = Self { entries: lent, ios };
        for index in 0..count {
            batch.set(index, NVME_GPU_ROW_NOT_RUN);
        }
        Ok(batch)
    }

    fn set(&self, index: usize, status: nvme_gpu_status) {
        let entries = std::ptr::with_exposed_provenance_mut::<Io>(self.entries.address() as usize);
        // SAFETY: an entry of the batch, which stays until the end.
        unsafe { (&raw mut (*entries.add(index)).status).write_unaligned(status) };
    }

    fn run(self, store: &Store) -> Outcome {
        let transfers = self
            .ios
            .iter()
            .map(|(is_write, offset, data)| match is_write {
                // SAFETY: as the header says: the memory stays until the end, and is not used meanwhile.
                false => Transfer::Read(*offset, unsafe { data.bytes_mut() }),
                // SAFETY: as above.
                true => Transfer::Write(*offset, unsafe { data.bytes() }),
            });
        let results = store.transfer_all(&mut transfers.collect::<Vec<_>>());
        let mut first = Outcome::SUCCESS;
        for (index, result) in results.into_iter().enumerate() {
            let failure = result.err().map(Failure::from);
            self.set(
                index,
                failure.as_ref().map_or(NVME_GPU_OK, |one| one.status),
            );
            if let Some(failure) = failure {
                let report = &mut first.report;
                report.failed += 1;
                if first.failure.is_none() {
                    report.first_row = index as u64;
                    report.first_status = failure.status;
                    let cause = format!("entry {index}: {}", failure.cause);
                    first.failure = Some(Failure { cause, ..failure });
                }
            }
        }
        first.report.rows = self.ios.len() as u64;
        first
    }
}

/// Carries out `count` reads and writes, with many commands in flight, and waits for all. Those of one batch are not
/// ordered: none may write bytes that another one reads or writes.
///
/// Each entry gets its status. Returns that of the first one that failed; the others were carried out all the same.
/// An entry that cannot be obeyed is refused with NVME_GPU_ERROR_USAGE before anything is sent or written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_batch(
    store: *mut StoreHandle,
    ios: *mut Io,
    count: usize,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let batch = unsafe { Batch::take(&opened, ios, count) }?;
        batch.run(&opened.store).result()
    })
}

/// As nvme_gpu_batch(), and returns at once: see nvme_gpu_pread_async(). `ios` must stay until the end; its statuses
/// are written before that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_batch_async(
    store: *mut StoreHandle,
    ios: *mut Io,
    count: usize,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let _ = stream;
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let batch = unsafe { Batch::take(&opened, ios, count) }?;
        // SAFETY: as the header says.
        unsafe { pending::start(&opened, pending, move |store| batch.run(store)) }
    })
}
