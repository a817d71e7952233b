//! Products with a matrix on a drive, measured: read by the kernel that multiplies, and in other ways, in turns.
// UNSAFETY: launches and copies over this module's own memory.
#![allow(unsafe_code)]

use crate::{Matrix, StreamedProducts, streamed, synthetic};
use nvme_compute_kernel::{BLOCK_THREADS, Gemv, PTX, kernel};
use nvme_formats::Stored;
use nvme_gpu_kernel::ROWS_PTX;
use nvme_gpu_kernel::rows::Gather;
use nvme_host::cuda::{DeviceMemory, Event, Function, Gpu, Module, Registered, Stream};
use nvme_host::{Error, Pages, Result, Store};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one product may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Blocks of kernels without queues.
const BLOCKS: u32 = 2048;
/// Bytes that a host thread reads at a time.
const CHUNK: u64 = 4 << 20;
/// Bytes of memory of the host that the bare limit reads, at most.
const MIRROR: u64 = 1 << 30;
const ROW: u64 = 4096;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct GemvJob {
    /// The format of the matrix, which is laid out at the store's begin.
    pub stored: Stored,
    /// Its rows.
    pub rows: u32,
    /// Its columns.
    pub columns: u32,
    /// Runs of each way.
    pub runs: usize,
    /// Threads of the way that reads by the CPU.
    pub threads: usize,
    /// Seed of weights and vector.
    pub seed: u64,
}

/// Seconds of each run of each way. Every product was compared with the CPU's.
#[derive(Clone, Debug, Default)]
pub struct GemvTimes {
    /// The kernel reads the matrix while it multiplies.
    pub streamed: Vec<f64>,
    /// The GPU reads the matrix to its memory, then multiplies.
    pub ranges: Vec<f64>,
    /// The matrix lies in memory of the GPU.
    pub resident: Vec<f64>,
    /// Threads of the CPU read to pinned memory, the GPU's copy engine copies it, then the GPU multiplies.
    pub by_cpu: Vec<f64>,
    /// Bare limit: a kernel copies `limit_bytes` bytes out of memory of the host. No drive.
    pub limit: Vec<f64>,
    /// As above.
    pub limit_bytes: u64,
    /// Bytes of the matrix.
    pub bytes: u64,
    /// Registers and bytes of local memory of a thread of the kernel that streams.
    pub cost: (u32, u32),
}

/// Writes a matrix to `store` and measures its products.
///
/// # Errors
/// What keeps a product from running, and one that is wrong.
pub fn gemv(store: &Arc<Store>, job: &GemvJob) -> Result<GemvTimes> {
    let rig = Rig::new(store, job)?;
    let mut times = GemvTimes {
        bytes: rig.matrix.bytes(),
        limit_bytes: rig.limit_rows() * ROW,
        cost: rig.products.cost()?,
        ..GemvTimes::default()
    };
    // One run of each before those that count.
    for run in 0..=job.runs {
        let one = [
            rig.timed(|| rig.streamed())?,
            rig.timed(|| rig.ranges())?,
            rig.timed(|| rig.resident())?,
            rig.timed(|| rig.by_cpu())?,
            rig.limit()?,
        ];
        let all = [
            &mut times.streamed,
            &mut times.ranges,
            &mut times.resident,
            &mut times.by_cpu,
            &mut times.limit,
        ];
        for (seconds, one) in all.into_iter().zip(one).filter(|_| run > 0) {
            seconds.push(one);
        }
    }
    Ok(times)
}

/// What a thread of the CPU reads by: two buffers of pinned memory, and their copies.
struct Reader {
    stream: Stream,
    copied: [Event; 2],
    _registered: Registered,
    pages: Arc<Pages>,
}

impl Reader {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let pages = Arc::new(Pages::new(2 * CHUNK as usize)?);
        Ok(Self {
            stream: Stream::new(gpu)?,
            copied: [Event::untimed(gpu)?, Event::untimed(gpu)?],
            _registered: Registered::pages(gpu, &pages)?,
            pages,
        })
    }
}

