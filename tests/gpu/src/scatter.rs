//! `table[ids] = rows` by the GPU itself: whole blocks of one drive, compared with bytes that the host computes; the
//! results of rows whose writes fail; and gathers beside and after it.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{BYTES, Drive, Job, dice, fault_timeout, several_streams, text};
use crate::hazards::{Graph, OwnStream, current};
use crate::limits::{give_up, limit};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::{SCATTER_ROWS, STATION_BYTES, code};
use nvme_host::cuda::{DeviceMemory, PendingRows, RowFailures, RowTable};
use std::collections::HashMap;
use std::time::{Duration, Instant};

type Rows = Vec<Vec<u8>>;

/// Scatters of one kind.
#[derive(Clone, Copy)]
struct ScatterKind {
    name: &'static str,
    /// First queue of the GPU in [`Drive`] that they use, and the number of queues.
    queues: (u32, u32),
    /// Rows of one of them.
    rows: u64,
    /// Rows of each of four streams.
    of_stream: u64,
}

/// More rows than fit into the queues that blocks own.
const SHARED: ScatterKind = ScatterKind {
    name: "",
    queues: (1, 4),
    rows: 600,
    of_stream: 512,
};
/// Rows that fit into the two owned queues of a [`Drive`], of 127 commands each.
const OWNED: ScatterKind = ScatterKind {
    name: "owned/",
    queues: (5, 2),
    rows: 200,
    of_stream: 90,
};

impl ScatterKind {
    /// Returns a fault on the writes of each of the queues.
    fn on_all_queues(self, fault: &str) -> String {
        let (first, count) = self.queues;
        let each = (first..first + count).map(|qid| fault.replace("QID", &qid.to_string()));
        each.collect::<Vec<_>>().join("&fault=")
    }

    /// Runs `work` with a drive; fails unless all of its scatters are of this kind.
    fn check(
        self,
        drive: &mut Drive,
        work: impl FnOnce(&mut Drive) -> Outcome<String>,
    ) -> Outcome<String> {
        let counts = |drive: &Drive| {
            let stats = drive.store().stats();
            [stats.shared_scatters, stats.owned_scatters]
        };
        let before = counts(drive);
        let done = work(drive)?;
        let after = counts(drive);
        let of_kind = usize::from(self.queues == OWNED.queues);
        let other = 1 - of_kind;
        match after[of_kind] > before[of_kind] && after[other] == before[other] {
            true => Ok(done),
            false => Err(format!("shared and owned scatters: {before:?}, {after:?}")),
        }
    }
}

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("scatter/shapes/block-{block}"), |_| {
            shapes(bench, block)
        });
    }
    report.test("scatter/who-writes", |_| who_writes(bench));
    report.test("scatter/launches", |_| launches(bench));
    report.test("scatter/bytes", |_| bytes(bench));
    report.test("scatter/cache", |_| cached(bench));
    report.test("scatter/fault/runs", |_| runs(bench));
    for kind in [SHARED, OWNED] {
        let name = |test: &str| format!("scatter/{}{test}", kind.name);
        report.test(&name("streams"), |_| streams(bench, kind));
        report.test(&name("fault/over-and-over"), |_| outages(bench, kind));
        for (fault_name, fault) in FAULTS {
            report.test(&name(&format!("fault/{fault_name}")), |_| {
                faults(bench, kind, (fault_name, fault))
            });
        }
        report.case(&name("graph/replay"), |options| {
            let rounds = (options.commands / 1000).clamp(3, 200);
            replay(bench, kind, rounds).into()
        });
        report.case(&name("graph/outlives-its-store"), |_| {
            outlives(bench, kind).into()
        });
    }
}

const FAULTS: [(&str, &str); 6] = [
    ("status", "status:0x281"),
    ("dropped", "drop"),
    ("late", "delay:LATE"),
    ("wrong-cid", "wrongcid:0xfff"),
    ("dead-cfs", "cfs"),
    ("all-ones", "allones"),
];

/// A scatter, and the bytes of its rows.
struct Written {
    table: RowTable,
    job: Job,
    rows: Rows,
}

impl Written {
    fn new(
        drive: &Drive,
        table: RowTable,
        ids: Vec<i64>,
        (is_wide, pad): (bool, u64),
        throw: &mut impl FnMut(u64) -> u64,
    ) -> Outcome<Self> {
        let job = Job::new(drive, table, ids, is_wide, pad)?;
        let rows = job.fill(throw)?;
        Ok(Self { table, job, rows })
    }

