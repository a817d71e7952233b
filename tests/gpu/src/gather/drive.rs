//! A drive with known bytes whose rows a GPU gathers, and gathers whose every row is checked.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::limits::{limit, text};
use crate::report::Outcome;
use nvme_gpu_kernel::rows::code;
use nvme_gpu_kernel::work::data_word;
use nvme_host::cuda::{
    DeviceMemory, GatherIds, GatherTarget, Gpu, PendingRows, RowFailures, RowRequest, RowTable,
    RowsOptions, Stream,
};
use nvme_host::store::{BegunGather, GpuOptions, RowElement};
use nvme_host::{Store, StoreOptions, Table};
use std::sync::Arc;
use std::time::Duration;

const SEED: u64 = 0x60A7;
pub const BYTES: u64 = 8 << 20;
/// Limit of a gather by owned queues: every gather that fits into them uses them.
const OWNED_BYTES: u64 = 2 << 20;
/// Content of the output before a gather.
pub const CANARY: u8 = 0xA5;

/// Returns the deadline of a command in a test of a fault: short if the fault loses commands, which are waited for.
pub fn fault_timeout(bench: &Bench, fault: &str) -> Duration {
    let loses_none = ["status:", "reorder", "torncqe"];
    if loses_none.iter().any(|kind| fault.starts_with(kind)) {
        return limit();
    }
    Duration::from_millis(200) * bench.patience as u32
}

/// Options of a store for kernels that read by themselves: few stations, so that blocks wait for each other.
pub fn few_stations(bench: &Bench, timeout: Duration) -> StoreOptions {
    StoreOptions {
        queues: 2,
        timeout,
        gpu: Some(GpuOptions {
            index: bench.gpu.index(),
            rows: RowsOptions {
                queues: 4,
                entries: 128,
                stations: 4,
                owned_bytes: OWNED_BYTES,
                ..RowsOptions::default()
            },
        }),
        ..StoreOptions::default()
    }
}

/// Returns the number of threads of a simulated drive: more than there are processors only take them from each other.
pub fn drive_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    processors.clamp(1, 4)
}

/// Returns a simulated drive for such a store, with a fault unless it is empty.
pub fn simulated(mib: u32, block: u32, fault: &str) -> String {
    let fault = match fault {
        "" => String::new(),
        fault => format!("&fault={fault}"),
    };
    let threads = drive_threads();
    format!("sim:mem?size={mib}MiB&block={block}&queues=8&threads={threads}{fault}")
}

/// A drive whose words count up, and the GPU's way to its rows.
pub struct Drive {
    pub(super) store: Store,
    pub stream: Stream,
    gpu: Arc<Gpu>,
    pub(super) image: Vec<u8>,
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

    /// Opens a device of [`BYTES`] bytes and writes them.
    pub fn open(bench: &Bench, name: &str, timeout: Duration) -> Outcome<Self> {
        Self::open_on(&bench.gpu, name, timeout)
    }

    /// Opens such a device with any GPU.
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
                        owned_bytes: OWNED_BYTES,
                        ..RowsOptions::default()
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

    /// Closes the store; returns the content of the drive.
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

    /// Makes all later gathers use a cache of `bytes` bytes for rows of `table`.
    pub fn keep_rows(&mut self, table: &RowTable, bytes: u64) -> Outcome<()> {
        self.cached = Some(self.rows(table)?.cached(bytes).map_err(text)?);
        Ok(())
    }

    /// Makes later gathers use no cache.
    pub fn keep_nothing(&mut self) {
        self.cached = None;
    }

    /// Returns the expected content of the drive.
    pub fn image_mut(&mut self) -> &mut Vec<u8> {
        &mut self.image
    }

    /// Returns the content of the drive.
    pub fn read_all(&self) -> Outcome<Vec<u8>> {
        let mut all = vec![0; BYTES as usize];
        self.store.read_at(0, &mut all).map_err(text)?;
        Ok(all)
    }
}

/// A gather and its memory.
pub struct Job {
    table: RowTable,
    ids: Vec<i64>,
    wide: bool,
    stride: u64,
    pub(super) device_ids: DeviceMemory,
    pub(super) out: DeviceMemory,
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

    pub fn start(&self, drive: &Drive, stream: &Stream) -> Outcome<PendingRows> {
        self.start_on(drive, stream.handle())
    }

    /// Starts the gather in `stream`, a `CUstream`.
    pub fn start_on(&self, drive: &Drive, stream: u64) -> Outcome<PendingRows> {
        drive.gather(&self.table, &self.request(), stream)
    }

    /// Begins the gather in `stream`, a `CUstream`.
    pub fn begin_on(&self, drive: &Drive, stream: u64) -> Outcome<BegunGather> {
        let ids = GatherIds {
            ids: self.device_ids.address(),
            wide_ids: self.wide,
            count: self.ids.len() as u64,
        };
        let table = drive.kept(&self.table)?;
        // SAFETY: the job's memory outlives the gather, which is waited for, or ends with the store.
        unsafe { table.begin_on_gpu(&ids, stream) }.map_err(text)
    }

