//! `out = table[ids]`: rows of every shape, by every kind of id, against bytes that the host works out; and what
//! becomes of rows whose reads fail.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::report::Report;
use nvme_gpu_kernel::rows::code;
use nvme_gpu_kernel::work::data_word;
use nvme_host::cuda::{
    DeviceMemory, Failures, Gpu, Pending, Request, RowTable, RowsOptions, Stream,
};
use nvme_host::store::{Element, GpuOptions};
use nvme_host::{Store, StoreOptions, Table};
use std::sync::Arc;
use std::time::Duration;

const SEED: u64 = 0x60A7;
pub const BYTES: u64 = 8 << 20;
pub const WAIT: Duration = Duration::from_secs(20);
/// What the output holds before a gather.
pub const CANARY: u8 = 0xA5;

type Outcome<T> = Result<T, String>;

pub fn text(error: nvme_host::Error) -> String {
    format!("{error} ({})", error.remedy())
}

/// A drive whose words count up, and the GPU's way to its rows.
pub struct Drive {
    store: Store,
    pub stream: Stream,
    gpu: Arc<Gpu>,
    image: Vec<u8>,
    /// The table with a cache by which all gathers go.
    cached: Option<Table>,
}

impl Drive {
    pub fn new(bench: &Bench, block: u32, fault: &str, timeout: Duration) -> Outcome<Self> {
        let fault = match fault {
            "" => String::new(),
            fault => format!("&fault={fault}"),
        };
        let name = format!("sim:mem?size=8MiB&block={block}&queues=8&threads=4{fault}");
        Self::open(bench, &name, timeout)
    }

    /// A device of [`BYTES`] bytes, which are written.
    pub fn open(bench: &Bench, name: &str, timeout: Duration) -> Outcome<Self> {
        Self::open_on(&bench.gpu, name, timeout)
    }

    /// The same for any GPU.
    pub fn open_on(gpu: &Arc<Gpu>, name: &str, timeout: Duration) -> Outcome<Self> {
        let open = || -> nvme_host::Result<Self> {
            let options = StoreOptions {
                queues: 2,
                timeout,
                gpu: Some(GpuOptions {
                    index: gpu.index(),
                    rows: RowsOptions {
                        queues: 4,
                        entries: 128,
                        stations: 4,
                    },
                }),
                ..StoreOptions::default()
            };
            let store = Store::open(name, &options)?;
            let words = (0..BYTES / 8).map(|index| data_word(SEED, index));
            let image: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            store.write_at(0, &image)?;
            Ok(Self {
                store,
                stream: Stream::new(gpu)?,
                gpu: Arc::clone(gpu),
                image,
                cached: None,
            })
        };
        open().map_err(text)
    }

    /// Closes the store; what the drive held.
    pub fn close(self) -> Vec<u8> {
        self.image
    }

    /// Closes the store, but not the stream.
    pub fn leave_stream(self) -> Stream {
        self.stream
    }

    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What the drive has to hold.
    pub fn image_mut(&mut self) -> &mut Vec<u8> {
        &mut self.image
    }

    /// What it holds.
    pub fn read_all(&self) -> Outcome<Vec<u8>> {
        let mut all = vec![0; BYTES as usize];
        self.store.read_at(0, &mut all).map_err(text)?;
        Ok(all)
    }
}

/// One gather and its memory.
pub struct Job {
    table: RowTable,
    ids: Vec<i64>,
    wide: bool,
    stride: u64,
    device_ids: DeviceMemory,
    out: DeviceMemory,
    status: DeviceMemory,
}

impl Job {
    pub fn new(
        drive: &Drive,
        table: RowTable,
        ids: Vec<i64>,
        wide: bool,
        pad: u64,
    ) -> Outcome<Self> {
        let bytes: Vec<u8> = match wide {
            true => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            false => ids
                .iter()
                .flat_map(|id| (*id as i32).to_le_bytes())
                .collect(),
        };
        let stride = u64::from(table.row_bytes) + pad;
        let len = ids.len() * stride as usize;
        let make = || -> nvme_host::Result<Self> {
            let device_ids = DeviceMemory::new(drive.gpu(), bytes.len())?;
            device_ids.upload(0, &bytes)?;
            let job = Self {
                table,
                wide,
                stride,
                device_ids,
                out: DeviceMemory::new(drive.gpu(), len)?,
                status: DeviceMemory::new(drive.gpu(), ids.len() * 4)?,
                ids,
            };
            job.out.upload(0, &vec![CANARY; len])?;
            job.status.upload(0, &vec![CANARY; job.ids.len() * 4])?;
            Ok(job)
        };
        make().map_err(text)
    }

