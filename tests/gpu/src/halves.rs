//! Gathers in halves: rows of every shape with other work between the halves, more gathers than there are queues, graphs,
//! streams, and all that may happen between the halves. Every row is compared.

use crate::bench::Bench;
use crate::by_host::Scratch;
use crate::gather::{CANARY, Drive, Job, dice, fault_timeout, several_streams};
use crate::hazards::{CALLS, Graph, OwnStream, current};
use crate::limits::{finish, limit, text};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::Error;
use nvme_host::cuda::{CudaGraph, PendingRows, RowTable, Stream};
use nvme_host::store::BegunGather;
use std::time::Instant;

/// A drive whose stations have a queue each: three of four may be held between halves.
const DEVICE: &str = "sim:mem?size=8MiB&block=512&queues=16&threads=4";
/// Rows that two of those queues are taken for.
const ROWS: i64 = 32;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("gather/halves/shapes", |_| shapes(bench));
    report.test("gather/halves/streams", |_| streams(bench));
    report.test("gather/halves/more-than-queues", |_| many(bench));
    report.test("gather/halves/by-the-second", |_| by_second(bench));
    report.test("gather/halves/dropped", |_| dropped(bench));
    report.test("gather/halves/usage", |_| usage(bench));
    report.test("gather/halves/graph/replay", |_| replay(bench));
    report.test("gather/halves/graph/two-streams", |_| two_streams(bench));
    report.test("gather/halves/graph/apart", |_| apart(bench));
    report.test("gather/halves/graph/never-finished", |_| unfinished(bench));
    report.test("gather/halves/reset", |_| reset(bench));
    report.test("gather/halves/closed", |_| closed(bench));
    for fault in [
        "drop@op=read,nth=7",
        "drop@op=read",
        "status:0x281@op=read,nth=7",
        "cfs@op=read,nth=7",
    ] {
        let name = fault.split(['@', ':']).next().unwrap_or(fault);
        let often = if fault.contains("nth") { "" } else { "-all" };
        report.test(&format!("gather/halves/fault/{name}{often}"), |_| {
            faults(bench, fault)
        });
    }
    for (name, call) in CALLS {
        report.test(&format!("gather/halves/beside/{name}"), |_| {
            beside(bench, call)
        });
    }
}

fn open(bench: &Bench) -> Outcome<Drive> {
    Drive::open(bench, DEVICE, limit())
}

/// Waits for the end of `pending`; all rows have to be those of the drive.
fn read(drive: &Drive, job: &Job, pending: &PendingRows) -> Outcome<()> {
    let ended = pending.wait(limit()).map_err(text)?;
    let codes = job.check(drive)?;
    match codes.iter().all(|code| *code == code::OK) && ended.failures.rows == 0 {
        true => Ok(()),
        false => Err(format!("rows failed: {codes:?}, {ended:?}")),
    }
}

/// Finishes the gather in `stream`; all rows have to be those of the drive.
fn finish_in(drive: &Drive, (job, begun): (&Job, &mut BegunGather), stream: u64) -> Outcome<()> {
    let pending = job.finish_on(begun, stream).map_err(text)?;
    read(drive, job, &pending)
}

fn ids(count: i64) -> Vec<i64> {
    (0..count).map(|index| index * 37 % 1000).collect()
}

/// Begins and finishes gathers until the second half reads no row, which shows that all stations were returned.
fn all_came_back(drive: &Drive) -> Outcome<()> {
    let job = Job::new(drive, drive.table(0, 256), ids(48), true, 0)?;
    let begin = Instant::now();
    loop {
        let before = drive.store().stats().late_rows;
        let mut begun = job.begin_on(drive, drive.stream.handle())?;
        finish_in(drive, (&job, &mut begun), drive.stream.handle())?;
        if drive.store().stats().late_rows == before {
            return Ok(());
        }
        if begin.elapsed() > limit() {
            return Err("stations did not come back".to_owned());
        }
    }
}

