//! How calls end: numbers, their texts, and the cause and remedy of the last failure of each thread. The
//! texts belong to the thread and stay valid until its next failure, so that a caller need not free them.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use nvme_host::Error;
use nvme_host::store::status;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

/// Result of a call: 0 is success; above 0 is the controller's status (SCT << 8 | SC, as in NVMe Base 2.0c,
/// "Status Field Definition"); -1 to -99 is the status of a row; -100 and below is an error of this library.
#[allow(non_camel_case_types)]
pub type nvme_gpu_status = i32;

/// Success.
pub const NVME_GPU_OK: i32 = 0;
/// Status of a row: the id is negative, or not below the number of rows.
pub const NVME_GPU_ROW_OUT_OF_RANGE: i32 = -1;
/// Status of a row: a command that the row needed was not answered in time.
pub const NVME_GPU_ROW_TIMED_OUT: i32 = -2;
/// Status of a row: the device, or the member of a stripe that holds the row, is gone.
pub const NVME_GPU_ROW_GONE: i32 = -3;
/// Status of a row: a file or the system failed.
pub const NVME_GPU_ROW_IO: i32 = -4;
/// Status of a row: the operation ended before a command for the row was sent.
pub const NVME_GPU_ROW_NOT_RUN: i32 = -5;

/// An argument that cannot be obeyed; nothing was sent to the device.
pub const NVME_GPU_ERROR_USAGE: i32 = -101;
/// A file operation failed.
pub const NVME_GPU_ERROR_FILE: i32 = -102;
/// A system call that is not about a file failed.
pub const NVME_GPU_ERROR_SYSTEM: i32 = -103;
/// The device could not be opened or brought up, or rows of it failed.
pub const NVME_GPU_ERROR_DEVICE: i32 = -104;
/// This machine lacks something: a permission, a driver, an IOMMU, a GPU.
pub const NVME_GPU_ERROR_ENVIRONMENT: i32 = -105;
/// A fault of this library.
pub const NVME_GPU_ERROR_INTERNAL: i32 = -106;
/// The controller cannot do this.
pub const NVME_GPU_ERROR_UNSUPPORTED: i32 = -107;
/// The operation has not ended yet: it continues in the background.
pub const NVME_GPU_ERROR_UNFINISHED: i32 = -108;
/// Data differ from the data that they were compared with.
pub const NVME_GPU_ERROR_MISMATCH: i32 = -109;
/// A command was not answered in time.
pub const NVME_GPU_ERROR_TIMEOUT: i32 = -110;
/// The device is gone: open it again.
pub const NVME_GPU_ERROR_GONE: i32 = -111;
/// The call was interrupted.
pub const NVME_GPU_ERROR_INTERRUPTED: i32 = -112;
/// Header and library are of versions that do not fit.
pub const NVME_GPU_ERROR_VERSION: i32 = -113;
/// The handle is NULL, was closed, or is none of this library.
pub const NVME_GPU_ERROR_CLOSED: i32 = -114;
/// The device has changed since it was opened: another host formatted a namespace, it became smaller, was
/// deleted, write protected or sanitized, or another drive answers. Nothing was sent: open it again.
pub const NVME_GPU_ERROR_CHANGED: i32 = -115;
/// No page has this key: it was never stored, or made room for another one. Compute it.
pub const NVME_GPU_ERROR_PAGE_MISSING: i32 = -121;
/// The page is not what was stored, and was dropped. Compute it again.
pub const NVME_GPU_ERROR_PAGE_LOST: i32 = -122;
/// Another call is storing this page.
pub const NVME_GPU_ERROR_PAGE_IN_PROGRESS: i32 = -123;
/// Every page of the area is in use, so that none can make room.
pub const NVME_GPU_ERROR_PAGE_NO_ROOM: i32 = -124;