    /// Returns the range of row `id` on the drive, if the table has it.
    fn place(&self, id: i64) -> Option<std::ops::Range<usize>> {
        if !(0..self.table.rows as i64).contains(&id) {
            return None;
        }
        let bytes = self.table.row_bytes as usize;
        let at = self.table.first_byte as usize + id as usize * bytes;
        Some(at..at + bytes)
    }

    /// Returns the last row for each id of the table, and its range on the drive.
    fn last(&self) -> HashMap<i64, (usize, std::ops::Range<usize>)> {
        let ids = self.job.ids().iter().enumerate();
        ids.filter_map(|(index, id)| Some((*id, (index, self.place(*id)?))))
            .collect()
    }

    /// Returns the rows' codes, and checks that the operation reports the same number of failures.
    fn codes(&self, failures: RowFailures) -> Outcome<Vec<i32>> {
        let codes = self.job.codes()?;
        let failed = codes.iter().filter(|code| **code != code::OK).count() as u64;
        let first = codes.iter().position(|code| *code != code::OK);
        let first = first.map(|index| (index as u64, codes[index]));
        if (failures.rows, failures.first) != (failed, first) {
            return Err(format!(
                "{failures:?}, but {failed} rows failed, first {first:?}"
            ));
        }
        for (id, code) in self.job.ids().iter().zip(&codes) {
            if self.place(*id).is_some() == (*code == code::OUT_OF_RANGE) {
                return Err(format!("id {id}: code {code}"));
            }
        }
        Ok(codes)
    }

    /// Waits for `pending`; returns the rows' codes.
    fn wait(&self, pending: &PendingRows) -> Outcome<Vec<i32>> {
        self.codes(pending.wait(limit()).map_err(text)?.failures)
    }
}

/// Compares the drive with the written rows: a row that was written has the new bytes, and one that failed the old
/// bytes or the new ones. The image gets the drive's bytes. Returns how many rows of the tables failed.
fn settle(drive: &mut Drive, all: &[(&Written, &[i32])]) -> Outcome<usize> {
    let have = read_all(drive)?;
    let (mut may, mut failed) = (drive.image_mut().clone(), 0);
    for (written, codes) in all {
        for (id, (index, place)) in written.last() {
            let (there, new) = (&have[place.clone()], &written.rows[index][..]);
            let is_as_it_was = codes[index] != code::OK && *there == may[place.clone()];
            if there != new && !is_as_it_was {
                return Err(format!(
                    "row {index}, id {id}, code {}: its bytes are wrong",
                    codes[index]
                ));
            }
            failed += usize::from(codes[index] != code::OK);
            may[place].copy_from_slice(there);
        }
    }
    if may != have {
        return Err("bytes beside the rows have changed".to_owned());
    }
    *drive.image_mut() = have;
    Ok(failed)
}

/// Returns the content of the drive, once its controller answers again.
fn read_all(drive: &Drive) -> Outcome<Vec<u8>> {
    let begin = Instant::now();
    loop {
        match drive.read_all() {
            Err(_) if begin.elapsed() < limit() => std::thread::sleep(Duration::from_millis(5)),
            other => return other,
        }
    }
}

/// Writes rows and gathers all rows of the table in the same stream.
fn scatter_and_gather(drive: &mut Drive, written: &Written) -> Outcome<()> {
    let ids = written.job.ids().to_vec();
    let after = Job::new(drive, written.table, ids, true, 0)?;
    let scattered = written.job.scatter(drive)?;
    let gathered = after.start(drive, &drive.stream)?;
    let codes = written.wait(&scattered)?;
    gathered.wait(limit()).map_err(text)?;
    match settle(drive, &[(written, &codes)])? {
        0 => after.check(drive).map(drop),
        failed => Err(format!("{failed} rows failed: {codes:?}")),
    }
}