/// Rows of one unit and of several blocks, with a gather by shared or owned queues between the halves.
fn shapes(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let (mut throw, mut rows) = (dice(71), 0);
    let stream = drive.stream.handle();
    for (row_bytes, first_byte, pad) in [
        (16, 0, 0),
        (48, 32, 16),
        (256, 96, 0),
        (1040, 16, 32),
        (4096, 0, 0),
    ] {
        let table = drive.table(first_byte, row_bytes);
        for count in [1, 17, 48, 120] {
            let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
            ids[count / 2] = table.rows as i64 - 1;
            let (job, between) = (
                Job::new(&drive, table, ids.clone(), throw(2) == 0, pad)?,
                Job::new(&drive, table, ids, true, pad)?,
            );
            let before = drive.store().stats();
            let mut begun = job.begin_on(&drive, stream)?;
            let other = between.start_on(&drive, stream)?;
            finish_in(&drive, (&job, &mut begun), stream)?;
            read(&drive, &between, &other)?;
            let after = drive.store().stats();
            if (after.begun_gathers, after.late_rows)
                != (before.begun_gathers + 1, before.late_rows)
            {
                return Err(format!("{count} rows of {row_bytes} bytes: {after:?}"));
            }
            rows += count;
        }
    }
    // Ids without a row, between others and alone.
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 256)
    };
    for ids in [vec![5, -1, 99, 100, i64::MAX], vec![100; 20]] {
        let job = Job::new(&drive, table, ids, true, 0)?;
        let mut begun = job.begin_on(&drive, stream)?;
        let pending = job.finish_on(&mut begun, stream).map_err(text)?;
        pending.wait(limit()).map_err(text)?;
        job.check(&drive)?;
    }
    Ok(format!("{rows} rows, each with another gather between"))
}

/// Begun in one stream and finished in another one, several at a time.
fn streams(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let (mut throw, table) = (dice(73), drive.table(0, 256));
    let streams = several_streams(bench, 4)?;
    for _ in 0..12 {
        let mut all = Vec::new();
        for at in 0..6 {
            let ids = (0..20).map(|_| throw(table.rows) as i64).collect();
            let job = Job::new(&drive, table, ids, true, 0)?;
            let begun = job.begin_on(&drive, streams[at % 4].handle())?;
            all.push((job, begun));
        }
        let mut pending = Vec::new();
        for (at, (job, begun)) in all.iter_mut().enumerate() {
            let stream = &streams[(at + throw(4) as usize) % 4];
            pending.push(job.finish_on(begun, stream.handle()).map_err(text)?);
        }
        for ((job, _), pending) in all.iter().zip(&pending) {
            read(&drive, job, pending)?;
        }
    }
    Ok("72 gathers over 4 streams".to_owned())
}

/// More gathers are begun in one stream than there are queues, and finished in the reverse order: those that found no
/// queue are read by their second halves, and ordinary gathers run beside them.
fn many(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let (table, stream) = (drive.table(0, 256), drive.stream.handle());
    let mut all = Vec::new();
    for at in 0..8 {
        let job = Job::new(&drive, table, (at * 40..at * 40 + ROWS).collect(), true, 0)?;
        let begun = job.begin_on(&drive, stream)?;
        all.push((job, begun));
    }
    for count in [24, 2000] {
        let job = Job::new(&drive, table, ids(count), true, 0)?;
        let pending = job.start_on(&drive, stream)?;
        read(&drive, &job, &pending)?;
    }
    for (job, begun) in all.iter_mut().rev() {
        finish_in(&drive, (job, begun), stream)?;
    }
    let late = drive.store().stats().late_rows;
    // Three blocks of 16 rows of one gather and a half found a queue.
    match late == 8 * ROWS as u64 - 48 {
        true => all_came_back(&drive).map(|()| format!("{late} rows by second halves")),
        false => Err(format!("{late} rows by second halves")),
    }
}

/// For some rows no queue can be held: the second half reads them as an ordinary gather does.
fn by_second(bench: &Bench) -> Outcome<String> {
    let mut drive = open(bench)?;
    let odd = drive.table(2, 100);
    let one = |drive: &Drive, table: RowTable, count| -> Outcome<()> {
        let job = Job::new(drive, table, ids(count), true, 0)?;
        let streams = several_streams(bench, 2)?;
        let mut begun = job.begin_on(drive, streams[0].handle())?;
        if begun.submits() {
            return Err(format!(
                "{count} rows of {} bytes were submitted",
                table.row_bytes
            ));
        }
        finish_in(drive, (&job, &mut begun), streams[1].handle())?;
        match job.finish_on(&mut begun, streams[0].handle()) {
            Err(Error::Usage { .. }) => Ok(()),
            other => Err(format!("finished again: {:?}", other.err())),
        }
    };
    one(&drive, odd, 20)?;
    one(&drive, drive.table(0, 256), 4000)?;
    let table = drive.table(0, 256);
    drive.keep_rows(&table, 1 << 20)?;
    one(&drive, table, 40)?;
    let file = Scratch::new()?;
    let drive = Drive::open(bench, &file.device(), limit())?;
    one(&drive, drive.table(0, 256), 40)?;
    Ok("odd rows, many rows, a cache, a file".to_owned())
}

