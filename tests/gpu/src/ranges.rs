//! Ranges of any offset, length and address, many in one launch: every byte, the results of a range whose reads fail,
//! and a graph of them.
// UNSAFETY: ranges hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE, Scratch};
use crate::gather::{BYTES, CANARY, Drive, dice, fault_timeout, text};
use crate::limits::limit;
use crate::reading::wait_for;
use crate::report::{Outcome, Report};
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, ReadRange};
use std::time::{Duration, Instant};

/// Bytes of a piece, which is read or zeroed as a whole.
const PIECE: usize = 4096;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device) in [("drive", DRIVE), ("stripe", STRIPE)] {
        report.test(&format!("ranges/shapes/{name}"), |_| shapes(bench, device));
    }
    report.test("ranges/shapes/block-512", |_| {
        shapes(bench, &DRIVE.replace("block=4096", "block=512"))
    });
    report.test("ranges/shapes/file", |_| {
        let file = Scratch::new()?;
        shapes(bench, &file.device())
    });
    for (name, fault) in [
        ("status", "status:0x281@op=read,nth=7-60"),
        ("dropped", "drop@op=read,nth=7"),
        ("dead-cfs", "cfs@op=read,nth=7"),
    ] {
        report.test(&format!("ranges/fault/{name}"), |_| faults(bench, fault));
    }
    report.test("ranges/graph", |_| graph(bench));
}

/// Ranges and their target memory.
struct Batch {
    ranges: Vec<ReadRange>,
    out: DeviceMemory,
    bytes: usize,
}

impl Batch {
    /// Makes ranges of (offset, bytes, bytes of the memory before them).
    fn new(drive: &Drive, ranges: &[(u64, u64, u64)]) -> Outcome<Self> {
        let bytes: u64 = ranges.iter().map(|(_, bytes, pad)| bytes + pad).sum();
        let bytes = bytes as usize + 64;
        let out = DeviceMemory::new(drive.gpu(), bytes).map_err(text)?;
        let mut to = out.address();
        let place = |(offset, bytes, pad): &(u64, u64, u64)| {
            let range = ReadRange {
                offset: *offset,
                bytes: *bytes,
                to: to + pad,
            };
            to = range.to + bytes;
            range
        };
        let batch = Self {
            ranges: ranges.iter().map(place).collect(),
            out,
            bytes,
        };
        batch.clear()?;
        Ok(batch)
    }

    fn clear(&self) -> Outcome<()> {
        self.out.upload(0, &vec![CANARY; self.bytes]).map_err(text)
    }

    fn start(&self, drive: &Drive) -> Outcome<PendingRows> {
        // SAFETY: the memory outlives the reads, which are waited for.
        unsafe {
            let store = drive.store();
            store.read_ranges_on_gpu(&self.ranges, drive.stream.handle())
        }
        .map_err(text)
    }

    /// Returns how many pieces are zero instead of the bytes of `image`; every other byte is right.
    fn zeroed(&self, image: &[u8]) -> Outcome<u64> {
        let mut have = vec![0; self.bytes];
        self.out.download(0, &mut have).map_err(text)?;
        let (mut at, mut zeroed) = (0, 0);
        for range in &self.ranges {
            let place = (range.to - self.out.address()) as usize;
            let (begin, end) = (range.offset as usize, (range.offset + range.bytes) as usize);
            let mut byte = begin;
            while byte < end {
                let next = (byte / PIECE * PIECE + PIECE).min(end);
                let have = &have[place + byte - begin..place + next - begin];
                if have != &image[byte..next] {
                    zeroed += 1;
                    if have.iter().any(|byte| *byte != 0) {
                        return Err(format!("{range:?}: byte {byte} of the drive is wrong"));
                    }
                }
                byte = next;
            }
            if have[at..place].iter().any(|byte| *byte != CANARY) {
                return Err(format!("bytes before {range:?} were written"));
            }
            at = place + range.bytes as usize;
        }
        match have[at..].iter().all(|byte| *byte == CANARY) {
            true => Ok(zeroed),
            false => Err("bytes after the last range were written".to_owned()),
        }
    }
}

