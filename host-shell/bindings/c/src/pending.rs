//! Operations under way: polling, waiting, and giving up their handles. A detached operation runs to its end by
//! itself; its memory has to stay until then, and its failure is only counted.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, give, put, value};
use crate::ends::EndNotices;
use crate::handles::OpenHandles;
use crate::opened::OpenedStore;
use crate::status::{CallFailure, NVME_GPU_ERROR_UNFINISHED, nvme_gpu_status};
use nvme_host::lock::lock;
use nvme_host::store::{BackgroundOperation, RowReport};
use nvme_host::{Store, Table};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An operation under way, or ended. Opaque; independent of the store's handle.
pub struct PendingHandle {
    _opaque: [u8; 0],
}

/// Outcome of rows. Set `size` to sizeof(nvme_gpu_report) before the call.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RowsReport {
    pub size: usize,
    /// Rows asked for; 0 where they were not counted: reads and writes, and gathers of a GPU.
    pub rows: u64,
    /// Rows whose status is not 0.
    pub failed: u64,
    /// Place in the request of the first of them; 0 without one.
    pub first_row: u64,
    /// Status of the first of them; 0 without one.
    pub first_status: i32,
    /// errno of the first command of a file that failed; 0 without one.
    pub error_number: i32,
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for RowsReport {
    const NAME: &'static str = "nvme_gpu_report";
}

const NOTHING: RowsReport = RowsReport {
    size: 0,
    rows: 0,
    failed: 0,
    first_row: 0,
    first_status: 0,
    error_number: 0,
};

/// Outcome of an operation.
#[derive(Clone)]
pub struct OperationReport {
    pub report: RowsReport,
    pub failure: Option<CallFailure>,
}

impl OperationReport {
    pub const SUCCESS: Self = Self {
        report: NOTHING,
        failure: None,
    };

    /// Returns the outcome of rows on the CPU.
    pub fn of_rows(report: RowReport) -> Self {
        let first = report.first.as_ref();
        let numbers = RowsReport {
            rows: report.rows as u64,
            failed: report.failed as u64,
            first_row: first.map_or(0, |first| first.row as u64),
            first_status: first.map_or(0, |first| first.status),
            error_number: report.errno.unwrap_or(0),
            ..NOTHING
        };
        let status = numbers.first_status;
        Self {
            report: numbers,
            // The number is that of the row.
            failure: report.check().err().map(|error| match error {
                nvme_host::Error::Changed { .. } => CallFailure::from(error),
                error => CallFailure {
                    status,
                    ..CallFailure::from(error)
                },
            }),
        }
    }

    #[cfg(feature = "cuda")]
    fn of_gpu(gathered: nvme_host::cuda::GatherOutcome) -> Self {
        let Some((row, status)) = gathered.failures.first else {
            return Self::SUCCESS;
        };
        let (name, remedy) = nvme_host::store::status::describe(status);
        let failed = gathered.failures.rows;
        let member = gathered.failures.member;
        let of = member.map_or_else(String::new, |member| {
            format!(" (member {member} of the stripe)")
        });
        Self {
            report: RowsReport {
                failed,
                first_row: row,
                first_status: status,
                ..NOTHING
            },
            failure: Some(CallFailure::new(
                status,
                format!("row {row}{of}: {name}; {failed} rows failed"),
                remedy,
            )),
        }
    }

    pub fn result(self) -> Answer<()> {
        self.failure.map_or(Ok(()), Err)
    }
}

impl From<CallFailure> for OperationReport {
    fn from(failure: CallFailure) -> Self {
        Self {
            report: NOTHING,
            failure: Some(failure),
        }
    }
}

impl From<nvme_host::Result<()>> for OperationReport {
    fn from(result: nvme_host::Result<()>) -> Self {
        result.map_or_else(|error| CallFailure::from(error).into(), |()| Self::SUCCESS)
    }
}

/// Executor of an operation.
enum OperationExecutor {
    Threads(BackgroundOperation<OperationReport>),
    #[cfg(feature = "cuda")]
    Gpu(nvme_host::cuda::PendingRows),
    Ended,
}

/// Object of a handle of an operation.
pub struct WaitingOperation {
    under: OperationExecutor,
    ended: Mutex<Option<OperationReport>>,
    pub notices: Arc<EndNotices>,
}

static PENDING: OpenHandles<Arc<WaitingOperation>> = OpenHandles::new();