/// Errors of this library: number, name and remedy.
const OWN: [(i32, &CStr, &CStr); 19] = [
    (
        NVME_GPU_ERROR_USAGE,
        c"Usage",
        c"nvme_gpu_last_remedy() says what to write instead",
    ),
    (
        NVME_GPU_ERROR_FILE,
        c"File Error",
        c"check the file and its file system",
    ),
    (
        NVME_GPU_ERROR_SYSTEM,
        c"System Error",
        c"`nvme-gpu doctor` shows what this machine lacks",
    ),
    (
        NVME_GPU_ERROR_DEVICE,
        c"Device Error",
        c"nvme_gpu_last_remedy() says what to do",
    ),
    (
        NVME_GPU_ERROR_ENVIRONMENT,
        c"Environment",
        c"`nvme-gpu doctor` shows what this machine lacks",
    ),
    (
        NVME_GPU_ERROR_INTERNAL,
        c"Internal Error",
        c"this is a fault of the library: report it",
    ),
    (
        NVME_GPU_ERROR_UNSUPPORTED,
        c"Unsupported",
        c"use a controller that has it",
    ),
    (
        NVME_GPU_ERROR_UNFINISHED,
        c"Unfinished",
        c"wait for it, or longer",
    ),
    (
        NVME_GPU_ERROR_MISMATCH,
        c"Mismatch",
        c"read both sides again",
    ),
    (
        NVME_GPU_ERROR_TIMEOUT,
        c"Timeout",
        c"raise timeout_ms if the device is slow, else check it",
    ),
    (
        NVME_GPU_ERROR_GONE,
        c"Device Gone",
        c"check that the device is there, then open it again",
    ),
    (NVME_GPU_ERROR_INTERRUPTED, c"Interrupted", c"call it again"),
    (
        NVME_GPU_ERROR_VERSION,
        c"Version Mismatch",
        c"compile with the header of the library that is loaded",
    ),
    (
        NVME_GPU_ERROR_CLOSED,
        c"Closed Handle",
        c"use a handle between its opening and its closing",
    ),
    (
        NVME_GPU_ERROR_CHANGED,
        c"Device Changed",
        c"another host changed the device: open it again",
    ),
    (
        NVME_GPU_ERROR_PAGE_MISSING,
        c"Page Missing",
        c"compute the page, and store it",
    ),
    (
        NVME_GPU_ERROR_PAGE_LOST,
        c"Page Lost",
        c"compute the page again, and store it",
    ),
    (
        NVME_GPU_ERROR_PAGE_IN_PROGRESS,
        c"Page In Progress",
        c"wait for the other call",
    ),
    (
        NVME_GPU_ERROR_PAGE_NO_ROOM,
        c"No Room For Page",
        c"store it later, or use a larger area",
    ),
];

thread_local! {
    static LAST: RefCell<(CString, CString)> = RefCell::default();
}

/// C's words for the options that the library's errors name in those of the tool.
const WORDS: [(&str, &str); 6] = [
    ("--timeout-ms", "timeout_ms of nvme_gpu_options"),
    ("--allow-write", "NVME_GPU_ALLOW_WRITE"),
    ("--queues", "queues of nvme_gpu_options"),
    ("--depth", "depth of nvme_gpu_options"),
    ("--tier", "gpu_tier of nvme_gpu_options"),
    ("--gpu", "the argument gpu"),
];

/// A failure on its way to C.
#[derive(Clone, Debug)]
pub struct CallFailure {
    pub status: nvme_gpu_status,
    pub cause: String,
    pub remedy: String,
}

impl CallFailure {
    pub fn new(status: i32, cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status,
            cause: cause.into(),
            remedy: remedy.into(),
        }
    }

    pub fn usage(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(NVME_GPU_ERROR_USAGE, cause, remedy)
    }

    /// Returns the failure with the number of the entry of a list that it concerns.
    pub fn of_entry(self, index: usize) -> Self {
        Self {
            cause: format!("entry {index}: {}", self.cause),
            ..self
        }
    }

    /// Keeps cause and remedy for this thread; the number.
    pub fn set_last(self) -> nvme_gpu_status {
        let text = |text: String| CString::new(text.replace('\0', "?")).unwrap_or_default();
        let texts = (text(self.cause), text(self.remedy));
        // A thread that ends keeps nothing.
        let _ = LAST.try_with(|last| last.replace(texts));
        self.status
    }
}

impl From<Error> for CallFailure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Command { status, .. } if !status.is_success() => i32::from(status.code()),
            error => status_of(error.code()),
        };
        let remedy = nvme_host::words::of_interface(&error.remedy(), &WORDS);
        Self::new(status, error.to_string(), remedy)
    }
}

