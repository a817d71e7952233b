//! Products by a GPU in one stream, and reads in a second stream at the same time; times are those of events. Two
//! streams are needed because a read and a product in one stream would never overlap; events order each buffer
//! between them.
// UNSAFETY: launches kernels and copies over this module's own memory.
#![allow(unsafe_code)]

use super::by_cpu::{MatrixReads, late};
use super::engine::{MatrixSource, PipelineEngine};
use super::trace::{PipelineTrace, SpanWork, WorkSpan};
use nvme_compute_kernel::{BLOCK_THREADS, GemvParameters, PTX, RmsNorm, kernel};
use nvme_host::cuda::{
    DeviceMemory, Gpu, KernelFunction, Module, PendingRows, RegisteredMemory, Stream, StreamEvent,
};
use nvme_host::store::status;
use nvme_host::{DmaPages, Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of blocks of a launch.
const BLOCKS: u32 = 2048;
/// Pause between two polls of an event.
const NAP: Duration = Duration::from_micros(20);
/// Looks without a pause.
const SPINS: u32 = 2000;

struct PinnedMemory {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
}

impl PinnedMemory {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let (pages, registered) = RegisteredMemory::pinned(gpu, bytes.max(1))?;
        Ok(Self { pages, registered })
    }

    /// Returns the first `bytes` bytes of the buffer. No copy from or to them is in progress.
    fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        let bytes = bytes.min(self.pages.len());
        // SAFETY: the pages are mapped as long as `self`, which is borrowed; the caller has waited for copies.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start(), bytes) }
    }
}

struct BatchSlot {
    batch: u64,
    part: u32,
    weights: Option<DeviceMemory>,
    /// Pinned buffer that the host reads into.
    staging: Option<PinnedMemory>,
    /// Pinned buffer for the product, unless products are joined.
    product: Option<PinnedMemory>,
    /// Begin and end of the read in its stream, and the time when the host began it.
    read: Option<(StreamEvent, StreamEvent)>,
    host_us: Option<f64>,
    /// Begin and end of the product.
    multiplied: Option<(StreamEvent, StreamEvent)>,
    pending: Option<PendingRows>,
    failure: Option<Error>,
}

pub(super) struct GpuEngine {
    gpu: Arc<Gpu>,
    reads: MatrixReads,
    module: Module,
    gemv: KernelFunction,
    norm: KernelFunction,
    reading: Stream,
    multiplying: Stream,
    /// Matrices in GPU memory, or in pinned memory, if none is read.
    resident: Vec<DeviceMemory>,
    pinned: Vec<PinnedMemory>,
    slots: Vec<BatchSlot>,
    x: DeviceMemory,
    ones: DeviceMemory,
    /// The joined products.
    y: DeviceMemory,
    limit: Duration,
    /// An event that has occurred, and its time: times of events are counted from it.
    anchor: (StreamEvent, f64),
    begin: Instant,
    trace: PipelineTrace,
}

