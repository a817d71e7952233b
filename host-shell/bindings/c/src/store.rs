//! Stores: opening, closing, and their properties. Handles are numbers that are looked up, so that a closed or
//! foreign handle is an error and never a wild pointer.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, calls, give, put, take, text, value};
use crate::memory::CallMemory;
use crate::opened::{DEVICES, OpenedStore, RegisteredRange, STORES, StoreHandle, TABLES, opened};
use crate::pages::PAGES;
use crate::status::{CallFailure, nvme_gpu_status};
use crate::version;
use nvme_host::lock::lock;
use nvme_host::store::{DataPath, FileIo};
use nvme_host::{Store, StoreOptions};
use std::ffi::c_char;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// nvme_gpu_options.flags: allows writes to a real device (a function behind VFIO, a block device).
pub const NVME_GPU_ALLOW_WRITE: u32 = 1;
/// nvme_gpu_options.flags: allows no writes at all. An image of the simulator is then shared with other readers.
pub const NVME_GPU_READ_ONLY: u32 = 2;
/// nvme_gpu_options.flags: files by io_uring, or not at all.
pub const NVME_GPU_FILE_URING: u32 = 4;
/// nvme_gpu_options.flags: files by pread and pwrite.
pub const NVME_GPU_FILE_PREAD: u32 = 8;

/// Flag of nvme_gpu_options, for files with a GPU: nvme_gpu_pread() into its memory uses NVIDIA's cuFile where
/// that accepts the file, else host threads. libcufile.so.0 is looked up when the file is opened;
/// nvme_gpu_path() shows the outcome.
pub const NVME_GPU_GDS: u32 = 16;
/// nvme_gpu_options.flags: as NVME_GPU_GDS, and the file is not opened, or not read, where cuFile refuses.
pub const NVME_GPU_GDS_REQUIRE: u32 = 32;

const ALL_FLAGS: u32 = 63;

/// Options of nvme_gpu_open(). Begin with NVME_GPU_OPTIONS_INIT, then set fields; 0 selects the default of a
/// field.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OpenOptions {
    /// sizeof(nvme_gpu_options).
    pub size: usize,
    /// NVME_GPU_VERSION: compared with the version of the library.
    pub version: u32,
    /// NVME_GPU_ALLOW_WRITE and so on, or-ed.
    pub flags: u32,
    /// Namespace of a controller, from 1 on. Default 1.
    pub nsid: u32,
    /// Queue pairs, or rings of io_uring, that all calls share: 1 to 4095. Default 8. A controller may grant fewer.
    pub queues: u32,
    /// Commands in flight of each: 1 to 4095. Default 64.
    pub depth: u32,
    /// Deadline of a controller's command, after which it is aborted, in ms. Default 5000. Files have no limit.
    pub timeout_ms: u32,
    /// With a GPU: queue pairs that the GPU drives, besides those of the CPU. Default 16.
    pub gpu_queues: u32,
    /// With a GPU: entries of each, 65536 at most, rounded up to a power of two. Default 1024. A controller may have
    /// fewer.
    pub gpu_entries: u32,
    /// With a GPU: blocks of a launch that run at a time, each with 1 MiB of slot memory. Default 32.
    pub gpu_stations: u32,
    /// With a GPU: queue pairs that are kept for kernels of your own, nvme_gpu_device_queues(). Default none.
    pub gpu_kernel_queues: u32,
    /// With a GPU: 1 for data in host memory, 2 for data in its memory, 3 for its queues' rings there, too; where that
    /// does not work, the store is not opened. Default: 1 or 2, the highest that works without a thread of the CPU, or
    /// else 0, a thread that rings doorbells.
    pub gpu_tier: u32,
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for OpenOptions {
    const NAME: &'static str = "nvme_gpu_options";
}

