//! Lifetimes: launches and graphs keep their memory and free it at their end; causes of a stale cache.
// UNSAFETY: asks the driver about its memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::Scratch;
use crate::gather::{BYTES, Drive, Job, dice, shapes_of, text};
use crate::hazards::current;
use crate::limits::limit;
use crate::report::{Outcome, Report};
use cudarc::driver::sys::{self, CUresult};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::{CudaGraph, PendingRows};
use std::time::{Duration, Instant};

/// Largest number of launches of a store that are in progress or captured.
const LAUNCHES: usize = 4096;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device) in [("drive", None), ("file", Some(()))] {
        report.test(&format!("graphs/come-back/{name}"), |_| {
            let file = device.map(|()| Scratch::new()).transpose()?;
            let device = match &file {
                Some(file) => file.device(),
                None => "sim:mem?size=8MiB&queues=8&threads=4".to_owned(),
            };
            come_back(&Drive::open(bench, &device, limit())?)
        });
    }
    report.test("graphs/twice", |_| twice(bench));
    report.test("gather/cache/dropped", |_| dropped(bench));
    report.test("gather/cache/recovery", |_| recovered(bench));
    report.test("gather/shapes/mdts", |_| {
        // Commands of 8 KiB at most.
        let name = "sim:mem?size=8MiB&block=512&mdts=1&queues=8&threads=4";
        shapes_of(&Drive::open(bench, name, limit())?, 3)
    });
    report.test("by-host/chunks", |_| chunks(bench));
}

/// Captures the launches of `start` in the drive's stream.
fn capture(
    drive: &Drive,
    start: impl FnOnce(u64) -> Outcome<PendingRows>,
) -> Outcome<(CudaGraph, PendingRows)> {
    let mut failed = None;
    let captured = CudaGraph::capture(&drive.stream, |stream| {
        start(stream).map_err(|error| {
            failed = Some(error.clone());
            nvme_host::Error::internal(error)
        })
    });
    captured.map_err(|error| failed.unwrap_or_else(|| text(error)))
}

