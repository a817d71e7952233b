//! Rows that a host thread moves in the order of the caller's stream: those of files and stripes, and writes, as far as
//! no GPU submits the commands.
//!
//! The stream copies ids (and rows to write) into pinned memory, calls a function of the host, and copies rows and row
//! status back. The function makes no call into the driver, and its thread belongs to the driver: other functions of
//! the host wait for it meanwhile.
// UNSAFETY: copies and host functions take raw addresses.
#![allow(unsafe_code)]

use super::super::captured::keep_with_graph;
use super::super::driver::{Gpu, check};
use super::super::leftovers::{self, LaunchLeftover};
use super::super::registered::RegisteredMemory;
use super::super::stream::{handle, is_capturing};
use super::board::RowFailures;
use super::ended::OperationOutcome;
use super::pending::{LaunchSequence, PendingRows};
use super::request::{RowDirection, RowRequest};
use cudarc::driver::sys;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::rows::code;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};

/// Bytes of rows that are staged at a time, unless one row is longer.
const STAGED_BYTES: u64 = 16 << 20;
const STAGED_ROWS: u64 = 1 << 20;

/// Function that moves rows: its arguments are the ids, the bytes of the rows, and the status words to fill, one for
/// each row.
pub type MoveRows = Box<dyn Fn(&[i64], &mut [u8], &mut [i32]) + Send + Sync>;

/// The staging memory of a store for one GPU.
pub struct HostRows {
    gpu: Arc<Gpu>,
    pool: Arc<Mutex<Vec<StagingMemory>>>,
}

/// Pinned memory of one operation at a time.
struct StagingMemory {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
}

/// Offsets of the parts of a chunk in the staging memory.
#[derive(Clone, Copy)]
struct ChunkLayout {
    rows: u64,
    status: usize,
    data: usize,
    bytes: usize,
}

impl ChunkLayout {
    fn new(count: u64, row_bytes: u64) -> Self {
        let rows = (STAGED_BYTES / row_bytes).clamp(1, count.min(STAGED_ROWS));
        let status = rows as usize * 8;
        let data = (status + rows as usize * 4).next_multiple_of(64);
        Self {
            rows,
            status,
            data,
            bytes: data + (rows * row_bytes) as usize,
        }
    }
}

/// An operation: it lives until its last function has run, or for as long as a graph may run it.
struct HostOperation {
    move_rows: MoveRows,
    row_bytes: u64,
    /// Bytes of an id, 4 or 8; 0 without ids, when rows are requested in their order.
    id_bytes: usize,
    layout: ChunkLayout,
    staging: Option<StagingMemory>,
    pool: Weak<Mutex<Vec<StagingMemory>>>,
    is_captured: bool,
    failures: Mutex<RowFailures>,
    ended: Arc<OperationOutcome>,
    count: u64,
    steps: Box<[ChunkStep]>,
}

/// An operation that the stream does not own: on drop it is freed, and its staging memory returns to the pool or,
/// after a graph, to the driver.
struct OwnedOperation(*mut HostOperation);

// SAFETY: the pointer is to an operation that only this owns, and whose parts may be used by any
// thread. CUDA calls the function on another thread.
unsafe impl Send for OwnedOperation {}

impl LaunchLeftover for OwnedOperation {}

impl OwnedOperation {
    fn new(operation: HostOperation) -> Self {
        let (count, rows) = (operation.count, operation.layout.rows);
        let raw = Box::into_raw(Box::new(operation));
        let steps = (0..count).step_by(rows as usize).map(|first| ChunkStep {
            operation: raw,
            first,
            rows: rows.min(count - first),
        });
        let steps = steps.collect();
        // SAFETY: the operation was allocated above, and no other pointer to it exists yet. The steps point back to the
        // operation, so they can only be stored once it has its final address.
        unsafe { (*raw).steps = steps };
        Self(raw)
    }

    fn raw(&self) -> *mut HostOperation {
        self.0
    }

    fn get(&self) -> &HostOperation {
        // SAFETY: the operation lives as long as this.
        unsafe { &*self.0 }
    }
}

impl Drop for OwnedOperation {
    fn drop(&mut self) {
        // SAFETY: `new` made the operation, and this alone owns it: no host function of it is in a stream, and no graph
        // holds it, since both take ownership away from this type.
        let mut over = unsafe { Box::from_raw(self.0) };
        // Staging memory of a graph is freed with it, and not returned to the pool: each living graph uses other
        // memory, up to 32 MiB, and the pool would keep the memory of the largest number of graphs at once until the
        // store is closed.
        let pool = over.pool.upgrade().filter(|_| !over.is_captured);
        if let (Some(staging), Some(pool)) = (over.staging.take(), pool) {
            lock(&pool).push(staging);
        }
    }
}

impl LaunchLeftover for StagingMemory {}

