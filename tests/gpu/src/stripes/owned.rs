//! Gathers of few rows over stripes, by queues that blocks own: a block reads from one drive.

use super::{BAD, faults_of, needs_bad, open_with};
use crate::bench::Bench;
use crate::gather::{Drive, Job, dice, fault_timeout, random_jobs, run_over, several_streams};
use crate::hazards::outlives;
use crate::limits::limit;
use crate::owned::{counted, gather};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowTable;
use std::time::Duration;

/// Queues of each drive: four of them belong to stations, one for each drive and one more.
const QUEUES: u32 = 12;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("stripes/owned/shapes", |_| shapes(bench));
    report.test("stripes/owned/ids", |_| ids(bench));
    report.test("stripes/owned/streams", |_| streams(bench));
    report.test("stripes/owned/outages", |_| outages(bench));
    for (name, fault, comes_back) in [
        ("status", "status:0x281@op=read,nth=7", true),
        ("dropped", "drop@op=read,nth=7", true),
        ("dead-cfs", "cfs@op=read,nth=7", true),
        ("all-ones", "allones@op=read,nth=7", false),
    ] {
        report.test(&format!("stripes/owned/fault/{name}"), |_| {
            let timeout = fault_timeout(bench, fault);
            let drive = open_with(bench, QUEUES, (fault, timeout))?;
            let table = drive.table(4096, 512);
            let told = faults_of(&drive, (table, 100), comes_back)?;
            match drive.store().stats() {
                stats if stats.shared_gathers == 0 => Ok(told),
                stats => Err(format!("{} gathers by shared queues", stats.shared_gathers)),
            }
        });
    }
    report.case("stripes/owned/graph/outlives-its-store", |_| {
        open(bench).and_then(|drive| outlives(drive, 60)).into()
    });
}

fn open(bench: &Bench) -> Outcome<Drive> {
    open_with(bench, QUEUES, ("", limit()))
}

/// Rows that divide a stripe go by owned queues, and others by shared ones.
fn shapes(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let mut throw = dice(41);
    let mut rows = 0;
    for (row_bytes, first_byte, pad, is_owned) in [
        (256, 0, 0, true),
        (256, 512, 24, true),
        (4, 4, 0, true),
        (16, 4080, 16, true),
        (4096, 4096, 0, true),
        (8192, 0, 4096, true),
        // Some rows lie on two drives.
        (256, 104, 0, false),
        (48, 0, 0, false),
        // No units of 4 bytes.
        (2, 0, 0, false),
    ] {
        let table = drive.table(first_byte, row_bytes);
        for count in [1, 2, 9, 24, 48, 100] {
            let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
            ids[count / 2] = table.rows as i64 - 1;
            ids[count - 1] = ids[0];
            let counts = if is_owned { (1, 0) } else { (0, 1) };
            counted(&drive, counts, || gather(&drive, table, ids, pad))?;
            rows += count;
        }
    }
    // A table inside one stripe, whatever its rows are.
    let inside = RowTable {
        rows: 300,
        ..drive.table(32776, 100)
    };
    counted(&drive, (1, 0), || {
        gather(&drive, inside, vec![0, 299, 150, 7], 0)
    })?;
    Ok(format!("{rows} rows compared"))
}

/// Ids without a row are between others, and alone.
fn ids(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 8192)
    };
    let mut mixed: Vec<i64> = (0..90).map(|index| index % 130).collect();
    mixed[33] = -1;
    mixed[50] = i64::MAX;
    mixed[89] = i64::MIN;
    for ids in [mixed, vec![100; 64], vec![-1]] {
        let job = Job::new(&drive, table, ids, true, 0)?;
        // Compares each code with its id.
        counted(&drive, (1, 0), || drive.run(&job).map(drop))?;
    }
    Ok("ids of rows and of none".to_owned())
}

/// Launches of both kinds take turns at the stations.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let mut throw = dice(43);
    let streams = several_streams(bench, 6)?;
    let mut rows = 0;
    for _ in 0..10 {
        let few = random_jobs(&drive, drive.table(0, 512), (8, 90), &mut throw)?;
        let many = random_jobs(&drive, drive.table(8, 700), (4, 200), &mut throw)?;
        let jobs: Vec<Job> = few.into_iter().chain(many).collect();
        counted(&drive, (8, 4), || {
            for codes in run_over(&drive, &jobs, &streams)? {
                if codes.iter().any(|code| *code != code::OK) {
                    return Err(format!("{codes:?}"));
                }
                rows += codes.len();
            }
            Ok(())
        })?;
    }
    Ok(format!("{rows} rows compared"))
}

/// One drive loses reads again and again. Rows on the others are read, those of the drive are right or have failed.
fn outages(bench: &Bench) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let fault = "drop@op=read,every=150";
    let drive = open_with(bench, QUEUES, (fault, timeout))?;
    let table = drive.table(0, 4096);
    let mut throw = dice(47);
    let (mut failed, mut rows) = (0, 0);
    for _ in 0..100 {
        let ids = (0..60).map(|_| throw(table.rows) as i64).collect();
        let job = Job::new(&drive, table, ids, true, 0)?;
        let (codes, failures) = drive.run_and_tell(&job)?;
        for (id, code) in job.ids().iter().zip(&codes) {
            if *code != code::OK && !needs_bad(&table, *id) {
                return Err(format!("row {id} of a member that works: {code}"));
            }
            failed += usize::from(*code != code::OK);
            rows += 1;
        }
        if codes.iter().any(|code| *code != code::OK) && failures.member != Some(BAD as u32) {
            return Err(format!("{failures:?}, but member {BAD} failed"));
        }
    }
    match failed {
        0 => Err("no row failed".to_owned()),
        all if all == rows => Err("every row failed".to_owned()),
        _ => Ok(format!("{failed} of {rows} rows failed, none is wrong")),
    }
}
