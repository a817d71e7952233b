//! What would move the bytes of a store better, and the events of the library.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::border::{Sized0, call, give};
use crate::opened::{StoreHandle, opened};
use crate::status::{CallFailure, nvme_gpu_status};
use crate::store::fixed;
use nvme_host::log::{LogLevel, set_log};
use std::ffi::{CString, c_char, c_void};

/// nvme_gpu_explain(): set `size` to sizeof(nvme_gpu_advice) before the call. Texts end with a 0; those that are too long
/// are cut. They are those of `nvme-gpu why`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct StoreAdvice {
    pub size: usize,
    /// The device as it was named.
    pub device: [c_char; 1024],
    /// What moves the bytes now.
    pub now: [c_char; 640],
    /// The next better way; empty if there is none.
    pub better: [c_char; 256],
    /// What stands between; empty if there is no better way.
    pub between: [c_char; 1536],
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for StoreAdvice {
    const NAME: &'static str = "nvme_gpu_advice";
}

/// Writes what moves the bytes of member `member` of a store now, the next better way, and what stands between. A store
/// that is no stripe has member 0 alone.
/// Errors: NVME_GPU_ERROR_USAGE for a member that is not there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_explain(
    store: *const StoreHandle,
    member: usize,
    advice: *mut StoreAdvice,
) -> nvme_gpu_status {
    call(|| {
        let all = opened(store)?.store.explain();
        let one = all.get(member).ok_or_else(|| {
            CallFailure::usage(
                format!("member {member} of a store that has {}", all.len()),
                "count members from 0 on",
            )
        })?;
        let known = StoreAdvice {
            size: 0,
            device: fixed(&one.device),
            now: fixed(&one.now),
            better: fixed(one.better.as_deref().unwrap_or_default()),
            between: fixed(one.between.as_deref().unwrap_or_default()),
        };
        // SAFETY: as the header says.
        unsafe { give(advice, &known) }
    })
}

/// Level of an event: something does not work any more.
pub const NVME_GPU_LOG_ERROR: i32 = 1;
/// Level of an event: something needed a recovery, or took long.
pub const NVME_GPU_LOG_WARNING: i32 = 2;
/// Level of an event: something began or ended as it should.
pub const NVME_GPU_LOG_INFO: i32 = 3;

/// Calls `callback` with each event of the library up to `level`: bring-ups, resets, commands that were aborted or took
/// long. It gets the level, a line of text that ends with a 0 and is valid during the call, and `context`. NULL for no function, which is the default. Replaces the earlier function, which does not run any more when this
/// returns.
///
/// The function is called from any thread, with locks held: it must not call this library, and must be quick.
/// Errors: NVME_GPU_ERROR_USAGE for an unknown level, and in a program whose Rust part has a subscriber of `tracing`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_set_log(
    callback: Option<
        unsafe extern "C" fn(level: i32, message: *const c_char, context: *mut c_void),
    >,
    context: *mut c_void,
    level: i32,
) -> nvme_gpu_status {
    call(|| {
        let level = match level {
            NVME_GPU_LOG_ERROR => LogLevel::Error,
            NVME_GPU_LOG_WARNING => LogLevel::Warning,
            NVME_GPU_LOG_INFO => LogLevel::Info,
            _ => {
                return Err(CallFailure::usage(
                    format!("{level} is no level of events"),
                    "use NVME_GPU_LOG_ERROR, _WARNING or _INFO",
                ));
            }
        };
        let context = context.expose_provenance();
        let sink = callback.map(|callback| {
            let sink = move |level, text: &str| {
                let level = match level {
                    LogLevel::Error => NVME_GPU_LOG_ERROR,
                    LogLevel::Warning => NVME_GPU_LOG_WARNING,
                    LogLevel::Info => NVME_GPU_LOG_INFO,
                };
                let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
                let context = std::ptr::with_exposed_provenance_mut(context);
                // SAFETY: as the header says: the function may be called from any thread, until it is replaced.
                unsafe { callback(level, text.as_ptr(), context) }
            };
            (level, Box::new(sink) as _)
        });
        Ok(set_log(sink)?)
    })
}
