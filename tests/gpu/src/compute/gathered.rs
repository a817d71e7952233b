//! Products of a vector and rows that ids in GPU memory name, by `nvme_gemv_gathered`: each format and many shapes against
//! sums of `f64`; ids that the matrix does not have; what becomes of elements whose reads fail.
// UNSAFETY: products take addresses of ids and vectors.
#![allow(unsafe_code)]

use super::{Drive, GUARD, Job, Outcome, POISON, bytes_of};
use crate::bench::Bench;
use crate::gather::{dice, several_streams, text};
use crate::limits::limit;
use crate::reading::{planned, until_whole, wait_for};
use crate::report::Report;
use nvme_compute::random_weights::StoredFormat;
use nvme_compute::{GpuIds, streamed};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures};

pub fn all(report: &mut Report, bench: &Bench) {
    for stored in StoredFormat::ALL {
        let name = format!("{stored:?}").to_lowercase();
        for block in [512, 4096] {
            report.test(&format!("gemv/ids/shapes/{name}/block-{block}"), |_| {
                shapes(bench, stored, block)
            });
        }
    }
    report.test("gemv/ids/usage", |_| usage(bench));
    report.test("gemv/ids/streams", |_| streams(bench));
    report.test("gemv/ids/graph", |_| graph(bench));
    for (name, fault) in super::FAULTS {
        report.test(&format!("gemv/ids/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
}

/// Ids of rows of a job, and the memory of the products.
struct Ids {
    ids: Vec<i64>,
    wide: bool,
    device_ids: DeviceMemory,
    device_y: DeviceMemory,
}

impl Ids {
    fn new(bench: &Bench, ids: Vec<i64>, wide: bool) -> Outcome<Self> {
        let memory = |bytes: usize| DeviceMemory::new(&bench.gpu, bytes).map_err(text);
        let bytes: Vec<u8> = match wide {
            true => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            false => ids
                .iter()
                .flat_map(|id| (*id as i32).to_le_bytes())
                .collect(),
        };
        let made = Self {
            device_ids: memory(bytes.len())?,
            device_y: memory((ids.len() + 2 * GUARD) * 4)?,
            ids,
            wide,
        };
        made.device_ids.upload(0, &bytes).map_err(text)?;
        Ok(made)
    }

    fn start_on(&self, drive: &Drive, job: &Job, stream: u64) -> nvme_host::Result<PendingRows> {
        let ids = GpuIds {
            address: self.device_ids.address(),
            count: self.ids.len() as u64,
            wide: self.wide,
        };
        let y = self.device_y.address() + 4 * GUARD as u64;
        let vectors = (job.device_x.address(), y);
        // SAFETY: ids and vectors outlive the product, which is waited for.
        unsafe {
            let products = &drive.products;
            products.gathered(&job.matrix, ids, vectors, stream)
        }
    }

    fn poison(&self) -> Outcome<()> {
        let all = vec![POISON; self.ids.len() + 2 * GUARD];
        self.device_y.upload(0, &bytes_of(&all)).map_err(text)
    }

    fn run(&self, drive: &Drive, job: &Job) -> Outcome<RowFailures> {
        self.poison()?;
        let pending = self.start_on(drive, job, drive.stream.handle());
        let ended = pending.map_err(text)?.wait(limit()).map_err(text)?;
        self.check(job, ended.failures)?;
        Ok(ended.failures)
    }

    /// Checks each element: right, or NaN and counted as failed. One without a row is NaN in any case.
    fn check(&self, job: &Job, failures: RowFailures) -> Outcome<()> {
        let mut bytes = vec![0; self.device_y.len()];
        self.device_y.download(0, &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let all: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        let (before, rest) = all.split_at(GUARD);
        let (y, after) = rest.split_at(self.ids.len());
        if before.iter().chain(after).any(|guard| *guard != POISON) {
            return Err("elements beside the product were written".to_owned());
        }
        let of_id = |id: i64| {
            usize::try_from(id)
                .ok()
                .and_then(|row| job.expected.get(row))
        };
        for (at, (found, id)) in y.iter().zip(&self.ids).enumerate() {
            let is_right = match of_id(*id) {
                Some((expected, tolerance)) => {
                    found.is_nan() || (f64::from(*found) - expected).abs() <= *tolerance
                }
                None => found.is_nan(),
            };
            if !is_right {
                return Err(format!(
                    "{:?} of {} columns: element {at} of id {id} is {found}, not {:?}",
                    job.stored,
                    job.columns,
                    of_id(*id)
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

/// No id, one, and many; the same row again and again; ids that there are not; rows of one group, of several pieces, and
/// between blocks.
fn shapes(bench: &Bench, stored: StoredFormat, block: u32) -> Outcome<String> {
    let drive = Drive::simulated(bench, block, "", limit())?;
    let least = stored.block().0.max(32);
    let (mut done, mut throw) = (0, dice(u64::from(block)));
    for (rows, columns, offset, count) in [
        (1, least, 0, 0),
        (1, least, 4094, 1),
        (9, 40 * least, 30, 33),
        (64, 2048, 4096, 700),
        (33, 1024, 32 << 10, 257),
        (7, 13_056, 2, 40),
        (4, 66_048, 512, 9),
        (500, 5 * least, 98, 2001),
    ] {
        let job = Job::new(&drive, bench, stored, (rows, columns), offset, 7)?;
        let mut ids: Vec<i64> = (0..count).map(|_| throw(rows.into()) as i64).collect();
        let odd = [
            -1,
            i64::from(rows),
            i64::from(i32::MIN),
            i64::from(i32::MAX),
        ];
        for (place, id) in odd.into_iter().enumerate().filter(|_| count > 30) {
            ids[place * 8 + 1] = id;
        }
        let wide = throw(2) == 0;
        if wide && count > 40 {
            ids[40] = 1 << 32;
        }
        let ids = Ids::new(bench, ids, wide)?;
        let failures = ids.run(&drive, &job)?;
        let missing = |id: &&i64| !(0..i64::from(rows)).contains(*id);
        let without = ids.ids.iter().filter(missing).count() as u64;
        let code = failures.first.map_or(code::OUT_OF_RANGE, |(_, code)| code);
        if (failures.rows, code) != (without, code::OUT_OF_RANGE) {
            return Err(format!("{rows} x {columns} at {offset}: {failures:?}"));
        }
        let there: Vec<i64> = ids.ids.iter().filter(|id| !missing(id)).copied().collect();
        let by_cpu = job.matrix.gathered(&there, &job.x).map_err(text)?;
        for (found, id) in by_cpu.iter().zip(&there) {
            let (expected, tolerance) = job.expected[*id as usize];
            if (f64::from(*found) - expected).abs() > tolerance {
                return Err(format!("{rows} x {columns}: the CPU's product is wrong"));
            }
        }
        done += count;
    }
    Ok(format!("{done} products"))
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let job = Job::new(&drive, bench, StoredFormat::F32, (3, 32), 0, 1)?;
    if job.matrix.gathered(&[3], &job.x).is_ok() || job.matrix.gathered(&[0], &[0.0; 31]).is_ok() {
        return Err("a row, or a vector, that the matrix does not have".to_owned());
    }
    let (x, stream) = (job.device_x.address(), drive.stream.handle());
    let ids = |address: u64, count: u64| GpuIds {
        address,
        count,
        wide: true,
    };
    for (what, ids, vectors) in [
        ("ids between words", ids(x + 4, 1), (x, x)),
        ("a vector between words", ids(x, 1), (x + 2, x)),
        ("2^32 ids", ids(x, 1 << 32), (x, x)),
    ] {
        // SAFETY: the calls are refused.
        let refused = unsafe { drive.products.gathered(&job.matrix, ids, vectors, stream) };
        if refused.map(drop).map_err(|error| error.exit_code()) != Err(2) {
            return Err(what.to_owned());
        }
    }
    Ok("refused before anything is launched".to_owned())
}

/// Products of several streams share the stations.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let streams = several_streams(bench, 4)?;
    let mut throw = dice(3);
    let jobs = (0..8u64).map(|at| {
        let (stored, shape) = (StoredFormat::ALL[at as usize], (100 + at as u32, 1024));
        let job = Job::new(&drive, bench, stored, shape, at << 20, at)?;
        let ids = (0..300).map(|_| throw(100) as i64).collect();
        Ok((job, Ids::new(bench, ids, at % 2 == 0)?))
    });
    let jobs: Vec<(Job, Ids)> = jobs.collect::<Outcome<_>>()?;
    for _ in 0..10 {
        let started = jobs.iter().zip(streams.iter().cycle());
        let started = started.map(|((job, ids), stream)| {
            ids.poison()?;
            ids.start_on(&drive, job, stream.handle()).map_err(text)
        });
        let started: Vec<PendingRows> = started.collect::<Outcome<_>>()?;
        for ((job, ids), pending) in jobs.iter().zip(&started) {
            let ended = pending.wait(limit()).map_err(text)?;
            ids.check(job, ended.failures)?;
            streamed::check(ended).map_err(text)?;
        }
    }
    Ok("80 products over 4 streams".to_owned())
}

/// A graph uses the ids that are in memory when it runs, and gives NaN after the store was closed.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::simulated(bench, 4096, "", limit())?;
    let job = Job::new(&drive, bench, StoredFormat::Q8_0, (200, 2048), 4096, 1)?;
    let mut ids = Ids::new(bench, vec![0; 150], true)?;
    let captured = CudaGraph::capture(&drive.stream, |stream| ids.start_on(&drive, &job, stream));
    let (graph, pending) = captured.map_err(text)?;
    let wait_for = |rounds| wait_for(rounds, || pending.ended());
    for round in 1..=3 {
        ids.ids = (0..150)
            .map(|at| (at * 7 + i64::from(round)) % 200)
            .collect();
        let bytes: Vec<u8> = ids.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        ids.device_ids.upload(0, &bytes).map_err(text)?;
        ids.poison()?;
        graph.launch(&drive.stream).map_err(text)?;
        wait_for(round)?;
        ids.check(&job, pending.last().failures)?;
        streamed::check(pending.last()).map_err(text)?;
    }
    let Drive { store, stream, .. } = drive;
    // The matrix shares the store; the vector stays.
    let Job {
        matrix, device_x, ..
    } = job;
    drop((matrix, store));
    ids.poison()?;
    graph.launch(&stream).map_err(text)?;
    wait_for(4)?;
    let failures = pending.last().failures;
    let mut last = [0; 4];
    let at = (GUARD + ids.ids.len() - 1) * 4;
    ids.device_y.download(at, &mut last).map_err(text)?;
    drop(device_x);
    match (failures.rows, failures.first) {
        (150, Some((0, code::GONE))) if f32::from_le_bytes(last).is_nan() => {
            Ok("3 launches, NaN when the store is gone".to_owned())
        }
        other => Err(format!("after the store: {other:?}")),
    }
}

/// Elements whose reads fail are NaN and counted, none is wrong, and a later product is complete if the controller
/// comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let drive = Drive::simulated(bench, 4096, &fault, timeout)?;
    // Rows are whole blocks, so that the host reads none of them.
    let job = Job::new(&drive, bench, StoredFormat::Bf16, (512, 4096), 0, 8)?;
    let mut throw = dice(21);
    let ids = (0..900).map(|_| throw(512) as i64).collect();
    let ids = Ids::new(bench, ids, false)?;
    until_whole(name, (1, 900), "products", || ids.run(&drive, &job))
}