const DEFAULTS: OpenOptions = OpenOptions {
    size: 0,
    version: version::NVME_GPU_VERSION,
    flags: 0,
    nsid: 0,
    queues: 0,
    depth: 0,
    timeout_ms: 0,
    gpu_queues: 0,
    gpu_entries: 0,
    gpu_stations: 0,
    gpu_kernel_queues: 0,
    gpu_tier: 0,
};

/// nvme_gpu_stats(): set `size` to sizeof(nvme_gpu_statistics) before the call. Counts since the store was opened.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct StoreStatistics {
    pub size: usize,
    /// Commands sent by the CPU, or system calls to a file.
    pub commands: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Commands that were sent again.
    pub retries: u64,
    /// Operations in the background that failed, whether or not they were waited for.
    pub background_failures: u64,
    /// Calls into this library since the process began, this one included: a graph that is launched again adds none.
    pub calls: u64,
    /// Gathers of a drive's rows or of stripes, launched on a GPU or captured in a graph, whose blocks own their queues.
    pub owned_gathers: u64,
    /// Gathers of a drive's rows or of stripes, launched or captured, whose blocks share their queues.
    pub shared_gathers: u64,
    /// Gathers of one drive's rows, launched or captured, whose reads nvme_gpu_gather_begin() submits.
    pub begun_gathers: u64,
    /// Rows of those that nvme_gpu_gather_finish() had to read: other gathers held the queues when they were begun.
    pub late_rows: u64,
    /// Rows that gathers left without data and scatters did not write, by the CPU and by a GPU, each run of a graph included.
    /// Of bytes that a GPU moves, they are parts of 64 KiB.
    pub failed_rows: u64,
    /// Rows of gathers on a GPU that read each distinct row once: those of 4,096 rows and more of a drive or of
    /// stripes, without a cache, each run of a graph included.
    pub unique_asked: u64,
    /// Those of them that were read.
    pub unique_read: u64,
    /// Rows of gathers that have ended, failed ones and each run of a graph included. When a GPU reads bytes, each part
    /// that it reads counts as a row.
    pub rows_read: u64,
    /// Rows of scatters that have ended, failed ones and each run of a graph included.
    pub rows_written: u64,
    /// Bytes that commands of the CPU read, and bytes of the rows that a GPU read.
    pub bytes_read: u64,
    /// Bytes that commands of the CPU wrote, and bytes of the rows that a GPU wrote.
    pub bytes_written: u64,
    /// Rows of gathers of the CPU that were copies of another row of the same gather, and were read once.
    pub duplicates_saved: u64,
    /// Recoveries of the store's controllers: commands that were aborted, and controller resets.
    pub recoveries: u64,
    /// Time that threads spent in reads and writes of the CPU and in waits for a GPU's rows, in nanoseconds, of all
    /// threads together.
    pub waited_ns: u64,
    /// Sum of the latencies of commands of the CPU, in nanoseconds.
    pub latency_ns: u64,
    /// Commands of the CPU that are under way.
    pub commands_under_way: u64,
    /// Launches on a GPU that have not ended, without those of graphs.
    pub launches_under_way: u64,
    /// Blocks of the last launch on a GPU.
    pub launch_blocks: u64,
    /// Registers that these blocks hold on the GPU together.
    pub launch_registers: u64,
    /// Number of commands of the CPU by their latency: element 0 counts those below 1 us, element n those from 2^(n-1) to
    /// 2^n us, the last one all that took longer, too.
    pub latency_us: [u64; 32],
    /// Rows of gathers on a GPU through a cache of rows that have ended, each run of a graph included.
    pub cache_asked: u64,
    /// Number of these rows that were in the cache, and not read from the drive.
    pub cache_hits: u64,
    /// Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks own their queues.
    pub owned_scatters: u64,
    /// Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks share their queues.
    pub shared_scatters: u64,
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for StoreStatistics {
    const NAME: &'static str = "nvme_gpu_statistics";
}