    pub fn start(&self, drive: &Drive, stream: &Stream) -> Outcome<Pending> {
        self.start_on(drive, stream.handle())
    }

    /// In `stream`, a `CUstream`.
    pub fn start_on(&self, drive: &Drive, stream: u64) -> Outcome<Pending> {
        drive.gather(&self.table, &self.request(), stream)
    }

    fn request(&self) -> Request {
        Request {
            ids: self.device_ids.address(),
            wide_ids: self.wide,
            count: self.ids.len() as u64,
            out: self.out.address(),
            out_stride: self.stride,
            status: self.status.address(),
        }
    }

    /// Writes the output's rows to the drive.
    pub fn scatter(&self, drive: &Drive) -> Outcome<Pending> {
        let table = drive.rows(&self.table)?;
        // SAFETY: the job's memory outlives the operation, which is waited for.
        unsafe { table.scatter_on_gpu(&self.request(), drive.stream.handle()) }.map_err(text)
    }

    /// Adds the output's rows to those of the drive.
    pub fn add(&self, drive: &Drive, element: Element) -> Outcome<Pending> {
        let (table, stream) = (drive.rows(&self.table)?, drive.stream.handle());
        // SAFETY: as above.
        unsafe { table.scatter_add_on_gpu(&self.request(), element, stream) }.map_err(text)
    }

    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Fills the output with other bytes; its rows.
    pub fn fill(&self, throw: &mut impl FnMut(u64) -> u64) -> Outcome<Vec<Vec<u8>>> {
        let bytes = self.ids.len() * self.stride as usize;
        let bytes: Vec<u8> = (0..bytes).map(|_| throw(256) as u8).collect();
        self.fill_with(&bytes)?;
        let rows = bytes.chunks_exact(self.stride as usize);
        Ok(rows
            .map(|row| row[..self.table.row_bytes as usize].to_vec())
            .collect())
    }

    pub fn fill_with(&self, bytes: &[u8]) -> Outcome<()> {
        self.out.upload(0, bytes).map_err(text)
    }

    fn codes(&self) -> Outcome<Vec<i32>> {
        let mut bytes = vec![0; self.ids.len() * 4];
        self.status.download(0, &mut bytes).map_err(text)?;
        let words = bytes.chunks_exact(4);
        Ok(words
            .map(|word| i32::from_le_bytes(word.try_into().unwrap_or_default()))
            .collect())
    }

    /// Other ids, as many.
    pub fn replace_ids(&mut self, ids: Vec<i64>) -> Outcome<()> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.ids = ids;
        self.device_ids.upload(0, &bytes).map_err(text)
    }

    /// Checks each row against its code: the row's bytes, or zeros; and nothing between rows has changed.
    pub fn check(&self, drive: &Drive) -> Outcome<Vec<i32>> {
        self.check_against(&drive.image)
    }

    /// The same against the bytes of a drive.
    pub fn check_against(&self, image: &[u8]) -> Outcome<Vec<i32>> {
        let codes = self.codes()?;
        let mut out = vec![0; self.ids.len() * self.stride as usize];
        self.out.download(0, &mut out).map_err(text)?;
        let row = self.table.row_bytes as usize;
        for (index, (id, code)) in self.ids.iter().zip(&codes).enumerate() {
            let have = &out[index * self.stride as usize..][..self.stride as usize];
            let is_row = (0..self.table.rows as i64).contains(id);
            if is_row == (*code == code::OUT_OF_RANGE) {
                return Err(format!("row {index}, id {id}: code {code}"));
            }
            let holds = match *code {
                code::OK => {
                    let at = self.table.first_byte as usize + *id as usize * row;
                    have[..row] == image[at..at + row]
                }
                _ => have[..row].iter().all(|byte| *byte == 0),
            };
            if !holds {
                return Err(format!(
                    "row {index}, id {id}, code {code}: its bytes are wrong"
                ));
            }
            if have[row..].iter().any(|byte| *byte != CANARY) {
                return Err(format!("row {index}: bytes after it were written"));
            }
        }
        Ok(codes)
    }
}

