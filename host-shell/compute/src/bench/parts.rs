//! Parts that these benchmarks share.
// UNSAFETY: launches and copies over this module's own memory.
#![allow(unsafe_code)]

use super::{CHUNK, LIMIT, MIRROR, ROW};
use crate::{StoredMatrix, random_weights};
use nvme_compute_kernel::BLOCK_THREADS;
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::ROWS;
use nvme_gpu_kernel::rows::GatherLaunch;
use nvme_host::cuda::{Gpu, KernelFunction, Module, RegisteredMemory, Stream, StreamEvent};
use nvme_host::{DmaPages, Error, Result, Store};
use std::sync::Arc;
use std::time::Instant;

/// Means of a CPU thread that reads: two halves of a pinned buffer, and the stream of their copies to the GPU.
pub(super) struct HalfReader {
    pub stream: Stream,
    copied: [StreamEvent; 2],
    _registered: RegisteredMemory,
    pages: Arc<DmaPages>,
}

impl HalfReader {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let pages = Arc::new(DmaPages::new(2 * CHUNK as usize)?);
        Ok(Self {
            stream: Stream::new(gpu)?,
            copied: [StreamEvent::untimed(gpu)?, StreamEvent::untimed(gpu)?],
            _registered: RegisteredMemory::pages(gpu, &pages)?,
            pages,
        })
    }

    /// Copies every `step`th chunk of `bytes` bytes, from chunk `first` on, to `to` plus the chunk's offset. `fill`
    /// receives that offset and fills the chunk in one of two buffers, which alternate. Chunks have `chunk` bytes,
    /// [`CHUNK`] at most.
    pub fn copy_part(
        &self,
        (bytes, chunk): (u64, u64),
        (first, step): (usize, usize),
        to: u64,
        fill: impl Fn(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let chunks = (first as u64..bytes.div_ceil(chunk)).step_by(step);
        for (turn, number) in chunks.enumerate() {
            let (at, half) = (number * chunk, turn % 2);
            let count = chunk.min(bytes - at) as usize;
            if turn > 1 {
                self.copied[half].wait()?;
            }
            // SAFETY: the range is the half of this thread's buffer whose last copy has ended.
            let (from, data) = unsafe {
                let from = self.pages.start().add(half * CHUNK as usize);
                (from, std::slice::from_raw_parts_mut(from, count))
            };
            fill(at, data)?;
            // SAFETY: the caller provides `count` bytes at `to + at`; the buffer lives until the stream has
            // ended.
            unsafe { self.stream.copy_in(to + at, from, count)? };
            self.copied[half].record_in(&self.stream)?;
        }
        self.stream.wait(LIMIT, || Ok(()))
    }
}

/// Runs `part` for each reader, by a thread each, with its number and how many there are.
pub(super) fn by_threads(
    readers: &[HalfReader],
    part: impl Fn(&HalfReader, (usize, usize)) -> Result<()> + Sync,
) -> Result<()> {
    let (part, step) = (&part, readers.len());
    std::thread::scope(|scope| {
        let readers = readers.iter().enumerate();
        let all: Vec<_> = readers
            .map(|(first, reader)| scope.spawn(move || part(reader, (first, step))))
            .collect();
        all.into_iter().try_for_each(|thread| {
            let panicked = |_| Err(Error::internal("a thread of the benchmark panicked"));
            thread.join().unwrap_or_else(panicked)
        })
    })
}

/// The bare limit: a kernel that copies bytes out of memory of the host. No drive.
pub(super) struct CopyLimit {
    module: Module,
    copy: KernelFunction,
    /// The matrix, or its begin, in memory of the host.
    mirror: Arc<DmaPages>,
    registered: RegisteredMemory,
}

impl CopyLimit {
    /// Creates the copy with the first bytes of `matrix`, which it also writes to the store.
    pub fn new(
        gpu: &Arc<Gpu>,
        store: &Store,
        matrix: &StoredMatrix,
        (stored, seed): (StoredFormat, u64),
    ) -> Result<Self> {
        let mirror = Arc::new(DmaPages::new(matrix.bytes().clamp(ROW, MIRROR) as usize)?);
        lay_out(store, matrix, (stored, seed), &mirror)?;
        let module = Module::of_image(gpu, &ROWS)?;
        Ok(Self {
            copy: module.function("nvme_copy_rows")?,
            module,
            registered: RegisteredMemory::pages(gpu, &mirror)?,
            mirror,
        })
    }

    /// Returns how many of `bytes` bytes are copied: whole rows, within the mirror's memory.
    pub fn bytes(&self, bytes: u64) -> u64 {
        bytes.min(self.mirror.len() as u64) / ROW * ROW
    }

    /// Measures a copy of `bytes` bytes to `to` in GPU memory, in seconds.
    pub fn seconds(&self, stream: &Stream, bytes: u64, to: u64) -> Result<f64> {
        let rows = self.bytes(bytes) / ROW;
        let copy = GatherLaunch {
            slots: self.registered.address(),
            out: to,
            count: rows,
            rows,
            out_stride: ROW,
            row_bytes: ROW as u32,
            slot_bytes: ROW as u32,
            run_rows: 1,
            block_shift: 12,
            unit_shift: 4,
            lanes: 32,
            ..GatherLaunch::default()
        };
        let begin = Instant::now();
        // SAFETY: the kernel takes one `GatherLaunch`; source and target are the mirror and memory of the caller with
        // as many bytes.
        unsafe {
            let module = &self.module;
            module.launch(stream, self.copy, 128, BLOCK_THREADS, &copy)?;
        }
        stream.wait(LIMIT, || Ok(()))?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Writes random weights, and their begin to the mirror.
fn lay_out(
    store: &Store,
    matrix: &StoredMatrix,
    (stored, seed): (StoredFormat, u64),
    mirror: &DmaPages,
) -> Result<()> {
    store.check_room("the matrix", 0, matrix.bytes())?;
    // Whole rows, so that blocks are whole.
    let step = (CHUNK / matrix.row_bytes).max(1);
    let mut chunk = vec![0; (step * matrix.row_bytes) as usize];
    let mut row = 0;
    while row < u64::from(matrix.rows) {
        let rows = step.min(u64::from(matrix.rows) - row);
        let chunk = &mut chunk[..(rows * matrix.row_bytes) as usize];
        random_weights::fill(stored, seed ^ row, chunk);
        let at = row * matrix.row_bytes;
        store.write_at(at, chunk)?;
        let room = (mirror.len() as u64)
            .saturating_sub(at)
            .min(chunk.len() as u64);
        if room > 0 {
            // SAFETY: the access stays inside the pages, which nothing else uses yet.
            unsafe {
                let to = mirror.start().add(at as usize);
                chunk.as_ptr().copy_to(to, room as usize);
            }
        }
        row += rows;
    }
    Ok(())
}

/// Returns `count` numbers from -1 to 1.
pub(super) fn vector(count: u32) -> Vec<f32> {
    (0..count)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0)
        .collect()
}

/// Returns the GPU of a store.
///
/// # Errors
/// [`Error::Usage`] without one.
pub(super) fn gpu_of(store: &Store) -> Result<&Arc<Gpu>> {
    let gpu = store.gpu();
    gpu.ok_or_else(|| Error::usage("the store was opened without a GPU", "open it with one"))
}
