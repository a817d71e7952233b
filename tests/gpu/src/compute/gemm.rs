//! Products of halves and matrices that stream from a drive, by `nvme_gemm_streamed`: each format and many shapes against
//! sums of `f64`; what becomes of columns whose reads fail; and the same of matrices in GPU memory.
// UNSAFETY: products take addresses of GPU memory.
#![allow(unsafe_code)]

use super::{GUARD, Outcome, POISON, bytes_of};
use crate::bench::Bench;
use crate::gather::{dice, few_stations, several_streams, simulated, text};
use crate::limits::{finish, limit};
use crate::reading::{planned, until_whole, wait_for};
use crate::report::Report;
use nvme_compute::gemm::{GemmOperands, StreamedGemm};
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_compute::{HalfFormat, StoredMatrix, streamed};
use nvme_gpu_kernel::rows::code;
use nvme_host::Store;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures, Stream};
use std::sync::Arc;
use std::time::Duration;

/// Largest error of an element against the sum of `f64`, relative to the sum of the absolute values of its products.
const TOLERANCE: f64 = 3e-5;
const FORMATS: [StoredFormat; 7] = [
    StoredFormat::Bf16,
    StoredFormat::F16,
    StoredFormat::Q8_0,
    StoredFormat::Q4_0,
    StoredFormat::Q4_1,
    StoredFormat::Q4K,
    StoredFormat::Q6K,
];

pub fn all(report: &mut Report, bench: &Bench) {
    for stored in FORMATS {
        let name = format!("{stored:?}").to_lowercase();
        for block in [512, 4096] {
            report.test(&format!("gemm/shapes/{name}/block-{block}"), |_| {
                shapes(bench, stored, block)
            });
        }
    }
    report.test("gemm/resident", |_| resident(bench));
    report.test("gemm/usage", |_| usage(bench));
    report.test("gemm/streams", |_| streams(bench));
    report.test("gemm/graph", |_| graph(bench));
    for (name, fault) in super::FAULTS {
        for stored in [StoredFormat::Bf16, StoredFormat::Q8_0] {
            let kind = format!("{stored:?}").to_lowercase();
            report.test(&format!("gemm/fault/{name}/{kind}"), |_| {
                faults(bench, (name, fault), stored)
            });
        }
    }
}

/// A drive and the kernels.
struct Drive {
    store: Arc<Store>,
    products: StreamedGemm,
    stream: Stream,
}

impl Drive {
    fn simulated(bench: &Bench, block: u32, fault: &str, timeout: Duration) -> Outcome<Self> {
        let device = simulated(16, block, fault);
        let open = || -> nvme_host::Result<Self> {
            let options = few_stations(bench, timeout);
            Ok(Self {
                store: Arc::new(Store::open(&device, &options)?),
                products: StreamedGemm::load(&bench.gpu)?,
                stream: Stream::new(&bench.gpu)?,
            })
        };
        open().map_err(text)
    }
}

/// The shape and the formats of a product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    stored: StoredFormat,
    half: HalfFormat,
    tokens: u32,
    rows: u32,
    columns: u32,
    offset: u64,
    readers: u32,
}

/// A matrix on a drive, rows of halves, and what their product is.
struct Job {
    shape: Shape,
    matrix: StoredMatrix,
    x: Vec<u16>,
    /// Each element of the product, and its allowed error.
    expected: Vec<(f64, f64)>,
    device_x: DeviceMemory,
    /// Memory of `y` with a guard before and after it.
    device_y: DeviceMemory,
    workspace: DeviceMemory,
}

impl Job {
    fn new(drive: &Drive, bench: &Bench, shape: Shape, seed: u64) -> Outcome<Self> {
        let matrix = StoredMatrix::new(
            &drive.store,
            shape.offset,
            shape.stored,
            shape.rows,
            shape.columns,
        );
        let matrix = matrix.map_err(text)?;
        let mut throw = dice(seed);
        let x = (0..shape.tokens * shape.columns)
            .map(|_| shape.half.of(throw(2001) as f32 / 1000.0 - 1.0));
        let x: Vec<u16> = x.collect();
        let memory = |bytes: usize| DeviceMemory::new(&bench.gpu, bytes.max(16)).map_err(text);
        let elements = shape.tokens as usize * shape.rows as usize;
        let mut job = Self {
            shape,
            device_x: memory(x.len() * 2)?,
            device_y: memory((elements + 2 * GUARD) * 4)?,
            workspace: memory(StreamedGemm::workspace_bytes(&matrix) as usize)?,
            matrix,
            x,
            expected: Vec::new(),
        };
        // Poisoned, so that a launch that relied on words or stages of an earlier one would fail.
        job.workspace.fill(0xFF).map_err(text)?;
        let bytes: Vec<u8> = job.x.iter().flat_map(|x| x.to_le_bytes()).collect();
        job.device_x.upload(0, &bytes).map_err(text)?;
        job.write(drive, seed)?;
        Ok(job)
    }