impl Drive {
    fn gather(&self, table: &RowTable, request: &Request, stream: u64) -> Outcome<Pending> {
        let table = match &self.cached {
            Some(cached) => cached.clone(),
            None => self.rows(table)?,
        };
        // SAFETY: the jobs' memory outlives the gathers, which are waited for.
        unsafe { table.gather_on_gpu(request, stream) }.map_err(text)
    }

    pub fn rows(&self, table: &RowTable) -> Outcome<Table> {
        let row_bytes = u64::from(table.row_bytes);
        self.store
            .table(table.first_byte, table.rows, row_bytes)
            .map_err(text)
    }

    /// Runs one gather; its codes, after every row was checked.
    pub fn run(&self, job: &Job) -> Outcome<Vec<i32>> {
        self.run_and_tell(job).map(|(codes, _)| codes)
    }

    /// The same, with what it came to.
    pub fn run_and_tell(&self, job: &Job) -> Outcome<(Vec<i32>, Failures)> {
        let pending = job.start(self, &self.stream)?;
        let gathered = pending.wait(WAIT).map_err(text)?;
        let codes = job.check(self)?;
        let failed = codes.iter().filter(|code| **code != code::OK).count() as u64;
        let first = codes.iter().position(|code| *code != code::OK);
        let first = first.map(|index| (index as u64, codes[index]));
        if (gathered.failures.rows, gathered.failures.first) != (failed, first) {
            return Err(format!(
                "{gathered:?}, but {failed} rows failed, first {first:?}"
            ));
        }
        Ok((codes, gathered.failures))
    }

    pub fn table(&self, first_byte: u64, row_bytes: u32) -> RowTable {
        RowTable {
            first_byte,
            rows: (BYTES - first_byte) / u64::from(row_bytes),
            row_bytes,
        }
    }
}

/// A gather sees what was written before it began, and not what is written afterwards.
fn writes(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", Duration::from_secs(5))?;
    let table = drive.table(96, 512);
    let mut throw = dice(11);
    for round in 0..50u8 {
        let at = 96 + throw(table.rows - 40) * 512;
        let new: Vec<u8> = (0..700).map(|byte| round ^ byte as u8).collect();
        drive.store.write_at(at, &new).map_err(text)?;
        drive.image[at as usize..][..new.len()].copy_from_slice(&new);
        let first = ((at - 96) / 512) as i64;
        let job = Job::new(&drive, table, (first..first + 40).collect(), false, 0)?;
        if drive.run(&job)?.iter().any(|code| *code != code::OK) {
            return Err("rows failed".to_owned());
        }
    }
    Ok("50 writes, each seen".to_owned())
}

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("gather/shapes/block-{block}"), |_| {
            let drive = Drive::new(bench, block, "", Duration::from_secs(5))?;
            shapes_of(&drive, u64::from(block))
        });
    }
    report.test("gather/ids", |_| ids(bench));
    report.test("gather/after-writes", |_| writes(bench));
    report.test("gather/streams", |_| streams(bench));
    report.test("gather/cache", |_| cached(bench));
    report.test("gather/fault/over-and-over", |_| outages(bench));
    for (name, fault) in [
        ("status", "status:0x281@op=read,nth=7"),
        ("dropped", "drop@op=read,nth=7"),
        ("late", "delay:LATE@op=read,nth=7"),
        ("wrong-cid", "wrongcid:0xfff@op=read,nth=7"),
        ("dead-cfs", "cfs@op=read,nth=7"),
        ("all-ones", "allones@op=read,nth=7"),
    ] {
        report.test(&format!("gather/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
}

/// Numbers that look random and repeat.
pub fn dice(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut at = 0;
    move |limit| {
        at += 1;
        data_word(seed, at) % limit.max(1)
    }
}

/// Rows of many sizes at many places.
pub fn shapes_of(drive: &Drive, seed: u64) -> Outcome<String> {
    let mut throw = dice(seed);
    let mut done = 0;
    for (row_bytes, first_byte, pad) in [
        (4096, 0, 0),
        (4096, 4096, 512),
        (512, 96, 0),
        (512, 0, 16),
        (1536, 152, 0),
        (16, 0, 0),
        (24, 8, 8),
        (100, 4, 4),
        (7, 3, 0),
        (1, 0, 0),
        (4097, 1, 2),
        (16 << 10, 0, 0),
        (64 << 10, 512, 0),
    ] {
        for count in [1, 31, 33, 700] {
            let table = drive.table(first_byte, row_bytes);
            let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows) as i64).collect();
            // The last row, a run of neighbours, and one row often.
            ids[0] = table.rows as i64 - 1;
            for at in 0..(count as usize / 3) {
                ids[at] = ids[0] - at as i64 / 2;
            }
            let wide = throw(2) == 0;
            let job = Job::new(drive, table, ids, wide, pad)?;
            let codes = drive.run(&job)?;
            if codes.iter().any(|code| *code != code::OK) {
                return Err(format!("{table:?}: {codes:?}"));
            }
            done += count;
        }
    }
    Ok(format!("{done} rows compared"))
}

