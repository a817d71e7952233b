//! Stores by path: opened when first used, closed together. Answers as `errno`.
// UNSAFETY: writes errno.

use nvme_gpu_capi::border::Answer;
use nvme_gpu_capi::opened::{STORES, StoreHandle};
use nvme_gpu_capi::process::PerProcess;
use nvme_gpu_capi::status::*;
use nvme_gpu_capi::store::{NVME_GPU_ALLOW_WRITE, open_device};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

/// Handles of stores by the path that opened them.
#[derive(Default)]
struct StorePaths {
    open: BTreeMap<String, usize>,
    /// A parent opened stores before a fork, and nothing was closed since.
    is_inherited: bool,
}

static BY_PATH: Shared<StorePaths> = PerProcess::new(Mutex::new(StorePaths {
    open: BTreeMap::new(),
    is_inherited: false,
}));

/// State that the threads of a process share; a child of `fork` begins with an empty one.
pub type Shared<T> = PerProcess<Mutex<T>>;

pub fn lock<T: Default>(shared: &Shared<T>) -> MutexGuard<'_, T> {
    nvme_host::lock::lock(shared.get(Mutex::default))
}

fn all_paths() -> MutexGuard<'static, StorePaths> {
    nvme_host::lock::lock(BY_PATH.get(|| {
        Mutex::new(StorePaths {
            open: BTreeMap::new(),
            is_inherited: true,
        })
    }))
}

/// Returns the stores of this process.
///
/// # Errors
/// In a child of `fork` whose parent opened some: paths would then name other stores than before.
fn own_paths() -> Answer<MutexGuard<'static, StorePaths>> {
    let paths = all_paths();
    match paths.is_inherited {
        true => Err(CallFailure::usage(
            "the devices of this layer were opened by another process, before a fork",
            "call cleanup_gds() or nvme_gpu_cleanup() in this process, then open what it uses",
        )),
        false => Ok(paths),
    }
}