/// Returns the operation of a handle.
pub fn operation(pending: *const PendingHandle) -> Answer<Arc<WaitingOperation>> {
    PENDING.get(pending, "pending operation")
}

impl WaitingOperation {
    fn new(under: OperationExecutor) -> Self {
        let notices = Arc::<EndNotices>::default();
        let to = Arc::clone(&notices);
        match &under {
            OperationExecutor::Threads(operation) => operation.when_ended(move || to.tell()),
            // A GPU tells nobody.
            #[cfg(feature = "cuda")]
            OperationExecutor::Gpu(_) => {}
            OperationExecutor::Ended => to.tell(),
        }
        Self {
            under,
            ended: Mutex::new(None),
            notices,
        }
    }

    /// True if the operation has ended, and its outcome is known.
    pub fn has_ended(&self) -> bool {
        self.settle(Duration::ZERO).is_some()
    }

    /// True if its end is known only to those who look.
    pub fn is_silent(&self) -> bool {
        #[cfg(feature = "cuda")]
        return matches!(self.under, OperationExecutor::Gpu(_));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Returns its outcome, if it has ended within `limit`.
    fn settle(&self, limit: Duration) -> Option<OperationReport> {
        match &self.under {
            OperationExecutor::Threads(operation) if operation.wait(limit) => {
                let mut ended = lock(&self.ended);
                if let Some(result) = operation.take() {
                    *ended = Some(result.unwrap_or_else(|error| CallFailure::from(error).into()));
                }
                ended.clone()
            }
            OperationExecutor::Threads(_) => None,
            #[cfg(feature = "cuda")]
            OperationExecutor::Gpu(pending) => {
                let outcome = match limit.is_zero() {
                    true => pending.outcome()?,
                    false => pending.wait(limit),
                };
                match outcome {
                    Ok(gathered) => Some(OperationReport::of_gpu(gathered)),
                    Err(nvme_host::Error::Unfinished { .. }) => None,
                    Err(error) => Some(CallFailure::from(error).into()),
                }
            }
            OperationExecutor::Ended => Some(OperationReport::SUCCESS),
        }
    }

    fn status(&self, limit: Duration) -> Answer<()> {
        let outcome = self.settle(limit);
        outcome.map_or_else(
            || Err(unfinished("the operation has not ended")),
            OperationReport::result,
        )
    }
}

/// Returns the failure of a wait whose time is over.
pub fn unfinished(cause: &str) -> CallFailure {
    let remedy = "wait for it, or longer; launch the graph that it was captured in";
    CallFailure::new(NVME_GPU_ERROR_UNFINISHED, cause, remedy)
}

/// Writes the handle of an operation to `to`; with NULL the operation continues without a handle.
///
/// # Safety
/// `to` is NULL or valid for a write.
unsafe fn hand_out(to: *mut *mut PendingHandle, under: OperationExecutor) -> Answer<()> {
    if to.is_null() {
        return Ok(());
    }
    let waiting = WaitingOperation::new(under);
    // SAFETY: the caller's.
    unsafe { put(to, PENDING.open(Arc::new(waiting)), "pending") }
}

/// Counts a failure that a caller may not ask for.
fn counted(failures: &AtomicU64, outcome: OperationReport) -> OperationReport {
    failures.fetch_add(u64::from(outcome.failure.is_some()), Ordering::Relaxed);
    outcome
}

/// Runs `job` on a thread of the store.
///
/// # Safety
/// `to` is NULL or valid for a write; the memory that `job` uses stays until it has ended.
pub unsafe fn start(
    opened: &OpenedStore,
    to: *mut *mut PendingHandle,
    job: impl FnOnce(&Store) -> OperationReport + Send + 'static,
) -> Answer<()> {
    let failures = Arc::clone(&opened.background_failures);
    let job = move |store: &Store| counted(&failures, job(store));
    let operation = opened.store.in_background(job)?;
    // SAFETY: the caller's.
    unsafe { hand_out(to, OperationExecutor::Threads(operation)) }
}

/// As [`start`], for a table of the store.
///
/// # Safety
/// As [`start`].
pub unsafe fn start_rows(
    opened: &OpenedStore,
    table: &Table,
    to: *mut *mut PendingHandle,
    job: impl FnOnce(&Table) -> OperationReport + Send + 'static,
) -> Answer<()> {
    let failures = Arc::clone(&opened.background_failures);
    let operation = table.in_background(move |table| counted(&failures, job(table)))?;
    // SAFETY: the caller's.
    unsafe { hand_out(to, OperationExecutor::Threads(operation)) }
}

/// Hands out an operation on a stream.
///
/// # Safety
/// `to` is NULL or valid for a write.
#[cfg(feature = "cuda")]
pub unsafe fn on_stream(
    to: *mut *mut PendingHandle,
    pending: nvme_host::cuda::PendingRows,
) -> Answer<()> {
    // SAFETY: the caller's.
    unsafe { hand_out(to, OperationExecutor::Gpu(pending)) }
}

/// Hands out an operation that had nothing to do.
///
/// # Safety
/// `to` is NULL or valid for a write.
pub unsafe fn nothing(to: *mut *mut PendingHandle) -> Answer<()> {
    // SAFETY: the caller's.
    unsafe { hand_out(to, OperationExecutor::Ended) }
}

/// Checks that a call which waits may use `stream`. Before it launches anything: a graph would use the caller's memory
/// after the call has failed.
///
/// # Errors
/// Usage for a stream that is being captured.
#[cfg(feature = "cuda")]
pub fn check_not_captured(opened: &OpenedStore, stream: *mut std::ffi::c_void) -> Answer<()> {
    match &opened.gpu {
        Some(gpu) if gpu.is_captured(stream.addr() as u64)? => Err(CallFailure::usage(
            "a stream that is captured runs nothing that could be waited for",
            "use the asynchronous call",
        )),
        _ => Ok(()),
    }
}

/// Waits for an operation on a stream, over `bytes` bytes, until the deadline that [`Store::patience`] computes
/// for it.
///
/// # Errors
/// Unfinished past the deadline: the operation continues, and its memory must stay valid.
#[cfg(feature = "cuda")]
pub fn wait_for_stream(
    opened: &OpenedStore,
    bytes: u64,
    pending: nvme_host::cuda::PendingRows,
) -> Answer<OperationReport> {
    let waiting = WaitingOperation::new(OperationExecutor::Gpu(pending));
    let limit = opened.store.patience(bytes);
    waiting.settle(limit).ok_or_else(|| {
        CallFailure::new(
            NVME_GPU_ERROR_UNFINISHED,
            format!("the operation has not ended within {} s", limit.as_secs_f64()),
            "keep its memory: it goes on; wait for what the stream does before it, or use the asynchronous call",
        )
    })
}

/// Returns the status of an operation that has ended, or NVME_GPU_ERROR_UNFINISHED, also while it is not known
/// whether the drive has changed. Does not wait, nor for the drive. May be called again, and by several
/// threads. The status of a gather or scatter is that of the first row that failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_poll(pending: *mut PendingHandle) -> nvme_gpu_status {
    call(|| operation(pending)?.status(Duration::ZERO))
}

