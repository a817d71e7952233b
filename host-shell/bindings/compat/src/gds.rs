//! Names of a GPUDirect Storage sketch.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::device::{answer, by_path, check, close_all, kept, size, usage};
use nvme_gpu_capi::border::text;
use nvme_gpu_capi::pending::{PendingHandle, nvme_gpu_pending_free, nvme_gpu_pending_wait};
use nvme_gpu_capi::transfer::{nvme_gpu_pread, nvme_gpu_pread_async, nvme_gpu_pwrite};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

#[repr(C)]
pub struct BatchReadRequest {
    pub offset: i64,
    pub size: usize,
    pub gpu_buffer: *mut c_void,
    pub result: isize,
}

#[unsafe(no_mangle)]
pub extern "C" fn init_gds() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cleanup_gds() {
    let _: c_int = answer(|| {
        close_all();
        Ok(0)
    });
}

fn place(offset: i64) -> Result<u64, i32> {
    u64::try_from(offset)
        .map_err(|_| usage(format!("the offset {offset} is negative"), "use 0 or more"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read_nvme_to_gpu(
    path: *const c_char,
    offset: i64,
    bytes: usize,
    gpu_buffer: *mut c_void,
) -> isize {
    answer(|| {
        let (offset, result) = (place(offset)?, size(bytes as u64)?);
        // SAFETY: the caller keeps the conditions of the header.
        let store = kept(unsafe { text(path, "path") }.and_then(by_path))?;
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe { nvme_gpu_pread(store, gpu_buffer, bytes, offset) })?;
        Ok(result)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_read_nvme_to_gpu(
    path: *const c_char,
    offset: i64,
    bytes: usize,
    gpu_buffer: *mut c_void,
) -> isize {
    // SAFETY: the caller vouches for this.
    unsafe { read_nvme_to_gpu(path, offset, bytes, gpu_buffer) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write_gpu_to_nvme(
    path: *const c_char,
    offset: i64,
    bytes: usize,
    gpu_buffer: *const c_void,
) -> isize {
    answer(|| {
        let (offset, result) = (place(offset)?, size(bytes as u64)?);
        // SAFETY: the caller keeps the conditions of the header.
        let store = kept(unsafe { text(path, "path") }.and_then(by_path))?;
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe { nvme_gpu_pwrite(store, gpu_buffer, bytes, offset) })?;
        Ok(result)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn async_batch_read(
    path: *const c_char,
    requests: *mut BatchReadRequest,
    num_requests: c_int,
) -> c_int {
    answer(|| {
        let count = usize::try_from(num_requests).map_err(|_| {
            usage(
                format!("num_requests is {num_requests}, which is negative"),
                "use 0 or more",
            )
        })?;
        if requests.is_null() && count > 0 {
            return Err(usage("requests is NULL", "give a pointer"));
        }
        // SAFETY: the caller keeps the conditions of the header.
        let store = kept(unsafe { text(path, "path") }.and_then(by_path))?;
        let mut under_way: Vec<(Result<(), i32>, *mut PendingHandle)> = Vec::new();
        for index in 0..count {
            // SAFETY: as the header says: `count` requests.
            let one = unsafe { requests.add(index).read() };
            let mut pending = null_mut();
            let started = place(one.offset).and_then(|offset| {
                size(one.size as u64)?;
                // SAFETY: as the header says; all are waited for below.
                check(unsafe {
                    nvme_gpu_pread_async(
                        store,
                        one.gpu_buffer,
                        one.size,
                        offset,
                        null_mut(),
                        &mut pending,
                    )
                })
            });
            under_way.push((started, pending));
        }
        let mut first = Ok(0);
        for (index, (started, pending)) in under_way.into_iter().enumerate() {
            // SAFETY: this function made the handle.
            let ended =
                started.and_then(|()| check(unsafe { nvme_gpu_pending_wait(pending, u64::MAX) }));
            // SAFETY: as above; NULL is ignored.
            unsafe { nvme_gpu_pending_free(pending) };
            // SAFETY: the index is below `count`.
            let one = unsafe { &mut *requests.add(index) };
            one.result = if ended.is_ok() { one.size as isize } else { -1 };
            if let (Err(status), Ok(_)) = (ended, &first) {
                first = Err(status);
            }
        }
        first
    })
}
