//! FFI boundary: catches panics, and records the thread's last error.
// UNSAFETY: reads and writes memory that C passes by pointer.
#![allow(unsafe_code)]

use crate::status::{CallFailure, NVME_GPU_ERROR_INTERNAL, NVME_GPU_OK, nvme_gpu_status};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

pub type Answer<T> = Result<T, CallFailure>;

/// Calls into the library.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of calls so far.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Runs the body of a function of the interface.
pub fn call(body: impl FnOnce() -> Answer<()>) -> nvme_gpu_status {
    CALLS.fetch_add(1, Ordering::Relaxed);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => NVME_GPU_OK,
        Ok(Err(failure)) => failure.set_last(),
        Err(_) => panicked().set_last(),
    }
}

/// As [`call`] for functions that return a value, or `otherwise` after a failure.
pub fn value<T>(otherwise: T, body: impl FnOnce() -> Answer<T>) -> T {
    CALLS.fetch_add(1, Ordering::Relaxed);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => {
            failure.set_last();
            otherwise
        }
        Err(_) => {
            panicked().set_last();
            otherwise
        }
    }
}

fn panicked() -> CallFailure {
    CallFailure::new(
        NVME_GPU_ERROR_INTERNAL,
        "the library panicked: the message is on standard error",
        "this is a fault of the library: report it",
    )
}

/// Returns the text at `text`.
///
/// # Safety
/// `text` is NULL or ends with a 0.
pub unsafe fn text<'a>(text: *const c_char, what: &str) -> Answer<&'a str> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL; the caller vouches for the rest.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map_err(|_| {
        CallFailure::usage(
            format!("{what} is no UTF-8: {}", bytes.to_string_lossy()),
            "use text of UTF-8; for a path a link to it",
        )
    })
}

pub fn null(what: &str) -> CallFailure {
    CallFailure::usage(format!("{what} is NULL"), "give a pointer")
}

/// Writes `value` to `to`.
///
/// # Safety
/// `to` is NULL or valid for a write.
pub unsafe fn put<T>(to: *mut T, value: T, what: &str) -> Answer<()> {
    if to.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL; the caller vouches for the rest. Programs may pack their structures.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// A structure whose first field is its size, made of integers, for which all zero is a value.
///
/// # Safety
/// `#[repr(C)]`, begins with a `usize`, and any bytes are a value.
pub unsafe trait Sized0: Copy {
    const NAME: &'static str;
}

/// Limit of the size of a structure, which later versions may enlarge: a size beyond it is an uninitialised
/// field, and reading that many bytes could leave the caller's memory.
const MOST_BYTES: usize = 4096;

/// # Safety
/// `from` is NULL or points to as many bytes as its first field says.
unsafe fn size_of_structure<T: Sized0>(from: *const T) -> Answer<usize> {
    // SAFETY: not NULL, checked by the callers; a structure has its size at least.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if !(size_of::<usize>()..=MOST_BYTES).contains(&size) {
        return Err(CallFailure::usage(
            format!("{}.size is {size}", T::NAME),
            format!("set it to sizeof({})", T::NAME),
        ));
    }
    Ok(size)
}

/// Returns the structure at `from`: fields that its size does not have are zero, and fields that this library
/// does not know have to be.
///
/// # Safety
/// `from` is NULL or points to as many bytes as its first field says.
pub unsafe fn take<T: Sized0>(from: *const T) -> Answer<T> {
    if from.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: the caller's.
    let size = unsafe { size_of_structure(from) }?;
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: the structure's size field says that `size` bytes are valid, and `known` of them fit into
    // `value`.
    unsafe {
        value
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(from.cast(), known);
    }
    for place in known..size {
        // SAFETY: below `size`.
        if unsafe { from.cast::<u8>().add(place).read() } != 0 {
            return Err(CallFailure::usage(
                format!("{} has fields of a later version", T::NAME),
                "set them to 0, or load a later library",
            ));
        }
    }
    // SAFETY: any bytes are a value.
    Ok(unsafe { value.assume_init() })
}

/// Checks the size of a structure that a call writes at its end: a call that moves bytes and then returns a usage error
/// would be made again.
///
/// # Safety
/// `to` is NULL or points to as many bytes as its first field says.
pub unsafe fn check_optional<T: Sized0>(to: *const T) -> Answer<()> {
    match to.is_null() {
        true => Ok(()),
        // SAFETY: the caller's.
        false => unsafe { size_of_structure(to) }.map(drop),
    }
}

/// Writes `value` to `to` as far as its size there goes; the size stays as it is.
///
/// # Safety
/// `to` is NULL or points to as many bytes as its first field says.
pub unsafe fn give<T: Sized0>(to: *mut T, value: &T) -> Answer<()> {
    if to.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: the caller's.
    let size = unsafe { size_of_structure(to) }?;
    let known = size.min(size_of::<T>());
    let head = size_of::<usize>();
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: `known` bytes are in both, and `value` is ours.
    unsafe {
        let to = to.cast::<u8>().add(head);
        to.copy_from_nonoverlapping(from.add(head), known - head);
    }
    Ok(())
}