/// # Errors
/// In a child of the process that opened the devices.
pub fn check_process() -> Answer<()> {
    own_paths().map(drop)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Returns the GPU of `NVME_GPU_INDEX`; without it the first one where there is one.
fn gpu() -> Answer<Option<i32>> {
    let Some(text) = variable("NVME_GPU_INDEX") else {
        return Ok(None);
    };
    let number = text.parse().map_err(|_| {
        let cause = format!("NVME_GPU_INDEX is '{text}'");
        CallFailure::usage(cause, "set it to the number of a GPU, or to -1 for none")
    });
    number.map(Some)
}

fn flags() -> Answer<u32> {
    match variable("NVME_GPU_ALLOW_WRITE").as_deref() {
        Some("1") => Ok(NVME_GPU_ALLOW_WRITE),
        Some("0") | None => Ok(0),
        Some(other) => Err(CallFailure::usage(
            format!("NVME_GPU_ALLOW_WRITE is '{other}'"),
            "set it to 1 to write to real devices, else to 0",
        )),
    }
}

/// Opens `device`, with a GPU if there is one.
pub fn open(device: &str) -> Answer<*mut StoreHandle> {
    let flags = flags()?;
    let open = |gpu| open_device(device, gpu, flags, 0);
    match gpu()? {
        Some(gpu) => open(gpu),
        None if cfg!(feature = "cuda") => match open(0) {
            Err(failure) if failure.status == NVME_GPU_ERROR_ENVIRONMENT => open(-1),
            answer => answer,
        },
        None => open(-1),
    }
}

/// Number of the tier whose rings lie in GPU memory.
const RINGS_IN_GPU_MEMORY: u32 = 3;

/// Opens the store of `NVME_GPU_DEVICE` with rings in GPU memory. One that is open is closed before, since a drive has
/// one store at a time; where the other is refused, it is opened again as it was.
pub fn with_rings_in_gpu_memory() -> Answer<()> {
    let device = named()?;
    let gpu = gpu()?.unwrap_or(0);
    if gpu < 0 {
        return Err(CallFailure::usage(
            "NVME_GPU_INDEX names no GPU",
            "set it to the number of the GPU whose memory the rings shall lie in",
        ));
    }
    let flags = flags()?;
    let all = &mut own_paths()?.open;
    let before = all.remove(&device);
    if let Some(before) = before {
        drop(STORES.close::<StoreHandle>(std::ptr::without_provenance_mut(before)));
    }
    let opened = open_device(&device, gpu, flags, RINGS_IN_GPU_MEMORY);
    let (handle, answer) = match (opened, before) {
        (Ok(handle), _) => (handle, Ok(())),
        (Err(failure), None) => return Err(failure),
        (Err(failure), Some(_)) => (open(&device)?, Err(failure)),
    };
    all.insert(device, handle.addr());
    answer
}

/// Returns the store of `device`, opened if need be.
pub fn by_path(device: &str) -> Answer<*mut StoreHandle> {
    let all = &mut own_paths()?.open;
    if let Some(known) = all.get(device) {
        return Ok(std::ptr::without_provenance_mut(*known));
    }
    let handle = open(device)?;
    all.insert(device.to_owned(), handle.addr());
    Ok(handle)
}

fn named() -> Answer<String> {
    variable("NVME_GPU_DEVICE").ok_or_else(|| {
        CallFailure::usage(
            "NVME_GPU_DEVICE is not set",
            "set it to a device, as in vfio:0000:01:00.0 or sim:mem?size=1GiB",
        )
    })
}

/// Returns the store of the device that `NVME_GPU_DEVICE` names.
pub fn of_environment() -> Answer<*mut StoreHandle> {
    by_path(&named()?)
}

/// Closes all stores that were opened by path.
pub fn close_all() {
    for (_, handle) in std::mem::take(&mut *all_paths()).open {
        drop(STORES.close::<StoreHandle>(std::ptr::without_provenance_mut(handle)));
    }
}

/// Converts the status of a call of the C interface.
pub fn check(status: nvme_gpu_status) -> Result<(), i32> {
    match status {
        NVME_GPU_OK => Ok(()),
        status => Err(status),
    }
}

/// Keeps a failure for this thread and returns its number.
pub fn kept<T>(answer: Answer<T>) -> Result<T, i32> {
    answer.map_err(CallFailure::set_last)
}

fn errno(status: nvme_gpu_status) -> i32 {
    match status {
        NVME_GPU_ERROR_USAGE | NVME_GPU_ERROR_VERSION => libc::EINVAL,
        NVME_GPU_ERROR_CLOSED => libc::EBADF,
        NVME_GPU_ERROR_GONE => libc::ENODEV,
        NVME_GPU_ERROR_CHANGED => libc::ESTALE,
        NVME_GPU_ERROR_TIMEOUT => libc::ETIMEDOUT,
        NVME_GPU_ERROR_UNFINISHED => libc::EAGAIN,
        NVME_GPU_ERROR_ENVIRONMENT | NVME_GPU_ERROR_UNSUPPORTED => libc::ENOTSUP,
        _ => libc::EIO,
    }
}

/// Returns the value of a call, or -1 with `errno` and the last error of this thread.
pub fn answer<T: From<i8>>(body: impl FnOnce() -> Result<T, nvme_gpu_status>) -> T {
    let status = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(status)) => status,
        Err(_) => CallFailure::new(NVME_GPU_ERROR_INTERNAL, "the library panicked", "report it")
            .set_last(),
    };
    set_errno(errno(status));
    T::from(-1)
}

#[allow(unsafe_code)]
fn set_errno(number: i32) {
    // SAFETY: the pointer is this thread's errno.
    unsafe { *libc::__errno_location() = number };
}

/// Returns the bytes as the result of a call.
pub fn size(bytes: u64) -> Result<isize, nvme_gpu_status> {
    isize::try_from(bytes).map_err(|_| {
        usage(
            format!(
                "a length of {bytes} bytes does not fit into the result, a signed 64-bit number"
            ),
            "ask for less",
        )
    })
}

pub fn usage(cause: impl Into<String>, remedy: &str) -> nvme_gpu_status {
    CallFailure::usage(cause, remedy).set_last()
}
