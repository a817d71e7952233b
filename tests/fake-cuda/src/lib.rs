//! A stand-in for the CUDA driver library, for tests of the host's side on machines without a GPU.
//!
//! GPU memory is host memory; a kernel is a host thread that drives the queues by the same core, as a group of one.
//! Captures forbid what they forbid on a GPU (`captures.rs`).
//!
//! The environment variable `FAKE_CUDA`, words with commas between them, makes it another driver or misbehave: `old`, `nogpu`, `two-gpus`, `small` (a GPU of compute capability 7.5), `oom`, `badptx`, `bar` (registers no
//! doorbells), `noregister` (registers no memory at all, as with confidential computing), `nohostalloc` (gives no pinned
//! memory), `register-limit=BYTES` (of one registration), `idle` (kernels do nothing), `hang` (kernels never end), `slow`
//! (each kernel begins 50 ms later), `torn`
//! (of litmus tests of two words the second is written, not the first), `nobatch` (knows no copies in batches), `badtrace`
//! (kernels fill the ring of their events with nonsense and count more of it than there can be), `onebuffer` (all commands
//! use one buffer).
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

mod captures;
mod choose;
mod compute;
mod copies;
mod events;
mod examples;
mod experts;
mod export;
mod gathered;
mod gemm;
mod graphs;
mod idle;
mod kernels;
mod ladder;
mod litmus;
mod matmul;
mod memory;
mod paged;
mod peer;
mod rows;
mod search;
mod streamed;
mod streams;
mod warps;

use nvme_gpu_kernel::Kernel;
use std::collections::BTreeMap;
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
        .chain(matmul::NAMES)
        .chain([LITMUS, PEER])
        .collect()
});

static RETAINED: AtomicU32 = AtomicU32::new(0);

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
        18 => c_int::from(export::is_supported()),
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
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    device: c_int,
) -> Status {
    let handle = std::ptr::without_provenance_mut(8 + device as usize);
    // SAFETY: the caller gives a place for one handle.
    unsafe { *context = handle };
    RETAINED.fetch_add(1, Ordering::Relaxed);
    SUCCESS
}

/// How often a GPU's context was retained. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_retained() -> c_uint {
    RETAINED.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
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
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_void,
    count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller gives terminated text.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    if fault("badptx") || !text.contains(".version") {
        for index in 0..count as usize {
            // SAFETY: both arrays have `count` entries; option 5 is the error log, larger than this text.
            unsafe {
                if *options.add(index) == 5 {
                    let log = b"ptxas stand-in, line 7; error   : Unknown instruction\n\0";
                    std::ptr::copy_nonoverlapping(
                        log.as_ptr(),
                        (*values.add(index)).cast(),
                        log.len(),
                    );
                }
            }
        }
        return INVALID_PTX;
    }
    let layout = text.split_once("nvme_gpu_device_layout[4] = {");
    let layout = layout.and_then(|(_, rest)| rest.split_once('}')?.0.parse().ok());
    let new = Box::new(Loaded { layout });
    // SAFETY: the caller gives a place for one handle.
    unsafe { *module = Box::into_raw(new).cast() };
    SUCCESS
}

/// A module: the layout that the device library in it carries.
struct Loaded {
    layout: Option<u32>,
}

/// The modules that functions were got from last: a function's handle is its name's address.
static MODULE_OF: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetModule(module: *mut *mut c_void, function: *const u8) -> Status {
    let Some(of) = lock(&MODULE_OF).get(&function.addr()).copied() else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller gives a place for one handle.
    unsafe { *module = std::ptr::with_exposed_provenance_mut(of) };
    SUCCESS
}

/// Knows one variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetGlobal_v2(
    address: *mut u64,
    bytes: *mut usize,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    // SAFETY: the caller gives a terminated name, and a module that `cuModuleLoadDataEx` made.
    let (name, module) = unsafe { (CStr::from_ptr(name), &*module.cast::<Loaded>()) };
    let Some(layout) = module.layout.filter(|_| name == c"nvme_gpu_device_layout") else {
        return NOT_FOUND;
    };
    let Some(place) = memory::of_gpu(4) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: allocated above; the caller gives a place for one address and one length.
    unsafe {
        (place as usize as *mut u32).write(layout);
        (*address, *bytes) = (place, 4);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(
    module: *mut *mut c_void,
    image: *const c_void,
) -> Status {
    // SAFETY: the caller's; there are no options.
    unsafe { cuModuleLoadDataEx(module, image, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> Status {
    lock(&MODULE_OF).retain(|_, of| *of != module.addr());
    // SAFETY: the caller gives a module that `cuModuleLoadDataEx` made, once.
    drop(unsafe { Box::from_raw(module.cast::<Loaded>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *const u8,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    // SAFETY: the caller gives a terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(known) = KERNELS.iter().find(|known| **known == name) else {
        return NOT_FOUND;
    };
    let handle = known.as_ptr();
    lock(&MODULE_OF).insert(handle.addr(), module.expose_provenance());
    // SAFETY: the caller gives a place for one handle.
    unsafe { *function = handle.cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, _: c_uint, _: *const u8) -> Status {
    // SAFETY: the caller gives a place for one integer.
    unsafe { *value = 64 };
    SUCCESS
}

/// Bytes of shared memory that a block of a kernel may have, where that was raised: by its handle.
static SHARED_LIMITS: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());
/// Without that.
const SHARED_LIMIT: u32 = 48 << 10;
/// What a multiprocessor of an H100 gives a block.
const MOST_SHARED: u32 = 227 << 10;

/// Knows the limit of shared memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(
    function: *const u8,
    attribute: c_uint,
    value: c_int,
) -> Status {
    match u32::try_from(value) {
        Ok(bytes) if attribute == 8 && bytes <= MOST_SHARED => {
            lock(&SHARED_LIMITS).insert(function.addr(), bytes.max(SHARED_LIMIT));
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

/// Whether a block of the kernel may have so many bytes.
fn may_share(function: *const u8, bytes: u32) -> bool {
    let limits = lock(&SHARED_LIMITS);
    bytes <= *limits.get(&function.addr()).unwrap_or(&SHARED_LIMIT)
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