/// Gathers that are never finished give their stations back, also when their store is closed first.
fn dropped(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let table = drive.table(0, 256);
    let job = Job::new(&drive, table, ids(ROWS), true, 0)?;
    for _ in 0..40 {
        drop(job.begin_on(&drive, drive.stream.handle())?);
    }
    finish(&drive.stream);
    all_came_back(&drive)?;
    if job
        .codes()?
        .iter()
        .any(|code| code.to_le_bytes() != [CANARY; 4])
    {
        return Err("a gather without a second half stored row status".to_owned());
    }
    let begun = job.begin_on(&drive, drive.stream.handle())?;
    finish(&drive.stream);
    drive.close();
    drop(begun);
    Ok("40 gathers, and one whose store was closed".to_owned())
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let stream = drive.stream.handle();
    let job = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 0)?;
    // Target addresses that are no multiples of 4 are refused, and the gather is finished at other ones.
    let uneven = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 2)?;
    let mut begun = job.begin_on(&drive, stream)?;
    let refused = uneven.finish_on(&mut begun, stream);
    if !matches!(refused, Err(Error::Usage { .. })) || begun.is_finished() {
        return Err(format!("uneven rows: {:?}", refused.err()));
    }
    finish_in(&drive, (&job, &mut begun), stream)?;
    match job.finish_on(&mut begun, stream) {
        Err(Error::Usage { .. }) => {}
        other => return Err(format!("finished again: {:?}", other.err())),
    }
    job.check(&drive)?;
    Ok("uneven rows, and a second finish".to_owned())
}

/// Both halves are captured in one graph with a gather between them, which is replayed with other ids.
fn replay(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    current(&drive)?;
    let (table, mut throw) = (drive.table(0, 256), dice(79));
    let mut some = || -> Vec<i64> { (0..48).map(|_| throw(table.rows) as i64).collect() };
    let (mut job, mut between) = (
        Job::new(&drive, table, some(), true, 0)?,
        Job::new(&drive, table, some(), true, 0)?,
    );
    let stream = OwnStream::new()?;
    let (graph, (pending, other, begun)) = Graph::of(&stream, |stream| {
        let mut begun = job.begin_on(&drive, stream)?;
        let other = between.start_on(&drive, stream)?;
        let pending = job.finish_on(&mut begun, stream).map_err(text)?;
        Ok((pending, other, begun))
    })?;
    drop(begun);
    for round in 1..=30 {
        job.replace_ids(some())?;
        between.replace_ids(some())?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        if (pending.ended(), other.ended()) != (round, round) {
            return Err(format!("{} and {} ends", pending.ended(), other.ended()));
        }
        read(&drive, &job, &pending)?;
        read(&drive, &between, &other)?;
    }
    match drive.store().stats().late_rows {
        0 => Ok("30 replays".to_owned()),
        late => Err(format!("{late} rows by second halves")),
    }
}

/// The second half in another stream of the capture.
fn two_streams(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    current(&drive)?;
    let job = Job::new(&drive, drive.table(0, 256), ids(48), true, 0)?;
    let (first, second) = (OwnStream::new()?, OwnStream::new()?);
    let (graph, pending) = Graph::of(&first, |stream| {
        let mut begun = job.begin_on(&drive, stream)?;
        let pending = job.finish_on(&mut begun, second.handle()).map_err(text)?;
        // The stream that began the capture has to end it.
        bench.gpu.order(second.handle(), stream).map_err(text)?;
        Ok(pending)
    })?;
    for _ in 0..3 {
        graph.launch(&first)?;
        first.synchronize()?;
        read(&drive, &job, &pending)?;
    }
    Ok("3 replays".to_owned())
}

/// If one half is in a graph and the other is not, it is refused, and a capture continues.
fn apart(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let job = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 0)?;
    let plain = drive.stream.handle();
    let refused = |begun: &mut BegunGather, stream, what: &str| match job.finish_on(begun, stream) {
        Err(Error::Usage { .. }) if !begun.is_finished() => Ok(()),
        other => Err(format!("{what}: {:?}", other.err())),
    };
    let mut outside = job.begin_on(&drive, plain)?;
    let captured = Stream::new(&bench.gpu).map_err(text)?;
    let begin = |stream| {
        Ok(job.begin_on(&drive, stream).and_then(|begun| {
            refused(&mut outside, stream, "begun outside")?;
            Ok(begun)
        }))
    };
    let (graph, begun) = CudaGraph::capture(&captured, begin).map_err(text)?;
    let mut begun = begun?;
    refused(&mut begun, plain, "begun in a graph")?;
    refused(
        &mut begun,
        captured.handle(),
        "begun in a graph of the stream",
    )?;
    let other = |stream| Ok(refused(&mut begun, stream, "begun in another graph"));
    let (second, ended) = CudaGraph::capture(&captured, other).map_err(text)?;
    ended?;
    drop((graph, second, begun));
    finish_in(&drive, (&job, &mut outside), plain)?;
    all_came_back(&drive)?;
    Ok("four ways".to_owned())
}

