//! Products with rows that ids name, measured.
// UNSAFETY: launches and copies over this module's own memory.
#![allow(unsafe_code)]

use super::parts::{CopyLimit, HalfReader, by_threads, gpu_of, vector};
use super::{CHUNK, GemvJob, GemvTimes, LIMIT, ROW};
use crate::steps::StepKernels;
use crate::{GpuIds, StoredMatrix, StreamedProducts, streamed};
use nvme_compute_kernel::GemvParameters;
use nvme_host::cuda::{DeviceMemory, RowRequest, Stream};
use nvme_host::store::RowIds;
use nvme_host::{Error, Result, Store};
use std::sync::Arc;
use std::time::Instant;

/// Workload of the measurement: rows at random places of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct GatheredJob {
    /// The matrix, and how it is measured.
    pub matrix: GemvJob,
    /// Number of ids.
    pub ids: u64,
}

/// Writes a matrix to `store` and measures products with some of its rows: by the kernel that reads them, by a
/// gather into GPU memory ([`GemvTimes::ranges`]), with rows that are already in GPU memory, and by reads of
/// the CPU.
///
/// # Errors
/// As [`gemv`](super::gemv).
pub fn gathered(store: &Arc<Store>, job: &GatheredJob) -> Result<GemvTimes> {
    let rig = GatheredFixture::new(store, job)?;
    let mut times = GemvTimes {
        bytes: rig.bytes(),
        limit_bytes: rig.limit.bytes(rig.bytes()),
        cost: rig.products.cost_of_gathered()?,
        ..GemvTimes::default()
    };
    // One run of each comes first and is not counted.
    for run in 0..=job.matrix.runs {
        let to = rig.dense.address();
        let one = [
            rig.timed(|| rig.gathered())?,
            rig.timed(|| rig.gather_then_product())?,
            rig.timed(|| rig.product())?,
            rig.timed(|| rig.by_cpu())?,
            rig.limit.seconds(&rig.stream, rig.bytes(), to)?,
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

struct GatheredFixture {
    readers: Vec<HalfReader>,
    matrix: StoredMatrix,
    products: StreamedProducts,
    steps: StepKernels,
    limit: CopyLimit,
    stream: Stream,
    ids: Vec<i64>,
    device_ids: DeviceMemory,
    /// The rows without gaps, for the product without reads.
    dense: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    expected: Vec<f32>,
}

impl GatheredFixture {
    fn new(store: &Arc<Store>, job: &GatheredJob) -> Result<Self> {
        let (ids, job) = (job.ids, job.matrix);
        let gpu = gpu_of(store)?;
        let matrix = StoredMatrix::new(store, 0, job.stored, job.rows, job.columns)?;
        let limit = CopyLimit::new(gpu, store, &matrix, (job.stored, job.seed))?;
        let x = vector(job.columns);
        let rows = u64::from(job.rows);
        let mixed = |at: u64| (at ^ job.seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let ids: Vec<i64> = (1..=ids).map(|at| (mixed(at) % rows) as i64).collect();
        let bytes_of = |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let id_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let readers = (0..job.threads.max(1)).map(|_| HalfReader::new(gpu));
        let memory = |bytes: usize| DeviceMemory::new(gpu, bytes.next_multiple_of(16));
        let rig = Self {
            readers: readers.collect::<Result<_>>()?,
            expected: matrix.gathered(&ids, &x)?,
            products: StreamedProducts::load(gpu)?,
            steps: StepKernels::load(gpu)?,
            limit,
            stream: Stream::new(gpu)?,
            device_ids: memory(id_bytes.len())?,
            dense: memory((ids.len() as u64 * matrix.row_bytes).max(ROW) as usize)?,
            x: memory(x.len() * 4)?,
            y: DeviceMemory::new(gpu, ids.len() * 4)?,
            matrix,
            ids,
        };
        rig.x.upload(0, &bytes_of(&x))?;
        rig.device_ids.upload(0, &id_bytes)?;
        Ok(rig)
    }

    /// Returns the number of bytes of all rows.
    fn bytes(&self) -> u64 {
        self.ids.len() as u64 * self.matrix.row_bytes
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
        let tolerance = 1e-6 * self.matrix.columns() as f32;
        let words = bytes.as_chunks::<4>().0.iter();
        let y = words.map(|word| f32::from_le_bytes(*word));
        let mut all = y.zip(&self.expected).enumerate();
        match all.find(|(_, (y, right))| y.is_nan() || (y - **right).abs() > tolerance) {
            None => Ok(seconds),
            Some((at, (y, right))) => Err(Error::internal(format!(
                "element {at} of a product is {y}, not {right}"
            ))),
        }
    }

    fn gathered(&self) -> Result<()> {
        let ids = GpuIds {
            address: self.device_ids.address(),
            count: self.ids.len() as u64,
            wide: true,
        };
        let vectors = (self.x.address(), self.y.address());
        // SAFETY: the memory belongs to this rig, which waits for the product.
        let pending = unsafe {
            let stream = self.stream.handle();
            self.products.gathered(&self.matrix, ids, vectors, stream)?
        };
        streamed::check(pending.wait(LIMIT)?)
    }

    fn gather_then_product(&self) -> Result<()> {
        let matrix = &self.matrix;
        let table = matrix
            .store
            .table(matrix.offset, matrix.rows.into(), matrix.row_bytes)?;
        let request = RowRequest {
            ids: self.device_ids.address(),
            wide_ids: true,
            count: self.ids.len() as u64,
            out: self.dense.address(),
            out_stride: matrix.row_bytes,
            status: 0,
        };
        // SAFETY: as above.
        let pending = unsafe { table.gather_on_gpu(&request, self.stream.handle())? };
        self.product()?;
        streamed::check(pending.wait(LIMIT)?)
    }

    /// Launches the product of the rows in GPU memory.
    fn product(&self) -> Result<()> {
        let gemv = GemvParameters {
            weights: self.dense.address(),
            x: self.x.address(),
            y: self.y.address(),
            row_bytes: self.matrix.row_bytes,
            rows: self.ids.len() as u32,
            columns: self.matrix.columns,
            stride: self.ids.len() as u32,
            tokens: 1,
            stored: self.matrix.stored as u32,
            adds: 0,
        };
        // SAFETY: the memory belongs to this rig, which waits for the stream.
        unsafe { self.steps.gemv(&gemv, self.stream.handle()) }
    }

    /// Reads the rows by threads of the CPU, then launches the product.
    fn by_cpu(&self) -> Result<()> {
        let matrix = &self.matrix;
        let table = matrix
            .store
            .table(matrix.offset, matrix.rows.into(), matrix.row_bytes)?;
        let chunk = (CHUNK / matrix.row_bytes).max(1) * matrix.row_bytes;
        let row = |byte: u64| (byte / matrix.row_bytes) as usize;
        by_threads(&self.readers, |reader, part| {
            let fill = |at: u64, data: &mut [u8]| {
                let ids = &self.ids[row(at)..row(at + data.len() as u64)];
                table.gather(RowIds::I64(ids), data, None)?.check()
            };
            reader.copy_part((self.bytes(), chunk), part, self.dense.address(), fill)
        })?;
        self.product()
    }
}
