//! Kinds of data by name of a number: ranges of blocks, checked before they are read.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::device::{Shared, answer, check, close_all, kept, lock, of_environment, size, usage};
use nvme_gpu_capi::process::PerProcess;
use nvme_gpu_capi::transfer::{nvme_gpu_pread, nvme_gpu_pread_async, nvme_gpu_stream};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

#[derive(Clone, Copy)]
struct SectorKind {
    start: u64,
    length: u64,
    sector_bytes: u32,
}

#[derive(Default)]
struct BufferRequest {
    buffer: usize,
    bytes: usize,
    kinds: BTreeMap<c_int, SectorKind>,
}

#[derive(Default)]
struct RequestLog {
    /// The number of the last one.
    last: c_int,
    all: BTreeMap<c_int, BufferRequest>,
}

static REQUESTS: Shared<RequestLog> = PerProcess::new(Mutex::new(RequestLog {
    last: 0,
    all: BTreeMap::new(),
}));

#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_init() -> c_int {
    answer(|| kept(of_environment()).map(|_| 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_cleanup() {
    let _: c_int = answer(|| {
        lock(&REQUESTS).all.clear();
        close_all();
        Ok(0)
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_read(offset: u64, bytes: usize, gpu_ptr: *mut c_void) -> isize {
    answer(|| {
        let (store, result) = (kept(of_environment())?, size(bytes as u64)?);
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe { nvme_gpu_pread(store, gpu_ptr, bytes, offset) })?;
        Ok(result)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_read_async(
    offset: u64,
    bytes: usize,
    gpu_ptr: *mut c_void,
    stream: nvme_gpu_stream,
) -> c_int {
    answer(|| {
        let store = kept(of_environment())?;
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe { nvme_gpu_pread_async(store, gpu_ptr, bytes, offset, stream, null_mut()) })?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_create_request(gpu_buffer: *mut c_void, buffer_size: usize) -> c_int {
    answer(|| {
        let mut requests = lock(&REQUESTS);
        let next = requests.last.checked_add(1);
        let id = next.ok_or_else(|| usage("no numbers are left", "start again"))?;
        requests.last = id;
        let request = BufferRequest {
            buffer: gpu_buffer.expose_provenance(),
            bytes: buffer_size,
            kinds: BTreeMap::new(),
        };
        requests.all.insert(id, request);
        Ok(id)
    })
}

fn with<T>(id: c_int, look: impl FnOnce(&mut BufferRequest) -> Result<T, i32>) -> Result<T, i32> {
    let mut requests = lock(&REQUESTS);
    match requests.all.get_mut(&id) {
        Some(request) => look(request),
        None => Err(usage(
            format!("there is no request {id}"),
            "use one that was created",
        )),
    }
}

fn kind(request: &BufferRequest, id: c_int) -> Result<SectorKind, i32> {
    let kind = request.kinds.get(&id).copied();
    kind.ok_or_else(|| usage(format!("the request has no kind {id}"), "add it first"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_add_kind(
    request_id: c_int,
    kind_id: c_int,
    start_lba: u64,
    length: u64,
    sector_size: u32,
) -> c_int {
    answer(|| {
        let end = start_lba
            .checked_add(length)
            .and_then(|end| end.checked_mul(sector_size.into()));
        if sector_size == 0 || end.is_none() {
            let cause = format!(
                "{length} sectors of {sector_size} bytes from {start_lba} on are no range of bytes"
            );
            return Err(usage(cause, "use a range of the device"));
        }
        with(request_id, |request| {
            let kind = SectorKind {
                start: start_lba,
                length,
                sector_bytes: sector_size,
            };
            request.kinds.insert(kind_id, kind);
            Ok(0)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read_nvme_kind(
    request_id: c_int,
    kind_id: c_int,
    idx: u64,
    length: u64,
    gpu_ptr: *mut c_void,
) -> isize {
    answer(|| {
        let kind = with(request_id, |request| kind(request, kind_id))?;
        if idx.checked_add(length).is_none_or(|end| end > kind.length) {
            let cause = format!(
                "sectors {idx} and {length} more of kind {kind_id}, which has {}",
                kind.length
            );
            return Err(usage(cause, "ask for sectors of the kind"));
        }
        let sector = u64::from(kind.sector_bytes);
        let result = size(length * sector)?;
        let store = kept(of_environment())?;
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe {
            nvme_gpu_pread(
                store,
                gpu_ptr,
                result.unsigned_abs(),
                (kind.start + idx) * sector,
            )
        })?;
        Ok(result)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_batch_read(
    request_id: c_int,
    kind_ids: *mut c_int,
    num_kinds: c_int,
) -> isize {
    answer(|| {
        let count = usize::try_from(num_kinds).map_err(|_| {
            usage(
                format!("num_kinds is {num_kinds}, which is negative"),
                "use 0 or more",
            )
        })?;
        if kind_ids.is_null() && count > 0 {
            return Err(usage("kind_ids is NULL", "give a pointer"));
        }
        let store = kept(of_environment())?;
        let (buffer, kinds) = with(request_id, |request| {
            let mut kinds = Vec::new();
            let mut at = 0u64;
            for index in 0..count {
                // SAFETY: as the header says: `count` numbers.
                let one = kind(request, unsafe { *kind_ids.add(index) })?;
                let bytes = one.length * u64::from(one.sector_bytes);
                kinds.push((at, bytes, one.start * u64::from(one.sector_bytes)));
                at = at.saturating_add(bytes);
            }
            match at <= request.bytes as u64 {
                true => Ok((request.buffer, kinds)),
                false => Err(usage(
                    format!(
                        "the kinds need {at} bytes and the buffer has {}",
                        request.bytes
                    ),
                    "read fewer kinds, or make the buffer larger",
                )),
            }
        })?;
        let mut total = 0;
        for (at, bytes, offset) in kinds {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(buffer + at as usize);
            // SAFETY: the buffer fulfils the contract in the header for the request's buffer, whose size was
            // checked.
            check(unsafe { nvme_gpu_pread(store, to.cast(), bytes as usize, offset) })?;
            total += bytes;
        }
        size(total)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_release_request(request_id: c_int) {
    let _: c_int = answer(|| {
        lock(&REQUESTS).all.remove(&request_id);
        Ok(0)
    });
}
