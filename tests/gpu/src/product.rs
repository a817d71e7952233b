//! Products of matrices in memory of the GPU: each format and each kernel for it, against sums of `f64`.
// UNSAFETY: launches over this module's own memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::text;
use crate::limits::finish;
use crate::report::{Outcome, Report};
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_compute_kernel::{BLOCK_THREADS, GemvParameters, PTX, kernel};
use nvme_host::cuda::{DeviceMemory, KernelFunction, LaunchSize, Module, Stream};

/// Content of `y` outside of the product.
const POISON: f32 = -77.25;
/// Largest error of an element against the sum of `f64`, relative to the sum of the absolute values of its products.
const TOLERANCE: f64 = 1e-5;
/// Bytes before and behind the rows that a kernel may load.
const AROUND: usize = 16;
/// Rows, columns as a multiple of the format's least number, vectors, bytes from a multiple of 16 to the first row.
const SHAPES: [(u32, u32, u32, usize); 15] = [
    (0, 1, 1, 0),
    (1, 1, 1, 0),
    (1, 1, 1, 2),
    (3, 7, 2, 6),
    (7, 40, 1, 0),
    (8, 128, 1, 0),
    (9, 131, 3, 14),
    (33, 16, 5, 0),
    (257, 33, 1, 0),
    (2049, 9, 4, 0),
    (8193, 5, 1, 2),
    (8200, 17, 1, 0),
    (20000, 3, 1, 4),
    (70, 129, 1, 10),
    (1000, 300, 2, 8),
];

pub fn all(report: &mut Report, bench: &Bench) {
    for stored in StoredFormat::ALL {
        let name = format!("{stored:?}").to_lowercase();
        report.test(&format!("product/{name}"), |_| shapes(bench, stored));
    }
}

struct Kernels {
    module: Module,
    narrow: KernelFunction,
    wide: KernelFunction,
    quantised: KernelFunction,
    stream: Stream,
}

fn shapes(bench: &Bench, stored: StoredFormat) -> Outcome<String> {
    let load = || -> nvme_host::Result<Kernels> {
        let module = Module::embedded(&bench.gpu, PTX.as_bytes())?;
        Ok(Kernels {
            narrow: module.function(kernel::GEMV)?,
            wide: module.function(kernel::GEMV_WIDE)?,
            quantised: module
                .function_with_shared(kernel::GEMV_QUANTISED, GemvParameters::QUANTISED_SHARED)?,
            stream: Stream::new(&bench.gpu)?,
            module,
        })
    };
    let kernels = load().map_err(text)?;
    let (mut narrow, mut wide, mut quantised) = (0, 0, 0);
    for (at, shape) in SHAPES.into_iter().enumerate() {
        let case = Case::new(bench, stored, shape, at as u64)?;
        for adds in [0, 1] {
            let gemv = GemvParameters { adds, ..case.gemv };
            let blocks = |count: u64, shared_bytes| LaunchSize {
                count: count.clamp(1, 300) as u32,
                threads: BLOCK_THREADS,
                shared_bytes,
            };
            case.run(&kernels, kernels.narrow, blocks(gemv.tiles(), 0), &gemv)?;
            narrow += 1;
            if gemv.is_wide() {
                case.run(&kernels, kernels.wide, blocks(gemv.tiles(), 0), &gemv)?;
                wide += 1;
            }
            if gemv.is_quantised() {
                let blocks = blocks(gemv.items(), GemvParameters::QUANTISED_SHARED);
                case.run(&kernels, kernels.quantised, blocks, &gemv)?;
                quantised += 1;
            }
        }
    }
    Ok(format!(
        "{narrow} by the narrow kernel, {wide} by the wide one, {quantised} by the tensor cores"
    ))
}

struct Case {
    weights: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    gemv: GemvParameters,
    /// The sum of each element, and its allowed error.
    expected: Vec<(f64, f64)>,
}

