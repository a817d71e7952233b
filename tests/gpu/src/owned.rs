//! Gathers of few rows by queues that blocks own: rows of every shape and code, more launches than queues, faults,
//! graphs; and gathers that use shared queues instead. The counts of the store show which queues were used.

use crate::bench::Bench;
use crate::gather::{
    Drive, FAULTS, Job, dice, faults, outages, random_jobs, run_over, several_streams,
};
use crate::hazards::outlives;
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowTable;

/// Rows of a gather that fit into the two owned queues of a [`Drive`], of 127 commands each.
const ROWS: usize = 200;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("gather/owned/shapes", |_| shapes(bench));
    report.test("gather/owned/ids", |_| ids(bench));
    report.test("gather/owned/streams", |_| streams(bench));
    report.test("gather/owned/too-many-rows", |_| too_many(bench));
    report.test("gather/owned/no-queue-left", |_| none_left(bench));
    report.case("gather/owned/graph/outlives-its-store", |_| {
        let drive = Drive::new(bench, 4096, "", limit());
        drive.and_then(|drive| outlives(drive, 100)).into()
    });
    report.test("gather/owned/fault/over-and-over", |_| outages(bench, 100));
    for (name, fault) in FAULTS {
        report.test(&format!("gather/owned/fault/{name}"), |_| {
            faults(bench, (name, fault), ROWS, None)
        });
    }
}

/// Runs `work`; fails unless it made this number of gathers by owned queues and by shared ones.
pub fn counted(
    drive: &Drive,
    counts: (u64, u64),
    work: impl FnOnce() -> Outcome<()>,
) -> Outcome<()> {
    let before = drive.store().stats();
    work()?;
    let after = drive.store().stats();
    let have = (
        after.owned_gathers - before.owned_gathers,
        after.shared_gathers - before.shared_gathers,
    );
    match have == counts {
        true => Ok(()),
        false => Err(format!(
            "{} gathers by owned queues and {} by shared ones, where {} and {} were expected",
            have.0, have.1, counts.0, counts.1
        )),
    }
}

/// Gathers `ids`, every row compared; all have to be read.
pub fn gather(drive: &Drive, table: RowTable, ids: Vec<i64>, pad: u64) -> Outcome<()> {
    let job = Job::new(drive, table, ids, true, pad)?;
    let codes = drive.run(&job)?;
    match codes.iter().all(|code| *code == code::OK) {
        true => Ok(()),
        false => Err(format!("{table:?}: rows failed: {codes:?}")),
    }
}

/// Rows of one unit and of many, inside blocks, over their borders and of several blocks.
fn shapes(bench: &Bench) -> Outcome<String> {
    let mut throw = dice(31);
    let mut rows = 0;
    for block in [512, 4096] {
        let drive = Drive::new(bench, block, "", limit())?;
        for (row_bytes, first_byte, pad) in [
            (16, 0, 0),
            (48, 32, 16),
            (256, 0, 0),
            (256, 96, 0),
            (512, 512, 4096),
            (1040, 16, 32),
            (4096, 0, 0),
            (4112, 4080, 0),
            // Offsets of published files: a header whose length is a multiple of 8, or a number of 4 bytes before.
            (256, 104, 0),
            (160, 8, 0),
            (256, 0, 24),
            (260, 500, 4),
            (4, 4, 0),
        ] {
            let table = drive.table(first_byte, row_bytes);
            // Of the longest rows two stations have slots for 170.
            for count in [1, 2, 8, 9, 24, 48, 127, 160] {
                let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
                // The last row, and one row often.
                ids[count / 2] = table.rows as i64 - 1;
                ids[count - 1] = ids[0];
                counted(&drive, (1, 0), || gather(&drive, table, ids, pad))?;
                rows += count;
            }
        }
    }
    Ok(format!("{rows} rows compared"))
}

/// Ids without a row are between others, and in some blocks there are no others.
fn ids(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 256)
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

/// Launches of eight streams take turns at two queues.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(37);
    let table = drive.table(0, 512);
    let streams = several_streams(bench, 8)?;
    let mut rows = 0;
    for _ in 0..20 {
        let jobs = random_jobs(&drive, table, (16, 60), &mut throw)?;
        counted(&drive, (16, 0), || {
            for codes in run_over(&drive, &jobs, &streams)? {
                if codes.iter().any(|code| *code != code::OK) {
                    return Err(format!("{codes:?}"));
                }
                rows += codes.len();
            }
            Ok(())
        })?;
    }
    Ok(format!("{rows} rows over 8 streams and 2 queues"))
}

/// More rows than fit into the queues, and rows that the kernel does not copy, go by shared queues.
fn too_many(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let mut throw = dice(41);
    let (table, odd) = (drive.table(0, 512), drive.table(2, 100));
    let mut some = |count, rows| (0..count).map(|_| throw(rows) as i64).collect();
    let (fit, many, uneven) = (
        some(254, table.rows),
        some(255, table.rows),
        some(8, odd.rows),
    );
    counted(&drive, (1, 0), || gather(&drive, table, fit, 0))?;
    counted(&drive, (0, 1), || gather(&drive, table, many, 0))?;
    counted(&drive, (0, 1), || gather(&drive, odd, uneven, 0))?;
    Ok("254 rows by owned queues, 255 by shared ones".to_owned())
}

/// The CPU and the shared queues use all queues of the controller: all gathers use the shared ones.
fn none_left(bench: &Bench) -> Outcome<String> {
    let name = "sim:mem?size=8MiB&block=512&queues=6&threads=4";
    let drive = Drive::open(bench, name, limit())?;
    let table = drive.table(0, 512);
    counted(&drive, (0, 1), || gather(&drive, table, vec![5, 3, 9], 0))?;
    Ok("by shared queues".to_owned())
}