    /// Other weights.
    fn write(&mut self, drive: &Drive, seed: u64) -> Outcome<()> {
        let shape = self.shape;
        let row_bytes = shape.stored.row_bytes(shape.columns).unwrap_or(0) as usize;
        let mut bytes = vec![0; row_bytes * shape.rows as usize];
        random_weights::fill(shape.stored, seed, &mut bytes);
        drive.store.write_at(shape.offset, &bytes).map_err(text)?;
        let rows = bytes.chunks_exact(row_bytes).map(|row| self.halves(row));
        let rows: Vec<Vec<f32>> = rows.collect();
        let columns = shape.columns as usize;
        let mut expected = Vec::new();
        for x in self.x.chunks(columns) {
            let x: Vec<f32> = x.iter().map(|x| shape.half.wide(*x)).collect();
            expected.extend(rows.iter().map(|w| {
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (mut sum, mut size) = (0.0, 0.0);
                for term in terms {
                    sum += term;
                    size += term.abs();
                }
                (sum, size * TOLERANCE)
            }));
        }
        self.expected = expected;
        Ok(())
    }

    fn halves(&self, row: &[u8]) -> Vec<f32> {
        let half = |k: u32| u16::from_le_bytes([row[2 * k as usize], row[2 * k as usize + 1]]);
        let mut w = vec![0.0; self.shape.columns as usize];
        for unit in 0..self.shape.columns / 32 {
            self.shape.stored.each(unit, half, |i, weight| {
                let rounded = self.shape.half.of(weight);
                w[(unit * 32 + i) as usize] = self.shape.half.wide(rounded);
            });
        }
        w
    }

    fn product(&self) -> GemmOperands {
        GemmOperands {
            x: self.device_x.address(),
            y: self.device_y.address() + 4 * GUARD as u64,
            workspace: self.workspace.address(),
            tokens: self.shape.tokens,
            half: self.shape.half,
            readers: self.shape.readers,
        }
    }

    fn start_on(&self, drive: &Drive, stream: u64) -> nvme_host::Result<PendingRows> {
        // SAFETY: all of the memory outlives the product, which is waited for.
        unsafe { drive.products.gemm(&self.matrix, &self.product(), stream) }
    }

    fn poison(&self) -> Outcome<()> {
        let all = vec![POISON; self.expected.len() + 2 * GUARD];
        self.device_y.upload(0, &bytes_of(&all)).map_err(text)
    }

    fn run(&self, drive: &Drive) -> Outcome<RowFailures> {
        self.poison()?;
        let pending = self.start_on(drive, drive.stream.handle()).map_err(text)?;
        let ended = pending.wait(limit()).map_err(text)?;
        self.check(ended.failures)?;
        Ok(ended.failures)
    }