/// nvme_gpu_path(): set `size` to sizeof(nvme_gpu_path_info) before the call. Texts end with a 0; those that are too
/// long are cut.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PathInfo {
    pub size: usize,
    /// -1 without a GPU, else how the GPU reaches the device: 0 relayed, 1 its own doorbells, 2 data in its memory,
    /// 3 rings of its queues there, too.
    pub tier: i32,
    /// 0.
    pub reserved: i32,
    /// Memory that rows are read into: `host`, or `gpu` where a GPU gathers.
    pub data: [c_char; 16],
    /// The device as it was named.
    pub device: [c_char; 1024],
    /// Mover of the data: as in `io_uring`.
    pub path: [c_char; 512],
    /// Reason why no faster path is used.
    pub why: [c_char; 1024],
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for PathInfo {
    const NAME: &'static str = "nvme_gpu_path_info";
}

fn or(value: u32, default: u32) -> u32 {
    match value {
        0 => default,
        value => value,
    }
}

/// Refuses options that have no effect without a GPU.
fn check_without_gpu(options: &OpenOptions, gpu: i32) -> Answer<()> {
    if gpu >= 0 {
        return Ok(());
    }
    let flags = options.flags;
    let of_gpu = [
        ("NVME_GPU_GDS", flags & NVME_GPU_GDS),
        ("NVME_GPU_GDS_REQUIRE", flags & NVME_GPU_GDS_REQUIRE),
        ("gpu_queues", options.gpu_queues),
        ("gpu_entries", options.gpu_entries),
        ("gpu_stations", options.gpu_stations),
        ("gpu_kernel_queues", options.gpu_kernel_queues),
        ("gpu_tier", options.gpu_tier),
    ];
    match of_gpu.iter().find(|(_, value)| *value != 0) {
        None => Ok(()),
        Some((name, _)) => Err(CallFailure::usage(
            format!("{name} of nvme_gpu_options is set, and the store has no GPU"),
            format!("open it with a GPU, or without {name}"),
        )),
    }
}

fn store_options(options: &OpenOptions, gpu: i32) -> Answer<StoreOptions> {
    if options.flags & !ALL_FLAGS != 0 {
        return Err(CallFailure::usage(
            format!(
                "the flags {:#x} of nvme_gpu_options are unknown",
                options.flags & !ALL_FLAGS
            ),
            "begin with NVME_GPU_OPTIONS_INIT",
        ));
    }
    let has = |flag: u32| options.flags & flag != 0;
    let file_io = match (has(NVME_GPU_FILE_URING), has(NVME_GPU_FILE_PREAD)) {
        (false, false) => FileIo::Auto,
        (true, false) => FileIo::Uring,
        (false, true) => FileIo::Pread,
        (true, true) => {
            return Err(CallFailure::usage(
                "NVME_GPU_FILE_URING and NVME_GPU_FILE_PREAD exclude each other",
                "set one of them",
            ));
        }
    };
    check_without_gpu(options, gpu)?;
    let default = StoreOptions::default();
    let timeout = match options.timeout_ms {
        0 => default.timeout,
        ms => Duration::from_millis(ms.into()),
    };
    Ok(StoreOptions {
        allow_write: has(NVME_GPU_ALLOW_WRITE),
        read_only: has(NVME_GPU_READ_ONLY),
        nsid: or(options.nsid, default.nsid),
        queues: or(options.queues, default.queues),
        depth: or(options.depth, default.depth),
        timeout,
        file_io,
        #[cfg(feature = "cuda")]
        gpu: of_gpu(options, gpu),
        #[cfg(feature = "cuda")]
        tier: tier(options.gpu_tier)?,
        #[cfg(feature = "cuda")]
        kernel_queues: options.gpu_kernel_queues,
        #[cfg(feature = "cuda")]
        gds: match (has(NVME_GPU_GDS), has(NVME_GPU_GDS_REQUIRE)) {
            (_, true) => nvme_host::store::GdsUse::Require,
            (true, _) => nvme_host::store::GdsUse::Auto,
            _ => nvme_host::store::GdsUse::Off,
        },
    })
    .and_then(|store| match (gpu, cfg!(feature = "cuda")) {
        (i32::MIN..=-2, _) => Err(CallFailure::usage(
            format!("there is no GPU {gpu}"),
            "use -1 for none",
        )),
        (0.., false) => Err(CallFailure::usage(
            "this library was built without CUDA",
            "use -1 for no GPU",
        )),
        _ => Ok(store),
    })
}

