//! Ends of operations for programs that wait for many things: an eventfd, and a wait for the first of several.
//!
//! Threads of the library tell the end of what they ran. The end of an operation on a GPU is a word in memory: a thread
//! looks for it as long as an eventfd waits for one.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::border::{Answer, call, put};
use crate::ends::WakeupCall;
use crate::pending::{PendingHandle, WaitingOperation, operation, unfinished};
use crate::process::PerProcess;
use crate::status::{CallFailure, nvme_gpu_status};
use nvme_host::Error;
use nvme_host::lock::lock;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// Most operations of a wait.
const MOST: usize = 1 << 20;
/// Pause between two looks at operations on a GPU of a thread that waits for them.
const NAP: Duration = Duration::from_micros(50);
/// Longest pause of the thread that looks for eventfds, after operations that do not end.
const LONGEST_NAP: Duration = Duration::from_millis(2);
/// Longest pause of a wait for threads of the library, which wake it.
const LONG: Duration = Duration::from_secs(60);

/// Operations on a GPU whose eventfds have not been raised.
#[derive(Default)]
struct WatchedOperations {
    operations: Vec<Weak<WaitingOperation>>,
    has_thread: bool,
}

static WATCHED: PerProcess<Mutex<WatchedOperations>> =
    PerProcess::new(Mutex::new(WatchedOperations {
        operations: Vec::new(),
        has_thread: false,
    }));

fn watched() -> MutexGuard<'static, WatchedOperations> {
    lock(WATCHED.get(Mutex::default))
}

/// Has a thread tell the end of an operation on a GPU.
fn watch(operation: &Arc<WaitingOperation>) -> Answer<()> {
    let mut watched = watched();
    watched.operations.push(Arc::downgrade(operation));
    if !watched.has_thread {
        let thread = std::thread::Builder::new().name("nvme-gpu-notice".to_owned());
        if let Err(source) = thread.spawn(look_for_ends) {
            watched.operations.pop();
            let call = "starting a thread for eventfds";
            return Err(Error::System { call, source }.into());
        }
        watched.has_thread = true;
    }
    Ok(())
}

/// Tells the ends of the operations, until none is left.
fn look_for_ends() {
    let mut nap = NAP;
    let mut known = 0;
    loop {
        // What is dropped last may call the driver of the GPU: not under the lock.
        let all: Vec<_> = watched()
            .operations
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        if all.len() > known {
            nap = NAP;
        }
        for operation in all.iter().filter(|one| one.has_ended()) {
            operation.notices.tell();
            nap = NAP;
        }
        drop(all);
        let mut kept = Vec::new();
        let mut watched = watched();
        watched.operations.retain(|one| {
            let operation = one.upgrade();
            let is_open = operation.as_ref().is_some_and(|one| !one.notices.is_told());
            kept.extend(operation);
            is_open
        });
        known = watched.operations.len();
        watched.has_thread = known > 0;
        drop(watched);
        drop(kept);
        if known == 0 {
            return;
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    }
}

/// Returns a descriptor of our own of the caller's eventfd.
fn eventfd(fd: c_int) -> Answer<OwnedFd> {
    let usage = |cause: String| {
        CallFailure::usage(
            cause,
            "make one with eventfd(2), and close it after the end",
        )
    };
    let kind = match fd {
        0.. => std::fs::read_link(format!("/proc/self/fd/{fd}")),
        _ => return Err(usage(format!("{fd} is no file descriptor"))),
    };
    let kind = kind.map_err(|error| usage(format!("descriptor {fd} is not open: {error}")))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(usage(format!(
            "descriptor {fd} is {}, and no eventfd",
            kind.display()
        )));
    }
    // SAFETY: the descriptor was open just now. The caller keeps it so during the call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    file.as_fd().try_clone_to_owned().map_err(|source| {
        Error::System {
            call: "dup",
            source,
        }
        .into()
    })
}

