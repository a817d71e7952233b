//! Many reads and writes in one call. All of them are in flight together; the result is the first failure in the
//! order of the entries.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, null};
use crate::memory::{CallLocation, CallMemory, place};
use crate::opened::{OpenedStore, StoreHandle, opened};
use crate::pending::{self, OperationReport, PendingHandle};
use crate::status::{
    CallFailure, NVME_GPU_ERROR_UNFINISHED, NVME_GPU_OK, NVME_GPU_ROW_NOT_RUN, nvme_gpu_status,
};
use crate::transfer::{check_range, nvme_gpu_stream};
use nvme_host::Store;
#[cfg(feature = "cuda")]
use nvme_host::cuda::ReadRange;
use nvme_host::store::StoreTransfer;
use std::ffi::c_void;

/// nvme_gpu_io.operation: read.
pub const NVME_GPU_READ: u32 = 0;
/// nvme_gpu_io.operation: write.
pub const NVME_GPU_WRITE: u32 = 1;

/// One read or write of a batch.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BatchIo {
    /// NVME_GPU_READ or NVME_GPU_WRITE.
    pub operation: u32,
    /// Written at the end: NVME_GPU_OK, or why it failed.
    pub status: nvme_gpu_status,
    /// First byte in the store.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Not changed by a write. Host memory; of a read by nvme_gpu_batch() also memory of the store's GPU.
    pub data: *mut c_void,
}

/// Returns the location of the memory of an entry.
///
/// # Errors
/// Usage for GPU memory, unless `takes_gpu`.
fn place_of(opened: &OpenedStore, memory: &CallMemory, takes_gpu: bool) -> Answer<CallLocation> {
    match place(opened, memory, "data")? {
        CallLocation::Gpu if !takes_gpu => Err(CallFailure::usage(
            "data lies in GPU memory, which batches take for reads by nvme_gpu_batch alone",
            "use nvme_gpu_batch for reads, or nvme_gpu_pread_async and nvme_gpu_pwrite_async",
        )),
        at => Ok(at),
    }
}

/// A batch on its way: the entries, where each status goes.
struct IoBatch {
    entries: CallMemory,
    ios: Vec<IoEntry>,
}

struct IoEntry {
    is_write: bool,
    offset: u64,
    data: CallMemory,
    #[cfg(feature = "cuda")]
    bytes: usize,
    at: CallLocation,
}

impl IoBatch {
    /// Checks all entries; no transfer has begun when one is rejected.
    ///
    /// # Safety
    /// The caller fulfils the contract in the header for `entries`.
    unsafe fn take(
        opened: &OpenedStore,
        entries: *mut BatchIo,
        count: usize,
        takes_gpu: bool,
    ) -> Answer<Self> {
        if entries.is_null() && count > 0 {
            return Err(null("ios"));
        }
        // SAFETY: the caller's.
        let lent =
            unsafe { CallMemory::elements(entries, count as u64, size_of::<BatchIo>(), "ios") }?;
        let mut ios = Vec::new();
        for index in 0..count {
            let named = |failure: CallFailure| failure.of_entry(index);
            // SAFETY: below `count`.
            let io = unsafe { entries.add(index).read_unaligned() };
            let is_write = match io.operation {
                NVME_GPU_READ => false,
                NVME_GPU_WRITE => true,
                other => {
                    let cause =
                        format!("operation {other} is neither NVME_GPU_READ nor NVME_GPU_WRITE");
                    let remedy = "use NVME_GPU_READ or NVME_GPU_WRITE";
                    return Err(named(CallFailure::usage(cause, remedy)));
                }
            };
            // SAFETY: the caller's.
            let data = unsafe { CallMemory::new(io.data, io.bytes, "data") }.map_err(named)?;
            check_range(opened, io.offset, io.bytes).map_err(named)?;
            let at = match io.bytes {
                0 => CallLocation::Host,
                _ => place_of(opened, &data, takes_gpu && !is_write).map_err(named)?,
            };
            ios.push(IoEntry {
                is_write,
                offset: io.offset,
                data,
                #[cfg(feature = "cuda")]
                bytes: io.bytes,
                at,
            });
        }
        let batch = Self { entries: lent, ios };
        for index in 0..count {
            batch.set(index, NVME_GPU_ROW_NOT_RUN);
        }
        Ok(batch)
    }

