//! Gathers that widen elements: every format, compared with the CPU's result bit by bit.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE, Scratch};
use crate::gather::{BYTES, CANARY, Drive, dice, fault_timeout, text};
use crate::hazards::{Graph, OwnStream, current};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use crate::stripes;
use nvme_gpu_kernel::rows::code;
use nvme_host::Table;
use nvme_host::cuda::{DeviceMemory, PendingRows, RowFailures, RowRequest};
use nvme_host::store::{Format, RowWidening, WideFormat};
use std::time::{Duration, Instant};

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device, cache) in [
        ("gather/wide/drive", DRIVE, 0),
        ("gather/wide/cached", DRIVE, 100_000),
        ("stripes/wide/formats", STRIPE, 0),
    ] {
        report.test(name, |_| {
            let drive = Drive::open(bench, device, limit())?;
            match drive.store().path().data {
                "gpu" => formats(&drive, cache),
                other => Err(format!("rows go by {other}")),
            }
        });
    }
    report.test("by-host/wide", |_| {
        let file = Scratch::new()?;
        formats(&Drive::open(bench, &file.device(), limit())?, 0)
    });
    report.case("stripes/wide/graph", |_| replay(bench).into());
    for (name, fault, comes_back) in [
        ("status", "status:0x281@op=read,nth=7-9", true),
        ("dropped", "drop@op=read,nth=7-8", true),
        ("dead-cfs", "cfs@op=read,nth=7", true),
        ("all-ones", "allones@op=read,nth=7", false),
    ] {
        report.test(&format!("stripes/wide/fault/{name}"), |_| {
            let of = |has_status| fault_of(bench, fault, comes_back, has_status);
            Ok(format!("{}; {} without row status", of(true)?, of(false)?))
        });
    }
}

