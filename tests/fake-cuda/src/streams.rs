//! Streams and launches: a kernel is a thread, and its end the moment of the events after it.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::captures::{self, Part};
use crate::threads;
use crate::{
    INVALID_HANDLE, INVALID_VALUE, KERNELS, NOT_READY, OUT_OF_MEMORY, PEER, SUCCESS, Status,
    compute, current_context, examples, fault, kernels, litmus, lock, peer, rows,
};
use nvme_gpu_kernel::Kernel;
use nvme_gpu_kernel::distinct::{DistinctLaunch, DistinctStripes};
use nvme_gpu_kernel::extents::MappedLaunch;
use nvme_gpu_kernel::rows::{
    Batched, BatchedScatter, BatchedStripes, CachedBatched, CachedGather, CheckLaunch,
    FollowLaunch, GatherLaunch, HalvedGather, ListedLaunch, RangesLaunch, ScatterLaunch,
    StripedGather, WidenLaunch,
};
use nvme_gpu_kernel::wide_batch::WidenedLaunch;
use nvme_gpu_kernel::work::LaunchArguments;
use std::ffi::{CStr, c_int, c_longlong, c_uint, c_void};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// When a kernel ended, once it has.
pub(crate) type End = Arc<OnceLock<Instant>>;

/// What a kernel, a copy or a function of the host does: once, or each time that its graph is launched.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

/// How much later each kernel begins with `FAKE_CUDA=slow`.
const LATE: Duration = Duration::from_millis(50);

/// How many more kernels, copies and functions of the host are taken before one is refused; below 0 all are.
static TAKEN_BEFORE_REFUSAL: AtomicI64 = AtomicI64::new(-1);

/// From now on so many kernels, copies and functions of the host are put into streams, and the one after them is refused
/// as without memory; with -1 none is. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_refuse_after(count: c_longlong) {
    TAKEN_BEFORE_REFUSAL.store(count, Ordering::SeqCst);
}

/// Whether the one that is about to be put into a stream is to be refused.
fn is_refused() -> bool {
    let taken = |left: i64| (left >= 0).then(|| left - 1);
    let before = TAKEN_BEFORE_REFUSAL.fetch_update(Ordering::SeqCst, Ordering::SeqCst, taken);
    before == Ok(0)
}

/// A stream: the kernel that was launched last, and what it captures.
#[derive(Default)]
pub(crate) struct Stream {
    running: Option<JoinHandle<()>>,
    end: Option<End>,
    pub captured: Option<Part>,
    /// The context that was current when it was made; 0 for none, which goes with every one.
    context: usize,
}

impl Stream {
    /// Whether it is of another context than the current one: kernels are not launched then; copies are carried out.
    fn is_foreign(&self) -> bool {
        self.context != 0 && self.context != current_context()
    }

    /// Its part in a capture that has not ended.
    pub fn part(&mut self) -> Option<&mut Part> {
        if self.captured.as_ref().is_some_and(Part::has_ended) {
            self.captured = None;
        }
        self.captured.as_mut()
    }

    /// The end of what was put into it last.
    pub fn end(&self) -> Option<End> {
        self.end.clone()
    }

    pub fn finish(&mut self) {
        if let Some(kernel) = self.running.take() {
            // A kernel that panicked has printed why, and reports nothing.
            let _ = kernel.join();
        }
    }

    /// Runs `work` on a thread after what is in the stream, or captures it.
    pub fn put(&mut self, work: Work) -> Status {
        match self.part() {
            Some(part) => part.add(work),
            None => self.run(move || {
                if !fault("idle") {
                    work();
                }
            }),
        }
    }

    /// Runs `work` on a thread after what is in the stream.
    fn run(&mut self, work: impl FnOnce() + Send + 'static) -> Status {
        let end = End::default();
        self.end = Some(Arc::clone(&end));
        let mut ends = lock(&ENDS);
        ends.retain(|end| end.get().is_none());
        ends.push(Arc::clone(&end));
        drop(ends);
        let before = self.running.take();
        self.running = Some(std::thread::spawn(move || {
            let _ends = Ends(end);
            if let Some(before) = before {
                // One that panicked has printed why.
                let _ = before.join();
            }
            while fault("hang") {
                std::thread::sleep(Duration::from_millis(50));
            }
            if fault("slow") {
                std::thread::sleep(LATE);
            }
            work();
        }));
        SUCCESS
    }
}