/// The data of one chunk, as its host function receives it.
struct ChunkStep {
    operation: *const HostOperation,
    first: u64,
    rows: u64,
}

// SAFETY: the pointer is to the operation that holds the step. The driver runs the host functions of one stream
// in order and never together, so at most one thread uses the operation.
unsafe impl Send for ChunkStep {}
// SAFETY: as above.
unsafe impl Sync for ChunkStep {}

impl HostRows {
    /// Creates the mover for operations in streams of `gpu`.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            pool: Arc::default(),
        }
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Enqueues an operation over rows of `row_bytes` bytes in `stream`, a `CUstream`. Returns before it runs.
    ///
    /// # Safety
    /// The addresses in `request` are valid on the GPU until the operation has ended, and for as long as a graph
    /// that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Environment`](nvme_driver::Error::Environment) with the answer of the driver, and without memory.
    pub unsafe fn start(
        &self,
        row_bytes: u64,
        request: &RowRequest,
        direction: RowDirection,
        move_rows: MoveRows,
        stream: u64,
    ) -> Result<PendingRows> {
        if request.count == 0 {
            return Ok(PendingRows::nothing());
        }
        let request = &request.judged(&self.gpu, row_bytes, direction, stream)?;
        leftovers::reap();
        let _guest = self.gpu.enter()?;
        let is_captured = is_capturing(stream)?;
        let layout = ChunkLayout::new(request.count, row_bytes);
        let staging = self.staging(layout.bytes)?;
        let device = staging.registered.address();
        let ended = Arc::<OperationOutcome>::default();
        let operation = OwnedOperation::new(HostOperation {
            move_rows,
            row_bytes,
            id_bytes: match (request.ids, request.wide_ids) {
                (0, _) => 0,
                (_, true) => 8,
                (_, false) => 4,
            },
            layout,
            staging: Some(staging),
            pool: Arc::downgrade(&self.pool),
            is_captured,
            failures: Mutex::default(),
            ended: Arc::clone(&ended),
            count: request.count,
            steps: Box::default(),
        });
        let queue = OperationStream {
            stream: handle(stream),
            device,
            layout,
            row_bytes,
            id_bytes: operation.get().id_bytes as u64,
        };
        let raw = operation.raw();
        let kept = match is_captured {
            // The graph has it from here on, whatever becomes of the capture.
            true => {
                keep_with_graph(stream, Box::new(operation))?;
                None
            }
            false => Some(operation),
        };
        let put = LaunchSequence::run_kernels(&self.gpu, stream, |sequence| {
            sequence.asks_stream();
            // SAFETY: the caller vouches for the request; the operation lives until its last function has run, or with
            // its graph, and the staging memory is the operation's.
            unsafe { queue.put(request, direction, raw) }
        });
        match put {
            Ok(()) => {
                // The operation's last function frees it.
                std::mem::forget(kept);
                Ok(PendingRows::of_host(ended, is_captured))
            }
            Err(error) => {
                // Functions that are still in the stream use the operation.
                if matches!(error, Error::Unfinished { .. }) {
                    std::mem::forget(kept);
                }
                Err(error)
            }
        }
    }

    /// Returns staging memory of at least `bytes` bytes.
    fn staging(&self, bytes: usize) -> Result<StagingMemory> {
        {
            let mut pool = lock(&self.pool);
            let fits = pool.iter().position(|one| one.pages.len() >= bytes);
            if let Some(index) = fits {
                return Ok(pool.swap_remove(index));
            }
        }
        let (pages, registered) = RegisteredMemory::pinned(&self.gpu, bytes.next_power_of_two())?;
        Ok(StagingMemory { pages, registered })
    }
}

/// The copies and functions of one operation.
struct OperationStream {
    stream: sys::CUstream,
    device: u64,
    layout: ChunkLayout,
    row_bytes: u64,
    id_bytes: u64,
}

impl OperationStream {
    /// # Safety
    /// As [`HostRows::start`].
    unsafe fn put(
        &self,
        request: &RowRequest,
        direction: RowDirection,
        operation: *mut HostOperation,
    ) -> Result<()> {
        let staged = self.device + self.layout.data as u64;
        // SAFETY: the operation lives until its last host function has run, and that one is enqueued after
        // these. If enqueuing fails in between, the caller waits for the stream before it frees the operation.
        for step in unsafe { &*operation }.steps.iter() {
            let bytes = step.rows * self.id_bytes;
            let ids = request.ids + step.first * self.id_bytes;
            let rows = request.out + step.first * request.out_stride;
            // SAFETY: the copy stays inside the request's ranges and the staging memory.
            unsafe {
                if bytes > 0 {
                    self.copy(self.device, ids, bytes)?;
                }
                if direction == RowDirection::Write {
                    let from = (rows, request.out_stride);
                    self.copy_rows((staged, self.row_bytes), from, step.rows)?;
                }
                self.call(run_step, std::ptr::from_ref(step).cast_mut().cast())?;
                if direction == RowDirection::Read {
                    let to = (rows, request.out_stride);
                    self.copy_rows(to, (staged, self.row_bytes), step.rows)?;
                }
                if request.status != 0 {
                    let to = request.status + step.first * 4;
                    self.copy(to, self.device + self.layout.status as u64, step.rows * 4)?;
                }
            }
        }
        // SAFETY: the operation lives until this function runs.
        unsafe { self.call(end, operation.cast()) }
    }