    /// Checks each element: right, or NaN in a column that was counted as failed.
    fn check(&self, failures: RowFailures) -> Outcome<()> {
        let count = self.expected.len();
        let mut bytes = vec![0; (count + 2 * GUARD) * 4];
        self.device_y.download(0, &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let all: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        let (before, rest) = all.split_at(GUARD);
        let (y, after) = rest.split_at(count);
        if before.iter().chain(after).any(|guard| *guard != POISON) {
            return Err("elements beside the product were written".to_owned());
        }
        let rows = self.shape.rows as usize;
        let mut lost = vec![false; rows];
        for (at, (found, (expected, tolerance))) in y.iter().zip(&self.expected).enumerate() {
            lost[at % rows] |= found.is_nan();
            if !found.is_nan() && (f64::from(*found) - expected).abs() > *tolerance {
                return Err(format!(
                    "{:?}: token {}, row {} is {found}, not {expected}",
                    self.shape,
                    at / rows,
                    at % rows
                ));
            }
        }
        let count = lost.iter().filter(|lost| **lost).count() as u64;
        let first = lost.iter().position(|lost| *lost);
        let said = failures.first.map(|(row, _)| row as usize);
        match (failures.rows, said) == (count, first) {
            true => Ok(()),
            false => Err(format!(
                "{count} columns are NaN, first {first:?}: {failures:?}"
            )),
        }
    }
}

fn half_of(stored: StoredFormat, other: bool) -> HalfFormat {
    match stored {
        StoredFormat::Bf16 => HalfFormat::Bf16,
        StoredFormat::F16 => HalfFormat::F16,
        _ if other => HalfFormat::F16,
        _ => HalfFormat::Bf16,
    }
}

/// No row or token, one, odd numbers, several strips; rows of one unit and of several pieces, at even bytes of the drive.
fn shapes(bench: &Bench, stored: StoredFormat, block: u32) -> Outcome<String> {
    let drive = Drive::simulated(bench, block, "", limit())?;
    let least = stored.block().0.max(32);
    let mut done = 0;
    for (at, (tokens, rows, columns, offset, readers)) in [
        (0, 5, least, 0, 1),
        (5, 0, least, 0, 1),
        (1, 1, least, 4094, 1),
        (3, 2, 40 * least, 30, 2),
        (130, 257, 3 * least, 4096 - 2, 1),
        (129, 1537, least, 6, 2),
        (17, 2100, 512, 98, 3),
        (64, 700, 1536, 8192, 2),
        (5, 9, 66_048, 512, 2),
        (300, 513, 768, 32_766, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let shape = Shape {
            stored,
            half: half_of(stored, at % 2 == 0),
            tokens,
            rows,
            columns,
            offset,
            readers,
        };
        let job = Job::new(&drive, bench, shape, at as u64 + 3)?;
        let failures = job.run(&drive)?;
        if failures.rows != 0 {
            return Err(format!("{shape:?}: {failures:?}"));
        }
        let by_cpu = job.matrix.products(&job.x, shape.half).map_err(text)?;
        let is_right = |(found, (expected, tolerance)): (&f32, &(f64, f64))| {
            (f64::from(*found) - expected).abs() <= *tolerance
        };
        if !by_cpu.iter().zip(&job.expected).all(is_right) {
            return Err(format!("{shape:?}: the CPU's product is wrong"));
        }
        done += job.expected.len();
    }
    Ok(format!("{done} elements"))
}

/// Matrices in GPU memory, by the same blocks.
fn resident(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let mut done = 0;
    for (stored, tokens, rows, columns) in [
        (StoredFormat::Bf16, 1, 1, 32),
        (StoredFormat::Bf16, 300, 700, 512),
        (StoredFormat::F16, 129, 1030, 96),
    ] {
        let shape = Shape {
            stored,
            half: half_of(stored, false),
            tokens,
            rows,
            columns,
            offset: 0,
            readers: 1,
        };
        let job = Job::new(&drive, bench, shape, 5)?;
        let mut bytes = vec![0; job.matrix.bytes() as usize];
        drive.store.read_at(0, &mut bytes).map_err(text)?;
        let w = DeviceMemory::new(&bench.gpu, bytes.len()).map_err(text)?;
        w.upload(0, &bytes).map_err(text)?;
        job.poison()?;
        // SAFETY: all of the memory outlives the product, which is waited for.
        let started = unsafe {
            let stream = drive.stream.handle();
            let products = &drive.products;
            products.resident(&job.matrix, w.address(), &job.product(), stream)
        };
        started.map_err(text)?;
        finish(&drive.stream);
        job.check(RowFailures::default())?;
        done += job.expected.len();
    }
    Ok(format!("{done} elements"))
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let shape = Shape {
        stored: StoredFormat::Bf16,
        half: HalfFormat::Bf16,
        tokens: 2,
        rows: 3,
        columns: 32,
        offset: 0,
        readers: 1,
    };
    let job = Job::new(&drive, bench, shape, 1)?;
    let right = job.product();
    let f32s = StoredMatrix::new(&drive.store, 0, StoredFormat::F32, 3, 32).map_err(text)?;
    for (what, matrix, product) in [
        (
            "rows between words",
            &job.matrix,
            GemmOperands {
                x: right.x + 2,
                ..right
            },
        ),
        (
            "a result between words",
            &job.matrix,
            GemmOperands {
                y: right.y + 2,
                ..right
            },
        ),
        (
            "a workspace between words",
            &job.matrix,
            GemmOperands {
                workspace: right.workspace + 4,
                ..right
            },
        ),
        (
            "other halves",
            &job.matrix,
            GemmOperands {
                half: HalfFormat::F16,
                ..right
            },
        ),
        ("f32", &f32s, right),
        (
            "too many tokens",
            &job.matrix,
            GemmOperands {
                tokens: 1 << 31,
                ..right
            },
        ),
    ] {
        // SAFETY: the calls are refused.
        let refused = unsafe { drive.products.gemm(matrix, &product, drive.stream.handle()) };
        if refused.map(drop).map_err(|error| error.exit_code()) != Err(2) {
            return Err(what.to_owned());
        }
    }
    if job.matrix.products(&[0; 31], HalfFormat::Bf16).is_ok() {
        return Err("a part of a row".to_owned());
    }
    Ok("refused before anything is launched".to_owned())
}

/// Products of several streams share stations and multiprocessors.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let streams = several_streams(bench, 4)?;
    let jobs = (0..4u64).map(|at| {
        let stored = FORMATS[at as usize];
        let shape = Shape {
            stored,
            half: half_of(stored, false),
            tokens: 150,
            rows: 600 + at as u32,
            columns: 512,
            offset: at << 20,
            readers: 2,
        };
        Job::new(&drive, bench, shape, at)
    });
    let jobs: Vec<Job> = jobs.collect::<Outcome<_>>()?;
    for _ in 0..5 {
        let started = jobs.iter().zip(&streams).map(|(job, stream)| {
            job.poison()?;
            job.start_on(&drive, stream.handle()).map_err(text)
        });
        let started: Vec<PendingRows> = started.collect::<Outcome<_>>()?;
        for (job, pending) in jobs.iter().zip(&started) {
            let ended = pending.wait(limit()).map_err(text)?;
            job.check(ended.failures)?;
            streamed::check(ended).map_err(text)?;
        }
    }
    Ok("20 products over 4 streams".to_owned())
}

/// A product in a graph sees the data written before each launch, and is NaN after the store was closed.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let shape = Shape {
        stored: StoredFormat::Q4_0,
        half: HalfFormat::F16,
        tokens: 100,
        rows: 1500,
        columns: 256,
        offset: 4096,
        readers: 2,
    };
    let mut job = Job::new(&drive, bench, shape, 1)?;
    let captured = CudaGraph::capture(&drive.stream, |stream| job.start_on(&drive, stream));
    let (graph, pending) = captured.map_err(text)?;
    let wait_for = |rounds| wait_for(rounds, || pending.ended());
    for round in 1..=3 {
        job.write(&drive, u64::from(round) + 50)?;
        job.poison()?;
        graph.launch(&drive.stream).map_err(text)?;
        wait_for(round)?;
        job.check(pending.last().failures)?;
        streamed::check(pending.last()).map_err(text)?;
    }
    let Drive {
        store,
        stream,
        products,
    } = drive;
    job.poison()?;
    // The matrix shares the store.
    let other = Store::open("sim:mem?size=1MiB", &nvme_host::StoreOptions::default());
    let other = Arc::new(other.map_err(text)?);
    job.matrix = StoredMatrix::new(&other, 0, StoredFormat::F32, 0, 32).map_err(text)?;
    drop((store, products));
    graph.launch(&stream).map_err(text)?;
    wait_for(4)?;
    let failures = pending.last().failures;
    job.check(failures)?;
    match (failures.rows, failures.first) {
        (1500, Some((0, code::GONE))) => Ok("3 launches, NaN when the store is gone".to_owned()),
        other => Err(format!("after the store: {other:?}")),
    }
}

/// Columns whose reads fail are NaN and counted, no element is wrong, and a later product is complete if the controller
/// comes back.
fn faults(bench: &Bench, (name, fault): (&str, &str), stored: StoredFormat) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let drive = Drive::simulated(bench, 4096, &fault, timeout)?;
    // Rows are whole blocks, so that the host reads none of them.
    let columns = if stored == StoredFormat::Bf16 {
        2048
    } else {
        4096
    };
    let shape = Shape {
        stored,
        half: HalfFormat::Bf16,
        tokens: 20,
        rows: 2048,
        columns,
        offset: 0,
        readers: 2,
    };
    let job = Job::new(&drive, bench, shape, 8)?;
    until_whole(name, (16, 2048), "columns", || job.run(&drive))
}
