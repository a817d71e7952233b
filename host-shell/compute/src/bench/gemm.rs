//! Products of halves and a matrix on a drive, measured.
// UNSAFETY: launches and copies over this module's own memory.
#![allow(unsafe_code)]

use super::parts::{CopyLimit, HalfReader, by_threads, gpu_of};
use super::{CHUNK, LIMIT, ROW};
use crate::gemm::{GemmOperands, StreamedGemm};
use crate::{HalfFormat, StoredMatrix, streamed};
use nvme_compute_kernel::reference;
use nvme_formats::StoredFormat;
use nvme_host::cuda::{DeviceMemory, Stream};
use nvme_host::{Error, Result, Store};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// Workload of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct GemmJob {
    /// The format of the matrix, which is laid out at the store's begin.
    pub stored: StoredFormat,
    /// Number of rows of halves that are multiplied: f16 if the matrix has that format, else bf16.
    pub tokens: u32,
    /// Rows of the matrix.
    pub rows: u32,
    /// Number of columns of the matrix.
    pub columns: u32,
    /// Number of blocks that read; 0 for the library's choice.
    pub read_blocks: u32,
    /// Runs of each way.
    pub runs: usize,
    /// Number of threads of the path that reads by the CPU.
    pub threads: usize,
    /// Seed of weights and halves.
    pub seed: u64,
}

/// Seconds of each run of each way. Some tokens of every product were compared with the CPU's, all rows of each.
#[derive(Clone, Debug, Default)]
pub struct GemmTimes {
    /// The blocks of one launch read the matrix and multiply.
    pub streamed: Vec<f64>,
    /// The same blocks multiply by halves that lie in memory of the GPU.
    pub resident: Vec<f64>,
    /// The GPU reads the matrix to its memory, then multiplies. Only for matrices of halves.
    pub ranges: Vec<f64>,
    /// Threads of the CPU read, the copy engine copies, then the GPU multiplies. Only for matrices of halves.
    pub by_cpu: Vec<f64>,
    /// Bare limit: a kernel copies `limit_bytes` bytes out of memory of the host. No drive.
    pub limit: Vec<f64>,
    /// Bytes that the kernel of `limit` copies.
    pub limit_bytes: u64,
    /// Bytes of the matrix.
    pub bytes: u64,
    /// Number of blocks of a launch, including those that read.
    pub blocks: u32,
    /// Registers and bytes of local memory of a thread of the kernel that streams.
    pub cost: (u32, u32),
}

/// Writes a matrix to `store` and measures its products.
///
/// # Errors
/// The error that keeps a product from running; a product with a wrong result.
pub fn gemm(store: &Arc<Store>, job: &GemmJob) -> Result<GemmTimes> {
    let rig = GemmFixture::new(store, job)?;
    let bytes = rig.matrix.bytes();
    let mut times = GemmTimes {
        bytes,
        limit_bytes: rig.limit.bytes(bytes),
        blocks: rig.products.blocks(),
        cost: rig.products.cost()?,
        ..GemmTimes::default()
    };
    let is_plain = matches!(job.stored, StoredFormat::Bf16 | StoredFormat::F16);
    // One run of each comes first and is not counted.
    for run in 0..=job.runs {
        let add = |to: &mut Vec<f64>, seconds: f64| {
            if run > 0 {
                to.push(seconds);
            }
        };
        add(&mut times.streamed, rig.timed(|| rig.streamed())?);
        add(&mut times.resident, rig.timed(|| rig.resident())?);
        if is_plain {
            add(&mut times.ranges, rig.timed(|| rig.read_then_product())?);
            add(&mut times.by_cpu, rig.timed(|| rig.by_cpu())?);
        }
        let to = rig.weights.address();
        add(&mut times.limit, rig.limit.seconds(&rig.stream, bytes, to)?);
        rig.load()?;
    }
    Ok(times)
}

struct GemmFixture {
    readers: Vec<HalfReader>,
    matrix: StoredMatrix,
    products: StreamedGemm,
    limit: CopyLimit,
    stream: Stream,
    half: HalfFormat,
    read_blocks: u32,
    tokens: u32,
    /// Tokens whose results are checked, with the expected values.
    checked: Vec<(u32, Vec<f32>)>,
    /// The matrix as halves, on the host and on the GPU.
    halves: Vec<u8>,
    weights: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    workspace: DeviceMemory,
}