struct Rig {
    readers: Vec<Reader>,
    matrix: Matrix,
    stored: Stored,
    products: StreamedProducts,
    module: Module,
    gemv: Function,
    of_rows: Module,
    copy: Function,
    stream: Stream,
    weights: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    /// The matrix, or its begin, in memory of the host.
    mirror: Arc<Pages>,
    registered: Registered,
    expected: Vec<f32>,
}

impl Rig {
    fn new(store: &Arc<Store>, job: &GemvJob) -> Result<Self> {
        let gpu = store.gpu().ok_or_else(|| {
            Error::usage("the store was opened without a GPU", "open it with one")
        })?;
        let matrix = Matrix::new(store, 0, job.stored, job.rows, job.columns)?;
        let mirror = Arc::new(Pages::new(matrix.bytes().clamp(ROW, MIRROR) as usize)?);
        lay_out(store, &matrix, job, &mirror)?;
        let x: Vec<f32> = (0..job.columns)
            .map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0)
            .collect();
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let module = Module::load(gpu, PTX.as_bytes())?;
        let of_rows = Module::load(gpu, ROWS_PTX.as_bytes())?;
        let readers = (0..job.threads.max(1)).map(|_| Reader::new(gpu));
        let rig = Self {
            readers: readers.collect::<Result<_>>()?,
            expected: matrix.product(&x)?,
            stored: job.stored,
            products: StreamedProducts::load(gpu)?,
            gemv: module.function(kernel::GEMV)?,
            copy: of_rows.function("nvme_copy_rows")?,
            module,
            of_rows,
            stream: Stream::new(gpu)?,
            // The product loads 16 bytes at a time.
            weights: DeviceMemory::new(gpu, matrix.bytes().max(ROW).next_multiple_of(16) as usize)?,
            x: DeviceMemory::new(gpu, bytes.len())?,
            y: DeviceMemory::new(gpu, job.rows as usize * 4)?,
            registered: Registered::pages(gpu, &mirror)?,
            mirror,
            matrix,
        };
        rig.x.upload(0, &bytes)?;
        Ok(rig)
    }

    /// Seconds of `product`, which is over when the stream is; then its product is compared.
    fn timed(&self, product: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.y.fill(0xFF)?;
        let begin = Instant::now();
        product()?;
        self.stream.wait(LIMIT, || Ok(()))?;
        let seconds = begin.elapsed().as_secs_f64();
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let y = words.map(|word| f32::from_le_bytes(*word));
        // Other orders of sums of elements of about 0.1.
        let tolerance = 1e-6 * self.matrix.columns() as f32;
        let is_wrong = |y: f32, expected: f32| y.is_nan() || (y - expected).abs() > tolerance;
        let mut all = y.zip(&self.expected).enumerate();
        match all.find(|(_, (y, expected))| is_wrong(*y, **expected)) {
            None => Ok(seconds),
            Some((row, (y, expected))) => Err(Error::internal(format!(
                "element {row} of a product is {y}, not {expected}"
            ))),
        }
    }

    fn streamed(&self) -> Result<()> {
        let (x, y) = (self.x.address(), self.y.address());
        // SAFETY: memory of this rig, which waits for the product.
        let pending = unsafe {
            let stream = self.stream.handle();
            self.products.gemv(&self.matrix, x, y, stream)?
        };
        streamed::check(pending.wait(LIMIT)?)
    }

    fn ranges(&self) -> Result<()> {
        let (bytes, to) = (self.matrix.bytes(), self.weights.address());
        // SAFETY: as above.
        let pending = unsafe {
            let store = &self.matrix.store;
            store.read_on_gpu(0, bytes, to, self.stream.handle())?
        };
        self.resident()?;
        streamed::check(pending.wait(LIMIT)?)
    }

    fn resident(&self) -> Result<()> {
        let gemv = Gemv {
            weights: self.weights.address(),
            x: self.x.address(),
            y: self.y.address(),
            row_bytes: self.matrix.row_bytes,
            rows: self.matrix.rows,
            columns: self.matrix.columns,
            stride: self.matrix.rows,
            tokens: 1,
            stored: self.stored as u32,
            adds: 0,
        };
        let warps_of_block = BLOCK_THREADS / 32;
        let blocks = self.matrix.rows.div_ceil(warps_of_block).clamp(1, BLOCKS);
        // SAFETY: the kernel takes one `Gemv`; memory of this rig, which waits for the stream.
        unsafe {
            let module = &self.module;
            module.launch(&self.stream, self.gemv, blocks, BLOCK_THREADS, &gemv)
        }
    }

    /// The weights by threads of the CPU, then the product.
    fn by_cpu(&self) -> Result<()> {
        std::thread::scope(|scope| {
            let step = self.readers.len();
            let readers = self.readers.iter().enumerate();
            let read = |(first, reader)| scope.spawn(move || self.read_part(reader, first, step));
            let all: Vec<_> = readers.map(read).collect();
            all.into_iter().try_for_each(|thread| {
                let panicked = |_| Err(Error::internal("a thread of the benchmark panicked"));
                thread.join().unwrap_or_else(panicked)
            })
        })?;
        self.resident()
    }

    /// Every `step`th chunk of the matrix to memory of the GPU, by two buffers in turns.
    fn read_part(&self, reader: &Reader, first: usize, step: usize) -> Result<()> {
        let bytes = self.matrix.bytes();
        let chunks = (first as u64..bytes.div_ceil(CHUNK)).step_by(step);
        for (turn, chunk) in chunks.enumerate() {
            let (at, half) = (chunk * CHUNK, turn % 2);
            let count = CHUNK.min(bytes - at) as usize;
            if turn > 1 {
                reader.copied[half].wait()?;
            }
            // SAFETY: a half of the buffer of this thread, whose last copy has ended.
            let (from, data) = unsafe {
                let from = reader.pages.start().add(half * CHUNK as usize);
                (from, std::slice::from_raw_parts_mut(from, count))
            };
            self.matrix.store.read_at(at, data)?;
            let to = self.weights.address() + at;
            // SAFETY: a part of the weights; the buffer stays until the stream has ended.
            unsafe { reader.stream.copy_in(to, from, count)? };
            reader.copied[half].record_in(&reader.stream)?;
        }
        reader.stream.wait(LIMIT, || Ok(()))
    }

    /// Rows of the mirror that lie in the matrix, too.
    fn limit_rows(&self) -> u64 {
        self.matrix.bytes().min(self.mirror.len() as u64) / ROW
    }

    /// Seconds of a kernel that copies the mirror to memory of the GPU, where the same bytes are.
    fn limit(&self) -> Result<f64> {
        let rows = self.limit_rows();
        let copy = Gather {
            slots: self.registered.address(),
            out: self.weights.address(),
            count: rows,
            rows,
            out_stride: ROW,
            row_bytes: ROW as u32,
            slot_bytes: ROW as u32,
            run_rows: 1,
            block_shift: 12,
            unit_shift: 4,
            lanes: 32,
            ..Gather::default()
        };
        let begin = Instant::now();
        // SAFETY: the kernel takes one `Gather`; the mirror and as many bytes of the weights.
        unsafe {
            let module = &self.of_rows;
            module.launch(&self.stream, self.copy, 128, BLOCK_THREADS, &copy)?;
        }
        self.stream.wait(LIMIT, || Ok(()))?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Writes random weights, and their begin to the mirror.
fn lay_out(store: &Store, matrix: &Matrix, job: &GemvJob, mirror: &Pages) -> Result<()> {
    // Whole rows, so that blocks are whole.
    let step = (CHUNK / matrix.row_bytes).max(1);
    let mut chunk = vec![0; (step * matrix.row_bytes) as usize];
    let mut row = 0;
    while row < u64::from(matrix.rows) {
        let rows = step.min(u64::from(matrix.rows) - row);
        let chunk = &mut chunk[..(rows * matrix.row_bytes) as usize];
        synthetic::fill(job.stored, job.seed ^ row, chunk);
        let at = row * matrix.row_bytes;
        store.write_at(at, chunk)?;
        let room = (mirror.len() as u64)
            .saturating_sub(at)
            .min(chunk.len() as u64);
        if room > 0 {
            // SAFETY: inside the pages, which nothing else uses yet.
            unsafe {
                let to = mirror.start().add(at as usize);
                chunk.as_ptr().copy_to(to, room as usize);
            }
        }
        row += rows;
    }
    Ok(())
}
