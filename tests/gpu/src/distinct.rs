//! Gathers of many rows whose ids come again: each distinct row is read once, and every position gets its bytes and its
//! status, from tables in one range and in several, in graphs, and when reads fail.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{Drive, Job, dice, fault_timeout, run_over, several_streams};
use crate::hazards::{Graph, OwnStream, current};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use crate::stripes;
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowTable;
use std::collections::BTreeSet;
use std::time::Instant;

/// Number of rows from which on a gather looks for ids that come again.
const LEAST: usize = 4096;

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("gather/distinct/shapes/block-{block}"), |_| {
            shapes(&Drive::new(bench, block, "", limit())?)
        });
    }
    report.test("gather/distinct/few", |_| few(bench));
    report.test("gather/distinct/neighbours", |_| neighbours(bench));
    report.test("gather/distinct/streams", |_| streams(bench));
    report.test("gather/distinct/graph", |_| graph(bench));
    report.test("gather/distinct/fault/status", |_| status(bench));
    for (name, fault) in [
        ("dropped", "drop@op=read,nth=40"),
        ("dead-cfs", "cfs@op=read,nth=40"),
    ] {
        report.test(&format!("gather/distinct/fault/{name}"), |_| {
            crate::gather::faults(bench, (name, fault), LEAST + 100, None)
        });
    }
}

/// The same over drives in stripes.
pub fn of_stripes(report: &mut Report, bench: &Bench) {
    report.test("stripes/distinct/shapes", |_| {
        shapes(&stripes::open(bench, "", limit())?)
    });
    report.test("stripes/distinct/fault/status", |_| {
        status_of_stripes(bench)
    });
    for (name, fault) in [
        ("dropped", "drop@op=read,nth=40"),
        ("dead-cfs", "cfs@op=read,nth=40"),
    ] {
        report.test(&format!("stripes/distinct/fault/{name}"), |_| {
            let drive = stripes::open(bench, fault, fault_timeout(bench, fault))?;
            let table = drive.table(100, 5000);
            let told = stripes::faults_of(&drive, (table, LEAST + 100), true)?;
            match drive.store().stats().unique_read {
                0 => Err("no gather looked for rows that come again".to_owned()),
                _ => Ok(told),
            }
        });
    }
}

/// One drive fails reads again and again: rows on it fail alone. Many reads are those of several rows and are repeated, so
/// that a launch may have no failed row.
fn status_of_stripes(bench: &Bench) -> Outcome<String> {
    let drive = stripes::open(bench, "status:0x281@op=read,every=25", limit())?;
    let (table, mut throw) = (drive.table(100, 5000), dice(44));
    let (begin, mut launches) = (Instant::now(), 0);
    while begin.elapsed() < limit() {
        let ids: Vec<i64> = (0..LEAST).map(|_| throw(table.rows) as i64).collect();
        let job = Job::new(&drive, table, ids, true, 0)?;
        let (codes, failures) = drive.run_and_tell(&job)?;
        launches += 1;
        let mut failed = 0;
        for (id, code) in job.ids().iter().zip(&codes) {
            match *code {
                code::OK => continue,
                0x281 if stripes::needs_bad(&table, *id) => failed += 1,
                code => return Err(format!("row {id}: {code}")),
            }
        }
        if failed > 0 {
            return match failures.member {
                Some(1) => Ok(format!("{failed} rows failed in {launches} gathers")),
                other => Err(format!("member {other:?} failed {failed} rows")),
            };
        }
    }
    Err(format!("no row failed in {launches} gathers"))
}

/// Returns ids in which rows repeat in several ways, with ids that the table does not have.
fn patterns(table: &RowTable, throw: &mut impl FnMut(u64) -> u64) -> Vec<(&'static str, Vec<i64>)> {
    let rows = table.rows as i64;
    let count = LEAST as i64 + 37;
    let mut some = |of: u64| -> Vec<i64> { (0..count).map(|_| throw(of) as i64).collect() };
    let mut outside = some(table.rows.min(900));
    for (place, id) in [-1, rows, i64::MIN, i64::MAX, -1, rows]
        .into_iter()
        .enumerate()
    {
        outside[place * 411] = id;
    }
    vec![
        ("many repeat", some(table.rows.min(700))),
        ("few repeat", some(table.rows)),
        ("all are alike", vec![rows - 1; LEAST]),
        (
            "none repeats",
            (0..count).map(|id| id * 7919 % rows).collect(),
        ),
        ("strides", (0..count).map(|id| id * 32 % rows).collect()),
        ("ids outside", outside),
    ]
}

/// Runs a gather, and returns the rows that were asked for and those that were read.
fn counted(drive: &Drive, job: &Job) -> Outcome<(u64, u64)> {
    let before = drive.store().stats();
    drive.run(job)?;
    let after = drive.store().stats();
    Ok((
        after.unique_asked - before.unique_asked,
        after.unique_read - before.unique_read,
    ))
}

/// Returns the number of distinct rows of the table among `ids`.
fn distinct(table: &RowTable, ids: &[i64]) -> u64 {
    let inside = ids.iter().filter(|id| (0..table.rows as i64).contains(id));
    inside.collect::<BTreeSet<_>>().len() as u64
}