/// Returns `count` ids: some rise or fall by one, some are repeated, and a few are not in the table.
fn mixed_ids(rows: u64, count: usize, throw: &mut impl FnMut(u64) -> u64) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..count).map(|_| throw(rows) as i64).collect();
    let third = count / 3;
    let begin = throw(rows.saturating_sub(third as u64)) as i64;
    for (at, id) in ids[..third].iter_mut().enumerate() {
        *id = (begin + at as i64).min(rows as i64 - 1);
    }
    for at in third..third + third / 2 {
        ids[at] = ids[third - 1 - (at - third) / 2];
    }
    for (place, id) in [(5, -1), (17, rows as i64), (40, i64::from(i32::MIN))] {
        if let Some(one) = ids.get_mut(place) {
            *one = id;
        }
    }
    ids
}

/// Rows of whole blocks, at many offsets of the drive and of GPU memory.
fn shapes(bench: &Bench, block: u32) -> Outcome<String> {
    let mut drive = Drive::new(bench, block, "", limit())?;
    let mut throw = dice(u64::from(block) + 1);
    let (mut written, mut owned) = (0, 0);
    for (blocks, first_block, pad) in [
        (1, 0, 0),
        (1, 3, 16),
        (2, 1, 4),
        (3, 0, 1),
        (9, 2, 0),
        (16, 0, 8),
    ] {
        for count in [1, 31, 33, 700] {
            let table = drive.table(first_block * u64::from(block), blocks * block);
            let ids = mixed_ids(table.rows, count, &mut throw);
            let shape = (throw(2) == 0, pad);
            let one = Written::new(&drive, table, ids, shape, &mut throw)?;
            scatter_and_gather(&mut drive, &one)
                .map_err(|why| format!("{table:?}, {count} rows, {pad} bytes between: {why}"))?;
            written += count;
            // Rows in units of 4 bytes, as many as slots and owned queues have room for.
            let of_station = (STATION_BYTES / u64::from(table.row_bytes)).min(127);
            owned += u64::from(pad != 1 && count as u64 <= 2 * of_station);
        }
    }
    let stats = drive.store().stats();
    match (stats.owned_scatters, stats.shared_scatters) {
        (of_blocks, shared) if of_blocks == owned && shared == 24 - owned => Ok(format!(
            "{written} rows compared, {owned} times by owned queues"
        )),
        other => Err(format!(
            "owned and shared scatters: {other:?}, not {owned} owned"
        )),
    }
}

/// The CPU's queues carry no rows of whole blocks, and all others.
fn who_writes(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(19);
    for (row_bytes, first_byte, is_by_gpu) in [
        (4096, 8192, true),
        (124 << 10, 0, true),
        (132 << 10, 0, false),
        (512, 0, false),
        (4096, 512, false),
    ] {
        let table = drive.table(first_byte, row_bytes);
        let ids = vec![3, 1, 3, table.rows as i64 - 1];
        let one = Written::new(&drive, table, ids, (true, 0), &mut throw)?;
        let before = drive.store().stats().commands;
        let codes = one.wait(&one.job.scatter(&drive)?)?;
        let is_by_cpu = drive.store().stats().commands != before;
        if is_by_cpu == is_by_gpu {
            return Err(format!("{table:?}: by the CPU {is_by_cpu}"));
        }
        if settle(&mut drive, &[(&one, &codes)])? != 0 {
            return Err(format!("{table:?}: {codes:?}"));
        }
    }
    // No words for the codes, and no rows.
    let table = drive.table(0, 4096);
    let none = Written::new(&drive, table, Vec::new(), (true, 0), &mut throw)?;
    if !none.job.scatter(&drive)?.is_done() {
        return Err("a scatter of no rows is under way".to_owned());
    }
    let one = Written::new(&drive, table, vec![9, -1, 8], (false, 0), &mut throw)?;
    let pending = one.job.scatter_without_status(&drive)?;
    let failures = pending.wait(limit()).map_err(text)?.failures;
    if failures.first != Some((1, code::OUT_OF_RANGE)) || failures.rows != 1 {
        return Err(format!("{failures:?}"));
    }
    settle(&mut drive, &[(&one, &[0, code::OUT_OF_RANGE, 0])])?;
    Ok("whole blocks by the GPU, others by the CPU".to_owned())
}

