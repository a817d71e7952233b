//! Names of an SPDK sketch, over the driver of this library. Each name keeps the meaning of the sketch, and
//! returns errno in place of this library's statuses.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::device::{
    Shared, answer, check, check_process, kept, lock, of_environment, size, usage,
    with_rings_in_gpu_memory,
};
use nvme_gpu_capi::opened::{StoreHandle, opened};
use nvme_gpu_capi::pending::{PendingHandle, nvme_gpu_pending_free, nvme_gpu_pending_poll};
use nvme_gpu_capi::process::PerProcess;
use nvme_gpu_capi::status::NVME_GPU_ERROR_UNFINISHED;
use nvme_gpu_capi::transfer::nvme_gpu_pread_async;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

/// `SPDKContext`: three views of one handle.
#[repr(C)]
pub struct SpdkContext {
    pub controller: *mut StoreHandle,
    pub qpair: *mut StoreHandle,
    pub ns: *mut StoreHandle,
}

/// `struct spdk_nvme_cpl`, as far as callbacks look at it: the status.
#[repr(C)]
pub struct SpdkCompletion {
    cdw0: u32,
    rsvd1: u32,
    sqhd: u16,
    sqid: u16,
    cid: u16,
    status: u16,
}

/// `GpuSgl`: the list that gpu_reset_sgl_fn and gpu_next_sge_fn iterate over.
#[repr(C)]
pub struct GpuSgl {
    segments: *const GpuSegment,
    count: u32,
    index: u32,
    offset: u32,
    reserved: u32,
}

#[repr(C)]
pub struct GpuSegment {
    address: *mut c_void,
    length: u32,
}

type Completed = unsafe extern "C" fn(*mut c_void, *const SpdkCompletion);
type ResetSgl = unsafe extern "C" fn(*mut c_void, u32);
type NextSge = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut u32) -> c_int;

/// A read under way: its parts, and who is called at its end.
struct PendingRead {
    parts: Vec<usize>,
    status: i32,
    callback: Option<(Completed, usize)>,
}

static UNDER_WAY: Shared<Vec<PendingRead>> = PerProcess::new(Mutex::new(Vec::new()));
static CONTEXT: Shared<usize> = PerProcess::new(Mutex::new(0));

fn context() -> Result<*mut SpdkContext, i32> {
    let store = kept(of_environment())?;
    let mut known = lock(&CONTEXT);
    if *known == 0 {
        let made = Box::new(SpdkContext {
            controller: null_mut(),
            qpair: null_mut(),
            ns: null_mut(),
        });
        *known = Box::into_raw(made).expose_provenance();
    }
    let context = std::ptr::with_exposed_provenance_mut::<SpdkContext>(*known);
    // SAFETY: it was made above, never freed, and changed under the lock.
    unsafe {
        (*context).controller = store;
        (*context).ns = store;
        if !(*context).qpair.is_null() {
            (*context).qpair = store;
        }
    }
    Ok(context)
}

