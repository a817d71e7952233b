//! Gathers of few rows through a cache, by queues that blocks own: rows that come again in a gather and in later ones,
//! caches that are too small, faults. The drive's own count of reads shows what was read.

use crate::bench::Bench;
use crate::gather::{
    Drive, FAULTS, dice, faults, outages_of, random_jobs, run_over, several_streams, text,
};
use crate::hazards::outlives;
use crate::limits::limit;
use crate::owned::{counted, gather};
use crate::report::{Outcome, Report};
use nvme_core::spec::{Nsid, log_page};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowTable;
use std::time::Duration;

/// Bytes of one set of 16 rows of 4 KiB, with their words.
const ONE_SET: u64 = 16 * (4096 + 20);

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("gather/kept/once", |_| once(bench));
    report.test("gather/kept/shapes", |_| shapes(bench));
    report.test("gather/kept/ids", |_| ids(bench));
    report.test("gather/kept/streams", |_| streams(bench));
    report.test("gather/kept/too-many-rows", |_| too_many(bench));
    report.case("gather/kept/graph/outlives-its-store", |_| {
        let drive = cached(bench, "", limit(), ONE_SET);
        drive.and_then(|drive| outlives(drive, 100)).into()
    });
    report.test("gather/kept/fault/over-and-over", |_| {
        let timeout = Duration::from_millis(60) * bench.patience as u32;
        let drive = cached(bench, "drop@op=read,every=1000", timeout, ONE_SET)?;
        outages_of(bench, &drive, 100)
    });
    for (name, fault) in FAULTS {
        report.test(&format!("gather/kept/fault/{name}"), |_| {
            faults(bench, (name, fault), 100, Some(ONE_SET))
        });
    }
}

/// Returns a drive whose gathers of rows of 4 KiB go through a cache of `bytes` bytes.
fn cached(bench: &Bench, fault: &str, timeout: Duration, bytes: u64) -> Outcome<Drive> {
    let mut drive = Drive::new(bench, 4096, fault, timeout)?;
    let table = drive.table(0, 4096);
    drive.keep_rows(&table, bytes)?;
    Ok(drive)
}

/// Returns the number of read commands that the drive has completed, as its SMART log says.
fn reads(drive: &Drive) -> Outcome<u128> {
    let controllers = drive.store().controllers();
    let mut sum = 0;
    for controller in controllers {
        let page = controller.log_page(log_page::lid::SMART, Nsid::ALL, 512);
        let page = page.map_err(text)?;
        let field = page.get(64..80).and_then(|bytes| bytes.try_into().ok());
        sum += u128::from_le_bytes(field.ok_or("a short log page")?);
    }
    Ok(sum)
}

/// Gathers `ids`, every row compared; fails unless the drive had this number of reads, and the cache this number of rows.
fn read(drive: &Drive, table: RowTable, ids: Vec<i64>, expected: (u128, u64)) -> Outcome<()> {
    let (count, before) = (ids.len(), reads(drive)?);
    let found = found(drive, count as u64, || {
        counted(drive, (1, 0), || gather(drive, table, ids, 0))
    })?;
    match (reads(drive)? - before, found) {
        have if have == expected => Ok(()),
        (reads, found) => Err(format!(
            "{reads} reads and {found} rows of the cache for {count} ids, not {} and {}",
            expected.0, expected.1
        )),
    }
}

/// Returns the number of rows that `run`, which gathers `count` rows, found in the cache, as the store counts them.
fn found(drive: &Drive, count: u64, run: impl FnOnce() -> Outcome<()>) -> Outcome<u64> {
    let before = drive.store().stats();
    run()?;
    let since = drive.store().stats().since(&before);
    match since.cache_asked {
        asked if asked == count => Ok(since.cache_hits),
        asked => Err(format!("{asked} rows of {count} were counted")),
    }
}