/// More rows than one launch takes, each id many times.
fn launches(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 512, "", limit())?;
    let mut throw = dice(70);
    let table = drive.table(0, 512);
    let count = 2 * SCATTER_ROWS as usize + 4000;
    let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
    // The same id in all launches, at their ends, and one that is none of the table in the last one.
    for at in [
        0,
        SCATTER_ROWS as usize - 1,
        SCATTER_ROWS as usize,
        count - 1,
    ] {
        ids[at] = 77;
    }
    ids[count - 2] = -1;
    let one = Written::new(&drive, table, ids, (false, 0), &mut throw)?;
    let codes = one.wait(&one.job.scatter(&drive)?)?;
    if codes.iter().filter(|code| **code != code::OK).count() != 1 {
        return Err("rows failed".to_owned());
    }
    settle(&mut drive, &[(&one, &codes)])?;
    Ok(format!("{count} rows in 3 launches"))
}

/// Whole blocks without ids.
fn bytes(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(41);
    let mut moved = 0;
    for _ in 0..12 {
        let blocks = 1 + throw(700);
        let offset = throw(BYTES / 4096 - blocks) * 4096;
        let len = (blocks * 4096) as usize;
        let new: Vec<u8> = (0..len).map(|_| throw(256) as u8).collect();
        let from = DeviceMemory::new(drive.gpu(), len).map_err(text)?;
        from.upload(0, &new).map_err(text)?;
        let before = drive.store().stats().commands;
        let (address, stream) = (from.address(), drive.stream.handle());
        // SAFETY: the memory outlives the operation, which is waited for.
        let pending = unsafe {
            let store = drive.store();
            store.write_from_gpu(offset, len as u64, address, stream)
        };
        let failures = pending.map_err(text)?.wait(limit()).map_err(text)?.failures;
        if failures.rows != 0 || drive.store().stats().commands != before {
            return Err(format!("{len} bytes from {offset} on: {failures:?}"));
        }
        drive.image_mut()[offset as usize..][..len].copy_from_slice(&new);
        moved += len;
    }
    match drive.read_all()? == *drive.image_mut() {
        true => Ok(format!("{moved} bytes")),
        false => Err("bytes are wrong".to_owned()),
    }
}

/// Returns `count` different rows from `first` on.
fn unlike_ids(first: u64, count: u64, throw: &mut impl FnMut(u64) -> u64) -> Vec<i64> {
    let mut ids: Vec<i64> = (first..first + count).map(|id| id as i64).collect();
    for at in 0..ids.len() {
        // Some neighbours stay together.
        if throw(3) == 0 {
            ids.swap(at, throw(count) as usize);
        }
    }
    ids
}

/// Launches a scatter of this many rows on each stream at once, each to its own rows, and returns their results.
fn round_of(
    drive: &Drive,
    (streams, rows): (&[OwnStream], u64),
    throw: &mut impl FnMut(u64) -> u64,
) -> Outcome<Vec<(Written, Vec<i32>)>> {
    let table = drive.table(0, 4096);
    let share = table.rows / streams.len() as u64;
    let make = |of: usize| {
        let ids = unlike_ids(of as u64 * share, rows, throw);
        Written::new(drive, table, ids, (true, 0), throw)
    };
    let all: Vec<Written> = (0..streams.len()).map(make).collect::<Outcome<_>>()?;
    let started = all.iter().zip(streams);
    let pending: Vec<PendingRows> = started
        .map(|(one, stream)| one.job.scatter_on(drive, stream.handle()))
        .collect::<Outcome<_>>()?;
    let ended = all.into_iter().zip(&pending);
    ended
        .map(|(one, pending)| {
            let codes = one.wait(pending)?;
            Ok((one, codes))
        })
        .collect()
}

fn settle_round(drive: &mut Drive, round: &[(Written, Vec<i32>)]) -> Outcome<usize> {
    let all: Vec<(&Written, &[i32])> = round.iter().map(|(one, codes)| (one, &codes[..])).collect();
    settle(drive, &all)
}

fn own_streams(drive: &Drive, count: usize) -> Outcome<Vec<OwnStream>> {
    current(drive)?;
    (0..count).map(|_| OwnStream::new()).collect()
}

fn streams(bench: &Bench, kind: ScatterKind) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(78);
    let streams = own_streams(&drive, 4)?;
    kind.check(&mut drive, |drive| {
        let mut rows = 0;
        for _ in 0..10 {
            let round = round_of(drive, (&streams, kind.of_stream), &mut throw)?;
            rows += round.iter().map(|(_, codes)| codes.len()).sum::<usize>();
            if settle_round(drive, &round)? != 0 {
                return Err("rows failed".to_owned());
            }
        }
        Ok(format!("{rows} rows over 4 streams"))
    })
}