/// A graph with first halves alone is launched several times: its stations are returned when the graph is destroyed.
fn unfinished(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let job = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 0)?;
    let stream = Stream::new(&bench.gpu).map_err(text)?;
    let (graph, begun) =
        CudaGraph::capture(&stream, |stream| Ok(job.begin_on(&drive, stream))).map_err(text)?;
    drop(begun?);
    for _ in 0..3 {
        graph.launch(&stream).map_err(text)?;
        finish(&stream);
    }
    let other = Job::new(&drive, drive.table(0, 256), ids(24), true, 0)?;
    let pending = other.start(&drive, &drive.stream)?;
    read(&drive, &other, &pending)?;
    drop(graph);
    all_came_back(&drive)?;
    Ok("a graph of first halves, launched three times".to_owned())
}

/// The controller is reset between the halves: the rows are gone, and those of the next gather are right.
fn reset(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let stream = drive.stream.handle();
    let job = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 0)?;
    for _ in 0..4 {
        let mut begun = job.begin_on(&drive, stream)?;
        finish(&drive.stream);
        let controller = drive.store().controllers().next().ok_or("no controller")?;
        controller.reset().map_err(text)?;
        let pending = job.finish_on(&mut begun, stream).map_err(text)?;
        pending.wait(limit()).map_err(text)?;
        let codes = job.check(&drive)?;
        if codes.iter().any(|code| *code != code::GONE) {
            return Err(format!("after a reset: {codes:?}"));
        }
        all_came_back(&drive)?;
    }
    Ok("4 resets".to_owned())
}

/// The store is closed between the halves.
fn closed(bench: &Bench) -> Outcome<String> {
    let drive = open(bench)?;
    let job = Job::new(&drive, drive.table(0, 256), ids(ROWS), true, 0)?;
    let stream = Stream::new(&bench.gpu).map_err(text)?;
    let mut begun = job.begin_on(&drive, stream.handle())?;
    finish(&stream);
    let image = drive.close();
    let pending = job.finish_on(&mut begun, stream.handle()).map_err(text)?;
    pending.wait(limit()).map_err(text)?;
    let codes = job.check_against(&image)?;
    match codes.iter().all(|code| *code == code::GONE) {
        true => Ok("its rows are gone".to_owned()),
        false => Err(format!("{codes:?}")),
    }
}

/// If reads fail or have no end, each row is right or reports it. After a read that failed once, a later gather is
/// right.
fn faults(bench: &Bench, fault: &str) -> Outcome<String> {
    let name = format!("{DEVICE}&fault={fault}");
    let drive = Drive::open(bench, &name, fault_timeout(bench, fault))?;
    let stream = drive.stream.handle();
    let (mut failed, mut rounds) = (0, 0);
    let (begin, fails_once) = (Instant::now(), fault.contains("nth"));
    loop {
        let job = Job::new(&drive, drive.table(0, 256), ids(ROWS + rounds % 8), true, 0)?;
        let mut begun = job.begin_on(&drive, stream)?;
        let pending = job.finish_on(&mut begun, stream).map_err(text)?;
        pending.wait(limit()).map_err(text)?;
        let codes = job.check(&drive)?;
        let bad = codes.iter().filter(|code| **code != code::OK).count();
        (failed, rounds) = (failed + bad, rounds + 1);
        match (fails_once, failed, bad) {
            (true, 1.., 0) => break,
            (false, ..) if bad != codes.len() => return Err(format!("{bad} rows failed")),
            (false, ..) if rounds == 4 => break,
            _ if begin.elapsed() > limit() => return Err(format!("{failed} rows failed")),
            _ => {}
        }
    }
    Ok(format!(
        "{failed} rows failed in {rounds} rounds, none is wrong"
    ))
}

/// The user's program calls CUDA between the halves: none of its calls waits for the drive.
fn beside(bench: &Bench, call: fn(&Drive) -> Outcome<()>) -> Outcome<String> {
    let name = format!("{DEVICE}&fault=delay:3ms@op=read,every=10");
    let drive = Drive::open(bench, &name, limit())?;
    current(&drive)?;
    let stream = drive.stream.handle();
    for round in 0..3 {
        let job = Job::new(&drive, drive.table(0, 256), ids(ROWS + round), true, 0)?;
        let mut begun = job.begin_on(&drive, stream)?;
        call(&drive)?;
        finish_in(&drive, (&job, &mut begun), stream)?;
    }
    Ok("3 rounds".to_owned())
}