impl GpuEngine {
    /// Creates the engine over the GPU of the store.
    ///
    /// # Errors
    /// Without a GPU, or memory.
    pub fn new(reads: MatrixReads, limit: Duration) -> Result<Self> {
        let data = Arc::clone(&reads.data);
        let (store, shape) = (&data.store, data.shape);
        let gpu = store.gpu().ok_or_else(|| {
            Error::usage("the store was opened without a GPU", "open it with one")
        })?;
        // The product loads 16 bytes at a time, and a little past the end.
        let bytes = shape.part_bytes().next_multiple_of(16) as usize + 16;
        let floats = |count: usize| DeviceMemory::new(gpu, count.max(1) * 4);
        let vectors = shape.vectors as usize;
        let (source, is_joined) = (reads.source, shape.joined);
        let all = shape.product_rows() as usize * vectors;
        let slot = |_| -> Result<BatchSlot> {
            let is_read = source != MatrixSource::Resident;
            let is_staged = matches!(source, MatrixSource::Threads | MatrixSource::File);
            let weights = is_read.then(|| DeviceMemory::new(gpu, bytes));
            let staging = is_staged.then(|| PinnedMemory::new(gpu, bytes));
            let product = (!is_joined).then(|| PinnedMemory::new(gpu, all * 4));
            Ok(BatchSlot {
                batch: 0,
                part: 0,
                weights: weights.transpose()?,
                staging: staging.transpose()?,
                product: product.transpose()?,
                read: None,
                host_us: None,
                multiplied: None,
                pending: None,
                failure: None,
            })
        };
        let (mut resident, mut pinned) = (Vec::new(), Vec::new());
        for part in 0..shape.parts {
            match source {
                MatrixSource::Resident => {
                    let memory = DeviceMemory::new(gpu, bytes)?;
                    memory.upload(0, &data.part(part))?;
                    resident.push(memory);
                }
                MatrixSource::Pinned => {
                    let mut memory = PinnedMemory::new(gpu, bytes)?;
                    let from = data.part(part);
                    memory.bytes(from.len()).copy_from_slice(&from);
                    pinned.push(memory);
                }
                _ => {}
            }
        }
        let module = Module::embedded(gpu, PTX.as_bytes())?;
        let reading = Stream::new(gpu)?;
        let begin = Instant::now();
        let anchor = StreamEvent::record(&reading)?;
        let mut engine = Self {
            gemv: module.function(kernel::GEMV)?,
            norm: module.function(kernel::RMS_NORM)?,
            module,
            multiplying: Stream::new(gpu)?,
            anchor: (anchor, 0.0),
            reading,
            resident,
            pinned,
            slots: (0..shape.buffers).map(slot).collect::<Result<_>>()?,
            x: floats(data.x.len())?,
            ones: floats(shape.product_rows() as usize)?,
            y: floats(all)?,
            gpu: Arc::clone(gpu),
            reads,
            limit,
            begin,
            trace: PipelineTrace::default(),
        };
        engine
            .ones
            .upload(0, &bytes_of(&vec![1.0; shape.product_rows() as usize]))?;
        engine.set_vectors(&data.x)?;
        Ok(engine)
    }

