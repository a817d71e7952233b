//! `out = table[ids]`: rows of every shape, by every kind of id, compared with bytes that the host computes; and the
//! results of rows whose reads fail.

mod drive;

pub use crate::limits::text;
pub use drive::{
    BYTES, CANARY, Drive, Job, dice, fault_timeout, few_stations, random_jobs, run_over,
    several_streams, simulated,
};

use crate::bench::Bench;
use crate::limits::limit;
use crate::report::Outcome;
use crate::report::Report;
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::{RowRequest, RowTable};
use std::collections::BTreeSet;
use std::time::Duration;

/// Faults of one read, by the names of their cases.
pub const FAULTS: [(&str, &str); 6] = [
    ("status", "status:0x281@op=read,nth=7"),
    ("dropped", "drop@op=read,nth=7"),
    ("late", "delay:LATE@op=read,nth=7"),
    ("wrong-cid", "wrongcid:0xfff@op=read,nth=7"),
    ("dead-cfs", "cfs@op=read,nth=7"),
    ("all-ones", "allones@op=read,nth=7"),
];

/// A gather sees writes that came before it began, and no later ones.
fn writes(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let table = drive.table(96, 512);
    let mut throw = dice(11);
    for round in 0..50u8 {
        let at = 96 + throw(table.rows - 40) * 512;
        let new: Vec<u8> = (0..700).map(|byte| round ^ byte as u8).collect();
        drive.store.write_at(at, &new).map_err(text)?;
        drive.image[at as usize..][..new.len()].copy_from_slice(&new);
        let first = ((at - 96) / 512) as i64;
        let job = Job::new(&drive, table, (first..first + 40).collect(), false, 0)?;
        if drive.run(&job)?.iter().any(|code| *code != code::OK) {
            return Err("rows failed".to_owned());
        }
    }
    Ok("50 writes, each seen".to_owned())
}

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("gather/shapes/block-{block}"), |_| {
            let drive = Drive::new(bench, block, "", limit())?;
            shapes_of(&drive, u64::from(block))
        });
    }
    report.test("gather/ids", |_| ids(bench));
    report.test("gather/after-writes", |_| writes(bench));
    report.test("gather/streams", |_| streams(bench));
    report.test("gather/cache", |_| cached(bench));
    report.test("gather/fault/over-and-over", |_| outages(bench, 300));
    for (name, fault) in FAULTS {
        report.test(&format!("gather/fault/{name}"), |_| {
            faults(bench, (name, fault), 600, None)
        });
    }
}

/// Gathers rows of many sizes at many offsets.
pub fn shapes_of(drive: &Drive, seed: u64) -> Outcome<String> {
    let mut throw = dice(seed);
    let mut done = 0;
    for (row_bytes, first_byte, pad) in [
        (4096, 0, 0),
        (4096, 4096, 512),
        (512, 96, 0),
        (512, 0, 16),
        (1536, 152, 0),
        (16, 0, 0),
        (24, 8, 8),
        (100, 4, 4),
        (7, 3, 0),
        (1, 0, 0),
        (4097, 1, 2),
        (16 << 10, 0, 0),
        (64 << 10, 512, 0),
    ] {
        for count in [1, 31, 33, 700] {
            let table = drive.table(first_byte, row_bytes);
            let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
            // The last row, a run of neighbours, and one row often.
            ids[0] = table.rows as i64 - 1;
            for at in 0..(count as usize / 3) {
                ids[at] = ids[0] - at as i64 / 2;
            }
            let wide = throw(2) == 0;
            let job = Job::new(drive, table, ids, wide, pad)?;
            let codes = drive.run(&job)?;
            if codes.iter().any(|code| *code != code::OK) {
                return Err(format!("{table:?}: {codes:?}"));
            }
            done += count;
        }
    }
    Ok(format!("{done} rows compared"))
}

fn ids(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 4096)
    };
    let odd = [-1, 100, i64::from(i32::MIN), i64::from(i32::MAX)];
    let mut asked: Vec<i64> = (0..300).map(|index| index % 130).collect();
    for (place, id) in odd.into_iter().enumerate() {
        asked[place * 41] = id;
    }
    for wide in [false, true] {
        if wide {
            asked.extend([i64::MIN, i64::MAX, 1 << 32, (1 << 32) + 5]);
        }
        let job = Job::new(&drive, table, asked.clone(), wide, 0)?;
        drive.run(&job)?;
    }
    let none = Job::new(&drive, table, Vec::new(), true, 0)?;
    drive.run(&none)?;
    // No word for the rows' codes.
    let job = Job::new(&drive, table, vec![1, -1], true, 0)?;
    let request = RowRequest {
        ids: job.device_ids.address(),
        wide_ids: true,
        count: 2,
        out: job.out.address(),
        out_stride: 4096,
        status: 0,
    };
    let pending = drive.gather(&table, &request, drive.stream.handle())?;
    let gathered = pending.wait(limit()).map_err(text)?;
    if gathered.failures.first != Some((1, code::OUT_OF_RANGE)) {
        return Err(format!("{gathered:?}"));
    }
    let outside = RowTable {
        rows: table.rows + BYTES,
        ..table
    };
    match drive.rows(&outside) {
        Err(_) => Ok(format!("{} ids", asked.len())),
        Ok(_) => Err("a table past the end".to_owned()),
    }
}

fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(77);
    let table = drive.table(0, 512);
    let streams = several_streams(bench, 4)?;
    let mut rows = 0;
    for _ in 0..20 {
        let jobs = random_jobs(&drive, table, (8, 500), &mut throw)?;
        for codes in run_over(&drive, &jobs, &streams)? {
            if codes.iter().any(|code| *code != code::OK) {
                return Err(format!("{codes:?}"));
            }
            rows += codes.len();
        }
    }
    Ok(format!("{rows} rows over 4 streams"))
}

/// Rows by way of a cache that is smaller than the table, from several streams, between writes.
fn cached(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(123);
    let streams = several_streams(bench, 4)?;
    let mut rows = 0;
    for (row_bytes, first_byte, bytes) in [(4096, 0, 200 << 12), (512, 96, 20_000), (100, 4, 9000)]
    {
        let table = drive.table(first_byte, row_bytes);
        drive.keep_rows(&table, bytes)?;
        for round in 0..20u8 {
            // Few rows often, and every other row now and then.
            let mut job = |_| {
                let id = |_| match throw(4) {
                    0 => throw(table.rows) as i64,
                    _ => throw(40) as i64,
                };
                Job::new(&drive, table, (0..400).map(id).collect(), true, 0)
            };
            let jobs: Vec<Job> = (0..6).map(&mut job).collect::<Outcome<_>>()?;
            for codes in run_over(&drive, &jobs, &streams)? {
                if codes.iter().any(|code| *code != code::OK) {
                    return Err(format!("{codes:?}"));
                }
                rows += codes.len();
            }
            let at = u64::from(first_byte as u32) + throw(30) * u64::from(row_bytes);
            let new = [round; 50];
            drive.store.write_at(at, &new).map_err(text)?;
            drive.image[at as usize..][..new.len()].copy_from_slice(&new);
        }
    }
    let too_few = drive.rows(&drive.table(0, 4096))?.cached(4096).is_err();
    match too_few {
        true => Ok(format!("{rows} rows between 60 writes")),
        false => Err("a cache of less than a set".to_owned()),
    }
}

/// Reads are lost again and again while launches of `count` rows continue over several streams: no row is wrong, and no
/// station is lost.
pub fn outages(bench: &Bench, count: usize) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let fault = format!("drop@op=read,every={}", count * 10);
    let drive = Drive::new(bench, 4096, &fault, timeout)?;
    outages_of(bench, &drive, count)
}

pub fn outages_of(bench: &Bench, drive: &Drive, count: usize) -> Outcome<String> {
    let table = drive.table(0, 4096);
    let mut throw = dice(21);
    let streams = several_streams(bench, 4)?;
    let (mut failed, mut rows) = (0, 0);
    for _ in 0..25 {
        let jobs = random_jobs(drive, table, (12, count), &mut throw)?;
        for codes in run_over(drive, &jobs, &streams)? {
            rows += codes.len();
            failed += codes.iter().filter(|code| **code != code::OK).count();
        }
    }
    match failed {
        0 => Err("no row failed".to_owned()),
        all if all == rows => Err("every row failed".to_owned()),
        _ => Ok(format!("{failed} of {rows} rows failed, none is wrong")),
    }
}

/// Rows whose reads fail report it, no row is wrong, and a later gather works if the controller comes back. Gathers
/// have `count` rows, and go through a cache of `kept` bytes if there is one.
pub fn faults(
    bench: &Bench,
    (name, fault): (&str, &str),
    count: usize,
    kept: Option<u64>,
) -> Outcome<String> {
    let timeout = fault_timeout(bench, fault);
    let fault = fault.replace("LATE", &format!("{}ms", timeout.as_millis() * 4));
    let mut drive = Drive::new(bench, 4096, &fault, timeout)?;
    let table = drive.table(0, 4096);
    if let Some(bytes) = kept {
        drive.keep_rows(&table, bytes)?;
    }
    let drive = drive;
    let mut throw = dice(5);
    let mut ids = || -> Vec<i64> { (0..count).map(|_| throw(table.rows) as i64).collect() };
    let job = Job::new(&drive, table, ids(), true, 0)?;
    let codes = drive.run(&job)?;
    let failed = codes.iter().filter(|code| **code != code::OK).count();
    if failed == 0 {
        return Err("no row failed".to_owned());
    }
    if name == "status" {
        let is_expected = |code: &i32| matches!(*code, code::OK | 0x281);
        let of_failed = job.ids().iter().zip(&codes).filter(|of| *of.1 != code::OK);
        let ids: BTreeSet<&i64> = of_failed.map(|(id, _)| id).collect();
        // A row that comes again is read once through a cache, and fails wherever it is.
        let is_one = failed == 1 || kept.is_some() && ids.len() == 1;
        if !codes.iter().all(is_expected) || !is_one {
            return Err(format!("{failed} rows failed: {codes:?}"));
        }
    }
    let begin = std::time::Instant::now();
    loop {
        let job = Job::new(&drive, table, ids(), true, 0)?;
        let codes = drive.run(&job)?;
        if codes.iter().all(|code| *code == code::OK) {
            break;
        }
        let gone = codes.iter().all(|code| *code == code::GONE);
        if name == "all-ones" && gone && begin.elapsed() > Duration::from_secs(3) {
            return Ok(format!(
                "{failed} rows failed, and all of a controller that is gone"
            ));
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "rows fail for {:?} after the fault: {codes:?}",
                limit()
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(format!("{failed} rows failed, then none"))
}