/// Few long ranges and many short ones, also more than a launch takes; their offsets modulo 16 differ between drive and
/// memory.
fn shapes(bench: &Bench, device: &str) -> Outcome<String> {
    let mut drive = Drive::open(bench, device, limit())?;
    let mut throw = dice(41);
    let (mut read, mut count) = (0, 0);
    for (most, ranges) in [
        (3 << 20, 3),
        (300_000, 20),
        (9000, 210),
        (5000, 96),
        (40, 97),
    ] {
        for unit in [1, 4, 4096] {
            let mut range = |_| {
                let bytes = throw(most + 1) / unit * unit;
                let offset = throw(BYTES - bytes) / unit * unit;
                (offset, bytes, throw(80) / unit.min(16) * unit.min(16))
            };
            let mut some: Vec<_> = (0..ranges).map(&mut range).collect();
            // The last bytes, none, and one range within another one.
            some.extend([(BYTES - unit, unit, 3), (BYTES, 0, 0), some[0]]);
            let batch = Batch::new(&drive, &some)?;
            let pending = batch.start(&drive)?;
            let failures = pending.wait(limit()).map_err(text)?.failures;
            if failures.rows != 0 || batch.zeroed(drive.image_mut())? != 0 {
                return Err(format!("{most} {ranges} {unit}: {failures:?}"));
            }
            read += some.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
            count += some.len();
        }
    }
    let past = Batch::new(&drive, &[(0, 1, 0)])?;
    let outside = ReadRange {
        offset: BYTES - 1,
        bytes: 2,
        to: past.out.address(),
    };
    // SAFETY: the call is refused.
    let refused = unsafe {
        let store = drive.store();
        store.read_ranges_on_gpu(&[past.ranges[0], outside], drive.stream.handle())
    };
    match refused.map(drop).map_err(|error| error.exit_code()) {
        Err(2) => Ok(format!("{read} bytes in {count} ranges")),
        other => Err(format!("past the end: {other:?}")),
    }
}

/// Pieces that were not read are zero and counted; a later read works.
fn faults(bench: &Bench, fault: &str) -> Outcome<String> {
    let timeout = fault_timeout(bench, fault);
    let mut drive = Drive::new(bench, 4096, fault, timeout)?;
    let mut throw = dice(6);
    let (begin, mut failed) = (Instant::now(), 0);
    loop {
        // Whole pieces at aligned offsets: each range is a few of them.
        let range = |_| (throw(1000) << 12, (throw(9) + 1) << 12, 0);
        let some: Vec<_> = (0..40).map(range).collect();
        let batch = Batch::new(&drive, &some)?;
        let gathered = batch.start(&drive)?.wait(limit()).map_err(text)?;
        let zeroed = batch.zeroed(drive.image_mut())?;
        let failures = gathered.failures;
        if failures.rows != zeroed || failures.first.is_some() != (zeroed > 0) {
            return Err(format!("{zeroed} pieces are zero: {failures:?}"));
        }
        failed += zeroed;
        if failed > 0 && zeroed == 0 {
            return Ok(format!("{failed} pieces failed, then none"));
        }
        if begin.elapsed() > limit() {
            return Err(format!("{failed} pieces failed after {:?}", limit()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The ranges of a graph are read each time that it is launched, and zeroed after the store was closed.
fn graph(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::open(bench, DRIVE, limit())?;
    let some: Vec<_> = (0..130u64).map(|at| (at * 61_000, 9000, 16)).collect();
    let batch = Batch::new(&drive, &some)?;
    let captured = CudaGraph::capture(&drive.stream, |_| {
        // SAFETY: the memory outlives the graph.
        unsafe {
            let store = drive.store();
            store.read_ranges_on_gpu(&batch.ranges, drive.stream.handle())
        }
    });
    let (graph, pending) = captured.map_err(text)?;
    let wait_for = |rounds| wait_for(rounds, || pending.ended());
    for round in 1..=3 {
        let at = some[7].0 as usize;
        let new = [round as u8; 100];
        drive.store().write_at(at as u64, &new).map_err(text)?;
        drive.image_mut()[at..][..100].copy_from_slice(&new);
        batch.clear()?;
        graph.launch(&drive.stream).map_err(text)?;
        wait_for(round)?;
        if batch.zeroed(drive.image_mut())? != 0 {
            return Err(format!("launch {round} zeroed pieces"));
        }
    }
    let image = drive.image_mut().clone();
    let stream = drive.leave_stream();
    graph.launch(&stream).map_err(text)?;
    wait_for(4)?;
    let zeroed = batch.zeroed(&image)?;
    let failures = pending.last().failures;
    match failures.rows == zeroed && zeroed >= 130 * 3 {
        true => Ok("130 ranges three times, zero when the store is gone".to_owned()),
        false => Err(format!("{zeroed} pieces are zero: {failures:?}")),
    }
}