#[cfg(feature = "cuda")]
fn tier(number: u32) -> Answer<Option<nvme_host::cuda::QueueTier>> {
    use nvme_host::cuda::QueueTier;
    match number {
        0 => Ok(None),
        1 => Ok(Some(QueueTier::Direct)),
        2 => Ok(Some(QueueTier::GpuMemory)),
        3 => Ok(Some(QueueTier::GpuRings)),
        _ => Err(CallFailure::usage(
            format!("nvme_gpu_options.gpu_tier is {number}"),
            "use 1, 2, 3, or 0 for the default",
        )),
    }
}

#[cfg(feature = "cuda")]
fn of_gpu(options: &OpenOptions, gpu: i32) -> Option<nvme_host::store::GpuOptions> {
    let index = u32::try_from(gpu).ok()?;
    let default = nvme_host::cuda::RowsOptions::default();
    let rows = nvme_host::cuda::RowsOptions {
        queues: or(options.gpu_queues, default.queues),
        entries: or(options.gpu_entries, default.entries),
        stations: or(options.gpu_stations, default.stations),
        ..default
    };
    Some(nvme_host::store::GpuOptions { index, rows })
}

/// Returns the options that a caller gave; NULL stands for the defaults.
///
/// # Safety
/// `options` is NULL or valid for a read.
pub unsafe fn given(options: *const OpenOptions) -> Answer<OpenOptions> {
    match options.is_null() {
        true => Ok(DEFAULTS),
        // SAFETY: the caller's.
        false => unsafe { take(options) },
    }
}

/// Returns `options` for GPU `gpu`, or -1, as the store takes them.
pub fn checked_options(options: &OpenOptions, gpu: i32) -> Answer<StoreOptions> {
    version::check(options.version)?;
    store_options(options, gpu)
}

fn open(device: &str, gpu: i32, options: &OpenOptions) -> Answer<OpenedStore> {
    let options = checked_options(options, gpu)?;
    let store = Store::open(device, &options)?;
    Ok(OpenedStore {
        #[cfg(feature = "cuda")]
        gpu: store.gpu().cloned(),
        store: Arc::new(store),
        #[cfg(feature = "cuda")]
        kernel_queues: options.kernel_queues,
        registered: Mutex::default(),
        background_failures: Arc::default(),
    })
}

/// Opens `device` with defaults but for the tier, for libraries over this one.
pub fn open_device(device: &str, gpu: i32, flags: u32, gpu_tier: u32) -> Answer<*mut StoreHandle> {
    let options = OpenOptions {
        flags,
        gpu_tier,
        ..DEFAULTS
    };
    Ok(STORES.open(Arc::new(open(device, gpu, &options)?)))
}

/// Opens a device: `sim:PATH`, `sim:mem?size=1GiB`, `vfio:BDF`, `vfio-user:SOCKET`, `file:PATH`, a path with
/// a slash, the name of a file in the current folder, or `stripe:DEVICE|DEVICE?stripe=128KiB`. UTF-8.
///
/// `gpu` is the number of a GPU, which submits the reads of rows itself (drives only), or -1. `options` may be
/// NULL: defaults, and versions are not compared. On success `*store` is a handle for nvme_gpu_close(), else
/// NULL.
///
/// Errors: NVME_GPU_ERROR_VERSION; NVME_GPU_ERROR_USAGE for invalid names and options, for a block device that
/// is in use, and for a drive that has a store already; NVME_GPU_ERROR_FILE, _DEVICE, _ENVIRONMENT, _TIMEOUT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_open(
    device: *const c_char,
    gpu: i32,
    options: *const OpenOptions,
    store: *mut *mut StoreHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(store, std::ptr::null_mut(), "store") }?;
        // SAFETY: as the header says.
        let device = unsafe { text(device, "device") }?;
        // SAFETY: as the header says.
        let options = unsafe { given(options) }?;
        let opened = open(device, gpu, &options)?;
        let handle = STORES.open(Arc::new(opened));
        // SAFETY: written once already.
        unsafe { put(store, handle, "store") }
    })
}