/// Adds 1 to `eventfd` when the operation has ended, once; at once if it has ended. Its status is then known from
/// nvme_gpu_pending_poll(). Any number of operations may name one eventfd, and an operation several. The library keeps a
/// descriptor of its own, so that the caller may close its one at any time.
///
/// An operation that has no end, as that of a graph that is never launched, leaves the eventfd as it is: give poll(2) and
/// epoll_wait(2) a limit. nvme_gpu_pending_free() takes the operation's eventfds away.
/// Errors: NVME_GPU_ERROR_USAGE for a descriptor that is no eventfd; NVME_GPU_ERROR_CLOSED; NVME_GPU_ERROR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_notify(
    pending: *mut PendingHandle,
    eventfd: c_int,
) -> nvme_gpu_status {
    call(|| {
        let operation = operation(pending)?;
        let file = self::eventfd(eventfd)?;
        // First, so that a call that fails leaves no eventfd. An end in between raises the file as it is added.
        if operation.is_silent() {
            watch(&operation)?;
        }
        operation.notices.add_file(file);
        Ok(())
    })
}

/// Waits until one of `count` operations has ended, `timeout_ms` at most (UINT64_MAX: without limit), and writes the
/// first place of one that has to `*index`. Its status is then known from nvme_gpu_pending_poll(). Places with NULL are
/// skipped: an operation that was seen is replaced by NULL, or it is found again.
///
/// Returns NVME_GPU_OK also where that operation failed. Errors: NVME_GPU_ERROR_UNFINISHED past the limit, and `*index` is
/// not written; NVME_GPU_ERROR_USAGE without an operation and for more than 1,048,576; NVME_GPU_ERROR_CLOSED for a handle
/// that is none, and nothing was waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pending_wait_any(
    pending: *const *mut PendingHandle,
    count: usize,
    timeout_ms: u64,
    index: *mut usize,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        let operations = unsafe { named(pending, count) }?;
        if index.is_null() {
            return Err(CallFailure::usage(
                "`index` is NULL",
                "name a size_t for the place",
            ));
        }
        let wakeup = Arc::<WakeupCall>::default();
        for (_, operation) in &operations {
            operation.notices.add_waiter(&wakeup);
        }
        let is_silent = operations.iter().any(|(_, one)| one.is_silent());
        let longest = if is_silent { NAP } else { LONG };
        let end = Instant::now().checked_add(Duration::from_millis(timeout_ms));
        loop {
            if let Some((place, _)) = operations.iter().find(|(_, one)| one.has_ended()) {
                // SAFETY: as the header says.
                return unsafe { put(index, *place, "index") };
            }
            let left = end.map_or(LONG, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(unfinished("none of the operations has ended"));
            }
            wakeup.sleep(left.min(longest));
        }
    })
}

/// Returns the operations of a list with their places, without those that are NULL.
///
/// # Safety
/// `pending` is NULL or valid for `count` reads.
unsafe fn named(
    pending: *const *mut PendingHandle,
    count: usize,
) -> Answer<Vec<(usize, Arc<WaitingOperation>)>> {
    if count > MOST {
        let cause = format!("{count} operations are more than {MOST}");
        return Err(CallFailure::usage(cause, "wait for fewer at a time"));
    }
    let handles = match (pending.is_null(), count) {
        (_, 0) => &[],
        (true, _) => {
            return Err(CallFailure::usage(
                "`pending` is NULL",
                "name the operations",
            ));
        }
        // SAFETY: the caller's.
        (false, count) => unsafe { std::slice::from_raw_parts(pending, count) },
    };
    let mut found = Vec::new();
    for (place, handle) in handles.iter().enumerate().filter(|(_, one)| !one.is_null()) {
        found.push((place, operation(*handle)?));
    }
    match found.is_empty() {
        true => Err(CallFailure::usage(
            "there is no operation to wait for",
            "name one that is not NULL",
        )),
        false => Ok(found),
    }
}