/// Returns the status of an error by its code, as the owner of a shared area names it, too.
pub fn status_of(code: &str) -> nvme_gpu_status {
    match code {
        "usage" => NVME_GPU_ERROR_USAGE,
        "file" => NVME_GPU_ERROR_FILE,
        "system" => NVME_GPU_ERROR_SYSTEM,
        "device" | "command" => NVME_GPU_ERROR_DEVICE,
        "environment" => NVME_GPU_ERROR_ENVIRONMENT,
        "unsupported" => NVME_GPU_ERROR_UNSUPPORTED,
        "unfinished" => NVME_GPU_ERROR_UNFINISHED,
        "mismatch" => NVME_GPU_ERROR_MISMATCH,
        "timeout" => NVME_GPU_ERROR_TIMEOUT,
        "gone" => NVME_GPU_ERROR_GONE,
        "changed" => NVME_GPU_ERROR_CHANGED,
        "interrupted" => NVME_GPU_ERROR_INTERRUPTED,
        "missing" => NVME_GPU_ERROR_PAGE_MISSING,
        "lost" => NVME_GPU_ERROR_PAGE_LOST,
        _ => NVME_GPU_ERROR_INTERNAL,
    }
}

/// Returns the message of the last call of this thread that failed: one line of UTF-8, never NULL, empty before
/// the first failure. Valid until the next failure of this thread. Failures of operations in the background are
/// not here before nvme_gpu_pending_poll() or nvme_gpu_pending_wait() returned them.
#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().0.as_ptr());
    text.unwrap_or(c"".as_ptr())
}

/// Returns the remedy for the failure of nvme_gpu_last_error(): one clause, valid as long as that is.
#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_last_remedy() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().1.as_ptr());
    text.unwrap_or(c"".as_ptr())
}

/// Returns the name of a status of a call or of a row, as in `Success`, `Unrecovered Read Error`, `Id Out of
/// Range`. Never NULL, valid for good.
#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_status_text(status: nvme_gpu_status) -> *const c_char {
    describe(status).0.as_ptr()
}

/// Returns the remedy for a status of a call or of a row: one clause. Never NULL, valid for good.
#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_status_remedy(status: nvme_gpu_status) -> *const c_char {
    describe(status).1.as_ptr()
}

fn describe(code: i32) -> (&'static CStr, &'static CStr) {
    if let Some((_, name, remedy)) = OWN.iter().find(|(known, ..)| *known == code) {
        return (name, remedy);
    }
    let (name, remedy) = status::describe(code);
    (kept(name), kept(remedy))
}

/// Returns a text with a 0 at its end. There are as many as there are statuses.
fn kept(text: &'static str) -> &'static CStr {
    use crate::process::PerProcess;
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    static KEPT: PerProcess<Mutex<BTreeMap<&'static str, &'static CStr>>> =
        PerProcess::new(Mutex::new(BTreeMap::new()));
    let kept = KEPT.get(Mutex::default);
    let mut all = nvme_host::lock::lock(kept);
    all.entry(text).or_insert_with(|| {
        let text = CString::new(text).unwrap_or_default();
        Box::leak(text.into_boxed_c_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_name_and_a_remedy_of_its_own() {
        for (code, name, remedy) in OWN {
            assert_eq!(describe(code), (name, remedy));
            assert!(!remedy.to_bytes().ends_with(b"."));
            assert_eq!(status::describe(code).0, "Unknown", "{code}");
        }
        assert_eq!(describe(0).0, c"Success");
        assert_eq!(describe(0x281).0, c"Unrecovered Read Error");
        assert_eq!(describe(NVME_GPU_ROW_GONE).0, c"Device Gone");
        assert_eq!(describe(i32::MIN).0, c"Unknown");
    }

    #[test]
    fn a_remedy_names_the_options_of_c() {
        let error = Error::usage("a cause", "raise --timeout-ms, or leave --gpu out");
        let remedy = CallFailure::from(error).remedy;
        assert!(
            remedy.contains("timeout_ms of nvme_gpu_options"),
            "{remedy}"
        );
        assert!(!remedy.contains("--"), "{remedy}");
    }

    #[test]
    fn an_error_never_has_the_number_of_success() {
        let of = |status| {
            let what = "Read".to_owned();
            CallFailure::from(Error::Command { what, status }).status
        };
        let failed = nvme_host::core::spec::Status::UNRECOVERED_READ_ERROR.with_dnr();
        assert_eq!(of(failed), 0x281);
        assert_eq!(
            of(nvme_host::core::spec::Status::SUCCESS.with_more()),
            NVME_GPU_ERROR_DEVICE
        );
    }

    #[test]
    fn numbers_of_rows_are_those_of_the_library() {
        let codes = status::RowStatus::ALL.map(status::RowStatus::code);
        assert_eq!(codes, [-1, -2, -3, -4, -5]);
        assert_eq!(codes[0], NVME_GPU_ROW_OUT_OF_RANGE);
        assert_eq!(codes[4], NVME_GPU_ROW_NOT_RUN);
    }
}
