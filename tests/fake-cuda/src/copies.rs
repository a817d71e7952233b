//! Copies and fills between the memories.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::memory::{is_device, is_host};
use crate::{INVALID_VALUE, SUCCESS, Status, fault, lock, streams};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> Status {
    // SAFETY: the caller's.
    unsafe { cuMemcpyHtoDAsync_v2(to, from, bytes, std::ptr::null_mut()) }
}

/// After what is in the default stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> Status {
    // SAFETY: the caller's.
    unsafe {
        lock(streams::stream(std::ptr::null_mut())).finish();
        cuMemcpyDtoHAsync_v2(to, from, bytes, std::ptr::null_mut())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) -> Status {
    // SAFETY: the caller's.
    unsafe { cuMemsetD8Async(to, value, bytes, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    to: u64,
    value: u8,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    if !is_device(to, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: inside an allocation, checked above.
    now_or_captured(stream, move || unsafe {
        (to as usize as *mut u8).write_bytes(value, bytes);
    })
}

/// Does `work` now, or captures it.
fn now_or_captured(stream: *mut c_void, work: impl Fn() + Copy + Send + Sync + 'static) -> Status {
    streams::capture(stream, work).unwrap_or_else(|| {
        work();
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const u8,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    if !is_device(to, bytes) || !is_host(from.addr() as u64, bytes) {
        return INVALID_VALUE;
    }
    let from = from.expose_provenance();
    // SAFETY: inside an allocation; the caller vouches for the other side.
    now_or_captured(stream, move || unsafe {
        let from = std::ptr::with_exposed_provenance::<u8>(from);
        std::ptr::copy(from, to as usize as *mut u8, bytes);
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut u8,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    if !is_device(from, bytes) || !is_host(to.addr() as u64, bytes) {
        return INVALID_VALUE;
    }
    let to = to.expose_provenance();
    // SAFETY: inside an allocation; the caller vouches for the other side.
    now_or_captured(stream, move || unsafe {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
        std::ptr::copy(from as usize as *const u8, to, bytes);
    })
}

/// Knows one function, and not in an old driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    _why: *mut c_uint,
) -> Status {
    // SAFETY: the caller gives a terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    let known = name == c"cuMemcpyBatchAsync" && !fault("nobatch");
    let address: *mut c_void = match known {
        true => cuMemcpyBatchAsync as *mut c_void,
        false => std::ptr::null_mut(),
    };
    // SAFETY: the caller gives a place for one address.
    unsafe { *function = address };
    if known { SUCCESS } else { INVALID_VALUE }
}

unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
    _attributes: *const c_void,
    _first_with: *const usize,
    _attributes_count: usize,
    _failed: *mut usize,
    stream: *mut c_void,
) -> Status {
    for index in 0..count {
        // SAFETY: the caller gives `count` entries in each list, and vouches for the ranges.
        let status = unsafe {
            let from = std::ptr::with_exposed_provenance(*from.add(index) as usize);
            cuMemcpyHtoDAsync_v2(*to.add(index), from, *bytes.add(index), stream)
        };
        if status != SUCCESS {
            return status;
        }
    }
    SUCCESS
}
