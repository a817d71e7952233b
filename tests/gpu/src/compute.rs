//! Products of matrices on a drive and vectors: each format and many shapes against sums of `f64`, and the results of
//! rows whose reads fail.
// UNSAFETY: products take addresses of vectors.
#![allow(unsafe_code)]

mod gathered;
mod gemm;

use crate::bench::Bench;
use crate::gather::{dice, few_stations, simulated, text};
use crate::limits::limit;
use crate::reading::{planned, until_whole, wait_for};
use crate::report::{Outcome, Report};
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_compute::{StoredMatrix, StreamedProducts, streamed};
use nvme_gpu_kernel::rows::code;
use nvme_host::Store;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Faults of the drive. `LATE` is longer than a kernel waits.
const FAULTS: [(&str, &str); 10] = [
    ("status", "status:0x281@op=read,nth=9"),
    ("dropped", "drop@op=read,nth=9"),
    ("late", "delay:LATE@op=read,nth=9"),
    ("reordered", "reorder@op=read,every=5"),
    ("duplicate", "duplicate@op=read,nth=9"),
    ("torn-cqe", "torncqe@op=read,nth=9"),
    ("wrong-cid", "wrongcid:0xfff@op=read,nth=9"),
    ("wrong-phase", "wrongphase@op=read,nth=9"),
    ("dead-cfs", "cfs@op=read,nth=9"),
    ("all-ones", "allones@op=read,nth=9"),
];

/// Content of `y` before a product, and of the elements around it at all times.
const POISON: f32 = -77.25;
/// Elements of the guards.
const GUARD: usize = 16;
/// Largest error of an element against the sum of `f64`, relative to the sum of the absolute values of its products.
const TOLERANCE: f64 = 1e-5;