/// Sets the end when it is dropped, also of a kernel that panicked: others wait for it.
struct Ends(End);

impl Drop for Ends {
    fn drop(&mut self) {
        // Set once, here.
        let _ = self.0.set(Instant::now());
    }
}

/// Ends of kernels and graphs of all streams that have not come yet.
static ENDS: Mutex<Vec<End>> = Mutex::new(Vec::new());

/// Waits for all streams.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    if let Some(refused) = captures::refused_to_all() {
        return refused;
    }
    let ends = lock(&ENDS).clone();
    while ends.iter().any(|end| end.get().is_none()) {
        std::thread::sleep(Duration::from_micros(50));
    }
    SUCCESS
}

/// Adds `work` to the graph if the stream is being captured, and returns the driver's result then.
pub(crate) fn capture(
    handle: *mut c_void,
    work: impl Fn() + Send + Sync + 'static,
) -> Option<Status> {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    stream.part().map(|part| part.add(Arc::new(work)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _: c_uint) -> Status {
    let new = Box::new(Mutex::new(Stream {
        context: current_context(),
        ..Stream::default()
    }));
    // SAFETY: the caller gives a place for one handle.
    unsafe { *stream = Box::into_raw(new).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    flags: c_uint,
    _priority: c_int,
) -> Status {
    // SAFETY: the caller's.
    unsafe { cuStreamCreate(stream, flags) }
}

/// The range of one H200's driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Status {
    // SAFETY: the caller gives places for two numbers.
    unsafe { (*least, *greatest) = (0, -5) };
    SUCCESS
}

/// The streams that need no handle: 0 and 1 are the default one, 2 is that of a thread.
static DEFAULT: LazyLock<[Mutex<Stream>; 3]> = LazyLock::new(Default::default);

/// The stream behind a handle.
///
/// # Safety
/// The handle is that of a default stream, or from `cuStreamCreate` and was not destroyed.
pub(crate) unsafe fn stream<'a>(handle: *mut c_void) -> &'a Mutex<Stream> {
    if let Some(stream) = DEFAULT.get(handle.addr()) {
        return match handle.addr() {
            1 => &DEFAULT[0],
            _ => stream,
        };
    }
    // SAFETY: the caller's.
    unsafe { &*handle.cast::<Mutex<Stream>>() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> Status {
    // SAFETY: the caller destroys a handle once.
    let stream = unsafe { Box::from_raw(handle.cast::<Mutex<Stream>>()) };
    let mut stream = lock(&stream);
    if let Some(part) = stream.part() {
        part.abandon();
    }
    // A kernel that hangs is left alone, as the driver does.
    if let Some(kernel) = stream.running.take() {
        threads::leave(kernel);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(handle: *mut c_void) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    if let Some(part) = stream.part() {
        return captures::of_stream(part);
    }
    if let Some(refused) = captures::refused() {
        return refused;
    }
    match &stream.running {
        Some(kernel) if !kernel.is_finished() => NOT_READY,
        _ => SUCCESS,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_uint) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    let state = match stream.part() {
        None => 0,
        Some(part) if lock(&part.capture).is_invalid => 2,
        Some(_) => 1,
    };
    // SAFETY: the caller gives a place for one value.
    unsafe { *status = state };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    if let Some(part) = stream.part() {
        return captures::of_stream(part);
    }
    if let Some(refused) = captures::refused() {
        return refused;
    }
    stream.finish();
    SUCCESS
}

/// Copies between any two memories, after what is in the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    to: u64,
    from: u64,
    bytes: usize,
    handle: *mut c_void,
) -> Status {
    if is_refused() {
        return OUT_OF_MEMORY;
    }
    let copy = move || {
        let from: *const u8 = std::ptr::with_exposed_provenance(from as usize);
        // SAFETY: the caller vouches for both sides.
        unsafe { from.copy_to(to as usize as *mut u8, bytes) };
    };
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    match stream.part() {
        Some(part) => part.add(Arc::new(copy)),
        None => {
            stream.finish();
            copy();
            SUCCESS
        }
    }
}

/// The driver's `CUDA_MEMCPY2D`.
#[repr(C)]
pub struct Copy2d {
    from_x: usize,
    from_y: usize,
    from_type: c_uint,
    from_host: u64,
    from: u64,
    from_array: u64,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_type: c_uint,
    to_host: u64,
    to: u64,
    to_array: u64,
    to_pitch: usize,
    width: usize,
    height: usize,
}

/// Rows between unified addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Copy2d, handle: *mut c_void) -> Status {
    // SAFETY: the caller gives one.
    let copy = unsafe { &*copy };
    const UNIFIED: c_uint = 4;
    if copy.from_type != UNIFIED
        || copy.to_type != UNIFIED
        || copy.width > copy.from_pitch.min(copy.to_pitch)
    {
        return INVALID_VALUE;
    }
    for row in 0..copy.height {
        let (to, from) = (row * copy.to_pitch, row * copy.from_pitch);
        // SAFETY: the caller's.
        let status = unsafe {
            cuMemcpyAsync(
                copy.to + to as u64,
                copy.from + from as u64,
                copy.width,
                handle,
            )
        };
        if status != SUCCESS {
            return status;
        }
    }
    SUCCESS
}

/// A function of the host, on another thread, after what is in the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> Status {
    let Some(function) = function else {
        return INVALID_VALUE;
    };
    if is_refused() {
        return OUT_OF_MEMORY;
    }
    let data = data.expose_provenance();
    let run = move || {
        // SAFETY: the caller vouches for function and data.
        unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
    };
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    match stream.part() {
        Some(part) => part.add(Arc::new(run)),
        None => stream.run(run),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *const u8,
    grid: c_uint,
    _: c_uint,
    _: c_uint,
    block: c_uint,
    _: c_uint,
    _: c_uint,
    shared_bytes: c_uint,
    handle: *mut c_void,
    parameters: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    if grid == 0 || block == 0 || block > 1024 || !crate::modules::may_share(function, shared_bytes)
    {
        return INVALID_VALUE;
    }
    let handle_of = |name: &&CStr| name.as_ptr().cast() == function;
    let Some(index) = KERNELS.iter().position(handle_of) else {
        return INVALID_VALUE;
    };
    let work: Work = match (Kernel::ALL.get(index), KERNELS[index]) {
        (Some(kernel), _) => {
            // SAFETY: these kernels take one `LaunchArguments`.
            let launch = unsafe { **parameters.cast::<*const LaunchArguments>() };
            Arc::new(move || kernels::run(*kernel, &launch, (grid, block, shared_bytes)))
        }
        (None, name) if name == rows::NAMES[2] => {
            // SAFETY: this kernel takes one `CheckLaunch`.
            let check = unsafe { **parameters.cast::<*const CheckLaunch>() };
            Arc::new(move || rows::check(check, grid, block))
        }
        (None, name) if name == rows::NAMES[3] => {
            // SAFETY: this kernel takes one `CachedGather`.
            let cached = unsafe { **parameters.cast::<*const CachedGather>() };
            Arc::new(move || rows::gather_cached(cached, grid, block))
        }
        (None, name) if name == rows::NAMES[4] => {
            // SAFETY: this kernel takes one `WidenLaunch`.
            let wide = unsafe { **parameters.cast::<*const WidenLaunch>() };
            Arc::new(move || rows::widen(wide, grid, block))
        }
        (None, name) if name == rows::NAMES[5] => {
            // SAFETY: this kernel takes one `StripedGather`.
            let rows = unsafe { **parameters.cast::<*const StripedGather>() };
            Arc::new(move || rows::gather_striped(rows, grid, block))
        }
        (None, name) if name == rows::NAMES[6] => {
            // SAFETY: this kernel takes one `RangesLaunch`.
            let ranges = unsafe { **parameters.cast::<*const RangesLaunch>() };
            Arc::new(move || rows::read_ranges(ranges, grid, block))
        }
        (None, name) if name == rows::NAMES[7] => {
            // SAFETY: this kernel takes one `ScatterLaunch`.
            let rows = unsafe { **parameters.cast::<*const ScatterLaunch>() };
            Arc::new(move || rows::scatter(rows, grid, block))
        }
        (None, name) if name == rows::NAMES[8] => {
            // SAFETY: this kernel takes one `ListedLaunch`.
            let listed = unsafe { **parameters.cast::<*const ListedLaunch>() };
            Arc::new(move || rows::read_listed(listed, grid, block))
        }
        (None, name) if name == rows::NAMES[9] => {
            // SAFETY: this kernel takes one `FollowLaunch`.
            let follow = unsafe { **parameters.cast::<*const FollowLaunch>() };
            Arc::new(move || rows::follow(follow, grid, block))
        }
        (None, name) if name == rows::NAMES[11] => {
            // SAFETY: this kernel takes one `Batched`.
            let batched = unsafe { **parameters.cast::<*const Batched>() };
            Arc::new(move || rows::gather_batched(batched, grid, block))
        }
        (None, name) if rows::NAMES[12..14].contains(&name) => {
            // SAFETY: these kernels take one `HalvedGather`.
            let halved = unsafe { **parameters.cast::<*const HalvedGather>() };
            let run = match name {
                name if name == rows::NAMES[12] => rows::begin_batched,
                _ => rows::finish_batched,
            };
            Arc::new(move || run(halved, grid, block))
        }
        (None, name) if name == rows::NAMES[14] => {
            // SAFETY: this kernel takes one `GatherLaunch` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<GatherLaunch>>() };
            Arc::new(move || rows::gather_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[15] => {
            // SAFETY: this kernel takes one `Batched` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<Batched>>() };
            Arc::new(move || rows::gather_batched_mapped(mapped, grid, block))
        }
        (None, name) if rows::NAMES[16..18].contains(&name) => {
            // SAFETY: these kernels take one `HalvedGather` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<HalvedGather>>() };
            let run = match name == rows::NAMES[16] {
                true => rows::begin_batched_mapped,
                false => rows::finish_batched_mapped,
            };
            Arc::new(move || run(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[18] => {
            // SAFETY: this kernel takes one `StripedGather` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<StripedGather>>() };
            Arc::new(move || rows::gather_striped_mapped(mapped, grid, block))
        }
        (None, name) if rows::NAMES[19..23].contains(&name) => {
            // SAFETY: these kernels take one `DistinctLaunch`.
            let distinct = unsafe { **parameters.cast::<*const DistinctLaunch>() };
            let run = match name {
                name if name == rows::NAMES[19] => rows::claim,
                name if name == rows::NAMES[20] => rows::list,
                name if name == rows::NAMES[21] => rows::gather_listed,
                _ => rows::repeat,
            };
            Arc::new(move || run(distinct, grid, block))
        }
        (None, name) if rows::NAMES[23..25].contains(&name) => {
            // SAFETY: these kernels take one `DistinctLaunch` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<DistinctLaunch>>() };
            let run = match name == rows::NAMES[23] {
                true => rows::claim_mapped,
                false => rows::gather_listed_mapped,
            };
            Arc::new(move || run(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[25] => {
            // SAFETY: this kernel takes one `Batched` with a conversion.
            let widened = unsafe { **parameters.cast::<*const WidenedLaunch<Batched>>() };
            Arc::new(move || rows::gather_batched_wide(widened, grid, block))
        }
        (None, name) if name == rows::NAMES[26] => {
            // SAFETY: this kernel takes one `HalvedGather` with a conversion.
            let widened = unsafe { **parameters.cast::<*const WidenedLaunch<HalvedGather>>() };
            Arc::new(move || rows::finish_batched_wide(widened, grid, block))
        }
        (None, name) if name == rows::NAMES[27] => {
            // SAFETY: this kernel takes one `Batched` with a conversion and a map.
            let mapped =
                unsafe { **parameters.cast::<*const MappedLaunch<WidenedLaunch<Batched>>>() };
            Arc::new(move || rows::gather_batched_wide_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[28] => {
            // SAFETY: this kernel takes one `HalvedGather` with a conversion and a map.
            let mapped =
                unsafe { **parameters.cast::<*const MappedLaunch<WidenedLaunch<HalvedGather>>>() };
            Arc::new(move || rows::finish_batched_wide_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[29] => {
            // SAFETY: this kernel takes one `CachedBatched`.
            let cached = unsafe { **parameters.cast::<*const CachedBatched>() };
            Arc::new(move || rows::gather_batched_cached(cached, grid, block))
        }
        (None, name) if name == rows::NAMES[30] => {
            // SAFETY: this kernel takes one `BatchedScatter`.
            let rows = unsafe { **parameters.cast::<*const BatchedScatter>() };
            Arc::new(move || rows::scatter_batched(rows, grid, block))
        }
        (None, name) if name == rows::NAMES[31] => {
            // SAFETY: this kernel takes one `BatchedStripes`.
            let rows = unsafe { **parameters.cast::<*const BatchedStripes>() };
            Arc::new(move || rows::gather_batched_striped(rows, grid, block))
        }
        (None, name) if name == rows::NAMES[32] => {
            // SAFETY: this kernel takes one `BatchedStripes` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<BatchedStripes>>() };
            Arc::new(move || rows::gather_batched_striped_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[33] => {
            // SAFETY: this kernel takes one `DistinctStripes`.
            let stripes = unsafe { **parameters.cast::<*const DistinctStripes>() };
            Arc::new(move || rows::gather_listed_striped(stripes, grid, block))
        }
        (None, name) if name == rows::NAMES[34] => {
            // SAFETY: this kernel takes one `DistinctStripes` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<DistinctStripes>>() };
            Arc::new(move || rows::gather_listed_striped_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[35] => {
            // SAFETY: this kernel takes one `CachedGather` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<CachedGather>>() };
            Arc::new(move || rows::gather_cached_mapped(mapped, grid, block))
        }
        (None, name) if name == rows::NAMES[36] => {
            // SAFETY: this kernel takes one `CachedBatched` with a map.
            let mapped = unsafe { **parameters.cast::<*const MappedLaunch<CachedBatched>>() };
            Arc::new(move || rows::gather_batched_cached_mapped(mapped, grid, block))
        }
        (None, name) if rows::NAMES.contains(&name) => {
            // SAFETY: these kernels take one `GatherLaunch`.
            let gather = unsafe { **parameters.cast::<*const GatherLaunch>() };
            let run = match name {
                name if name == rows::NAMES[0] => rows::gather,
                name if name == rows::NAMES[10] => rows::end,
                _ => rows::copy,
            };
            Arc::new(move || run(gather, grid, block))
        }
        (None, name) if name == examples::NAMES[0] => {
            // SAFETY: this kernel takes one `Args`.
            let args = unsafe { **parameters.cast::<*const gpu_histogram::Args>() };
            Arc::new(move || examples::histogram(args, grid, block))
        }
        (None, name) if name == examples::NAMES[1] => {
            // SAFETY: this kernel takes one `Walk`.
            let walk = unsafe { **parameters.cast::<*const gpu_histogram::Walk>() };
            Arc::new(move || examples::walk(walk, grid, block))
        }
        (None, name) if name == examples::NAMES[2] => Arc::new(|| {}),
        (None, name) if compute::NAMES.contains(&name) => {
            // SAFETY: the caller's.
            unsafe { compute::launch(name, parameters, (grid, block, shared_bytes)) }
        }
        (None, name) if name == PEER => {
            // SAFETY: this kernel takes one `Args`.
            let args = unsafe { **parameters.cast::<*const gpu_peer::Args>() };
            Arc::new(move || peer::run(&args, grid))
        }
        (None, _) => {
            // SAFETY: the litmus kernel takes one `Args`.
            let args = unsafe { **parameters.cast::<*const gpu_litmus::Args>() };
            Arc::new(move || litmus::run(&args, grid, block))
        }
    };
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    if stream.is_foreign() {
        return INVALID_HANDLE;
    }
    if is_refused() {
        return OUT_OF_MEMORY;
    }
    stream.put(work)
}