/// Gathers through a cache see each scatter before them, from several streams and in the same one.
fn cached(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    let mut throw = dice(124);
    let streams = several_streams(bench, 4)?;
    let table = drive.table(0, 4096);
    drive.keep_rows(&table, 300 << 12)?;
    for round in 0..20 {
        let few = |_| throw(60) as i64;
        let ids: Vec<i64> = (0..400).map(few).collect();
        let make = |_| Job::new(&drive, table, ids.clone(), true, 0);
        let jobs: Vec<Job> = (0..6).map(make).collect::<Outcome<_>>()?;
        for codes in crate::gather::run_over(&drive, &jobs, &streams)? {
            if codes.iter().any(|code| *code != code::OK) {
                return Err(format!("round {round}: {codes:?}"));
            }
        }
        let ids = (0..50).map(|_| throw(60) as i64).collect();
        let one = Written::new(&drive, table, ids, (true, 0), &mut throw)?;
        scatter_and_gather(&mut drive, &one).map_err(|why| format!("round {round}: {why}"))?;
    }
    Ok("20 scatters, each seen".to_owned())
}

/// Some commands for several rows fail: a row fails for itself, and keeps its old bytes then.
fn runs(bench: &Bench) -> Outcome<String> {
    let fault = SHARED.on_all_queues("status:0x281@op=write,qid=QID,every=3");
    let mut drive = Drive::new(bench, 4096, &fault, limit())?;
    let mut throw = dice(33);
    let table = drive.table(0, 4096);
    let (mut failed, mut rows) = (0, 0);
    for _ in 0..4 {
        let first = throw(1000);
        let ids = (first..first + 900).map(|id| id as i64).collect();
        let one = Written::new(&drive, table, ids, (false, 0), &mut throw)?;
        let codes = one.wait(&one.job.scatter(&drive)?)?;
        if let Some(other) = codes.iter().find(|code| !matches!(**code, 0 | 0x281)) {
            return Err(format!("code {other}"));
        }
        // A command that failed was not carried out.
        let have = drive.read_all()?;
        for (index, place) in one.last().into_values() {
            let is_new = have[place.clone()] == one.rows[index][..];
            let is_old = have[place.clone()] == drive.image_mut()[place];
            if (is_new, is_old) != (codes[index] == 0, codes[index] != 0) {
                return Err(format!("row {index}: code {}, new {is_new}", codes[index]));
            }
        }
        rows += codes.len();
        failed += settle(&mut drive, &[(&one, &codes)])?;
    }
    match failed {
        0 => Err("no row failed".to_owned()),
        all if all * 2 > rows => Err(format!("{all} of {rows} rows failed")),
        _ => Ok(format!(
            "{failed} of {rows} rows failed, each for itself, and kept its bytes"
        )),
    }
}

/// Writes are lost repeatedly: no row is wrong, and no I/O context is lost.
fn outages(bench: &Bench, kind: ScatterKind) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let every = 7 * kind.of_stream / 4;
    let fault = format!("drop@op=write,qid=QID,every={every}");
    let mut drive = Drive::new(bench, 4096, &kind.on_all_queues(&fault), timeout)?;
    let mut throw = dice(22);
    let streams = own_streams(&drive, 4)?;
    kind.check(&mut drive, |drive| {
        let (mut failed, mut rows) = (0, 0);
        for _ in 0..12 {
            let round = round_of(drive, (&streams, kind.of_stream), &mut throw)?;
            rows += round.iter().map(|(_, codes)| codes.len()).sum::<usize>();
            failed += settle_round(drive, &round)?;
        }
        match failed {
            0 => Err("no row failed".to_owned()),
            all if all == rows => Err("every row failed".to_owned()),
            _ => Ok(format!("{failed} of {rows} rows failed, none is wrong")),
        }
    })
}

/// Rows whose writes fail report it, and later scatters work if the controller comes back.
fn faults(bench: &Bench, kind: ScatterKind, (name, fault): (&str, &str)) -> Outcome<String> {
    let timeout = fault_timeout(bench, fault);
    let fault = fault.replace("LATE", &format!("{}ms", timeout.as_millis() * 4));
    let fault = format!("{fault}@op=write,qid={},nth=7", kind.queues.0);
    let mut drive = Drive::new(bench, 4096, &fault, timeout)?;
    kind.check(&mut drive, |drive| faulty(drive, kind, name))
}