pub fn all(report: &mut Report, bench: &Bench) {
    for stored in StoredFormat::ALL {
        let name = format!("{stored:?}").to_lowercase();
        for block in [512, 4096] {
            report.test(&format!("gemv/shapes/{name}/block-{block}"), |_| {
                shapes(bench, stored, block)
            });
        }
    }
    report.test("gemv/large", |_| large(bench));
    report.test("gemv/usage", |_| usage(bench));
    report.test("gemv/streams", |_| streams(bench));
    report.test("gemv/graph", |_| graph(bench));
    for (name, fault) in FAULTS {
        report.test(&format!("gemv/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
    report.test("gemv/fault/over-and-over", |_| outages(bench));
    gathered::all(report, bench);
    gemm::all(report, bench);
}

/// A drive and the kernel.
struct Drive {
    store: Arc<Store>,
    products: StreamedProducts,
    stream: Stream,
}

impl Drive {
    fn new(bench: &Bench, device: &str, timeout: Duration) -> Outcome<Self> {
        let open = || -> nvme_host::Result<Self> {
            let options = few_stations(bench, timeout);
            Ok(Self {
                store: Arc::new(Store::open(device, &options)?),
                products: StreamedProducts::load(&bench.gpu)?,
                stream: Stream::new(&bench.gpu)?,
            })
        };
        open().map_err(text)
    }

    fn simulated(bench: &Bench, block: u32, fault: &str, timeout: Duration) -> Outcome<Self> {
        let name = simulated(16, block, fault);
        Self::new(bench, &name, timeout)
    }
}

/// A matrix on a drive, a vector, and what their product is.
struct Job {
    matrix: StoredMatrix,
    stored: StoredFormat,
    columns: u32,
    offset: u64,
    x: Vec<f32>,
    /// Each element of the product, and its allowed error.
    expected: Vec<(f64, f64)>,
    device_x: DeviceMemory,
    /// Memory of `y` with a guard before and after it.
    device_y: DeviceMemory,
}

impl Job {
    /// `shape` is rows and columns.
    fn new(
        drive: &Drive,
        bench: &Bench,
        stored: StoredFormat,
        (rows, columns): (u32, u32),
        offset: u64,
        seed: u64,
    ) -> Outcome<Self> {
        let mut throw = dice(seed);
        let x: Vec<f32> = (0..columns)
            .map(|_| throw(2001) as f32 / 1000.0 - 1.0)
            .collect();
        let matrix =
            StoredMatrix::new(&drive.store, offset, stored, rows, columns).map_err(text)?;
        let memory = |count: usize| DeviceMemory::new(&bench.gpu, count * 4).map_err(text);
        let mut job = Self {
            matrix,
            stored,
            columns,
            offset,
            device_x: memory(x.len())?,
            device_y: memory(rows as usize + 2 * GUARD)?,
            x,
            expected: Vec::new(),
        };
        job.device_x.upload(0, &bytes_of(&job.x)).map_err(text)?;
        job.write(drive, seed)?;
        Ok(job)
    }

    /// Other weights.
    fn write(&mut self, drive: &Drive, seed: u64) -> Outcome<()> {
        let row_bytes = self.stored.row_bytes(self.columns).unwrap_or(0) as usize;
        let mut bytes = vec![0; row_bytes * self.matrix.rows() as usize];
        random_weights::fill(self.stored, seed, &mut bytes);
        drive.store.write_at(self.offset, &bytes).map_err(text)?;
        self.expected = bytes
            .chunks_exact(row_bytes)
            .map(|row| self.product(row))
            .collect();
        Ok(())
    }

    /// Returns the product of a row by `f64`, and the sum of the sizes.
    fn product(&self, row: &[u8]) -> (f64, f64) {
        let half = |k: u32| u16::from_le_bytes([row[2 * k as usize], row[2 * k as usize + 1]]);
        let (mut sum, mut size) = (0.0, 0.0);
        for unit in 0..self.columns / 32 {
            self.stored.each(unit, half, |i, weight| {
                let product = f64::from(weight) * f64::from(self.x[(unit * 32 + i) as usize]);
                sum += product;
                size += product.abs();
            });
        }
        (sum, size * TOLERANCE)
    }

    fn start_on(&self, drive: &Drive, stream: u64) -> nvme_host::Result<PendingRows> {
        let y = self.device_y.address() + 4 * GUARD as u64;
        // SAFETY: the vectors outlive the product, which is waited for.
        unsafe {
            let products = &drive.products;
            products.gemv(&self.matrix, self.device_x.address(), y, stream)
        }
    }

    fn poison(&self) -> Outcome<()> {
        let all = vec![POISON; self.matrix.rows() as usize + 2 * GUARD];
        self.device_y.upload(0, &bytes_of(&all)).map_err(text)
    }

    /// Runs the product once and checks every element; returns the failures, whose rows are NaN.
    fn run(&self, drive: &Drive) -> Outcome<RowFailures> {
        self.poison()?;
        let pending = self.start_on(drive, drive.stream.handle()).map_err(text)?;
        let ended = pending.wait(limit()).map_err(text)?;
        self.check(ended.failures)?;
        Ok(ended.failures)
    }

    /// Checks each element: right, or NaN and counted as failed.
    fn check(&self, failures: RowFailures) -> Outcome<()> {
        let rows = self.matrix.rows() as usize;
        let mut bytes = vec![0; self.device_y.len()];
        self.device_y.download(0, &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let all: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        let y = &all[GUARD..GUARD + rows];
        if all[..GUARD]
            .iter()
            .chain(&all[GUARD + rows..])
            .any(|guard| *guard != POISON)
        {
            return Err("elements beside the product were written".to_owned());
        }
        for (row, (found, (expected, tolerance))) in y.iter().zip(&self.expected).enumerate() {
            let apart = (f64::from(*found) - expected).abs();
            if !found.is_nan() && apart > *tolerance {
                return Err(format!(
                    "{:?}, {rows} x {} at {}: element {row} is {found}, not {expected}",
                    self.stored, self.columns, self.offset
                ));
            }
        }
        let lost = y.iter().filter(|found| found.is_nan()).count() as u64;
        let first = y.iter().position(|found| found.is_nan());
        let said = failures.first.map(|(row, _)| row as usize);
        match (failures.rows, said) == (lost, first) {
            true => Ok(()),
            false => Err(format!(
                "{lost} elements are NaN, first {first:?}: {failures:?}"
            )),
        }
    }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Numbers of rows: none, one, odd ones; rows of one group and of thousands, at even bytes of the drive.
fn shapes(bench: &Bench, stored: StoredFormat, block: u32) -> Outcome<String> {
    let drive = Drive::simulated(bench, block, "", limit())?;
    let least = stored.block().0.max(32);
    let (mut done, mut most) = (0, 0u64);
    for (rows, columns, offset) in [
        (0, least, 0),
        (1, least, 0),
        (1, least, 4094),
        (1, 40 * least, 30),
        (2, 13_056, 2),
        (7, least, 4096 - 2),
        (31, 3 * least, 100),
        (33, 1024, 32 << 10),
        (257, 5 * least, 98),
        (1001, 256, 6),
        (300, 1536, 32_766),
        (65, 4352, 1_000_002),
    ] {
        let job = Job::new(
            &drive,
            bench,
            stored,
            (rows, columns),
            offset,
            u64::from(rows) + 3,
        )?;
        let failures = job.run(&drive)?;
        if failures.rows != 0 {
            return Err(format!("{rows} x {columns} at {offset}: {failures:?}"));
        }
        let by_cpu = job.matrix.product(&job.x).map_err(text)?;
        let is_right = |(found, (expected, tolerance)): (&f32, &(f64, f64))| {
            (f64::from(*found) - expected).abs() <= *tolerance
        };
        if !by_cpu.iter().zip(&job.expected).all(is_right) {
            return Err(format!("{rows} x {columns}: the CPU's product is wrong"));
        }
        done += 1;
        most = most.max(job.matrix.bytes());
    }
    Ok(format!("{done} matrices of up to {most} bytes"))
}

/// Each warp has many pieces, so that its ring wraps often.
fn large(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let mut bytes = 0;
    for (stored, shape) in [
        (StoredFormat::Bf16, (1500, 4096)),
        (StoredFormat::Q8_0, (37, 262_144)),
        (StoredFormat::Q6K, (4000, 4096)),
    ] {
        let job = Job::new(&drive, bench, stored, shape, 4098, 5)?;
        let failures = job.run(&drive)?;
        if failures.rows != 0 {
            return Err(format!("{stored:?}: {failures:?}"));
        }
        bytes += job.matrix.bytes();
    }
    Ok(format!("{bytes} bytes"))
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let size = drive.store.len();
    for (what, stored, rows, columns, offset) in [
        ("an odd byte", StoredFormat::Bf16, 1, 32, 1),
        ("half a unit", StoredFormat::Bf16, 1, 16, 0),
        ("half a block", StoredFormat::Q6K, 1, 128, 0),
        ("no columns", StoredFormat::F32, 1, 0, 0),
        ("past the end", StoredFormat::F32, 2, 32, size - 128),
    ] {
        match StoredMatrix::new(&drive.store, offset, stored, rows, columns) {
            Err(error) if error.exit_code() == 2 => {}
            other => return Err(format!("{what}: {other:?}")),
        }
    }
    let job = Job::new(&drive, bench, StoredFormat::F32, (3, 32), 0, 1)?;
    if job.matrix.product(&[0.0; 31]).is_ok() {
        return Err("a short vector".to_owned());
    }
    // SAFETY: the call is refused.
    let odd = unsafe {
        let x = job.device_x.address();
        drive
            .products
            .gemv(&job.matrix, x + 2, x, drive.stream.handle())
    };
    if odd.map(drop).map_err(|error| error.exit_code()) != Err(2) {
        return Err("a vector between two words".to_owned());
    }
    let by_file = {
        let file = crate::by_host::Scratch::new()?;
        let of_file = Drive::new(bench, &file.device(), limit())?;
        let job = Job::new(&of_file, bench, StoredFormat::F32, (3, 32), 0, 1)?;
        let refused = job.start_on(&of_file, of_file.stream.handle());
        refused.map(drop).map_err(|error| error.exit_code())
    };
    match by_file {
        Err(2) => Ok("refused before anything is launched".to_owned()),
        other => Err(format!("a matrix in a file: {other:?}")),
    }
}

/// Products of several streams share the stations.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let streams = crate::gather::several_streams(bench, 4)?;
    let jobs = (0..8u64).map(|at| {
        let stored = StoredFormat::ALL[at as usize];
        Job::new(&drive, bench, stored, (100 + at as u32, 1024), at << 20, at)
    });
    let jobs: Vec<Job> = jobs.collect::<Outcome<_>>()?;
    for _ in 0..10 {
        let started = jobs
            .iter()
            .zip(streams.iter().cycle())
            .map(|(job, stream)| {
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
    Ok("80 products over 4 streams".to_owned())
}

/// A product in a graph sees the data written before each launch, and is NaN after the store was closed.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let mut job = Job::new(&drive, bench, StoredFormat::Q4K, (200, 2048), 4096, 1)?;
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
    // The matrix shares the store.
    let Job {
        matrix,
        expected,
        device_y,
        device_x,
        ..
    } = job;
    drop((matrix, store, products));
    graph.launch(&stream).map_err(text)?;
    wait_for(4)?;
    let failures = pending.last().failures;
    let mut last = [0; 4];
    device_y
        .download((GUARD + expected.len() - 1) * 4, &mut last)
        .map_err(text)?;
    drop(device_x);
    match (
        failures.rows,
        failures.first,
        f32::from_le_bytes(last).is_nan(),
    ) {
        (200, Some((0, code::GONE)), true) => {
            Ok("3 launches, NaN when the store is gone".to_owned())
        }
        other => Err(format!("after the store: {other:?}")),
    }
}

/// Elements whose rows' reads fail are NaN and counted, none is wrong, and a later product is complete if the
/// controller comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let drive = Drive::simulated(bench, 4096, &fault, timeout)?;
    // Rows are whole blocks, so that the host reads none of them.
    let job = Job::new(&drive, bench, StoredFormat::Bf16, (512, 4096), 0, 8)?;
    until_whole(name, (8, 512), "rows", || job.run(&drive))
}

/// Reads are lost repeatedly under products on several streams: none is wrong, and no I/O context is lost.
fn outages(bench: &Bench) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let drive = Drive::simulated(bench, 4096, "drop@op=read,every=400", timeout)?;
    let streams = crate::gather::several_streams(bench, 4)?;
    let jobs =
        (0..4u64).map(|at| Job::new(&drive, bench, StoredFormat::Q8_0, (250, 2048), at << 20, at));
    let jobs: Vec<Job> = jobs.collect::<Outcome<_>>()?;
    let (mut failed, mut whole, mut rounds) = (0, 0, 0);
    let begin = Instant::now();
    while rounds < 15 || failed == 0 || whole == 0 {
        rounds += 1;
        let started = jobs.iter().zip(&streams).map(|(job, stream)| {
            job.poison()?;
            job.start_on(&drive, stream.handle()).map_err(text)
        });
        let started: Vec<PendingRows> = started.collect::<Outcome<_>>()?;
        let before = failed;
        for (job, pending) in jobs.iter().zip(&started) {
            let failures = pending.wait(limit()).map_err(text)?.failures;
            job.check(failures)?;
            failed += failures.rows;
            whole += u32::from(failures.rows == 0);
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "{rounds} rounds: {failed} rows failed, {whole} products were whole"
            ));
        }
        if failed > before {
            // The controller is being reset.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(format!(
        "{failed} rows failed, {whole} of {} products were whole, none is wrong",
        rounds * 4
    ))
}