impl Case {
    fn new(
        bench: &Bench,
        stored: StoredFormat,
        (rows, least, tokens, misaligned): (u32, u32, u32, usize),
        seed: u64,
    ) -> Outcome<Self> {
        let columns = stored.block().0.max(32) * least;
        let row_bytes = stored.row_bytes(columns).unwrap_or(0) as usize;
        let mut bytes = vec![0; row_bytes * rows as usize];
        random_weights::fill(stored, seed, &mut bytes);
        let mut numbers = vec![0; columns as usize * tokens as usize * 4];
        random_weights::fill(StoredFormat::F32, seed + 100, &mut numbers);
        let x: Vec<f32> = numbers
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word))
            .collect();
        let memory = |len: usize| DeviceMemory::new(&bench.gpu, len.max(1)).map_err(text);
        let stride = rows + 3;
        let begin = AROUND + misaligned;
        let case = Self {
            weights: memory(begin + bytes.len() + AROUND)?,
            x: memory(numbers.len())?,
            y: memory((stride * tokens) as usize * 4)?,
            gemv: GemvParameters::default(),
            expected: Vec::new(),
        };
        case.weights.fill(0xFF).map_err(text)?;
        case.weights.upload(begin, &bytes).map_err(text)?;
        case.x.upload(0, &numbers).map_err(text)?;
        let vectors = x.chunks_exact(columns as usize);
        let expected = vectors
            .flat_map(|x| {
                bytes
                    .chunks_exact(row_bytes)
                    .map(move |row| sum(stored, row, x))
            })
            .collect();
        Ok(Self {
            gemv: GemvParameters {
                weights: case.weights.address() + begin as u64,
                x: case.x.address(),
                y: case.y.address(),
                row_bytes: row_bytes as u64,
                rows,
                columns,
                stride,
                tokens,
                stored: stored as u32,
                adds: 0,
            },
            expected,
            ..case
        })
    }

    fn run(
        &self,
        kernels: &Kernels,
        function: KernelFunction,
        blocks: LaunchSize,
        gemv: &GemvParameters,
    ) -> Outcome<()> {
        let poison = POISON.to_le_bytes().repeat(self.y.len() / 4);
        self.y.upload(0, &poison).map_err(text)?;
        // SAFETY: the memory belongs to this case, which waits for the stream.
        let launched = unsafe {
            let module = &kernels.module;
            module.launch_blocks(kernels.stream.handle(), function, blocks, gemv)
        };
        launched.map_err(text)?;
        finish(&kernels.stream);
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes).map_err(text)?;
        let mut found = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word));
        let before = if gemv.adds == 0 {
            0.0
        } else {
            f64::from(POISON)
        };
        let mut expected = self.expected.iter();
        for token in 0..gemv.tokens {
            for row in 0..gemv.stride {
                let value = found.next().unwrap_or(f32::NAN);
                let is_right = match row < gemv.rows {
                    true => expected.next().is_some_and(|(sum, most)| {
                        // The addition rounds once more.
                        let most = most + before.abs() * f64::from(f32::EPSILON);
                        (f64::from(value) - before - sum).abs() <= most
                    }),
                    false => value == POISON,
                };
                if !is_right {
                    return Err(format!("token {token}, row {row}: {value}, {gemv:x?}"));
                }
            }
        }
        Ok(())
    }
}

/// Returns the product of a row and a vector, and the tolerance.
fn sum(stored: StoredFormat, row: &[u8], x: &[f32]) -> (f64, f64) {
    let half = |k: u32| u16::from_le_bytes([row[2 * k as usize], row[2 * k as usize + 1]]);
    let (mut sum, mut size) = (0.0, 0.0);
    for (unit, x) in x.chunks_exact(32).enumerate() {
        stored.each(unit as u32, half, |i, weight| {
            let product = f64::from(weight) * f64::from(x[i as usize]);
            sum += product;
            size += product.abs();
        });
    }
    (sum, size * TOLERANCE)
}
