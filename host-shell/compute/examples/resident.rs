//! Products of a matrix in GPU memory and one vector, format by format, beside a copy of the matrix inside the GPU.
//!
//! ```sh
//! cargo run --release -p nvme-compute --example resident -- [ROWS] [COLUMNS] [RUNS]
//! ```
//!
//! 32,768 x 8,192 without numbers: more bytes than the caches of a GPU hold. Weights are random; 64 elements of each
//! product are compared with sums of `f64`. It prints one line of JSON for each format: GB/s of the matrix, medians of
//! RUNS (5) runs that alternate with copies, whose rate counts bytes read and written.
// UNSAFETY: launches and copies over this program's own memory.
#![allow(unsafe_code)]

mod arguments;

use arguments::Arguments;
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_compute::steps::StepKernels;
use nvme_compute_kernel::GemvParameters;
use nvme_host::bench::median;
use nvme_host::cuda::{DeviceMemory, Gpu, Stream, StreamEvent};
use nvme_host::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
const FORMATS: [StoredFormat; 9] = StoredFormat::ALL;
/// Products that follow on each other in one measurement.
const AT_A_TIME: u32 = 10;
/// Rows that are compared.
const CHECKED: usize = 64;
const TOLERANCE: f64 = 1e-5;

fn main() -> std::process::ExitCode {
    arguments::end(run)
}

fn run(words: &Arguments) -> Result<()> {
    let (rows, columns) = (words.number(0, 32768)?, words.number(1, 8192)?);
    let runs = words.number(2, 5)?;
    let gpu = Gpu::open(0)?;
    let steps = StepKernels::load(&gpu)?;
    let stream = Stream::new(&gpu)?;
    for stored in FORMATS {
        let Some(row_bytes) = stored.row_bytes(columns) else {
            continue;
        };
        let case = Case::new(&gpu, stored, (rows, columns, row_bytes))?;
        // What both cost at first is not measured.
        case.product(&steps, &stream)?;
        case.copy(&stream)?;
        case.check(rows)?;
        let (mut products, mut copies) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            products.push(case.product(&steps, &stream)?);
            copies.push(case.copy(&stream)?);
        }
        let rate = |seconds: &[f64], bytes: u64| bytes as f64 / median(seconds) / 1e9;
        let bytes = row_bytes * u64::from(rows);
        let (product, copy) = (rate(&products, bytes), rate(&copies, 2 * bytes));
        println!(
            "{{\"gpu\":\"{}\",\"stored\":\"{stored:?}\",\"rows\":{rows},\"columns\":{columns},\"bytes\":{bytes},\
             \"runs\":{runs},\"gb_per_s\":{product:.1},\"copy_gb_per_s\":{copy:.1},\"of_copy\":{:.3},\"checked\":true}}",
            gpu.describe(),
            product / copy,
        );
    }
    Ok(())
}

struct Case {
    gemv: GemvParameters,
    weights: DeviceMemory,
    other: DeviceMemory,
    _x: DeviceMemory,
    y: DeviceMemory,
    vector: Vec<f32>,
    first: Vec<u8>,
}

impl Case {
    fn new(
        gpu: &Arc<Gpu>,
        stored: StoredFormat,
        (rows, columns, row_bytes): (u32, u32, u64),
    ) -> Result<Self> {
        let bytes = (row_bytes * u64::from(rows)) as usize;
        let memory = |bytes: usize| DeviceMemory::new(gpu, bytes.max(16));
        let (weights, other) = (memory(bytes)?, memory(bytes)?);
        let (x, y) = (memory(columns as usize * 4)?, memory(rows as usize * 4)?);
        // As many rows as are checked, again and again.
        let mut first = vec![0; row_bytes as usize * CHECKED.min(rows as usize)];
        random_weights::fill(stored, 1, &mut first);
        for at in (0..bytes).step_by(first.len().max(1)) {
            let count = first.len().min(bytes - at);
            weights.upload(at, &first[..count])?;
        }
        let mut numbers = vec![0; columns as usize * 4];
        random_weights::fill(StoredFormat::F32, 2, &mut numbers);
        x.upload(0, &numbers)?;
        let vector = numbers.as_chunks::<4>().0.iter();
        Ok(Self {
            gemv: GemvParameters {
                weights: weights.address(),
                x: x.address(),
                y: y.address(),
                row_bytes,
                rows,
                columns,
                stride: rows,
                tokens: 1,
                stored: stored as u32,
                adds: 0,
            },
            vector: vector.map(|word| f32::from_le_bytes(*word)).collect(),
            weights,
            other,
            _x: x,
            y,
            first,
        })
    }

    /// Seconds of a product.
    fn product(&self, steps: &StepKernels, stream: &Stream) -> Result<f64> {
        // SAFETY: the memory belongs to this case, which waits for the stream.
        timed(stream, |stream| unsafe {
            steps.gemv(&self.gemv, stream.handle())
        })
    }

    /// Seconds of a copy of the matrix.
    fn copy(&self, stream: &Stream) -> Result<f64> {
        let (to, from) = (self.other.address(), self.weights.address());
        // SAFETY: as above.
        timed(stream, |stream| unsafe {
            stream.copy_within(to, from, self.weights.len())
        })
    }

    /// Compares the first and the last rows with sums of `f64`.
    fn check(&self, rows: u32) -> Result<()> {
        let mut bytes = vec![0; rows as usize * 4];
        self.y.download(0, &mut bytes)?;
        let stored = StoredFormat::of_number(self.gemv.stored).unwrap_or(StoredFormat::F32);
        let row_bytes = self.gemv.row_bytes as usize;
        for (number, found) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let row = number % (self.first.len() / row_bytes);
            if number >= CHECKED && number + CHECKED < rows as usize {
                continue;
            }
            let row = &self.first[row * row_bytes..][..row_bytes];
            let half = |k: u32| u16::from_le_bytes([row[2 * k as usize], row[2 * k as usize + 1]]);
            let (mut sum, mut size) = (0.0, 0.0);
            for (unit, x) in (0..).zip(self.vector.chunks_exact(32)) {
                stored.each(unit, half, |i, weight| {
                    let product = f64::from(weight) * f64::from(x[i as usize]);
                    sum += product;
                    size += product.abs();
                });
            }
            let found = f64::from(f32::from_le_bytes(*found));
            if found.is_nan() || (found - sum).abs() > size * TOLERANCE {
                return Err(Error::internal(format!(
                    "{stored:?}: row {number} is {found}, not {sum}"
                )));
            }
        }
        Ok(())
    }
}

fn timed(stream: &Stream, work: impl Fn(&Stream) -> Result<()>) -> Result<f64> {
    let begin = StreamEvent::record(stream)?;
    (0..AT_A_TIME).try_for_each(|_| work(stream))?;
    let end = StreamEvent::record(stream)?;
    stream.wait(LIMIT, || Ok(()))?;
    Ok(end.seconds_since(&begin)? / f64::from(AT_A_TIME))
}