fn ids(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", Duration::from_secs(5))?;
    let table = RowTable {
        rows: 100,
        ..drive.table(0, 4096)
    };
    let odd = [-1, 100, i64::from(i32::MIN), i64::from(i32::MAX)];
    let mut asked: Vec<i64> = (0..300).map(|index| index % 130).collect();
    for (place, id) in odd.into_iter().enumerate() {
        asked[place * 41] = id;
    }
    for wide in [false, true] {
        if wide {
            asked.extend([i64::MIN, i64::MAX, 1 << 32, (1 << 32) + 5]);
        }
        let job = Job::new(&drive, table, asked.clone(), wide, 0)?;
        drive.run(&job)?;
    }
    let none = Job::new(&drive, table, Vec::new(), true, 0)?;
    drive.run(&none)?;
    // No word for the rows' codes.
    let job = Job::new(&drive, table, vec![1, -1], true, 0)?;
    let request = Request {
        ids: job.device_ids.address(),
        wide_ids: true,
        count: 2,
        out: job.out.address(),
        out_stride: 4096,
        status: 0,
    };
    let pending = drive.gather(&table, &request, drive.stream.handle())?;
    let gathered = pending.wait(WAIT).map_err(text)?;
    if gathered.failures.first != Some((1, code::OUT_OF_RANGE)) {
        return Err(format!("{gathered:?}"));
    }
    let outside = RowTable {
        rows: table.rows + BYTES,
        ..table
    };
    match drive.rows(&outside) {
        Err(_) => Ok(format!("{} ids", asked.len())),
        Ok(_) => Err("a table past the end".to_owned()),
    }
}

/// Several streams of the GPU.
pub fn several_streams(bench: &Bench, count: usize) -> Outcome<Vec<Stream>> {
    let stream = |_| Stream::new(&bench.gpu).map_err(text);
    (0..count).map(stream).collect()
}

/// So many gathers of so many random rows each.
pub fn random_jobs(
    drive: &Drive,
    table: RowTable,
    (jobs, rows): (usize, usize),
    throw: &mut impl FnMut(u64) -> u64,
) -> Outcome<Vec<Job>> {
    let mut job = |_| {
        let ids = (0..rows).map(|_| throw(table.rows) as i64).collect();
        Job::new(drive, table, ids, true, 0)
    };
    (0..jobs).map(&mut job).collect()
}

/// Starts all of them, on the streams in turns, and waits: the codes of each, after every row was checked.
pub fn run_over(drive: &Drive, jobs: &[Job], streams: &[Stream]) -> Outcome<Vec<Vec<i32>>> {
    let started = jobs.iter().zip(streams.iter().cycle());
    let pending: Vec<Pending> = started
        .map(|(job, stream)| job.start(drive, stream))
        .collect::<Outcome<_>>()?;
    let ended = jobs.iter().zip(&pending);
    ended
        .map(|(job, pending)| {
            pending.wait(WAIT).map_err(text)?;
            job.check(drive)
        })
        .collect()
}

fn streams(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", Duration::from_secs(5))?;
    let mut throw = dice(77);
    let table = drive.table(0, 512);
    let streams = several_streams(bench, 4)?;
    let mut rows = 0;
    for _ in 0..20 {
        let jobs = random_jobs(&drive, table, (8, 500), &mut throw)?;
        for codes in run_over(&drive, &jobs, &streams)? {
            if codes.iter().any(|code| *code != code::OK) {
                return Err(format!("{codes:?}"));
            }
            rows += codes.len();
        }
    }
    Ok(format!("{rows} rows over 4 streams"))
}