    fn set(&self, index: usize, status: nvme_gpu_status) {
        let entries =
            std::ptr::with_exposed_provenance_mut::<BatchIo>(self.entries.address() as usize);
        // SAFETY: an entry of the batch, which stays until the end.
        unsafe { (&raw mut (*entries.add(index)).status).write_unaligned(status) };
    }

    /// Returns the entries of a kind of memory, with their numbers.
    fn entries_in(&self, at: CallLocation) -> impl Iterator<Item = (usize, &IoEntry)> {
        let entries = self.ios.iter().enumerate();
        entries.filter(move |(_, entry)| entry.at == at)
    }

    /// Runs the entries in host memory.
    fn run(&self, store: &Store) -> OperationReport {
        let transfers =
            self.entries_in(CallLocation::Host)
                .map(|(_, entry)| match entry.is_write {
                    // SAFETY: as the header says: the memory stays until the end, and is not used meanwhile.
                    false => StoreTransfer::Read(entry.offset, unsafe { entry.data.bytes_mut() }),
                    // SAFETY: as above.
                    true => StoreTransfer::Write(entry.offset, unsafe { entry.data.bytes() }),
                });
        let results = store.transfer_all(&mut transfers.collect::<Vec<_>>());
        let failures = results
            .into_iter()
            .map(|result| result.err().map(CallFailure::from));
        let numbers = self.entries_in(CallLocation::Host).map(|(index, _)| index);
        self.conclude(numbers.zip(failures))
    }

    /// Writes the status of each of `ends`, and returns the outcome of all: one that has not ended comes before other
    /// failures, as its memory is in use.
    fn conclude(
        &self,
        ends: impl Iterator<Item = (usize, Option<CallFailure>)>,
    ) -> OperationReport {
        let mut first = OperationReport::SUCCESS;
        for (index, failure) in ends {
            self.set(
                index,
                failure.as_ref().map_or(NVME_GPU_OK, |one| one.status),
            );
            if let Some(failure) = failure {
                let report = &mut first.report;
                report.failed += 1;
                let known = first.failure.as_ref();
                if known.is_none_or(|known| !is_unfinished(known) && is_unfinished(&failure)) {
                    report.first_row = index as u64;
                    report.first_status = failure.status;
                    first.failure = Some(failure.of_entry(index));
                }
            }
        }
        first.report.rows = self.ios.len() as u64;
        first
    }

    /// Executes all entries and waits: reads into GPU memory share launches, which run while the host reads the
    /// other entries.
    fn now(&self, opened: &OpenedStore) -> Answer<()> {
        #[cfg(feature = "cuda")]
        {
            let ranges: Vec<ReadRange> = self
                .entries_in(CallLocation::Gpu)
                .map(|(_, entry)| entry.range())
                .collect();
            if ranges.is_empty() {
                return self.run(&opened.store).result();
            }
            // SAFETY: as the header says: the memory stays until the end, which is waited for.
            let read = |ranges: &[ReadRange]| unsafe { opened.store.read_ranges_on_gpu(ranges, 0) };
            let under_way = read(&ranges)?;
            // Also if the wait for them ends early.
            for (index, _) in self.entries_in(CallLocation::Gpu) {
                self.set(index, NVME_GPU_ERROR_UNFINISHED);
            }
            let of_host = self.run(&opened.store);
            let bytes = ranges.iter().map(|range| range.bytes).sum();
            let all = pending::wait_for_stream(opened, bytes, under_way)?;
            // Failures count through the parts of all entries, so they do not tell which entry failed: each is
            // read once more in a separate launch, until one does not end.
            let mut unfinished = None;
            let alone = |(index, entry): (usize, &IoEntry)| {
                let failure = match all.failure {
                    None => None,
                    Some(_) if unfinished.is_some() => unfinished.clone(),
                    Some(_) => read(&[entry.range()])
                        .map_err(CallFailure::from)
                        .and_then(|one| pending::wait_for_stream(opened, entry.bytes as u64, one))
                        .and_then(OperationReport::result)
                        .err(),
                };
                unfinished = failure.clone().filter(is_unfinished);
                (index, failure)
            };
            let of_gpu = self.conclude(self.entries_in(CallLocation::Gpu).map(alone));
            let mut ends = [of_host, of_gpu];
            ends.sort_by_key(|end| {
                let is_other = !end.failure.as_ref().is_some_and(is_unfinished);
                (is_other, end.failure.is_none(), end.report.first_row)
            });
            let [first, _] = ends;
            first.result()
        }
        #[cfg(not(feature = "cuda"))]
        self.run(&opened.store).result()
    }
}