    /// # Safety
    /// Both ranges are valid until the stream has copied them.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(to, from, bytes as usize, self.stream)
        })
    }

    /// Copies rows from one address to another, each with its stride.
    ///
    /// # Safety
    /// As [`copy`](Self::copy).
    unsafe fn copy_rows(&self, to: (u64, u64), from: (u64, u64), rows: u64) -> Result<()> {
        let bytes = self.row_bytes;
        if to.1 == bytes && from.1 == bytes {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { self.copy(to.0, from.0, rows * bytes) };
        }
        let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: unified,
            srcHost: std::ptr::null(),
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.1 as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: unified,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.1 as usize,
            WidthInBytes: bytes as usize,
            Height: rows as usize,
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        check("cuMemcpy2DAsync", unsafe {
            sys::cuMemcpy2DAsync_v2(&copy, self.stream)
        })
    }

    /// # Safety
    /// `data` is the pointer that `function` expects, and stays valid until the function has run.
    unsafe fn call(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(self.stream, Some(function), data)
        })
    }
}

/// Moves the rows of one chunk.
///
/// # Safety
/// `data` is a step of a living operation.
unsafe extern "C" fn run_step(data: *mut c_void) {
    // SAFETY: the caller's. The host functions of one operation run in order and never together.
    let (step, of) = unsafe {
        let step = &*data.cast::<ChunkStep>();
        (step, &*step.operation)
    };
    let Some(staging) = &of.staging else { return };
    let (host, rows) = (staging.pages.start(), step.rows as usize);
    // SAFETY: these are parts of the staging memory that do not overlap. The operation owns the staging memory, and the
    // stream runs its functions one at a time, so no copy or function uses it meanwhile.
    let (ids, status, data) = unsafe {
        let status = host.add(of.layout.status).cast::<i32>();
        let data = host.add(of.layout.data);
        (
            std::slice::from_raw_parts(host, rows * of.id_bytes),
            std::slice::from_raw_parts_mut(status, rows),
            std::slice::from_raw_parts_mut(data, rows * of.row_bytes as usize),
        )
    };
    status.fill(code::NOT_RUN);
    let wide = widened(ids, of.id_bytes, step);
    // Our own panic must not unwind into the driver.
    let moved = catch_unwind(AssertUnwindSafe(|| (of.move_rows)(&wide, data, status)));
    if moved.is_err() {
        status.fill(code::NOT_RUN);
        data.fill(0);
    }
    let failed = status.iter().filter(|code| **code != code::OK).count() as u64;
    let mut failures = lock(&of.failures);
    failures.rows += failed;
    if failures.first.is_none() {
        let first = status.iter().position(|code| *code != code::OK);
        failures.first = first.map(|index| (step.first + index as u64, status[index]));
    }
}

/// Returns the ids as 64-bit numbers.
fn widened(ids: &[u8], id_bytes: usize, step: &ChunkStep) -> Vec<i64> {
    match id_bytes {
        0 => (step.first..step.first + step.rows)
            .map(|id| id as i64)
            .collect(),
        4 => ids
            .as_chunks::<4>()
            .0
            .iter()
            .map(|id| i64::from(i32::from_ne_bytes(*id)))
            .collect(),
        _ => ids
            .as_chunks::<8>()
            .0
            .iter()
            .map(|id| i64::from_ne_bytes(*id))
            .collect(),
    }
}

/// Publishes the outcome of the operation to the threads that wait for it.
///
/// # Safety
/// `data` is a living operation. If a graph holds it, `is_captured` is set.
unsafe extern "C" fn end(data: *mut c_void) {
    let operation = data.cast::<HostOperation>();
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let of = unsafe { &*operation };
    let failures = std::mem::take(&mut *lock(&of.failures));
    let ended = Arc::clone(&of.ended);
    if !of.is_captured {
        // SAFETY: this is the last function of an operation that no graph can run again, and the only pointer
        // to it is the one that this function received.
        let mut over = unsafe { Box::from_raw(operation) };
        if let Some(staging) = over.staging.take() {
            match over.pool.upgrade() {
                Some(pool) => lock(&pool).push(staging),
                // A host function must not call the driver, and freeing the staging memory does.
                None => leftovers::keep(Box::new(staging)),
            }
        }
    }
    ended.add(failures);
}