/// Closes a store, its tables, and its queues for kernels. NULL and a closed handle are ignored.
///
/// Does not wait for the operations of the store: those that were started run to their end, their memory must
/// stay valid, and nvme_gpu_pending_t handles stay valid. The device is free when the last of them has ended.
/// Calls that other threads have begun end as if the store were open. A captured graph may be launched
/// afterwards: its gathers zero each row, with status NVME_GPU_ROW_GONE. Registered memory is unregistered, at the
/// latest by the first call of these after every operation has ended and every graph with one was destroyed:
/// nvme_gpu_register(), nvme_gpu_unregister() and nvme_gpu_close() of any store. It must stay valid until then.
/// With no operation under way the controller is shut down here, which takes the time that the drive needs for
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_close(store: *mut StoreHandle) {
    value((), || {
        let closed = STORES.close(store);
        let devices = DEVICES.close_all(|device| device.store == store.addr());
        let tables = TABLES.close_all(|table| table.store == store.addr());
        let pages = PAGES.close_all(|pages| pages.store == Some(store.addr()));
        drop(devices);
        drop(tables);
        drop(pages);
        drop(closed);
        #[cfg(feature = "cuda")]
        crate::kept::reap();
        Ok(())
    });
}

/// Returns the size of a store in bytes; 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_len(store: *const StoreHandle) -> u64 {
    value(0, || Ok(opened(store)?.store.len()))
}

/// Returns a number that changes with each write through the store that has ended, and with writes to its file
/// by other programs, as exactly as the file's timestamps show them: data read before the change may be stale.
/// Writes of kernels of your own are not seen. 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_write_mark(store: *const StoreHandle) -> u64 {
    value(0, || Ok(opened(store)?.store.write_mark()))
}

/// Returns the unit that the device writes, in bytes: writes of whole blocks need no read before them. 1 for a
/// file, 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_block_size(store: *const StoreHandle) -> u32 {
    value(0, || Ok(opened(store)?.store.block_bytes()))
}

/// Writes the data path of a store, with the reason for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_path(
    store: *const StoreHandle,
    info: *mut PathInfo,
) -> nvme_gpu_status {
    call(|| {
        let DataPath {
            device,
            data,
            tier,
            path,
            why,
        } = opened(store)?.store.path();
        let known = PathInfo {
            size: 0,
            tier: tier.and_then(|tier| i32::try_from(tier).ok()).unwrap_or(-1),
            reserved: 0,
            data: fixed(data),
            device: fixed(&device),
            path: fixed(&path),
            why: fixed(&why),
        };
        // SAFETY: as the header says.
        unsafe { give(info, &known) }
    })
}

/// Returns as much of `text` as fits before a 0.
pub fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut room = [0; N];
    let cut = text.floor_char_boundary(N - 1);
    for (to, from) in room.iter_mut().zip(text[..cut].bytes()) {
        *to = from as c_char;
    }
    room
}

