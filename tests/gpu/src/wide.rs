//! Gathers that widen elements on the way: every format, against what the CPU makes of the same bytes, bit by bit.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE};
use crate::gather::{BYTES, CANARY, Drive, WAIT, dice, text};
use crate::report::Report;
use nvme_gpu_kernel::rows::code;
use nvme_host::Table;
use nvme_host::cuda::{DeviceMemory, Request};
use nvme_host::store::{Format, Wide, Widen};
use std::time::Duration;

type Outcome<T> = Result<T, String>;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device, cache) in [
        ("gather/wide/drive", DRIVE, 0),
        ("gather/wide/cached", DRIVE, 100_000),
        ("by-host/wide", STRIPE, 0),
    ] {
        report.test(name, |_| {
            let drive = Drive::open(bench, device, Duration::from_secs(5))?;
            formats(&drive, cache)
        });
    }
}

fn formats(drive: &Drive, cache: u64) -> Outcome<String> {
    let mut throw = dice(33);
    let mut rows = 0;
    for from in Format::ALL {
        for to in [Wide::F16, Wide::F32] {
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
                let widen = Widen { from, to };
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

/// Gathers `ids`, and compares.
fn one(drive: &Drive, table: &Table, widen: Widen, ids: &[i64], pad: u64) -> Outcome<usize> {
    let wide_bytes = widen.row_bytes(table.row_bytes()).map_err(text)?;
    let stride = (wide_bytes + pad) as usize;
    let id_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let memory = |bytes: &[u8]| -> nvme_host::Result<DeviceMemory> {
        let memory = DeviceMemory::new(drive.gpu(), bytes.len())?;
        memory.upload(0, bytes)?;
        Ok(memory)
    };
    let device_ids = memory(&id_bytes).map_err(text)?;
    let out = memory(&vec![CANARY; stride * ids.len()]).map_err(text)?;
    let status = memory(&vec![CANARY; ids.len() * 4]).map_err(text)?;
    let request = Request {
        ids: device_ids.address(),
        wide_ids: true,
        count: ids.len() as u64,
        out: out.address(),
        out_stride: stride as u64,
        status: status.address(),
    };
    let stream = drive.stream.handle();
    // SAFETY: the memory outlives the gather, which is waited for.
    let pending = unsafe { table.gather_as_on_gpu(&request, widen, stream) }.map_err(text)?;
    let gathered = pending.wait(WAIT).map_err(text)?;
    let mut have = vec![0; stride * ids.len()];
    out.download(0, &mut have).map_err(text)?;
    let mut codes = vec![0; ids.len() * 4];
    status.download(0, &mut codes).map_err(text)?;

    let mut expected = vec![0; wide_bytes as usize * ids.len()];
    let mut expected_codes = vec![0; ids.len()];
    let report = table
        .gather_as(ids.into(), widen, &mut expected, Some(&mut expected_codes))
        .map_err(text)?;
    if gathered.failures.rows != report.failed as u64 {
        return Err(format!("{gathered:?}, but {} rows failed", report.failed));
    }
    let codes = codes
        .chunks_exact(4)
        .map(|word| i32::from_le_bytes(word.try_into().unwrap_or_default()));
    for (row, (got, wanted)) in codes.zip(&expected_codes).enumerate() {
        let have = &have[row * stride..][..stride];
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