/// Waits until an operation has ended, `timeout_ms` at most (UINT64_MAX: without limit): as nvme_gpu_pending_poll(). A
/// gather that was captured ends when its graph was launched and ran.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_wait(
    pending: *mut PendingHandle,
    timeout_ms: u64,
) -> nvme_gpu_status {
    call(|| {
        let waiting = operation(pending)?;
        if timeout_ms != u64::MAX {
            return waiting.status(Duration::from_millis(timeout_ms));
        }
        loop {
            match waiting.status(Duration::from_secs(60)) {
                Err(failure) if failure.status == NVME_GPU_ERROR_UNFINISHED => {}
                ended => return ended,
            }
        }
    })
}

/// Writes the outcome of an operation that has ended, row by row. Returns NVME_GPU_OK also where rows failed;
/// NVME_GPU_ERROR_UNFINISHED before the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_report(
    pending: *mut PendingHandle,
    report: *mut RowsReport,
) -> nvme_gpu_status {
    call(|| {
        let waiting = operation(pending)?;
        let outcome = waiting.settle(Duration::ZERO).ok_or_else(|| {
            let cause = "the operation has not ended";
            CallFailure::new(NVME_GPU_ERROR_UNFINISHED, cause, "wait for it")
        })?;
        // SAFETY: as the header says.
        unsafe { give(report, &outcome.report) }
    })
}

/// Frees the handle of an operation, which continues: its memory must stay valid until it has ended, and no eventfd
/// learns of that. NULL and a handle that was freed are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_free(pending: *mut PendingHandle) {
    value((), || {
        if let Some(waiting) = PENDING.close(pending) {
            waiting.notices.cancel();
        }
        Ok(())
    });
}