/// Rows by way of a cache that is smaller than the table, from several streams, between writes.
fn cached(bench: &Bench) -> Outcome<String> {
    let mut drive = Drive::new(bench, 4096, "", Duration::from_secs(5))?;
    let mut throw = dice(123);
    let streams = several_streams(bench, 4)?;
    let mut rows = 0;
    for (row_bytes, first_byte, bytes) in [(4096, 0, 200 << 12), (512, 96, 20_000), (100, 4, 9000)]
    {
        let table = drive.table(first_byte, row_bytes);
        drive.cached = Some(drive.rows(&table)?.cached(bytes).map_err(text)?);
        for round in 0..20u8 {
            // Few rows often, and every other row now and then.
            let mut job = |_| {
                let id = |_| match throw(4) {
                    0 => throw(table.rows) as i64,
                    _ => throw(40) as i64,
                };
                Job::new(&drive, table, (0..400).map(id).collect(), true, 0)
            };
            let jobs: Vec<Job> = (0..6).map(&mut job).collect::<Outcome<_>>()?;
            for codes in run_over(&drive, &jobs, &streams)? {
                if codes.iter().any(|code| *code != code::OK) {
                    return Err(format!("{codes:?}"));
                }
                rows += codes.len();
            }
            let at = u64::from(first_byte as u32) + throw(30) * u64::from(row_bytes);
            let new = [round; 50];
            drive.store.write_at(at, &new).map_err(text)?;
            drive.image[at as usize..][..new.len()].copy_from_slice(&new);
        }
    }
    let too_few = drive.rows(&drive.table(0, 4096))?.cached(4096).is_err();
    match too_few {
        true => Ok(format!("{rows} rows between 60 writes")),
        false => Err("a cache of less than a set".to_owned()),
    }
}

/// Reads are lost again and again while launches go on over several streams: no row is wrong, and no station is lost.
fn outages(bench: &Bench) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let drive = Drive::new(bench, 4096, "drop@op=read,every=3000", timeout)?;
    outages_of(bench, &drive)
}

pub fn outages_of(bench: &Bench, drive: &Drive) -> Outcome<String> {
    let table = drive.table(0, 4096);
    let mut throw = dice(21);
    let streams = several_streams(bench, 4)?;
    let (mut failed, mut rows) = (0, 0);
    for _ in 0..25 {
        let jobs = random_jobs(drive, table, (12, 300), &mut throw)?;
        for codes in run_over(drive, &jobs, &streams)? {
            rows += codes.len();
            failed += codes.iter().filter(|code| **code != code::OK).count();
        }
    }
    match failed {
        0 => Err("no row failed".to_owned()),
        all if all == rows => Err("every row failed".to_owned()),
        _ => Ok(format!("{failed} of {rows} rows failed, none is wrong")),
    }
}

/// Rows whose reads fail say so, no row is wrong, and a later gather works where the controller comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let timeout = Duration::from_millis(200) * bench.patience as u32;
    let fault = fault.replace("LATE", &format!("{}ms", timeout.as_millis() * 4));
    let drive = Drive::new(bench, 4096, &fault, timeout)?;
    let table = drive.table(0, 4096);
    let mut throw = dice(5);
    let mut ids = || -> Vec<i64> { (0..600).map(|_| throw(table.rows) as i64).collect() };
    let job = Job::new(&drive, table, ids(), true, 0)?;
    let codes = drive.run(&job)?;
    let failed = codes.iter().filter(|code| **code != code::OK).count();
    if failed == 0 {
        return Err("no row failed".to_owned());
    }
    if name == "status" {
        let is_expected = |code: &i32| matches!(*code, code::OK | 0x281);
        if !codes.iter().all(is_expected) || failed > 1 {
            return Err(format!("{failed} rows failed: {codes:?}"));
        }
    }
    let begin = std::time::Instant::now();
    loop {
        let job = Job::new(&drive, table, ids(), true, 0)?;
        let codes = drive.run(&job)?;
        if codes.iter().all(|code| *code == code::OK) {
            break;
        }
        let gone = codes.iter().all(|code| *code == code::GONE);
        if name == "all-ones" && gone && begin.elapsed() > Duration::from_secs(3) {
            return Ok(format!(
                "{failed} rows failed, and all of a controller that is gone"
            ));
        }
        if begin.elapsed() > WAIT {
            return Err(format!("rows fail for {WAIT:?} after the fault: {codes:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(format!("{failed} rows failed, then none"))
}
