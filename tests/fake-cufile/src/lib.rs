//! A stand-in for libcufile, for tests on machines without it: GPU memory is the memory of the stand-in for CUDA.
//!
//! The environment variable `FAKE_CUFILE` makes it answer as cuFile does: `p2pdma`, `compat` (what its properties say),
//! `unopened:N` (the driver ends with N), `unregistered:N` (no file is registered), `failing:N` (transfers end with N),
//! `errno` (they end with EIO), `aligned` (they take multiples of 4096 alone), `short` (each moves 1000 bytes less, 1
//! at least), `ends` (they move nothing), `nobatch` (batches cannot be submitted), `stray` (a batch ends what was not
//! in it), `half` (the second entry of a batch is refused when the first is under way), `untold` (the first question for
//! the ends of a batch fails), `pending` (it tells of entries under way, too).
// UNSAFETY: a C interface of raw pointers, whose callers keep cuFile's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(clippy::missing_safety_doc, reason = "cufile.h documents them")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `CUfileError_t`.
#[repr(C)]
pub struct Answer {
    code: c_int,
    cuda: c_int,
}

const OK: Answer = Answer { code: 0, cuda: 0 };

fn code(code: c_int) -> Answer {
    Answer { code, cuda: 0 }
}

fn fault(name: &str) -> bool {
    std::env::var("FAKE_CUFILE").is_ok_and(|value| value == name)
}

/// N of the fault `NAME:N`.
fn number(name: &str) -> Option<c_int> {
    let value = std::env::var("FAKE_CUFILE").ok()?;
    value.strip_prefix(name)?.strip_prefix(':')?.parse().ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registered files, batches and buffers.
static FILES: Mutex<BTreeMap<usize, c_int>> = Mutex::new(BTreeMap::new());
static BATCHES: Mutex<BTreeMap<usize, Vec<Event>>> = Mutex::new(BTreeMap::new());
static BUFFERS: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());
/// Batches whose ends were asked for.
static ASKED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
static NEXT: AtomicUsize = AtomicUsize::new(1);

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Answer {
    number("unopened").map_or(OK, code)
}