fn is_unfinished(failure: &CallFailure) -> bool {
    failure.status == NVME_GPU_ERROR_UNFINISHED
}

#[cfg(feature = "cuda")]
impl IoEntry {
    fn range(&self) -> ReadRange {
        ReadRange {
            offset: self.offset,
            bytes: self.bytes as u64,
            to: self.data.address(),
        }
    }
}

/// Carries out `count` reads and writes, with many commands in flight, and waits for all. Those of one batch are not
/// ordered: none may write bytes that another one reads or writes.
///
/// Each entry gets its status. Returns that of the first one that failed; the others were carried out all the same.
/// NVME_GPU_ERROR_UNFINISHED comes before any other failure: reads with that status continue, and their memory is in use.
/// An entry that cannot be obeyed is refused with NVME_GPU_ERROR_USAGE before anything is sent or written.
///
/// Reads may go to memory of the store's GPU, ordered after the default stream: up to 96 of one drive are one launch.
/// If one of them fails, each is read once more for its status.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_batch(
    store: *mut StoreHandle,
    ios: *mut BatchIo,
    count: usize,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let batch = unsafe { IoBatch::take(&opened, ios, count, true) }?;
        batch.now(&opened)
    })
}

/// As nvme_gpu_batch() in host memory, and returns at once: see nvme_gpu_pread_async(). `ios` must stay until the end; its statuses
/// are written before that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_batch_async(
    store: *mut StoreHandle,
    ios: *mut BatchIo,
    count: usize,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let _ = stream;
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let batch = unsafe { IoBatch::take(&opened, ios, count, false) }?;
        // SAFETY: as the header says.
        unsafe { pending::start(&opened, pending, move |store| batch.run(store)) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_has_not_ended_comes_before_other_failures() {
        let mut byte = 0u8;
        let io = BatchIo {
            operation: NVME_GPU_READ,
            status: NVME_GPU_OK,
            offset: 0,
            bytes: 1,
            data: (&raw mut byte).cast(),
        };
        let mut ios = [io; 3];
        // SAFETY: the memory is there until the end of the test.
        let batch = unsafe {
            IoBatch {
                entries: CallMemory::elements(ios.as_mut_ptr(), 3, size_of::<BatchIo>(), "ios")
                    .unwrap_or_else(|failure| panic!("{}", failure.cause)),
                ios: Vec::new(),
            }
        };
        let failed = CallFailure::usage("it failed", "none");
        let unfinished = pending::unfinished("it has not ended");
        let ends = [Some(failed), None, Some(unfinished)];
        let report = batch.conclude((0..).zip(ends));
        assert_eq!(report.report.failed, 2);
        assert_eq!(report.report.first_row, 2);
        assert_eq!(report.report.first_status, NVME_GPU_ERROR_UNFINISHED);
        assert!(report.failure.as_ref().is_some_and(is_unfinished));
        let usage = CallFailure::usage("", "").status;
        let statuses = ios.map(|io| io.status);
        assert_eq!(statuses, [usage, NVME_GPU_OK, NVME_GPU_ERROR_UNFINISHED]);
    }
}