    /// Finishes the gather in `stream`, a `CUstream`.
    ///
    /// # Errors
    /// As `BegunGather::finish`.
    pub fn finish_on(
        &self,
        begun: &mut BegunGather,
        stream: u64,
    ) -> nvme_host::Result<PendingRows> {
        let target = GatherTarget {
            out: self.out.address(),
            out_stride: self.stride,
            status: self.status.address(),
        };
        // SAFETY: as above.
        unsafe { begun.finish(&target, stream) }
    }

    fn request(&self) -> RowRequest {
        RowRequest {
            ids: self.device_ids.address(),
            wide_ids: self.wide,
            count: self.ids.len() as u64,
            out: self.out.address(),
            out_stride: self.stride,
            status: self.status.address(),
        }
    }

    /// Writes the output's rows to the drive.
    pub fn scatter(&self, drive: &Drive) -> Outcome<PendingRows> {
        self.scatter_on(drive, drive.stream.handle())
    }

    /// Starts the scatter in `stream`, a `CUstream`.
    pub fn scatter_on(&self, drive: &Drive, stream: u64) -> Outcome<PendingRows> {
        let table = drive.rows(&self.table)?;
        // SAFETY: the job's memory outlives the operation, which is waited for.
        unsafe { table.scatter_on_gpu(&self.request(), stream) }.map_err(text)
    }

    /// Starts a scatter without memory for the status of each row.
    pub fn scatter_without_status(&self, drive: &Drive) -> Outcome<PendingRows> {
        let request = RowRequest {
            status: 0,
            ..self.request()
        };
        let table = drive.rows(&self.table)?;
        // SAFETY: as above.
        unsafe { table.scatter_on_gpu(&request, drive.stream.handle()) }.map_err(text)
    }

    /// Adds the output's rows to those of the drive.
    pub fn add(&self, drive: &Drive, element: RowElement) -> Outcome<PendingRows> {
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

    pub fn codes(&self) -> Outcome<Vec<i32>> {
        let mut bytes = vec![0; self.ids.len() * 4];
        self.status.download(0, &mut bytes).map_err(text)?;
        let words = bytes.chunks_exact(4);
        Ok(words
            .map(|word| i32::from_le_bytes(word.try_into().unwrap_or_default()))
            .collect())
    }

    /// Replaces the ids by as many others.
    pub fn replace_ids(&mut self, ids: Vec<i64>) -> Outcome<()> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.ids = ids;
        self.device_ids.upload(0, &bytes).map_err(text)
    }

    /// Checks each row against its code: it has the row's bytes, or zeros; and nothing between rows has changed.
    pub fn check(&self, drive: &Drive) -> Outcome<Vec<i32>> {
        self.check_against(&drive.image)
    }

    /// Checks the rows as [`check`](Self::check) does, against the bytes of a drive.
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
    pub(super) fn gather(
        &self,
        table: &RowTable,
        request: &RowRequest,
        stream: u64,
    ) -> Outcome<PendingRows> {
        let table = self.kept(table)?;
        // SAFETY: the jobs' memory outlives the gathers, which are waited for.
        unsafe { table.gather_on_gpu(request, stream) }.map_err(text)
    }

    /// Returns the table, or the one with a cache.
    fn kept(&self, table: &RowTable) -> Outcome<Table> {
        match &self.cached {
            Some(cached) => Ok(cached.clone()),
            None => self.rows(table),
        }
    }

    pub fn rows(&self, table: &RowTable) -> Outcome<Table> {
        let row_bytes = u64::from(table.row_bytes);
        self.store
            .table(table.first_byte, table.rows, row_bytes)
            .map_err(text)
    }

    /// Runs one gather and checks every row; returns the codes.
    pub fn run(&self, job: &Job) -> Outcome<Vec<i32>> {
        self.run_and_tell(job).map(|(codes, _)| codes)
    }

    /// Does the same as [`run`](Self::run), and returns the failures, too.
    pub fn run_and_tell(&self, job: &Job) -> Outcome<(Vec<i32>, RowFailures)> {
        let pending = job.start(self, &self.stream)?;
        let gathered = pending.wait(limit()).map_err(text)?;
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

/// Numbers that look random and repeat.
pub fn dice(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut at = 0;
    move |limit| {
        at += 1;
        data_word(seed, at) % limit.max(1)
    }
}

/// Several streams of the GPU.
pub fn several_streams(bench: &Bench, count: usize) -> Outcome<Vec<Stream>> {
    let stream = |_| Stream::new(&bench.gpu).map_err(text);
    (0..count).map(stream).collect()
}

/// Makes `jobs` gathers of `rows` random rows each.
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

/// Starts all jobs, on the streams in turn, and waits; returns the codes of each, after every row was checked.
pub fn run_over(drive: &Drive, jobs: &[Job], streams: &[Stream]) -> Outcome<Vec<Vec<i32>>> {
    let started = jobs.iter().zip(streams.iter().cycle());
    let pending: Vec<PendingRows> = started
        .map(|(job, stream)| job.start(drive, stream))
        .collect::<Outcome<_>>()?;
    let ended = jobs.iter().zip(&pending);
    ended
        .map(|(job, pending)| {
            pending.wait(limit()).map_err(text)?;
            job.check(drive)
        })
        .collect()
}
