//! Rows that a host thread moves in the order of a stream: rows of files and stripes, and rows that are written.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{BYTES, CANARY, Drive, Job, dice, shapes_of, text};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::{DeviceMemory, PendingRows};
use nvme_host::store::RowElement;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

pub const STRIPE: &str =
    "stripe:sim:mem?size=4MiB&queues=8|sim:mem?size=4MiB&queues=8?stripe=16KiB";
pub const DRIVE: &str = "sim:mem?size=8MiB&block=4096&queues=8&threads=4";

/// A file that goes away with this.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Outcome<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("gpu-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, vec![0; BYTES as usize]).map_err(|error| error.to_string())?;
        Ok(Self(path))
    }

    pub fn device(&self) -> String {
        format!("file:{}", self.0.display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A file that is left in the folder for such files does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("by-host/file", |_| {
        let file = Scratch::new()?;
        let drive = Drive::open(bench, &file.device(), limit())?;
        shapes_of(&drive, 1)
    });
    report.test("by-host/stripe", |_| {
        let drive = Drive::open(bench, STRIPE, limit())?;
        shapes_of(&drive, 2)
    });
    report.test("by-host/large-rows", |_| large_rows(bench));
    for (name, device) in [("drive", DRIVE), ("stripe", STRIPE)] {
        report.test(&format!("by-host/scatter/{name}"), |_| {
            scatter(bench, device)
        });
        report.test(&format!("by-host/bytes/{name}"), |_| bytes(bench, device));
    }
    report.test("by-host/bytes/file", |_| {
        let file = Scratch::new()?;
        bytes(bench, &file.device())
    });
    report.test("by-host/sums", |_| sums(bench));
    report.test("by-host/fault", |_| fault(bench));
}

/// Rows that are too long for a slot of the GPU.
fn large_rows(bench: &Bench) -> Outcome<String> {
    let drive = Drive::open(bench, DRIVE, limit())?;
    for row_bytes in [128 << 10, (300 << 10) + 1] {
        let table = drive.table(100, row_bytes);
        let ids = (0..table.rows as i64).rev().chain([-1]).collect();
        drive.run(&Job::new(&drive, table, ids, true, 64)?)?;
    }
    Ok("rows of 128 and 300 KiB".to_owned())
}

/// Writes rows, reads them back on the same stream and without it.
fn scatter(bench: &Bench, device: &str) -> Outcome<String> {
    let mut drive = Drive::open(bench, device, limit())?;
    let mut throw = dice(8);
    let mut written = 0;
    for (row_bytes, first_byte, pad) in [(4096, 0, 0), (512, 96, 16), (100, 7, 0), (9000, 5, 1)] {
        let table = drive.table(first_byte, row_bytes);
        // Some ids are repeated, one is not in the table.
        let mut ids: Vec<i64> = (0..200)
            .map(|_| throw(table.rows.min(300)) as i64)
            .collect();
        ids[17] = -1;
        let wide = throw(2) == 0;
        let job = Job::new(&drive, table, ids, wide, pad)?;
        let rows = job.fill(&mut throw)?;
        // A gather of the same ids follows in the stream.
        let after = Job::new(&drive, table, job.ids().to_vec(), wide, 0)?;
        let scattered = job.scatter(&drive)?;
        let gathered = after.start(&drive, &drive.stream)?;
        let failures = scattered.wait(limit()).map_err(text)?.failures;
        if (failures.rows, failures.first) != (1, Some((17, code::OUT_OF_RANGE))) {
            return Err(format!("{failures:?}"));
        }
        gathered.wait(limit()).map_err(text)?;
        for (id, row) in job.ids().iter().zip(&rows) {
            if *id >= 0 {
                let at = first_byte as usize + *id as usize * row_bytes as usize;
                drive.image_mut()[at..][..row.len()].copy_from_slice(row);
            }
        }
        after.check(&drive)?;
        if drive.read_all()? != *drive.image_mut() {
            return Err("bytes beside the rows have changed".to_owned());
        }
        written += rows.len();
    }
    Ok(format!(
        "{written} rows written, the last of each id is there"
    ))
}

/// Ranges of any offset and length, from and to GPU memory.
fn bytes(bench: &Bench, device: &str) -> Outcome<String> {
    let mut drive = Drive::open(bench, device, limit())?;
    let mut throw = dice(31);
    let mut moved = 0;
    for round in 0..30 {
        let most = if round % 3 == 0 { 3 << 20 } else { 9000 };
        let offset = throw(BYTES - most);
        let len = (throw(most) + 1) as usize;
        let make = || -> nvme_host::Result<_> {
            let from = DeviceMemory::new(drive.gpu(), len)?;
            let to = DeviceMemory::new(drive.gpu(), len + 16)?;
            to.upload(0, &vec![CANARY; len + 16])?;
            Ok((from, to))
        };
        let (from, to) = make().map_err(text)?;
        let new: Vec<u8> = (0..len)
            .map(|at| (at as u64 * 31 + offset + round) as u8)
            .collect();
        from.upload(0, &new).map_err(text)?;
        let stream = drive.stream.handle();
        let start = || -> nvme_host::Result<[PendingRows; 2]> {
            let store = drive.store();
            // SAFETY: both memories outlive the operations, which are waited for.
            unsafe {
                let written = store.write_from_gpu(offset, len as u64, from.address(), stream)?;
                let read = store.read_on_gpu(offset, len as u64, to.address() + 5, stream)?;
                Ok([written, read])
            }
        };
        for pending in start().map_err(text)? {
            let failures = pending.wait(limit()).map_err(text)?.failures;
            if failures.rows != 0 {
                return Err(format!("{len} bytes from {offset} on: {failures:?}"));
            }
        }
        drive.image_mut()[offset as usize..][..len].copy_from_slice(&new);
        let mut have = vec![0; len + 16];
        to.download(0, &mut have).map_err(text)?;
        if have[5..len + 5] != new || have[..5] != [CANARY; 5] || have[len + 5..] != [CANARY; 11] {
            return Err(format!("{len} bytes from {offset} on are wrong"));
        }
        moved += len;
    }
    if drive.read_all()? != *drive.image_mut() {
        return Err("bytes beside the ranges have changed".to_owned());
    }
    // SAFETY: the calls are refused.
    let outside = unsafe {
        let store = drive.store();
        let none = store
            .read_on_gpu(BYTES, 0, 0, 0)
            .map(|pending| pending.is_done());
        let past = store.read_on_gpu(BYTES - 4, 5, 0, 0).err();
        (none, past.map(|error| error.exit_code()))
    };
    match outside {
        (Ok(true), Some(2)) => Ok(format!("{moved} bytes written and read")),
        other => Err(format!("past the end: {other:?}")),
    }
}

/// Sums of rows with the same id.
fn sums(bench: &Bench) -> Outcome<String> {
    let drive = Drive::open(bench, DRIVE, limit())?;
    let table = drive.table(40, 100);
    drive.store().write_at(40, &[0; 1000]).map_err(text)?;
    let job = Job::new(&drive, table, vec![3, 5, 3, 3], true, 0)?;
    job.fill_with(&1.5f32.to_le_bytes().repeat(100))?;
    for _ in 0..2 {
        let pending = job.add(&drive, RowElement::F32)?;
        let failures = pending.wait(limit()).map_err(text)?.failures;
        if failures.rows != 0 {
            return Err(format!("{failures:?}"));
        }
    }
    let mut have = [0; 1000];
    drive.store().read_at(40, &mut have).map_err(text)?;
    for (place, word) in have.as_chunks::<4>().0.iter().enumerate() {
        let want = match place / 25 {
            3 => 9.0,
            5 => 3.0,
            _ => 0.0,
        };
        if f32::from_le_bytes(*word) != want {
            return Err(format!("element {place}: {}", f32::from_le_bytes(*word)));
        }
    }
    match job.add(&drive, RowElement::F16) {
        Ok(_) => Ok("6 rows in 2 calls".to_owned()),
        Err(why) => Err(why),
    }
}

/// Reads that fail on the way through the host.
fn fault(bench: &Bench) -> Outcome<String> {
    let members = "stripe:sim:mem?size=4MiB&queues=8&fault=status:0x281@op=read,every=40|sim:mem?size=4MiB&queues=8";
    let drive = Drive::open(bench, members, limit())?;
    let table = drive.table(0, 4096);
    // No rows are neighbours, so that each is read by itself.
    let ids = (0..600).map(|id| id * 3).collect();
    let job = Job::new(&drive, table, ids, true, 0)?;
    let codes = drive.run(&job)?;
    let failed = codes.iter().filter(|code| **code == 0x281).count();
    let other = codes.iter().find(|code| **code != 0 && **code != 0x281);
    match (failed, other) {
        (1..30, None) => Ok(format!("{failed} of 600 rows say so")),
        _ => Err(format!("{codes:?}")),
    }
}