/// Counts of a store.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_stats(
    store: *const StoreHandle,
    statistics: *mut StoreStatistics,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        let stats = opened.store.stats();
        let known = StoreStatistics {
            size: 0,
            commands: stats.commands,
            bytes: stats.bytes,
            retries: stats.retries,
            background_failures: opened.background_failures.load(Ordering::Relaxed),
            calls: calls(),
            owned_gathers: stats.owned_gathers,
            shared_gathers: stats.shared_gathers,
            begun_gathers: stats.begun_gathers,
            late_rows: stats.late_rows,
            failed_rows: stats.failed_rows,
            unique_asked: stats.unique_asked,
            unique_read: stats.unique_read,
            rows_read: stats.rows_read,
            rows_written: stats.rows_written,
            bytes_read: stats.bytes_read,
            bytes_written: stats.bytes_written,
            duplicates_saved: stats.duplicates_saved,
            recoveries: stats.recoveries,
            waited_ns: stats.waited_ns,
            latency_ns: stats.latency_ns,
            commands_under_way: stats.commands_under_way,
            launches_under_way: stats.launches_under_way,
            launch_blocks: stats.launch_blocks,
            launch_registers: stats.launch_registers,
            latency_us: stats.latency_us,
            cache_asked: stats.cache_asked,
            cache_hits: stats.cache_hits,
            owned_scatters: stats.owned_scatters,
            shared_scatters: stats.shared_scatters,
        };
        // SAFETY: as the header says.
        unsafe { give(statistics, &known) }
    })
}

/// Makes everything durable that was written before by calls that have returned and by operations that have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_flush(store: *mut StoreHandle) -> nvme_gpu_status {
    call(|| Ok(opened(store)?.store.flush()?))
}

/// Lets the GPU of a store reach `bytes` bytes of host memory at `memory`, until nvme_gpu_unregister() or
/// nvme_gpu_close(): gathers on a stream may then have ids and row status there. The pages are pinned. Without a GPU,
/// and for GPU memory, it is recorded and changes nothing.
///
/// The memory must not be freed, nor a stream use it, before it is unregistered, nor be registered twice.
/// Errors: NVME_GPU_ERROR_USAGE; NVME_GPU_ERROR_ENVIRONMENT with the driver's answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_register(
    store: *mut StoreHandle,
    memory: *mut std::ffi::c_void,
    bytes: usize,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        // SAFETY: as the header says.
        let lent = unsafe { CallMemory::new(memory, bytes, "memory") }?;
        if bytes == 0 {
            return Err(CallFailure::usage(
                "there are no bytes",
                "register 1 or more",
            ));
        }
        // Of a store that was closed: the same bytes may be registered again.
        #[cfg(feature = "cuda")]
        crate::kept::reap();
        let start = memory.addr();
        let mut registered = lock(&opened.registered);
        let before = registered.range(..start + bytes).next_back();
        if before.is_some_and(|(at, one)| at + one.bytes > start) {
            return Err(CallFailure::usage(
                "some of these bytes are registered already",
                "register memory once",
            ));
        }
        #[cfg(feature = "cuda")]
        let pinned = match &opened.gpu {
            Some(gpu)
                if crate::memory::place(&opened, &lent, "memory")?
                    == crate::memory::CallLocation::Host =>
            {
                // SAFETY: as the header says.
                Some(unsafe { nvme_host::cuda::CallerMemory::register(gpu, memory.cast(), bytes) }?)
            }
            _ => None,
        };
        let _ = lent;
        let registration = RegisteredRange {
            bytes,
            #[cfg(feature = "cuda")]
            memory: pinned,
        };
        registered.insert(start, registration);
        Ok(())
    })
}

/// Ends the registration of the memory that begins at `memory`. Nothing may use it on the GPU any more.
/// Errors: NVME_GPU_ERROR_USAGE when none begins there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_unregister(
    store: *mut StoreHandle,
    memory: *mut std::ffi::c_void,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        let taken = lock(&opened.registered).remove(&memory.addr());
        #[cfg(feature = "cuda")]
        crate::kept::reap();
        match taken {
            Some(_) => Ok(()),
            None => Err(CallFailure::usage(
                "no registered memory begins there",
                "give the address that was registered",
            )),
        }
    })
}
