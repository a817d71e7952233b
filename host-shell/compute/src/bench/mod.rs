//! Measurements of products with a matrix on a drive: read by the kernel that multiplies, and by other paths,
//! alternating.
// UNSAFETY: launches and copies over this module's own memory.
#![allow(unsafe_code)]

mod gathered;
mod gemm;
mod parts;

pub use gathered::{GatheredJob, gathered};
pub use gemm::{GemmJob, GemmTimes, gemm};

use crate::steps::StepKernels;
use crate::{StoredMatrix, StreamedProducts, streamed};
use nvme_compute_kernel::GemvParameters;
use nvme_formats::StoredFormat;
use nvme_host::cuda::{DeviceMemory, Stream};
use nvme_host::{Error, Result, Store};
use parts::{CopyLimit, HalfReader, by_threads, gpu_of, vector};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of one product.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes that a host thread reads at a time.
const CHUNK: u64 = 4 << 20;
/// Bytes of memory of the host that the bare limit reads, at most.
const MIRROR: u64 = 1 << 30;
const ROW: u64 = 4096;

/// Workload of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct GemvJob {
    /// The format of the matrix, which is laid out at the store's begin.
    pub stored: StoredFormat,
    /// Number of rows of the matrix.
    pub rows: u32,
    /// Number of columns of the matrix.
    pub columns: u32,
    /// Runs of each way.
    pub runs: usize,
    /// Number of threads of the path that reads by the CPU.
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
    /// Bytes that the kernel of `limit` copies.
    pub limit_bytes: u64,
    /// Bytes of the matrix.
    pub bytes: u64,
    /// Registers and bytes of local memory of a thread of the kernel that streams.
    pub cost: (u32, u32),
}

/// Writes a matrix to `store` and measures its products.
///
/// # Errors
/// The error that keeps a product from running; a product with a wrong result.
pub fn gemv(store: &Arc<Store>, job: &GemvJob) -> Result<GemvTimes> {
    let rig = GemvFixture::new(store, job)?;
    let mut times = GemvTimes {
        bytes: rig.matrix.bytes(),
        limit_bytes: rig.limit.bytes(rig.matrix.bytes()),
        cost: rig.products.cost()?,
        ..GemvTimes::default()
    };
    // One run of each comes first and is not counted.
    for run in 0..=job.runs {
        let one = [
            rig.timed(|| rig.streamed())?,
            rig.timed(|| rig.ranges())?,
            rig.timed(|| rig.resident())?,
            rig.timed(|| rig.by_cpu())?,
            rig.limit
                .seconds(&rig.stream, rig.matrix.bytes(), rig.weights.address())?,
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

struct GemvFixture {
    readers: Vec<HalfReader>,
    matrix: StoredMatrix,
    stored: StoredFormat,
    products: StreamedProducts,
    steps: StepKernels,
    limit: CopyLimit,
    stream: Stream,
    weights: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    expected: Vec<f32>,
}

impl GemvFixture {
    fn new(store: &Arc<Store>, job: &GemvJob) -> Result<Self> {
        let gpu = gpu_of(store)?;
        let matrix = StoredMatrix::new(store, 0, job.stored, job.rows, job.columns)?;
        let limit = CopyLimit::new(gpu, store, &matrix, (job.stored, job.seed))?;
        let x = vector(job.columns);
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let readers = (0..job.threads.max(1)).map(|_| HalfReader::new(gpu));
        let rig = Self {
            readers: readers.collect::<Result<_>>()?,
            expected: matrix.product(&x)?,
            stored: job.stored,
            products: StreamedProducts::load(gpu)?,
            steps: StepKernels::load(gpu)?,
            limit,
            stream: Stream::new(gpu)?,
            // The product loads 16 bytes at a time.
            weights: DeviceMemory::new(gpu, matrix.bytes().max(ROW).next_multiple_of(16) as usize)?,
            x: DeviceMemory::new(gpu, bytes.len())?,
            y: DeviceMemory::new(gpu, job.rows as usize * 4)?,
            matrix,
        };
        rig.x.upload(0, &bytes)?;
        Ok(rig)
    }

    /// Measures the seconds of `product`, until its stream is done; then the result is compared.
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
        // SAFETY: the memory belongs to this rig, which waits for the product.
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
        let gemv = GemvParameters {
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
        // SAFETY: the memory belongs to this rig, which waits for the stream.
        unsafe { self.steps.gemv(&gemv, self.stream.handle()) }
    }

    /// Reads the weights by threads of the CPU, then launches the product.
    fn by_cpu(&self) -> Result<()> {
        let (bytes, to) = (self.matrix.bytes(), self.weights.address());
        by_threads(&self.readers, |reader, part| {
            let fill = |at: u64, data: &mut [u8]| self.matrix.store.read_at(at, data);
            reader.copy_part((bytes, CHUNK), part, to, fill)
        })?;
        self.resident()
    }
}