/// Rows that fail become zeros, whether or not the status of each is requested; no row is wrong.
fn fault_of(bench: &Bench, fault: &str, comes_back: bool, has_status: bool) -> Outcome<String> {
    let timeout = fault_timeout(bench, fault);
    let mut drive = stripes::open(bench, fault, timeout)?;
    let image = std::mem::take(drive.image_mut());
    // The format whose zero bytes come out as -0.0.
    let widen = RowWidening {
        from: Format::Q4_0,
        to: WideFormat::F16,
    };
    let (first_byte, row_bytes) = (100, 40 * 18);
    let rows = (BYTES - first_byte) / row_bytes;
    let table = drive
        .store()
        .table(first_byte, rows, row_bytes)
        .map_err(text)?;
    let wide_bytes = widen.row_bytes(row_bytes).map_err(text)? as usize;
    let mut throw = dice(9);
    let (begin, mut failed, mut launches) = (Instant::now(), 0, 0);
    loop {
        let ids: Vec<i64> = (0..200).map(|_| throw(rows) as i64).collect();
        let have = gather(&drive, &table, widen, &ids, (0, has_status))?;
        launches += 1;
        let mut zeros = 0;
        for (row, (id, bytes)) in ids
            .iter()
            .zip(have.out.chunks_exact(wide_bytes))
            .enumerate()
        {
            let at = first_byte as usize + *id as usize * row_bytes as usize;
            let mut wanted = vec![0; wide_bytes];
            nvme_formats::widen(
                widen.from,
                widen.to,
                &image[at..][..row_bytes as usize],
                &mut wanted,
            );
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            let code = have.codes.as_ref().map(|codes| codes[row]);
            let is_known = code.is_none_or(|code| is_zero == (code != code::OK));
            if !is_zero && bytes != wanted || !is_known {
                return Err(format!(
                    "row {row}, id {id}, code {code:?}: its bytes are wrong"
                ));
            }
            zeros += u64::from(is_zero);
        }
        if have.failures.rows != zeros {
            return Err(format!("{:?}, but {zeros} rows are zeros", have.failures));
        }
        failed += zeros;
        let is_over = match comes_back {
            true => zeros == 0,
            false => have
                .failures
                .first
                .is_some_and(|(_, code)| code == code::GONE),
        };
        if failed > 0 && is_over {
            return Ok(format!("{failed} rows failed in {launches} gathers"));
        }
        if begin.elapsed() > limit() {
            return Err(format!("after {:?}: {:?}", limit(), have.failures));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn formats(drive: &Drive, cache: u64) -> Outcome<String> {
    let mut throw = dice(33);
    let mut rows = 0;
    for from in Format::ALL {
        for to in [WideFormat::F16, WideFormat::F32] {
            // Row lengths that fill rounds of a warp, and that do not; places at even and odd bytes.
            for (elements, first_byte, pad) in
                [(5, 77, 0), (224, 3, 0), (2048, 4096, 16), (2880, 2, 4)]
            {
                let blocks = u32::div_ceil(elements, from.block_elements());
                let row_bytes = u64::from(blocks * from.block_bytes());
                let count = (BYTES - first_byte) / row_bytes;
                let mut table = drive
                    .store()
                    .table(first_byte, count, row_bytes)
                    .map_err(text)?;
                if cache > 0 {
                    table = table.cached(cache + row_bytes * 40).map_err(text)?;
                }
                let widen = RowWidening { from, to };
                for _ in 0..2 {
                    let ids: Vec<i64> = (0..90)
                        .map(|row| match row % 30 {
                            7 => -1,
                            8 => count as i64,
                            _ => throw(count.min(60)) as i64,
                        })
                        .collect();
                    rows += one(drive, &table, widen, &ids, pad)?;
                }
            }
        }
    }
    Ok(format!("{rows} rows of {} formats", Format::ALL.len()))
}

/// The output of a gather.
struct Gathered {
    out: Vec<u8>,
    codes: Option<Vec<i32>>,
    failures: RowFailures,
}

/// The memory of a gather.
struct Asked {
    _ids: DeviceMemory,
    out: DeviceMemory,
    status: DeviceMemory,
    request: RowRequest,
}

impl Asked {
    /// Makes a job whose wide rows are `stride` bytes apart.
    fn new(drive: &Drive, ids: &[i64], stride: usize, has_status: bool) -> Outcome<Self> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let memory = |bytes: &[u8]| -> nvme_host::Result<DeviceMemory> {
            let memory = DeviceMemory::new(drive.gpu(), bytes.len())?;
            memory.upload(0, bytes)?;
            Ok(memory)
        };
        let ids_memory = memory(&bytes).map_err(text)?;
        let out = memory(&vec![CANARY; stride * ids.len()]).map_err(text)?;
        let status = memory(&vec![CANARY; ids.len() * 4]).map_err(text)?;
        let request = RowRequest {
            ids: ids_memory.address(),
            wide_ids: true,
            count: ids.len() as u64,
            out: out.address(),
            out_stride: stride as u64,
            status: if has_status { status.address() } else { 0 },
        };
        Ok(Self {
            _ids: ids_memory,
            out,
            status,
            request,
        })
    }

    /// Enqueues the gather in `stream`, a `CUstream`.
    fn start(&self, table: &Table, widen: RowWidening, stream: u64) -> Outcome<PendingRows> {
        // SAFETY: the memory outlives the gather, which is waited for.
        unsafe { table.gather_as_on_gpu(&self.request, widen, stream) }.map_err(text)
    }

    fn came_to(&self, failures: RowFailures) -> Outcome<Gathered> {
        let count = self.request.count as usize;
        let mut out = vec![0; self.request.out_stride as usize * count];
        self.out.download(0, &mut out).map_err(text)?;
        let mut codes = vec![0; count * 4];
        self.status.download(0, &mut codes).map_err(text)?;
        let codes = codes.as_chunks::<4>().0.iter();
        let codes = codes.map(|word| i32::from_le_bytes(*word)).collect();
        Ok(Gathered {
            out,
            codes: (self.request.status != 0).then_some(codes),
            failures,
        })
    }
}

/// Gathers `ids` to wide rows, `pad` bytes apart.
fn gather(
    drive: &Drive,
    table: &Table,
    widen: RowWidening,
    ids: &[i64],
    (pad, has_status): (u64, bool),
) -> Outcome<Gathered> {
    let wide_bytes = widen.row_bytes(table.row_bytes()).map_err(text)?;
    let asked = Asked::new(drive, ids, (wide_bytes + pad) as usize, has_status)?;
    let pending = asked.start(table, widen, drive.stream.handle())?;
    asked.came_to(pending.wait(limit()).map_err(text)?.failures)
}

/// Both launches are captured in one graph, which runs while the store is open, and after it was closed.
fn replay(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::open(bench, STRIPE, limit())?;
    let image = std::mem::take(drive.image_mut());
    current(&drive)?;
    let widen = RowWidening {
        from: Format::Q4_0,
        to: WideFormat::F32,
    };
    let (row_bytes, count) = (40 * 18, 300);
    let ids: Vec<i64> = (0..count).rev().collect();
    let table = drive
        .store()
        .table(0, count as u64, row_bytes)
        .map_err(text)?;
    let wide_bytes = widen.row_bytes(row_bytes).map_err(text)? as usize;
    let mut wanted = vec![0; wide_bytes * count as usize];
    for (id, row) in ids.iter().zip(wanted.chunks_exact_mut(wide_bytes)) {
        let stored = &image[*id as usize * row_bytes as usize..][..row_bytes as usize];
        nvme_formats::widen(widen.from, widen.to, stored, row);
    }
    let asked = Asked::new(&drive, &ids, wide_bytes, true)?;
    let stream = OwnStream::new()?;
    let (graph, pending) = Graph::of(&stream, |stream| asked.start(&table, widen, stream))?;
    let run = || {
        graph.launch(&stream)?;
        stream.synchronize()?;
        asked.came_to(pending.last().failures)
    };
    for round in 1..4 {
        let have = run()?;
        let is_well = have.failures.rows == 0 && have.out == wanted;
        if !is_well || pending.ended() != round {
            return Err(format!("replay {round}: {:?}", have.failures));
        }
    }
    drop(table);
    drop(drive.close());
    let have = run()?;
    let is_gone = have
        .codes
        .is_some_and(|codes| codes.iter().all(|code| *code == code::GONE));
    match is_gone && have.out.iter().all(|byte| *byte == 0) {
        true => Ok("3 replays of 300 rows; then all are zero and GONE".to_owned()),
        false => Err(format!("without the store: {:?}", have.failures)),
    }
}

/// Gathers `ids`, and compares.
fn one(drive: &Drive, table: &Table, widen: RowWidening, ids: &[i64], pad: u64) -> Outcome<usize> {
    let wide_bytes = widen.row_bytes(table.row_bytes()).map_err(text)?;
    let stride = (wide_bytes + pad) as usize;
    let have = gather(drive, table, widen, ids, (pad, true))?;
    let codes = have.codes.unwrap_or_default();
    let mut expected = vec![0; wide_bytes as usize * ids.len()];
    let mut expected_codes = vec![0; ids.len()];
    let report = table
        .gather_as(ids.into(), widen, &mut expected, Some(&mut expected_codes))
        .map_err(text)?;
    if have.failures.rows != report.failed as u64 {
        return Err(format!(
            "{:?}, but {} rows failed",
            have.failures, report.failed
        ));
    }
    for (row, (got, wanted)) in codes.into_iter().zip(&expected_codes).enumerate() {
        let have = &have.out[row * stride..][..stride];
        let wanted_bytes = &expected[row * wide_bytes as usize..][..wide_bytes as usize];
        let (bytes, after) = have.split_at(wide_bytes as usize);
        if got != *wanted || bytes != wanted_bytes || after.iter().any(|byte| *byte != CANARY) {
            let at = bytes.iter().zip(wanted_bytes).position(|(a, b)| a != b);
            return Err(format!(
                "{widen:?}, rows of {} bytes, row {row} (id {}): code {got}, expected {wanted}; differs at byte {at:?}",
                table.row_bytes(),
                ids[row]
            ));
        }
        let is_row = (0..table.rows() as i64).contains(&ids[row]);
        if is_row != (got == code::OK) {
            return Err(format!("row {row}: code {got}"));
        }
    }
    Ok(ids.len())
}