/// A row that comes again in a block is read once, and not at all while it is in the cache.
fn once(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 512, "", limit())?;
    let table = drive.table(0, 512);
    drive.keep_rows(&table, 1 << 20)?;
    let again = |row: i64| (0..64).map(move |at| row + at % 9).collect::<Vec<i64>>();
    read(&drive, table, again(0), (9, 0))?;
    read(&drive, table, again(0), (0, 64))?;
    // Four rows are in the cache, one of them eight times and three of them seven times.
    read(&drive, table, again(5), (5, 29))?;
    // All of a warp are one row, and each row of a block is another one.
    read(&drive, table, vec![700; 64], (1, 0))?;
    read(&drive, table, (100..164).collect(), (64, 0))?;
    read(&drive, table, (100..164).rev().collect(), (0, 64))?;
    let new = [9; 512];
    drive.store().write_at(512, &new).map_err(text)?;
    drive.image_mut()[512..1024].copy_from_slice(&new);
    read(&drive, table, again(0), (9, 0))?;
    read(&drive, table, again(0), (0, 64))?;
    Ok("9 of 64, 0, 5, 1, 64, 0; after a write 9, 0".to_owned())
}

/// Rows of one unit and of many, inside blocks and over their borders, in caches that hold all and few of them.
fn shapes(bench: &Bench) -> Outcome<String> {
    let mut throw = dice(43);
    let mut rows = 0;
    for block in [512, 4096] {
        let mut drive = Drive::new(bench, block, "", limit())?;
        for (row_bytes, first_byte, pad) in [
            (16, 0, 0),
            (48, 32, 16),
            (256, 96, 0),
            (512, 512, 4096),
            (1040, 16, 32),
            (4112, 4080, 0),
            (256, 104, 0),
            (160, 8, 0),
            (260, 500, 4),
            (4, 4, 0),
        ] {
            let table = drive.table(first_byte, row_bytes);
            for sets in [1, 20] {
                let line = u64::from(row_bytes.next_multiple_of(16)) + 20;
                drive.keep_rows(&table, sets * 16 * line)?;
                for count in [1, 2, 31, 33, 64, 65, 127, 160] {
                    let mut ids: Vec<i64> = (0..count).map(|_| throw(60) as i64).collect();
                    ids[count / 2] = table.rows as i64 - 1;
                    counted(&drive, (1, 0), || gather(&drive, table, ids, pad))?;
                    rows += count;
                }
            }
        }
    }
    Ok(format!("{rows} rows compared"))
}

/// Ids without a row are between others, cached and not.
fn ids(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 512, "", limit())?;
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 256)
    };
    drive.keep_rows(&table, 1 << 16)?;
    let mut mixed: Vec<i64> = (0..90).map(|index| index % 130).collect();
    mixed[33] = -1;
    mixed[50] = i64::MAX;
    mixed[89] = i64::MIN;
    for ids in [mixed.clone(), mixed, vec![100; 64], vec![-1]] {
        let job = crate::gather::Job::new(&drive, table, ids, true, 0)?;
        // Compares each code with its id.
        counted(&drive, (1, 0), || drive.run(&job).map(drop))?;
    }
    Ok("ids of rows and of none".to_owned())
}

/// Launches of eight streams want the same 16 lines, and take turns at two queues.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = cached(bench, "", limit(), ONE_SET)?;
    let mut throw = dice(47);
    let table = RowTable {
        rows: 40,
        ..drive.table(0, 4096)
    };
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
    Ok(format!("{rows} rows over 8 streams and 16 lines"))
}

/// More rows than fit into the queues, and rows that the kernel does not copy, go by shared queues.
fn too_many(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 512, "", limit())?;
    for (table, count, counts) in [
        (drive.table(0, 512), 254, (1, 0)),
        (drive.table(0, 512), 255, (0, 1)),
        (drive.table(2, 100), 8, (0, 1)),
    ] {
        drive.keep_rows(&table, 1 << 20)?;
        for expected in [0, count as u64] {
            let found = found(&drive, count as u64, || {
                counted(&drive, counts, || {
                    gather(&drive, table, (0..count).collect(), 0)
                })
            })?;
            if found != expected {
                return Err(format!(
                    "{found} rows of {count} were in the cache, not {expected}"
                ));
            }
        }
    }
    Ok("254 rows by owned queues, 255 by shared ones".to_owned())
}