    fn wait(&self, event: &StreamEvent) -> Result<()> {
        let (begin, mut looks) = (Instant::now(), 0u32);
        while !event.is_done()? {
            if begin.elapsed() > self.limit {
                return Err(late(self.limit));
            }
            looks = looks.saturating_add(1);
            match looks {
                0..SPINS => std::hint::spin_loop(),
                _ => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }

    /// Returns the time in microseconds of `event`, which has occurred.
    fn us(&self, event: &StreamEvent) -> Result<f64> {
        Ok(self.anchor.1 + event.seconds_since(&self.anchor.0)? * 1e6)
    }

    /// Reads a matrix into pinned memory by the host, and enqueues its copy.
    fn read_by_host(&mut self, slot: usize, part: u32) -> Result<()> {
        // The copy that used this buffer before has to have ended.
        if let Some((_, end)) = self.slots[slot].read.take() {
            self.wait(&end)?;
        }
        let bytes = self.reads.data.shape.part_bytes() as usize;
        self.slots[slot].host_us = Some(self.begin.elapsed().as_secs_f64() * 1e6);
        let BatchSlot {
            staging: Some(staging),
            weights: Some(weights),
            ..
        } = &mut self.slots[slot]
        else {
            return Err(Error::internal("a buffer without memory"));
        };
        let to = weights.address();
        let from = staging.bytes(bytes);
        let read = self.reads.part(part, from);
        let from = from.as_ptr();
        let first = StreamEvent::record(&self.reading)?;
        match read {
            // SAFETY: the memory belongs to the slot, which stays until its copy has ended.
            Ok(()) => unsafe { self.reading.copy_in(to, from, bytes)? },
            Err(error) => self.slots[slot].failure = Some(error),
        }
        self.slots[slot].read = Some((first, StreamEvent::record(&self.reading)?));
        Ok(())
    }

    /// Records the spans of the batch of a slot, whose events have occurred.
    fn note(&mut self, slot: usize) -> Result<()> {
        let of = &mut self.slots[slot];
        let (read, multiplied, host_us) = (of.read.take(), of.multiplied.take(), of.host_us.take());
        let mut spans = Vec::new();
        let batch = of.batch;
        let mut span = |work, begin_us, end_us| {
            spans.push(WorkSpan {
                work,
                batch,
                slot: slot as u32,
                begin_us,
                end_us,
            });
        };
        if let Some((first, last)) = &read {
            let begin_us = match host_us {
                Some(us) => us,
                None => self.us(first)?,
            };
            span(SpanWork::Read, begin_us, self.us(last)?);
        }
        if let Some((first, last)) = multiplied {
            span(SpanWork::Compute, self.us(&first)?, self.us(&last)?);
            // The anchor moves on, because times between events are single floats of milliseconds, which lose
            // precision.
            let us = self.us(&first)?;
            self.anchor = (first, us);
        }
        spans.into_iter().for_each(|span| self.trace.note(span));
        Ok(())
    }

    fn upload(memory: &DeviceMemory, numbers: &[f32]) -> Result<()> {
        memory.upload(0, &bytes_of(numbers))
    }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

fn numbers_of(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|word| f32::from_le_bytes(*word)).collect()
}

impl PipelineEngine for GpuEngine {
    fn is_ahead(&self) -> bool {
        true
    }

    fn set_vectors(&mut self, x: &[f32]) -> Result<()> {
        Self::upload(&self.x, x)
    }

    fn read_vectors(&mut self) -> Result<()> {
        let (at, bytes) = (self.reads.data.shape.vectors_at(), self.x.len() as u64);
        let store = &self.reads.data.store;
        // SAFETY: the memory belongs to this engine, which waits for the read.
        let pending =
            unsafe { store.read_on_gpu(at, bytes, self.x.address(), self.reading.handle())? };
        failed_of(&pending, self.limit)?;
        self.reading.wait(self.limit, || Ok(()))
    }

    fn read(&mut self, batch: u64, slot: u32, part: u32) -> Result<()> {
        let at = slot as usize;
        let of = &mut self.slots[at];
        (of.batch, of.part, of.failure) = (batch, part, None);
        let (reads, shape) = (&self.reads, self.reads.data.shape);
        let to = of.weights.as_ref().map_or(0, DeviceMemory::address);
        match reads.source {
            MatrixSource::Resident => return Ok(()),
            MatrixSource::Threads | MatrixSource::File => return self.read_by_host(at, part),
            MatrixSource::Gpu | MatrixSource::Pinned => {}
        }
        let first = StreamEvent::record(&self.reading)?;
        // SAFETY: the memory belongs to the slot, whose last product has been taken; it stays valid until its read has
        // ended.
        unsafe {
            match self.pinned.get(part as usize) {
                Some(from) => {
                    let bytes = shape.part_bytes() as usize;
                    self.reading.copy_in(to, from.pages.start(), bytes)?;
                }
                None => {
                    let (from, stream) = (reads.data.at(part), self.reading.handle());
                    let store = &reads.data.store;
                    of.pending = Some(store.read_on_gpu(from, shape.part_bytes(), to, stream)?);
                }
            }
        }
        of.read = Some((first, StreamEvent::record(&self.reading)?));
        Ok(())
    }

    fn multiply(&mut self, slot: u32) -> Result<()> {
        let shape = self.reads.data.shape;
        let of = &mut self.slots[slot as usize];
        if let Some((_, end)) = &of.read {
            end.before(self.multiplying.handle())?;
        }
        let (y, first_row) = match &of.product {
            None => (self.y.address(), of.part * shape.rows),
            Some(product) => (product.registered.address(), 0),
        };
        let weights = match (&of.weights, self.resident.get(of.part as usize)) {
            (_, Some(resident)) => resident.address(),
            (Some(weights), None) => weights.address(),
            (None, None) => return Err(Error::internal("a buffer without memory")),
        };
        let gemv = GemvParameters {
            weights,
            x: self.x.address(),
            y: y + u64::from(first_row) * 4,
            row_bytes: shape.row_bytes(),
            rows: shape.rows,
            columns: shape.columns,
            stride: shape.product_rows(),
            tokens: shape.vectors,
            stored: shape.stored as u32,
            adds: 0,
        };
        let begin = StreamEvent::record(&self.multiplying)?;
        let blocks = shape.rows.div_ceil(BLOCK_THREADS / 32).clamp(1, BLOCKS);
        // SAFETY: the kernel takes one `GemvParameters`; the memory belongs to this engine, which waits for the stream
        // before it is freed.
        unsafe {
            let module = &self.module;
            module.launch(&self.multiplying, self.gemv, blocks, BLOCK_THREADS, &gemv)?;
        }
        of.multiplied = Some((begin, StreamEvent::record(&self.multiplying)?));
        Ok(())
    }

    fn take(&mut self, slot: u32) -> Result<Vec<f32>> {
        let at = slot as usize;
        let Some((_, end)) = &self.slots[at].multiplied else {
            return Err(Error::internal("a batch that was not multiplied"));
        };
        self.wait(end)?;
        self.note(at)?;
        let of = &mut self.slots[at];
        if let Some(pending) = of.pending.take() {
            failed_of(&pending, self.limit)?;
        }
        if let Some(error) = of.failure.take() {
            return Err(error);
        }
        let shape = self.reads.data.shape;
        let bytes = shape.product_rows() as usize * shape.vectors as usize * 4;
        let product = of.product.as_mut();
        Ok(product.map_or_else(Vec::new, |product| numbers_of(product.bytes(bytes))))
    }

    fn feed_back(&mut self) -> Result<()> {
        let shape = self.reads.data.shape;
        let norm = RmsNorm {
            x: self.y.address(),
            weight: self.ones.address(),
            y: self.x.address(),
            elements: shape.product_rows(),
            tokens: shape.vectors,
            epsilon: 0.0,
            reserved: 0,
        };
        let blocks = shape.vectors.div_ceil(BLOCK_THREADS / 32).max(1);
        // SAFETY: the kernel takes one `RmsNorm`; the memory belongs to this engine, as above.
        unsafe {
            let module = &self.module;
            module.launch(&self.multiplying, self.norm, blocks, BLOCK_THREADS, &norm)
        }
    }

    fn vectors(&mut self) -> Result<Vec<f32>> {
        self.multiplying.wait(self.limit, || Ok(()))?;
        let mut bytes = vec![0; self.x.len()];
        self.x.download(0, &mut bytes)?;
        Ok(numbers_of(&bytes))
    }

    fn trace(&mut self) -> PipelineTrace {
        std::mem::take(&mut self.trace)
    }
}

/// Waits for a read.
///
/// # Errors
/// The error of the first part that was not read.
fn failed_of(pending: &PendingRows, limit: Duration) -> Result<()> {
    let Some((part, code)) = pending.wait(limit)?.failures.first else {
        return Ok(());
    };
    let (what, remedy) = status::describe(code);
    Err(Error::device(
        format!("part {part} of a read by the GPU: {what}"),
        remedy,
    ))
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        // The memory of work that does not end is kept: the store's watch thread ends reads, kernels end on their own.
        let ended =
            [&self.reading, &self.multiplying].map(|stream| stream.wait(self.limit, || Ok(())));
        if ended.iter().any(Result::is_err) {
            for slot in self.slots.drain(..) {
                std::mem::forget(slot);
            }
        }
        let _ = &self.gpu;
    }
}
