//! The primary contexts of GPUs: retained and released by count, each with a number of its own from its first retain to
//! its end.

use super::{INVALID_CONTEXT, SUCCESS, Status, lock, modules};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;

/// A GPU's context: how often it is held, and its number.
#[derive(Default)]
struct PrimaryContext {
    held: u32,
    number: u64,
}

/// By the GPU's number.
static CONTEXTS: Mutex<BTreeMap<c_int, PrimaryContext>> = Mutex::new(BTreeMap::new());
/// How often any of them was retained, and how many there were.
static COUNTS: Mutex<(u32, u64)> = Mutex::new((0, 0));

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    device: c_int,
) -> Status {
    let mut contexts = lock(&CONTEXTS);
    let mut counts = lock(&COUNTS);
    let of = contexts.entry(device).or_default();
    counts.0 += 1;
    if of.held == 0 {
        counts.1 += 1;
        of.number = counts.1;
    }
    of.held += 1;
    // SAFETY: the caller gives a place for one handle.
    unsafe { *context = std::ptr::without_provenance_mut(8 + device as usize) };
    SUCCESS
}

/// Ends the context, and its modules with it, when nobody holds it any longer.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status {
    let mut contexts = lock(&CONTEXTS);
    let of = contexts.entry(device).or_default();
    if of.held == 0 {
        return INVALID_CONTEXT;
    }
    of.held -= 1;
    if of.held == 0 {
        modules::end_with_context(device);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetId(context: *mut c_void, number: *mut c_ulonglong) -> Status {
    let contexts = lock(&CONTEXTS);
    let Some(of) = contexts.get(&super::device_of(context.addr())) else {
        return INVALID_CONTEXT;
    };
    // SAFETY: the caller gives a place for one integer.
    unsafe { *number = of.number };
    SUCCESS
}

/// How often a GPU's context was retained. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_retained() -> c_uint {
    lock(&COUNTS).0
}