/// The head of `CUfileDrvProps_t`.
#[repr(C)]
pub struct Properties {
    nvfs: [c_uint; 2],
    sizes: [usize; 2],
    status: c_uint,
    control: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(to: *mut Properties) -> Answer {
    let known = Properties {
        nvfs: if fault("p2pdma") { [0, 0] } else { [2, 25] },
        sizes: [4, 16 << 20],
        status: if fault("compat") { 0 } else { 1 << 6 },
        control: 2,
    };
    // SAFETY: the caller passes the address of a structure that is large enough.
    unsafe { to.write(known) };
    OK
}

/// `CUfileDescr_t`.
#[repr(C)]
pub struct Descr {
    kind: c_uint,
    padding: u32,
    fd: c_int,
    rest: u32,
    fs_ops: *const c_void,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut usize, descr: *mut Descr) -> Answer {
    if let Some(number) = number("unregistered") {
        return code(number);
    }
    // SAFETY: the caller gives one.
    let descr = unsafe { &*descr };
    if descr.kind != 1 || descr.fd < 0 {
        return code(5022);
    }
    let new = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&FILES).insert(new, descr.fd);
    // SAFETY: the caller passes the address of a handle.
    unsafe { *handle = new };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: usize) {
    lock(&FILES).remove(&handle).expect("a registered file");
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(address: u64, bytes: usize, _flags: c_int) -> Answer {
    let mut buffers = lock(&BUFFERS);
    match buffers.contains_key(&address) {
        true => code(5023),
        false => {
            buffers.insert(address, bytes);
            OK
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(address: u64) -> Answer {
    lock(&BUFFERS).remove(&address).map_or(code(5024), |_| OK)
}

/// # Safety
/// The caller vouches for the memory.
unsafe fn transfer(is_write: bool, handle: usize, at: u64, bytes: usize, offset: i64) -> isize {
    let Some(fd) = lock(&FILES).get(&handle).copied() else {
        return -5027;
    };
    if let Some(number) = number("failing") {
        return -number as isize;
    }
    if fault("errno") {
        // SAFETY: the pointer is this thread's error number.
        unsafe { *libc::__errno_location() = libc::EIO };
        return -1;
    }
    let all = at | bytes as u64 | offset as u64;
    if fault("aligned") && !all.is_multiple_of(4096) {
        return -5022;
    }
    let bytes = match bytes {
        _ if fault("ends") => 0,
        0 => 0,
        bytes if fault("short") => bytes.saturating_sub(1000).max(1),
        bytes => bytes,
    };
    // The data pass through memory of this function and another descriptor, because the caller's may require whole
    // blocks.
    let path = format!("/proc/self/fd/{fd}");
    let mut room = vec![0u8; bytes];
    use std::os::unix::fs::FileExt;
    let memory = std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
    if is_write {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { memory.copy_to(room.as_mut_ptr(), bytes) };
        let file = std::fs::File::options().write(true).open(path);
        return match file.and_then(|file| file.write_at(&room, offset as u64)) {
            Ok(moved) => moved as isize,
            Err(_) => -5025,
        };
    }
    let file = std::fs::File::open(path);
    match file.and_then(|file| file.read_at(&mut room, offset as u64)) {
        Ok(moved) => {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            unsafe { memory.copy_from(room.as_ptr(), moved) };
            moved as isize
        }
        Err(_) => -5030,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: usize,
    memory: u64,
    bytes: usize,
    offset: i64,
    memory_offset: i64,
) -> isize {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { transfer(false, handle, memory + memory_offset as u64, bytes, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWrite(
    handle: usize,
    memory: u64,
    bytes: usize,
    offset: i64,
    memory_offset: i64,
) -> isize {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { transfer(true, handle, memory + memory_offset as u64, bytes, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileReadAsync(
    handle: usize,
    memory: u64,
    bytes: *mut usize,
    offset: *mut i64,
    memory_offset: *mut i64,
    moved: *mut isize,
    _stream: *mut c_void,
) -> Answer {
    // SAFETY: the caller's words and memory.
    unsafe {
        let at = memory + *memory_offset as u64;
        *moved = transfer(false, handle, at, *bytes, *offset);
    }
    OK
}

/// `CUfileIOParams_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Params {
    mode: c_uint,
    memory: u64,
    offset: i64,
    memory_offset: i64,
    bytes: usize,
    handle: usize,
    opcode: c_uint,
    cookie: usize,
}

/// `CUfileIOEvents_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Event {
    cookie: usize,
    status: c_uint,
    moved: isize,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSetUp(id: *mut usize, count: c_uint) -> Answer {
    if count > 128 {
        return code(5022);
    }
    let new = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&BATCHES).insert(new, Vec::new());
    // SAFETY: the caller passes the address of a handle.
    unsafe { *id = new };
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSubmit(
    id: usize,
    count: c_uint,
    all: *mut Params,
    _flags: c_uint,
) -> Answer {
    if fault("nobatch") {
        return code(5035);
    }
    let is_half = fault("half");
    for index in 0..count as usize {
        if is_half && index == 1 {
            return code(5022);
        }
        // SAFETY: the caller gives `count` entries, and vouches for their memory.
        let (params, moved) = unsafe {
            let params = *all.add(index);
            let at = params.memory + params.memory_offset as u64;
            let (is_write, handle) = (params.opcode == 1, params.handle);
            let moved = transfer(is_write, handle, at, params.bytes, params.offset);
            (params, moved)
        };
        let event = Event {
            cookie: params.cookie + if fault("stray") { 1000 } else { 0 },
            status: if moved < 0 { 0x40 } else { 0x10 },
            moved,
        };
        lock(&BATCHES).get_mut(&id).expect("a batch").push(event);
    }
    OK
}

/// Reports half of the ended entries, the last first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOGetStatus(
    id: usize,
    _least: c_uint,
    count: *mut c_uint,
    events: *mut Event,
    _limit: *mut c_void,
) -> Answer {
    let is_first = lock(&ASKED).insert(id);
    if is_first && fault("untold") {
        return code(5030);
    }
    let mut batches = lock(&BATCHES);
    let ended = batches.get_mut(&id).expect("a batch");
    if is_first && fault("pending") {
        let under_way = Event {
            status: 2,
            moved: 0,
            ..*ended.last().expect("an entry")
        };
        // SAFETY: the caller gives room for one.
        unsafe {
            events.write(under_way);
            *count = 1;
        }
        return OK;
    }
    // SAFETY: the caller passes a count, and room for as many entries.
    unsafe {
        let most = (ended.len().div_ceil(2)).min(*count as usize);
        for index in 0..most {
            events.add(index).write(ended.pop().expect("as many"));
        }
        *count = most as c_uint;
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBatchIODestroy(id: usize) {
    let left = lock(&BATCHES).remove(&id).expect("a batch");
    assert!(left.is_empty(), "a batch is destroyed before its end");
}