fn faulty(drive: &mut Drive, kind: ScatterKind, name: &str) -> Outcome<String> {
    let table = drive.table(0, 4096);
    let mut throw = dice(6);
    let mut next = |drive: &Drive| {
        let ids: Vec<i64> = (0..kind.rows).map(|_| throw(table.rows) as i64).collect();
        let one = Written::new(drive, table, ids, (true, 0), &mut throw)?;
        let codes = one.wait(&one.job.scatter(drive)?)?;
        Ok::<_, String>((one, codes))
    };
    let (one, codes) = next(drive)?;
    let failed = codes.iter().filter(|code| **code != code::OK).count();
    if failed == 0 {
        return Err("no row failed".to_owned());
    }
    let is_expected = |code: &i32| matches!(*code, code::OK | 0x281);
    if name == "status" && (!codes.iter().all(is_expected) || failed > 1) {
        return Err(format!("{failed} rows failed: {codes:?}"));
    }
    if name != "all-ones" {
        settle(drive, &[(&one, &codes)])?;
    }
    let begin = Instant::now();
    loop {
        let (one, codes) = next(drive)?;
        if name == "all-ones" {
            let gone = codes.iter().all(|code| *code == code::GONE);
            if gone && begin.elapsed() > Duration::from_secs(3) {
                return Ok(format!(
                    "{failed} rows failed, and all of a controller that is gone"
                ));
            }
        } else if settle(drive, &[(&one, &codes)])? == 0 {
            return Ok(format!("{failed} rows failed, then none"));
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "rows fail for {:?} after the fault: {codes:?}",
                limit()
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A scatter in a graph, replayed with other ids and rows.
fn replay(bench: &Bench, kind: ScatterKind, rounds: u64) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    current(&drive)?;
    kind.check(&mut drive, |drive| replay_of(drive, kind, rounds))
}

fn replay_of(drive: &mut Drive, kind: ScatterKind, rounds: u64) -> Outcome<String> {
    let table = drive.table(0, 4096);
    let mut throw = dice(4);
    let ids = mixed_ids(table.rows, kind.rows as usize, &mut throw);
    let mut one = Written::new(drive, table, ids, (true, 0), &mut throw)?;
    let stream = OwnStream::new()?;
    let (graph, pending) = Graph::of(&stream, |stream| one.job.scatter_on(drive, stream))?;
    if !pending.is_captured() || pending.is_done() {
        return Err("the scatter ran while it was captured".to_owned());
    }
    for round in 0..rounds {
        one.job
            .replace_ids(mixed_ids(table.rows, kind.rows as usize, &mut throw))?;
        one.rows = one.job.fill(&mut throw)?;
        let begin = Instant::now();
        graph.launch(&stream)?;
        while u64::from(pending.ended()) <= round {
            if begin.elapsed() > limit() {
                give_up(&format!("replay {round} does not end"));
            }
        }
        let codes = one.codes(pending.last().failures)?;
        match settle(drive, &[(&one, &codes)]) {
            Ok(0) => {}
            other => return Err(format!("replay {round}: {other:?}")),
        }
    }
    Ok(format!("{rounds} replays of {} rows", kind.rows))
}

/// A graph is launched after its store was closed: each row reports it.
fn outlives(bench: &Bench, kind: ScatterKind) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", limit())?;
    current(&drive)?;
    let table = drive.table(0, 4096);
    let mut throw = dice(14);
    let ids = (0..kind.rows as i64).collect();
    let one = Written::new(&drive, table, ids, (true, 0), &mut throw)?;
    let stream = OwnStream::new()?;
    let (graph, pending) = Graph::of(&stream, |stream| one.job.scatter_on(&drive, stream))?;
    graph.launch(&stream)?;
    stream.synchronize()?;
    let codes = one.codes(pending.last().failures)?;
    if settle(&mut drive, &[(&one, &codes)])? != 0 {
        return Err("rows failed while the store was there".to_owned());
    }
    drop(drive.close());
    graph.launch(&stream)?;
    stream.synchronize()?;
    let codes = one.codes(pending.last().failures)?;
    match codes.iter().all(|code| *code == code::GONE) && pending.ended() == 2 {
        true => Ok(format!("{} rows are GONE", kind.rows)),
        false => Err(format!("{codes:?}")),
    }
}
