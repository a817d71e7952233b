//! A stand-in for the CUDA driver library, for tests of the host's side on machines without a GPU.
//!
//! Here belongs what the library calls of CUDA, with the rules that a real driver would enforce. It says nothing
//! about speed, or about the order of memory on a GPU.
//!
//! GPU memory is host memory; a kernel runs in a host thread, from its own source, each thread of a launch as a coroutine.
//! Captures forbid what they forbid on a GPU (`captures.rs`).
//!
//! The environment variable `FAKE_CUDA`, words with commas between them, makes it another driver or misbehave: `old`, `nogpu`, `two-gpus`, `small` (a GPU of compute capability 7.5), `oom`, `badptx`, `nocode` (knows no machine code), `bar` (registers no
//! doorbells), `noregister` (registers no memory at all, as with confidential computing), `nohostalloc` (gives no pinned
//! memory), `register-limit=BYTES` (of one registration), `idle` (kernels do nothing), `hang` (kernels never end), `slow`
//! (each kernel begins 50 ms later), `torn`
//! (of litmus tests of two words the second is written, not the first), `nobatch` (knows no copies in batches), `badtrace`
//! (kernels fill the ring of their events with nonsense and count more of it than there can be), `integrated` (a GPU whose memory is the host's), `hosttables` (a GPU that uses the processor's page tables), `onebuffer` (all commands
//! use one buffer).
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

mod captures;
mod compute;
mod contexts;
mod copies;
mod events;
mod examples;
mod export;
mod graphs;
mod idle;
mod kernels;
mod litmus;
mod memory;
mod modules;
mod peer;
mod rows;
mod streams;
mod tensor_map;
mod threads;

use nvme_gpu_kernel::Kernel;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 100;
const INVALID_CONTEXT: Status = 201;
const INVALID_PTX: Status = 218;
const INVALID_IMAGE: Status = 200;
const NO_BINARY_FOR_GPU: Status = 209;
const INVALID_HANDLE: Status = 400;
const ILLEGAL_STATE: Status = 401;
const NOT_FOUND: Status = 500;
const NOT_READY: Status = 600;
const CAPTURE_UNSUPPORTED: Status = 900;
const CAPTURE_INVALIDATED: Status = 901;
const CAPTURE_MERGE: Status = 902;
const CAPTURE_UNMATCHED: Status = 903;
const CAPTURE_UNJOINED: Status = 904;
const CAPTURE_ISOLATION: Status = 905;
const CAPTURED_EVENT: Status = 907;
const CAPTURE_WRONG_THREAD: Status = 908;

/// The kernel whose argument is not a `Launch`.
const LITMUS: &CStr = c"nvme_litmus";
/// The kernel that is a controller.
const PEER: &CStr = c"nvme_peer";
/// Handles of kernels: the places of their names here, those of `Kernel`, of `rows`, of the examples,
/// of those that compute, the litmus kernel's and the controller's.
static KERNELS: LazyLock<Vec<&'static CStr>> = LazyLock::new(|| {
    let kernels = Kernel::ALL.iter().map(|kernel| kernel.symbol());
    let kernels = kernels.chain(rows::NAMES).chain(examples::NAMES);
    kernels
        .chain(compute::NAMES)
        .chain([LITMUS, PEER])
        .collect()
});

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether `FAKE_CUDA`, a list with commas, has `name`.
fn fault(name: &str) -> bool {
    std::env::var("FAKE_CUDA").is_ok_and(|all| all.split(',').any(|one| one == name))
}

/// The number behind `name=` in `FAKE_CUDA`.
fn fault_number(name: &str) -> Option<usize> {
    let all = std::env::var("FAKE_CUDA").ok()?;
    let number = |one: &str| one.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    all.split(',').find_map(number)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *version = if fault("old") { 11_040 } else { 13_000 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Status {
    if fault("nogpu") { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *count = if fault("two-gpus") { 2 } else { 1 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *device = ordinal };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> Status {
    let text = b"Stand-in\0";
    let len = text.len().min(len.max(0) as usize);
    // SAFETY: the caller gives a place for `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, len) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    which: c_uint,
    _: c_int,
) -> Status {
    let answer = match which {
        16 => 4,
        // Integrated: what it exports is memory of this machine.
        18 => c_int::from(fault("integrated") || export::is_supported()),
        100 => c_int::from(fault("hosttables")),
        75 if fault("small") => 7,
        75 => 9,
        76 if fault("small") => 5,
        118 => 100,
        124 => c_int::from(export::is_supported()),
        _ => 0,
    };
    // SAFETY: the caller gives a place for one integer.
    unsafe { *value = answer };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Status {
    let mut contexts = CONTEXTS.take();
    contexts.pop();
    contexts.push(context);
    CONTEXTS.set(contexts);
    SUCCESS
}

thread_local! {
    /// The contexts of a thread, the current one last.
    static CONTEXTS: std::cell::Cell<Vec<*mut c_void>> = const { std::cell::Cell::new(Vec::new()) };
    /// The mode in which a thread takes part in captures: 0 is global, 2 relaxed.
    static CAPTURE_MODE: std::cell::Cell<c_uint> = const { std::cell::Cell::new(0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> Status {
    let contexts = CONTEXTS.take();
    // SAFETY: the caller gives a place for one handle.
    unsafe { *context = contexts.last().copied().unwrap_or_default() };
    CONTEXTS.set(contexts);
    SUCCESS
}

/// The current context of the calling thread, 0 without one.
fn current_context() -> usize {
    let contexts = CONTEXTS.take();
    let current = contexts.last().map_or(0, |context| context.addr());
    CONTEXTS.set(contexts);
    current
}

/// The GPU of a context: that of a primary one is in its handle, other contexts are of GPU 0.
fn device_of(context: usize) -> c_int {
    match context {
        8..1000 => (context - 8) as c_int,
        _ => 0,
    }
}

/// A context beside the primary one, current from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut *mut c_void, _: c_uint, _: c_int) -> Status {
    static NEXT: AtomicU32 = AtomicU32::new(1000);
    let handle = std::ptr::without_provenance_mut(NEXT.fetch_add(1, Ordering::Relaxed) as usize);
    // SAFETY: the caller gives a place for one handle.
    unsafe { *context = handle };
    cuCtxPushCurrent_v2(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(_: *mut c_void) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> Status {
    let mut contexts = CONTEXTS.take();
    contexts.push(context);
    CONTEXTS.set(contexts);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> Status {
    let mut contexts = CONTEXTS.take();
    // SAFETY: the caller gives a place for one handle.
    unsafe { *context = contexts.pop().unwrap_or_default() };
    CONTEXTS.set(contexts);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> Status {
    // SAFETY: the caller gives a mode, and a place for the one before it.
    unsafe { *mode = CAPTURE_MODE.replace(*mode) };
    SUCCESS
}

/// The mode of the calling thread.
fn capture_mode() -> c_uint {
    CAPTURE_MODE.get()
}

/// Memory of every GPU is the host's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, _: c_int, _: c_int) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *can = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(context: *mut c_void, _: c_uint) -> Status {
    memory::reach_peer(device_of(context.addr()));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    _: *const u8,
    _: c_int,
    _: usize,
) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *blocks = 1 };
    SUCCESS
}
