//! Modules and their functions: loaded in the current context, gone with it. The text of an image is looked at for its
//! layout alone; a function is one of the kernels that the stand-in knows by name.

use super::{
    INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, KERNELS, NO_BINARY_FOR_GPU,
    NOT_FOUND, OUT_OF_MEMORY, SUCCESS, Status, lock, memory,
};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_void,
    count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller gives machine code, which begins with the head of an ELF file, or terminated text.
    if let Some(status) = unsafe { code(image.cast(), module) } {
        return status;
    }
    // SAFETY: the caller gives terminated text.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    if super::fault("badptx") || !text.contains(".version") {
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
    // SAFETY: the caller gives a place for one handle.
    unsafe { *module = loaded(layout) };
    SUCCESS
}

fn loaded(layout: Option<u32>) -> *mut c_void {
    let device = super::device_of(super::current_context());
    let new = Box::into_raw(Box::new(Loaded { layout })).cast::<c_void>();
    lock(&LIVE).insert(new.expose_provenance(), device);
    LOADS.fetch_add(1, Ordering::Relaxed);
    new
}

/// Loads machine code for the GPU of the stand-in, sm_90. Returns None for what is none.
///
/// # Safety
/// `image` has the 64 bytes of an ELF file's head, or ends before with a zero byte; `module` has room for a handle.
unsafe fn code(image: *const u8, module: *mut *mut c_void) -> Option<Status> {
    // SAFETY: the caller's; a byte is read only when those before it were the magic number's.
    let is_elf = (0..4).all(|at| unsafe { image.add(at).read() } == b"\x7fELF"[at]);
    if !is_elf {
        return None;
    }
    // SAFETY: the caller's, for an ELF file: `e_machine` is at 18, `e_flags` at 48.
    let (machine, flags) = unsafe {
        let machine = image.add(18).cast::<u16>().read_unaligned();
        (machine, image.add(48).cast::<u32>().read_unaligned())
    };
    if super::fault("nocode") || super::fault("badptx") {
        return Some(INVALID_IMAGE);
    }
    // The capability that the code is for, in the second byte since version 8 of the format.
    if (machine, flags >> 8 & 0xff) != (EM_CUDA, 90) {
        return Some(NO_BINARY_FOR_GPU);
    }
    CODE_LOADS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's.
    unsafe { *module = loaded(None) };
    Some(SUCCESS)
}

/// How many modules of machine code were loaded. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_code_loads() -> c_uint {
    CODE_LOADS.load(Ordering::Relaxed)
}

/// How many modules were loaded. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_loads() -> c_uint {
    LOADS.load(Ordering::Relaxed)
}

/// Ends the modules of a GPU whose context ends.
pub fn end_with_context(device: c_int) {
    let mut live = lock(&LIVE);
    let (ended, left) = std::mem::take(&mut *live)
        .into_iter()
        .partition::<BTreeMap<_, _>, _>(|(_, of)| *of == device);
    *live = left;
    for module in ended.into_keys() {
        lock(&MODULE_OF).retain(|_, of| *of != module);
        // SAFETY: made by `cuModuleLoadDataEx` and ended once, since it is out of `LIVE` now.
        drop(unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Loaded>(module)) });
    }
}

/// A module: the layout that the device library in it carries.
struct Loaded {
    layout: Option<u32>,
}

/// The modules that are loaded, with the GPU of each.
static LIVE: Mutex<BTreeMap<usize, c_int>> = Mutex::new(BTreeMap::new());
static LOADS: AtomicU32 = AtomicU32::new(0);
static CODE_LOADS: AtomicU32 = AtomicU32::new(0);
/// `e_machine` of a file for NVIDIA's GPUs.
const EM_CUDA: u16 = 190;

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
    if lock(&LIVE).remove(&module.addr()).is_none() {
        return INVALID_HANDLE;
    }
    lock(&MODULE_OF).retain(|_, of| *of != module.addr());
    // SAFETY: made by `cuModuleLoadDataEx` and ended once, since it is out of `LIVE` now.
    drop(unsafe { Box::from_raw(module.cast::<Loaded>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *const u8,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    // The modules of a context that ended are gone, as on a GPU.
    if !lock(&LIVE).contains_key(&module.addr()) {
        return INVALID_HANDLE;
    }
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

/// Answers 64 for all but the limit of shared memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    function: *const u8,
) -> Status {
    let answer = match attribute {
        MAX_SHARED => *lock(&SHARED_LIMITS)
            .get(&function.addr())
            .unwrap_or(&SHARED_LIMIT),
        _ => 64,
    };
    // SAFETY: the caller gives a place for one integer.
    unsafe { *value = answer as c_int };
    SUCCESS
}

/// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
const MAX_SHARED: c_uint = 8;

/// Bytes of shared memory that a block of a kernel may have, where that was raised: by its handle.
static SHARED_LIMITS: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());
/// Without that.
const SHARED_LIMIT: u32 = 48 << 10;
/// Most shared memory of a block on an H100.
const MOST_SHARED: u32 = 227 << 10;

/// Knows the limit of shared memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(
    function: *const u8,
    attribute: c_uint,
    value: c_int,
) -> Status {
    match u32::try_from(value) {
        Ok(bytes) if attribute == MAX_SHARED && bytes <= MOST_SHARED => {
            lock(&SHARED_LIMITS).insert(function.addr(), bytes);
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

/// Whether a block of the kernel may have so many bytes.
pub fn may_share(function: *const u8, bytes: u32) -> bool {
    let limits = lock(&SHARED_LIMITS);
    bytes <= *limits.get(&function.addr()).unwrap_or(&SHARED_LIMIT)
}