/// There are more captures than a store has launches. A thread of the driver frees the objects of a graph: until it
/// has, a capture may be refused.
fn come_back(drive: &Drive) -> Outcome<String> {
    let table = drive.table(0, 512);
    let job = Job::new(drive, table, vec![3, 1, 2], true, 0)?;
    let (mut made, begin) = (0, Instant::now());
    while made < LAUNCHES + 100 {
        match capture(drive, |stream| job.start_on(drive, stream)) {
            Ok((graph, pending)) => {
                made += 1;
                if made % 1000 == 1 {
                    graph.launch(&drive.stream).map_err(text)?;
                    pending.wait(limit()).map_err(text)?;
                    job.check(drive)?;
                    drive.stream.finish().map_err(text)?;
                }
                drop(graph);
            }
            Err(error) if begin.elapsed() > limit() * 4 => return Err(format!("{made}: {error}")),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    // A handle reports that its graph was destroyed.
    let (graph, pending) = capture(drive, |stream| job.start_on(drive, stream))?;
    if pending.is_over() {
        return Err("a graph that is there is over".to_owned());
    }
    drop(graph);
    let begin = Instant::now();
    while !pending.is_over() {
        if begin.elapsed() > limit() {
            return Err("a graph that is gone is not over".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(format!("{made} captures of one store"))
}

/// Two graphs, of two captures each, launched in turns: each end is counted.
fn twice(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let table = drive.table(0, 4096);
    let jobs = [vec![5; 100], vec![7, -1, 9]].map(|ids| Job::new(&drive, table, ids, true, 0));
    let [first, second] = jobs;
    let (first, second) = (first?, second?);
    let (one, of_first) = capture(&drive, |stream| first.start_on(&drive, stream))?;
    let (other, of_second) = capture(&drive, |stream| second.start_on(&drive, stream))?;
    for round in 1..=20u32 {
        for graph in [&one, &other] {
            graph.launch(&drive.stream).map_err(text)?;
        }
        drive.stream.finish().map_err(text)?;
        if (of_first.ended(), of_second.ended()) != (round, round) {
            return Err(format!(
                "{} and {} ends",
                of_first.ended(),
                of_second.ended()
            ));
        }
        let failed = of_second.last().failures;
        if of_first.last().failures.rows != 0 || failed.first != Some((1, code::OUT_OF_RANGE)) {
            return Err(format!("{failed:?}"));
        }
    }
    first.check(&drive)?;
    second.check(&drive)?;
    Ok("20 rounds".to_owned())
}

pub fn free_bytes() -> Outcome<usize> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the call writes two numbers.
    match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
        CUresult::CUDA_SUCCESS => Ok(free),
        other => Err(format!("cuMemGetInfo: {other:?}")),
    }
}

/// Caches are dropped while a gather may still use them: their memory is freed when it has ended.
fn dropped(bench: &Bench) -> Outcome<String> {
    const CACHE: u64 = 64 << 20;
    let mut drive = Drive::new(bench, 4096, "delay:20ms@op=read,every=50", limit())?;
    current(&drive)?;
    let table = drive.table(0, 4096);
    let mut throw = dice(4);
    let before = free_bytes()?;
    for round in 0..20 {
        drive.keep_rows(&table, CACHE)?;
        let ids = (0..200).map(|_| throw(table.rows) as i64).collect();
        let job = Job::new(&drive, table, ids, true, 0)?;
        let pending = job.start(&drive, &drive.stream)?;
        drive.keep_nothing();
        match round % 2 {
            0 => {
                pending.wait(limit()).map_err(text)?;
                job.check(&drive)?;
                drop(pending);
            }
            _ => {
                // Nobody asks how it ended.
                drop(pending);
                drive.stream.finish().map_err(text)?;
                job.check(&drive)?;
            }
        }
    }
    // The memory of the last gathers is freed when the list of abandoned launches is examined.
    let job = Job::new(&drive, table, vec![1], true, 0)?;
    for _ in 0..100 {
        drop(job.start(&drive, &drive.stream)?);
        drive.stream.finish().map_err(text)?;
    }
    let after = free_bytes()?;
    match before.saturating_sub(after) < 3 * CACHE as usize {
        true => Ok("20 caches of 64 MiB".to_owned()),
        false => Err(format!("{} bytes did not come back", before - after)),
    }
}

/// Reads that the drive has carried out.
fn reads(drive: &Drive) -> Outcome<u64> {
    const SMART: u8 = 2;
    let controller = drive.store().controllers().next();
    let controller = controller.ok_or("no controller")?;
    let all = nvme_core::spec::Nsid(u32::MAX);
    let page = controller.log_page(SMART, all, 512).map_err(text)?;
    let words = page.get(64..72).and_then(|bytes| bytes.try_into().ok());
    Ok(words.map_or(0, u64::from_le_bytes))
}

/// Until the controller was reset, a write without an end may take place: rows that were cached before are read again.
fn recovered(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let table = drive.table(0, 4096);
    drive.keep_rows(&table, 1 << 20)?;
    let job = Job::new(&drive, table, (0..32).collect(), true, 0)?;
    let took = |what: &str| -> Outcome<u64> {
        let before = reads(&drive)?;
        let codes = drive.run(&job)?;
        match codes.iter().all(|code| *code == code::OK) {
            true => Ok(reads(&drive)? - before),
            false => Err(format!("{what}: {codes:?}")),
        }
    };
    let cold = took("first")?;
    // A row whose line another warp fills at the time is not kept then, but later.
    let mut warm = took("second")?;
    for _ in 0..8 {
        if warm != 0 {
            warm = took("again")?;
        }
    }
    let controller = drive.store().controllers().next().ok_or("no controller")?;
    controller.reset().map_err(text)?;
    let recovered = took("after a reset")?;
    match (cold, warm, recovered) {
        (1.., 0, 1..) => Ok(format!("{cold} reads, none, and {recovered} after a reset")),
        all => Err(format!("{all:?} reads")),
    }
}

/// There are more rows than a host thread stages at a time: each chunk's rows and status are stored in the right place.
fn chunks(bench: &Bench) -> Outcome<String> {
    let file = Scratch::new()?;
    let drive = Drive::open(bench, &file.device(), limit())?;
    let table = drive.table(0, 1 << 20);
    let rows = (BYTES >> 20) as i64;
    let mut ids: Vec<i64> = (0..40).map(|index| (index * 5) % rows).collect();
    for place in [3, 17, 33, 39] {
        ids[place] = rows + place as i64;
    }
    let codes = drive.run(&Job::new(&drive, table, ids, true, 4096)?)?;
    let failed = codes
        .iter()
        .filter(|code| **code == code::OUT_OF_RANGE)
        .count();
    match failed {
        4 => Ok("40 MiB of rows".to_owned()),
        _ => Err(format!("{codes:?}")),
    }
}