#[unsafe(no_mangle)]
pub extern "C" fn init_spdk_nvme() -> c_int {
    answer(|| context().map(|_| 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn create_io_qpair() -> c_int {
    answer(|| {
        let context = context()?;
        let _held = lock(&CONTEXT);
        // SAFETY: as in `context`.
        unsafe { (*context).qpair = (*context).ns };
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn spdk_ctx() -> *mut SpdkContext {
    let address: isize = answer(|| context().map(|context| context.expose_provenance() as isize));
    match address {
        -1 => null_mut(),
        address => std::ptr::with_exposed_provenance_mut(address as usize),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn gpu_queue_init() -> c_int {
    answer(|| {
        kept(check_process())?;
        if !lock(&UNDER_WAY).is_empty() {
            return Err(usage(
                "reads are under way",
                "call poll_completions() until they have ended",
            ));
        }
        let has_context = *lock(&CONTEXT) != 0;
        let answer = kept(with_rings_in_gpu_memory());
        // The store is another one, also where the old one was opened again.
        if has_context {
            context()?;
        }
        answer.map(|()| 0)
    })
}

/// Starts reads into `segments`, whose bytes are contiguous on the device.
///
/// # Safety
/// The segments stay valid until the read has ended.
unsafe fn start(
    store: *mut StoreHandle,
    mut offset: u64,
    segments: &[(*mut c_void, usize)],
    callback: Option<(Completed, usize)>,
) -> Result<(), i32> {
    let mut read = PendingRead {
        parts: Vec::new(),
        status: 0,
        callback,
    };
    let mut failed = None;
    for &(address, bytes) in segments {
        let mut pending = null_mut();
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let started = check(unsafe {
            nvme_gpu_pread_async(store, address, bytes, offset, null_mut(), &mut pending)
        });
        if let Err(status) = started {
            failed = Some(status);
            break;
        }
        read.parts.push(pending.expose_provenance());
        offset += bytes as u64;
    }
    match (failed, read.parts.is_empty()) {
        (Some(status), true) => Err(status),
        (failed, _) => {
            // Reads that were started end together with this one, which reports the failure.
            read.status = failed.unwrap_or(0);
            lock(&UNDER_WAY).push(read);
            Ok(())
        }
    }
}

/// Returns the place and length of blocks.
fn blocks(store: *mut StoreHandle, lba: u64, count: u32) -> Result<(u64, u64), i32> {
    let block = match kept(opened(store))?.store.block_bytes() {
        1 => 512,
        bytes => u64::from(bytes),
    };
    let offset = lba.checked_mul(block);
    let offset = offset.ok_or_else(|| {
        usage(
            format!("LBA {lba} is past the end of every device"),
            "use one of the device",
        )
    })?;
    Ok((offset, u64::from(count) * block))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn submit_gpu_read(
    ctx: *mut SpdkContext,
    lba: u64,
    lba_count: u32,
    gpu_buffer: *mut c_void,
) -> isize {
    answer(|| {
        // SAFETY: the caller keeps the conditions of the header.
        let Some(ctx) = (unsafe { ctx.as_ref() }) else {
            return Err(usage(
                "ctx is NULL",
                "use spdk_ctx() after init_spdk_nvme()",
            ));
        };
        if ctx.qpair.is_null() {
            return Err(usage(
                "there is no queue pair",
                "call create_io_qpair() first",
            ));
        }
        let (offset, bytes) = blocks(ctx.ns, lba, lba_count)?;
        let result = size(bytes)?;
        // SAFETY: the caller keeps the conditions of the header.
        unsafe { start(ctx.ns, offset, &[(gpu_buffer, bytes as usize)], None) }?;
        Ok(result)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll_completions(ctx: *mut SpdkContext) -> c_int {
    answer(|| {
        if ctx.is_null() {
            return Err(usage(
                "ctx is NULL",
                "use spdk_ctx() after init_spdk_nvme()",
            ));
        }
        kept(check_process())?;
        let mut done = Vec::new();
        {
            let mut all = lock(&UNDER_WAY);
            for read in all.iter_mut() {
                let status = &mut read.status;
                read.parts.retain(|part| {
                    let pending = std::ptr::with_exposed_provenance_mut::<PendingHandle>(*part);
                    // SAFETY: any handle may be polled.
                    let ended = unsafe { nvme_gpu_pending_poll(pending) };
                    if ended == NVME_GPU_ERROR_UNFINISHED {
                        return true;
                    }
                    if *status == 0 {
                        *status = ended;
                    }
                    // SAFETY: the handle was returned by `start`.
                    unsafe { nvme_gpu_pending_free(pending) };
                    false
                });
            }
            done.extend(all.extract_if(.., |read| read.parts.is_empty()));
        }
        let mut failed = None;
        for read in &done {
            if let Some((callback, context)) = read.callback {
                // Internal Error (generic, 6h) for failures that have no status of a controller.
                let code = u16::try_from(read.status).unwrap_or(6);
                let completion = SpdkCompletion {
                    cdw0: 0,
                    rsvd1: 0,
                    sqhd: 0,
                    sqid: 0,
                    cid: 0,
                    status: code << 1,
                };
                // SAFETY: the caller fulfils the contract in the header for the callback. No lock is held, so
                // the callback may call this library.
                unsafe { callback(std::ptr::with_exposed_provenance_mut(context), &completion) };
            } else if read.status != 0 {
                failed = failed.or(Some(read.status));
            }
        }
        match failed {
            Some(status) => Err(status),
            None => Ok(c_int::try_from(done.len()).unwrap_or(c_int::MAX)),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reset_sgl_fn(sgl: *mut c_void, offset: u32) {
    // SAFETY: the caller keeps the conditions of the header.
    let Some(sgl) = (unsafe { sgl.cast::<GpuSgl>().as_mut() }) else {
        return;
    };
    (sgl.index, sgl.offset) = (0, offset);
    while sgl.index < sgl.count {
        // SAFETY: as the header says: `count` segments.
        let length = unsafe { (*sgl.segments.add(sgl.index as usize)).length };
        if sgl.offset < length {
            break;
        }
        sgl.offset -= length;
        sgl.index += 1;
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_next_sge_fn(
    sgl: *mut c_void,
    address: *mut *mut c_void,
    length: *mut u32,
) -> c_int {
    // SAFETY: the caller keeps the conditions of the header.
    let Some(sgl) = (unsafe { sgl.cast::<GpuSgl>().as_mut() }) else {
        return -1;
    };
    if sgl.index >= sgl.count || address.is_null() || length.is_null() {
        return -1;
    }
    // SAFETY: as the header says: `count` segments, and two places.
    unsafe {
        let segment = &*sgl.segments.add(sgl.index as usize);
        *address = segment.address.wrapping_byte_add(sgl.offset as usize);
        *length = segment.length - sgl.offset.min(segment.length);
    }
    sgl.index += 1;
    sgl.offset = 0;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn spdk_nvme_ns_cmd_readv_ext(
    ns: *mut StoreHandle,
    qpair: *mut StoreHandle,
    lba: u64,
    lba_count: u32,
    cb_fn: Option<Completed>,
    cb_arg: *mut c_void,
    reset_sgl_fn: Option<ResetSgl>,
    next_sge_fn: Option<NextSge>,
    opts: *mut c_void,
) -> c_int {
    answer(|| {
        let (Some(reset), Some(next)) = (reset_sgl_fn, next_sge_fn) else {
            return Err(usage("a function of the list is NULL", "give both"));
        };
        if !opts.is_null() {
            return Err(usage("opts is not NULL", "give NULL"));
        }
        if qpair != ns {
            return Err(usage(
                "the queue pair is of another device",
                "use those of one spdk_ctx()",
            ));
        }
        let (offset, bytes) = blocks(ns, lba, lba_count)?;
        let mut segments = Vec::new();
        let mut left = size(bytes)?.unsigned_abs();
        // SAFETY: the caller fulfils the contract in the header for the functions.
        unsafe { reset(cb_arg, 0) };
        while left > 0 {
            let (mut address, mut length) = (null_mut(), 0);
            // SAFETY: as above.
            let more = unsafe { next(cb_arg, &mut address, &mut length) };
            if more != 0 || length == 0 {
                return Err(usage(
                    format!("the list ends {left} bytes early"),
                    "describe as many bytes as the blocks have",
                ));
            }
            let part = left.min(length as usize);
            segments.push((address, part));
            left -= part;
        }
        let callback = cb_fn.map(|callback| (callback, cb_arg.expose_provenance()));
        // SAFETY: the caller fulfils the contract in the header for the memory.
        unsafe { start(ns, offset, &segments, callback) }?;
        Ok(0)
    })
}