fn shapes(drive: &Drive) -> Outcome<String> {
    let mut throw = dice(40);
    let (mut rows, mut read) = (0, 0);
    // Whole blocks, rows at odd bytes, rows over blocks, and rows that are no powers of two.
    for (row_bytes, first_byte, pad) in [
        (256, 0, 0),
        (264, 104, 8),
        (512, 96, 16),
        (7, 3, 0),
        (1000, 4, 0),
        (4096, 0, 0),
    ] {
        let table = drive.table(first_byte, row_bytes);
        for (name, ids) in patterns(&table, &mut throw) {
            let wanted = (ids.len() as u64, distinct(&table, &ids));
            let wide = ids.iter().any(|id| i32::try_from(*id).is_err()) || throw(2) == 0;
            let job = Job::new(drive, table, ids, wide, pad)?;
            let counts = counted(drive, &job).map_err(|why| format!("{name}: {why}"))?;
            if counts != wanted {
                return Err(format!("{table:?}, {name}: {counts:?}, not {wanted:?}"));
            }
            (rows, read) = (rows + counts.0, read + counts.1);
        }
    }
    Ok(format!("{rows} rows, {read} of them read"))
}

/// A gather of few rows goes without the search.
fn few(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let table = drive.table(0, 256);
    let job = Job::new(&drive, table, vec![5; LEAST - 1], true, 0)?;
    match counted(&drive, &job)? {
        (0, 0) => Ok(format!("{} rows", LEAST - 1)),
        other => Err(format!("{other:?}")),
    }
}

/// Rows of one block are read by one command, in whatever order they are asked for: the 600th command would fail.
fn neighbours(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "status:0x281@op=read,nth=600", limit())?;
    let table = RowTable {
        rows: 8 * LEAST as u64,
        ..drive.table(8, 16)
    };
    // 4,096 rows of 128 blocks.
    let ids = (0..LEAST as i64)
        .map(|id| id * 2731 % LEAST as i64)
        .collect();
    let codes = drive.run(&Job::new(&drive, table, ids, true, 0)?)?;
    match codes.iter().filter(|code| **code != code::OK).count() {
        0 => Ok(format!("{LEAST} rows by fewer than 600 commands")),
        failed => Err(format!("{failed} rows failed")),
    }
}

/// Gathers of several streams at the same time use memory of their own.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let (table, mut throw) = (drive.table(0, 256), dice(41));
    let streams = several_streams(bench, 3)?;
    let mut job = |_| {
        let ids = (0..LEAST + 500).map(|_| throw(3000) as i64).collect();
        Job::new(&drive, table, ids, true, 0)
    };
    let jobs: Vec<Job> = (0..6).map(&mut job).collect::<Outcome<_>>()?;
    for codes in run_over(&drive, &jobs, &streams)? {
        if codes.iter().any(|code| *code != code::OK) {
            return Err("rows failed".to_owned());
        }
    }
    let stats = drive.store().stats();
    match stats.unique_asked == 6 * (LEAST as u64 + 500) && stats.unique_read < stats.unique_asked {
        true => Ok(format!(
            "{} rows, {} read",
            stats.unique_asked, stats.unique_read
        )),
        false => Err(format!("{stats:?}")),
    }
}

/// A captured gather, launched again with other ids, finds its memory ready each time.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    current(&drive)?;
    let (table, mut throw) = (drive.table(4, 256), dice(42));
    let stream = OwnStream::new()?;
    let mut ids = || -> Vec<i64> { (0..LEAST + 9).map(|_| throw(2000) as i64 - 1).collect() };
    let mut job = Job::new(&drive, table, ids(), true, 0)?;
    let (graph, pending) = Graph::of(&stream, |stream| job.start_on(&drive, stream))?;
    let (mut asked, mut read) = (0, 0);
    for round in 0..5 {
        job.replace_ids(ids())?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        let codes = job.check(&drive)?;
        let failed = codes.iter().filter(|code| **code != code::OK).count() as u64;
        let told = pending.last().failures.rows;
        if failed == 0 || told != failed {
            return Err(format!(
                "round {round}: {failed} rows failed, {told} were told"
            ));
        }
        asked += codes.len() as u64;
        read += distinct(&table, job.ids());
    }
    let stats = drive.store().stats();
    match (stats.unique_asked, stats.unique_read) == (asked, read) {
        true => Ok(format!("{asked} rows, {read} read")),
        false => Err(format!("{stats:?}, not {asked} and {read}")),
    }
}

/// A read that fails, fails each position of its row, and no other one.
fn status(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "status:0x281@op=read,nth=7", limit())?;
    let (table, mut throw) = (drive.table(0, 512), dice(43));
    let ids: Vec<i64> = (0..2 * LEAST).map(|_| throw(1000) as i64 * 3).collect();
    let job = Job::new(&drive, table, ids.clone(), true, 0)?;
    let (codes, failures) = drive.run_and_tell(&job)?;
    let failed = |at: &usize| codes[*at] != code::OK;
    let Some(first) = (0..ids.len()).find(failed) else {
        return Err("no row failed".to_owned());
    };
    for (at, id) in ids.iter().enumerate() {
        let wanted = if *id == ids[first] { 0x281 } else { code::OK };
        if codes[at] != wanted {
            return Err(format!("position {at}, id {id}: {:#x}", codes[at]));
        }
    }
    let places = ids.iter().filter(|id| **id == ids[first]).count();
    match failures.rows == places as u64 && places > 1 {
        true => Ok(format!("{places} positions of one row failed")),
        false => Err(format!("{failures:?}, {places} positions")),
    }
}