impl GemmFixture {
    fn new(store: &Arc<Store>, job: &GemmJob) -> Result<Self> {
        let gpu = gpu_of(store)?;
        let matrix = StoredMatrix::new(store, 0, job.stored, job.rows, job.columns)?;
        let limit = CopyLimit::new(gpu, store, &matrix, (job.stored, job.seed))?;
        let half = match job.stored {
            StoredFormat::F16 => HalfFormat::F16,
            _ => HalfFormat::Bf16,
        };
        let columns = job.columns as usize;
        let number = |at: usize| {
            let mixed = (at as u64 ^ job.seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            half.of((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0)
        };
        let count = job.tokens as usize * columns;
        let x: Vec<u16> = (0..count).into_par_iter().map(number).collect();
        let mut checked = Vec::new();
        for token in [0, job.tokens / 2, job.tokens - 1] {
            let of_token = &x[token as usize * columns..][..columns];
            checked.push((token, matrix.products(of_token, half)?));
        }
        let halves = halves_of(&matrix, half)?;
        let readers = (0..job.threads.max(1)).map(|_| HalfReader::new(gpu));
        let memory = |bytes: usize| DeviceMemory::new(gpu, bytes.max(ROW as usize));
        let raw = matrix.bytes() as usize;
        let rig = Self {
            readers: readers.collect::<Result<_>>()?,
            products: StreamedGemm::load(gpu)?,
            limit,
            stream: Stream::new(gpu)?,
            half,
            read_blocks: job.read_blocks,
            tokens: job.tokens,
            checked,
            weights: memory(halves.len().max(raw))?,
            halves,
            x: memory(x.len() * 2)?,
            y: memory(job.tokens as usize * job.rows as usize * 4)?,
            workspace: memory(StreamedGemm::workspace_bytes(&matrix) as usize)?,
            matrix,
        };
        let bytes: Vec<u8> = x.par_iter().flat_map_iter(|x| x.to_le_bytes()).collect();
        rig.x.upload(0, &bytes)?;
        rig.load()?;
        Ok(rig)
    }

    /// Uploads the halves to GPU memory.
    fn load(&self) -> Result<()> {
        self.weights.upload(0, &self.halves)
    }

    fn product(&self) -> GemmOperands {
        GemmOperands {
            x: self.x.address(),
            y: self.y.address(),
            workspace: self.workspace.address(),
            tokens: self.tokens,
            half: self.half,
            readers: self.read_blocks,
        }
    }

    /// Measures the seconds of `product`, until its stream is done; then some tokens are compared.
    fn timed(&self, product: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.y.fill(0xFF)?;
        let begin = Instant::now();
        product()?;
        self.stream.wait(LIMIT, || Ok(()))?;
        let seconds = begin.elapsed().as_secs_f64();
        let row_bytes = self.matrix.rows as usize * 4;
        let mut bytes = vec![0; row_bytes];
        // Other orders of sums of elements of about 0.1.
        let tolerance = 4e-6 * self.matrix.columns() as f32;
        for (token, expected) in &self.checked {
            self.y.download(*token as usize * row_bytes, &mut bytes)?;
            let words = bytes.as_chunks::<4>().0.iter();
            let found = words.map(|word| f32::from_le_bytes(*word));
            for (row, (found, right)) in found.zip(expected).enumerate() {
                if found.is_nan() || (found - right).abs() > tolerance {
                    return Err(Error::internal(format!(
                        "token {token}, row {row} of a product is {found}, not {right}"
                    )));
                }
            }
        }
        Ok(seconds)
    }

    fn streamed(&self) -> Result<()> {
        // SAFETY: the memory belongs to this rig, which waits for the product.
        let pending = unsafe {
            let (product, stream) = (self.product(), self.stream.handle());
            self.products.gemm(&self.matrix, &product, stream)?
        };
        streamed::check(pending.wait(LIMIT)?)
    }

    fn resident(&self) -> Result<()> {
        let (w, stream) = (self.weights.address(), self.stream.handle());
        // SAFETY: as above.
        unsafe {
            let product = self.product();
            self.products.resident(&self.matrix, w, &product, stream)
        }
    }

    fn read_then_product(&self) -> Result<()> {
        let (bytes, to) = (self.matrix.bytes(), self.weights.address());
        // SAFETY: as above.
        let pending = unsafe {
            let store = &self.matrix.store;
            store.read_on_gpu(0, bytes, to, self.stream.handle())?
        };
        self.resident()?;
        streamed::check(pending.wait(LIMIT)?)
    }

    fn by_cpu(&self) -> Result<()> {
        let (bytes, to) = (self.matrix.bytes(), self.weights.address());
        by_threads(&self.readers, |reader, part| {
            let fill = |at: u64, data: &mut [u8]| self.matrix.store.read_at(at, data);
            reader.copy_part((bytes, CHUNK), part, to, fill)
        })?;
        self.resident()
    }
}

/// Returns the elements of a matrix as halves.
fn halves_of(matrix: &StoredMatrix, half: HalfFormat) -> Result<Vec<u8>> {
    let (row_bytes, columns) = (matrix.row_bytes as usize, matrix.columns as usize);
    let step = (CHUNK as usize / row_bytes).max(1);
    let mut all = vec![0; matrix.rows as usize * columns * 2];
    let mut bytes = vec![0; step * row_bytes];
    for (number, to) in all.chunks_mut(step * columns * 2).enumerate() {
        let bytes = &mut bytes[..to.len() / (columns * 2) * row_bytes];
        let at = matrix.offset + (number * step * row_bytes) as u64;
        matrix.store.read_at(at, bytes)?;
        let rows = bytes.par_chunks(row_bytes);
        rows.zip(to.par_chunks_mut(columns * 2))
            .for_each(|(row, to)| {
                let mut numbers = vec![0.0; columns];
                reference::unpack(matrix.stored, row, &mut numbers);
                for (to, number) in to.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                    *to = half.of(number).to_le_bytes();
                }
            });
    }
    Ok(all)
}
