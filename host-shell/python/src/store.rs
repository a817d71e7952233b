//! Stores, tables and what is under way on them.
// UNSAFETY: threads of the pool and kernels use memory by address; its owners are kept until they have ended.
#![allow(unsafe_code)]

use crate::array::Array;
use crate::error::{Fault, OrRaise};
use crate::pool::{Job, lock};
use crate::view::{Memory, View};
use crate::wait;
use nvme_host::cuda::{Gpu, Request, RowsOptions};
use nvme_host::store::{Duplicates, Element, FileIo, GpuOptions, Ids, RowReport};
use nvme_host::{Error, StoreOptions};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

type Open = Arc<nvme_host::Store>;

/// A gather, or another transfer on a GPU, that was launched.
pub struct Flight {
    pending: nvme_host::cuda::Pending,
    word: &'static str,
    number: u64,
    /// Rows, or bytes of a read or write.
    count: u64,
    is_reported: AtomicBool,
    /// Of a captured one: how many of its runs were looked at.
    seen: AtomicU32,
}

impl Flight {
    /// Waits `limit` at most; whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        self.pending.wait(limit).is_ok()
    }

    /// What went wrong, once.
    fn fault(&self) -> Option<Fault> {
        if self.pending.is_captured() {
            let ended = self.pending.ended();
            if self.seen.swap(ended, Ordering::AcqRel) == ended {
                return None;
            }
        } else if !self.pending.is_done() || self.is_reported.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.describe()
    }

    fn describe(&self) -> Option<Fault> {
        let failures = self.pending.last().failures;
        let (row, code) = failures.first?;
        let (word, number, count) = (self.word, self.number, self.count);
        let what = match word {
            "read" | "write" => {
                format!("{word} {number} of {count} bytes on the GPU, in rows of 64 KiB")
            }
            _ => format!("{word} {number} of {count} rows on the GPU"),
        };
        Some(Fault::row(code, row, None, &what, failures.rows))
    }
}

/// A gather under way, with what it needs.
struct Held {
    flight: Arc<Flight>,
    #[expect(dead_code, reason = "kept until the gather has ended")]
    store: Open,
    #[expect(dead_code, reason = "kept until the gather has ended")]
    buffers: Option<Py<PyAny>>,
}

/// The gathers of one table.
#[derive(Default)]
struct Flights {
    held: Mutex<VecDeque<Held>>,
    captured: Mutex<Vec<Arc<Flight>>>,
    failed: Mutex<Option<Fault>>,
    launched: AtomicU64,
}

impl Flights {
    /// Puts a transfer into a stream by `launch`, and keeps what it needs until it has ended.
    fn launch(
        self: &Arc<Self>,
        py: Python<'_>,
        store: Open,
        (word, count): (&'static str, u64),
        buffers: Option<Py<PyAny>>,
        launch: impl FnOnce() -> nvme_host::Result<nvme_host::cuda::Pending> + Send,
    ) -> PyResult<GpuOperation> {
        let flight = Arc::new(Flight {
            pending: py.detach(launch).or_raise()?,
            word,
            number: self.launched.fetch_add(1, Ordering::Relaxed),
            count,
            is_reported: AtomicBool::new(false),
            seen: AtomicU32::new(0),
        });
        if flight.pending.is_captured() {
            lock(&self.captured).push(Arc::clone(&flight));
        } else {
            lock(&self.held).push_back(Held {
                flight: Arc::clone(&flight),
                store,
                buffers,
            });
        }
        Ok(GpuOperation {
            flight,
            flights: Arc::clone(self),
        })
    }

    /// Gives back the buffers of those that have ended, and keeps the first failure.
    fn reap(&self) {
        let mut over = Vec::new();
        {
            let mut held = lock(&self.held);
            // Those of one stream end in order; of several streams, a long list is looked through.
            if held.len() > 32 {
                let (done, left): (Vec<Held>, Vec<Held>) =
                    held.drain(..).partition(|one| one.flight.pending.is_done());
                over = done;
                *held = VecDeque::from(left);
            } else {
                while held.front().is_some_and(|one| one.flight.pending.is_done()) {
                    over.extend(held.pop_front());
                }
            }
        }
        for one in &over {
            if let Some(fault) = one.flight.fault() {
                lock(&self.failed).get_or_insert(fault);
            }
        }
    }

    fn look_at_captured(&self) {
        for flight in lock(&self.captured).iter() {
            if let Some(fault) = flight.fault() {
                lock(&self.failed).get_or_insert(fault);
            }
        }
    }

    /// # Errors
    /// The first failure that was not reported yet.
    fn check(&self) -> Result<(), Fault> {
        match lock(&self.failed).take() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn is_idle(&self) -> bool {
        lock(&self.held).is_empty()
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        let held = std::mem::take(&mut *lock(&self.held));
        let left = held.into_iter().filter(|one| !one.flight.pending.is_done());
        lock(&LEFT).flights.extend(left);
    }
}

/// What was left under way by those who started it: kept until it has ended.
#[derive(Default)]
struct Left {
    flights: Vec<Held>,
    jobs: Vec<(Arc<Job>, Vec<Py<View>>)>,
}

static LEFT: Mutex<Left> = Mutex::new(Left {
    flights: Vec::new(),
    jobs: Vec::new(),
});

/// Gives back what was left under way and has ended. With the GIL held.
fn reap_left() {
    let over = {
        let mut left = lock(&LEFT);
        if left.flights.is_empty() && left.jobs.is_empty() {
            return;
        }
        let (flights, still) = std::mem::take(&mut left.flights)
            .into_iter()
            .partition(|one| one.flight.pending.is_done());
        left.flights = still;
        let (jobs, still) = std::mem::take(&mut left.jobs)
            .into_iter()
            .partition(|one| one.0.is_done());
        left.jobs = still;
        Left { flights, jobs }
    };
    // Outside the lock: buffers may run code of Python when they go.
    drop(over);
}

/// How many buffers are kept for transfers that were left under way.
#[pyfunction]
pub fn kept_buffers() -> usize {
    reap_left();
    let left = lock(&LEFT);
    left.flights.len() + left.jobs.len()
}

/// A transfer on a thread of the pool.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Operation {
    job: Arc<Job>,
    buffers: Mutex<Vec<Py<View>>>,
}

impl Operation {
    fn start(
        buffers: Vec<Py<View>>,
        work: impl FnOnce() -> Result<(), Fault> + Send + 'static,
    ) -> PyResult<Self> {
        reap_left();
        let job = Job::start(work)?;
        Ok(Self {
            job,
            buffers: Mutex::new(buffers),
        })
    }
}

#[pymethods]
impl Operation {
    /// Whether it has ended, well or not.
    fn done(&self) -> bool {
        self.job.is_done()
    }

    /// Waits `timeout` seconds at most, or without a limit; whether it has ended. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::seconds(timeout)?;
        let is_done = wait::until(py, limit, |slice| self.job.wait(slice))?;
        if is_done {
            // The buffers go when the GIL is held, which is now.
            let buffers = std::mem::take(&mut *lock(&self.buffers));
            drop(buffers);
        }
        Ok(is_done)
    }

    /// Raises what went wrong, if it has ended and something did.
    fn check(&self) -> PyResult<()> {
        Ok(self.job.result()?)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut *lock(&self.buffers));
        if !self.job.is_done() {
            lock(&LEFT).jobs.push((Arc::clone(&self.job), buffers));
        }
    }
}

/// A gather on a GPU.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct GpuOperation {
    flight: Arc<Flight>,
    flights: Arc<Flights>,
}

#[pymethods]
impl GpuOperation {
    /// Whether it has ended, a captured one at least once.
    fn done(&self) -> bool {
        self.flight.pending.is_done()
    }

    /// Whether it is part of a graph.
    #[getter]
    fn is_captured(&self) -> bool {
        self.flight.pending.is_captured()
    }

    /// Waits `timeout` seconds at most, or without a limit; whether it has ended. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::seconds(timeout)?;
        wait::until(py, limit, |slice| self.flight.wait(slice))
    }

    /// Raises what went wrong, if it has ended and something did; it is not raised again elsewhere.
    fn check(&self) -> PyResult<()> {
        if !self.flight.pending.is_done() {
            return Ok(());
        }
        self.flight.is_reported.store(true, Ordering::Release);
        let fault = self.flight.describe();
        self.flights.reap();
        fault.map_or(Ok(()), |fault| Err(fault.into()))
    }
}

/// A drive, a file, or several of them as one range of bytes.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Store {
    process: u32,
    open: Mutex<Option<Open>>,
    gpu: Option<Arc<Gpu>>,
    tables: Mutex<Vec<Weak<Flights>>>,
    /// Reads and writes of bytes on the GPU.
    flights: Arc<Flights>,
}

impl Store {
    /// The store, while it is open and in the process that opened it.
    fn get(&self) -> Result<Open, Fault> {
        if self.process != std::process::id() {
            return Err(Fault::usage(
                "this store was opened by another process, before a fork",
                "open it in the process that uses it; let worker processes start by 'spawn'",
            ));
        }
        lock(&self.open)
            .clone()
            .ok_or_else(|| Fault::usage("the store is closed", "open it again, or close it later"))
    }

    /// # Errors
    /// For a store without a GPU.
    pub fn gpu(&self) -> Result<Arc<Gpu>, Fault> {
        self.gpu.clone().ok_or_else(|| {
            Fault::usage(
                "the store was opened without a GPU",
                "open it with gpu=0, or use memory of the host",
            )
        })
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (device, *, gpu=None, queues=8, depth=64, timeout_ms=5000, allow_write=false, read_only=false, nsid=1, gpu_queues=16, file_io="auto"))]
    #[expect(clippy::too_many_arguments, reason = "options of Python")]
    fn new(
        py: Python<'_>,
        device: &str,
        gpu: Option<u32>,
        queues: u32,
        depth: u32,
        timeout_ms: u64,
        allow_write: bool,
        read_only: bool,
        nsid: u32,
        gpu_queues: u32,
        file_io: &str,
    ) -> PyResult<Self> {
        let file_io = match file_io {
            "auto" => FileIo::Auto,
            "uring" => FileIo::Uring,
            "pread" => FileIo::Pread,
            other => {
                let cause = format!("file_io is '{other}'");
                return Err(Fault::usage(cause, "use 'auto', 'uring' or 'pread'").into());
            }
        };
        let of_gpu = |index| GpuOptions {
            index,
            rows: RowsOptions {
                queues: gpu_queues,
                ..RowsOptions::default()
            },
        };
        let options = StoreOptions {
            allow_write,
            read_only,
            nsid,
            queues,
            depth,
            timeout: Duration::from_millis(timeout_ms),
            file_io,
            gpu: gpu.map(of_gpu),
        };
        reap_left();
        // What is opened after Ctrl-C is closed by the thread that opened it.
        let opened = Arc::new(Mutex::new(None));
        let (device, place) = (device.to_owned(), Arc::clone(&opened));
        let job = Job::start(move || {
            let store = nvme_host::Store::open(&device, &options)?;
            let gpu = gpu.map(Gpu::open).transpose()?;
            *lock(&place) = Some((store, gpu));
            Ok(())
        })?;
        wait::until(py, None, |slice| job.wait(slice))?;
        job.result()?;
        let taken = lock(&opened).take();
        let Some((store, gpu)) = taken else {
            return Err(Fault::of(&Error::internal("nothing was opened")).into());
        };
        Ok(Self {
            process: std::process::id(),
            open: Mutex::new(Some(Arc::new(store))),
            gpu,
            tables: Mutex::default(),
            flights: Arc::default(),
        })
    }

    #[getter]
    fn is_open(&self) -> bool {
        self.get().is_ok()
    }

    /// Which GPU gathers; None without one.
    #[getter]
    fn gpu_index(&self) -> Option<u32> {
        self.gpu.as_ref().map(|gpu| gpu.index())
    }

    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.get()?.len())
    }

    #[getter]
    fn block_bytes(&self) -> PyResult<u32> {
        Ok(self.get()?.block_bytes())
    }

    /// What carries the data, as JSON.
    fn path(&self) -> PyResult<String> {
        let path = serde_json::to_string(&self.get()?.path());
        Ok(path.unwrap_or_default())
    }

    /// Counts, as JSON.
    fn stats(&self) -> PyResult<String> {
        let stats = serde_json::to_string(&self.get()?.stats());
        Ok(stats.unwrap_or_default())
    }

    fn read(&self, view: Py<View>, offset: u64) -> PyResult<Operation> {
        let store = self.get()?;
        let to = view.get().of_host("the destination", true)?;
        within(&store, offset, to.bytes)?;
        Operation::start(vec![view], move || {
            // SAFETY: the view is kept until this ended.
            store.read_at(offset, unsafe { to.slice_mut() })?;
            Ok(())
        })
    }

    fn write(&self, view: Py<View>, offset: u64, durable: bool) -> PyResult<Operation> {
        let store = self.get()?;
        let from = view.get().of_host("the source", false)?;
        within(&store, offset, from.bytes)?;
        Operation::start(vec![view], move || {
            // SAFETY: the view is kept until this ended.
            let data = unsafe { from.slice() };
            match durable {
                true => store.write_at_fua(offset, data)?,
                false => store.write_at(offset, data)?,
            }
            Ok(())
        })
    }

    /// Puts a read of `bytes` bytes to the GPU's address `address` into `stream`, or a write from there.
    #[pyo3(signature = (is_write, offset, bytes, address, stream, buffers=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn move_on_gpu(
        &self,
        py: Python<'_>,
        is_write: bool,
        offset: u64,
        bytes: u64,
        address: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        let (store, used) = (self.get()?, self.get()?);
        let word = if is_write { "write" } else { "read" };
        // SAFETY: the address is of the buffers, which are kept until the transfer has ended; that of a graph is its
        // user's to keep.
        self.flights
            .launch(py, store, (word, bytes), buffers, || unsafe {
                match is_write {
                    true => used.write_from_gpu(offset, bytes, address, stream),
                    false => used.read_on_gpu(offset, bytes, address, stream),
                }
            })
    }

    fn flush(&self) -> PyResult<Operation> {
        let store = self.get()?;
        Operation::start(Vec::new(), move || Ok(store.flush()?))
    }

    /// What `then` does from now on comes after what `first` does now: two streams of the store's GPU.
    fn order(&self, first: u64, then: u64) -> PyResult<()> {
        self.get()?;
        if first != then {
            self.gpu()?.order(first, then).or_raise()?;
        }
        Ok(())
    }

    /// Waits for gathers on the GPU, `timeout` seconds at most, and closes. What still is under way keeps its
    /// buffers, and the device, until it has ended.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let limit = wait::seconds(timeout)?;
        let open = lock(&self.open).take();
        let tables = std::mem::take(&mut *lock(&self.tables));
        let of_tables = tables.iter().filter_map(Weak::upgrade);
        for table in of_tables.chain([Arc::clone(&self.flights)]) {
            let last = lock(&table.held).back().map(|one| Arc::clone(&one.flight));
            if let Some(last) = last {
                wait::until(py, limit, |slice| last.wait(slice))?;
            }
            table.reap();
        }
        reap_left();
        if let Some(open) = open {
            let job = Job::start(move || {
                drop(open);
                Ok(())
            })?;
            wait::until(py, None, |slice| job.wait(slice))?;
        }
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let open = lock(&self.open).take();
        if self.process != std::process::id() {
            // The parent's: its threads are not here to answer.
            std::mem::forget(open);
            std::mem::forget(self.gpu.take());
            return;
        }
        if let Some(open) = open {
            Python::attach(|py| py.detach(|| drop(open)));
        }
    }
}

/// # Errors
/// When the range ends past the store.
fn within(store: &Open, offset: u64, bytes: usize) -> Result<(), Fault> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= store.len() => Ok(()),
        _ => Err(Fault::usage(
            format!(
                "{bytes} bytes at {offset} do not lie inside the store's {} bytes",
                store.len()
            ),
            "check offset and length, which are in bytes",
        )),
    }
}

/// Ids in memory of the host, as slices want them.
enum OwnedIds {
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl OwnedIds {
    /// # Safety
    /// The memory is valid for the length of the call.
    unsafe fn copy(memory: Memory, is_wide: bool) -> Self {
        // SAFETY: the caller's.
        let bytes = unsafe { memory.slice() };
        match is_wide {
            true => Self::I64(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|one| i64::from_le_bytes(*one))
                    .collect(),
            ),
            false => Self::I32(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|one| i32::from_le_bytes(*one))
                    .collect(),
            ),
        }
    }

    fn get(&self) -> Ids<'_> {
        match self {
            Self::I32(ids) => Ids::I32(ids),
            Self::I64(ids) => Ids::I64(ids),
        }
    }
}

/// # Errors
/// For what cannot be added.
fn element(dtype: &str) -> Result<Element, Fault> {
    match dtype {
        "float32" => Ok(Element::F32),
        "float16" => Ok(Element::F16),
        "bfloat16" => Ok(Element::Bf16),
        "int32" => Ok(Element::I32),
        other => {
            let cause = format!("rows of {other} cannot be added to");
            let remedy = "use float32, float16, bfloat16 or int32";
            Err(Fault::usage(cause, remedy))
        }
    }
}

/// What is done with rows in memory of the host.
enum Rows {
    Gather,
    Scatter(Duplicates),
    Add(Element),
}

/// Rows of one size in a store.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Table {
    store: Py<Store>,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    flights: Arc<Flights>,
}

impl Table {
    fn get(&self) -> Result<(Open, nvme_host::Table), Fault> {
        let store = self.store.get().get()?;
        let table = store.table(self.offset, self.rows, self.row_bytes)?;
        Ok((store, table))
    }

    fn run(
        &self,
        ids: Py<View>,
        rows: Py<View>,
        status: Option<Py<View>>,
        wide: bool,
        what: Rows,
    ) -> PyResult<Operation> {
        let (store, table) = self.get()?;
        let is_gather = matches!(what, Rows::Gather);
        let of_ids = ids.get().of_host("ids", false)?;
        let name = if is_gather { "out" } else { "the source" };
        let of_rows = rows.get().of_host(name, is_gather)?;
        let of_status = status
            .as_ref()
            .map(|view| view.get().of_host("status", true));
        let of_status = of_status.transpose()?;
        let count = of_ids.bytes / if wide { 8 } else { 4 };
        if of_status.is_some_and(|memory| memory.bytes != count * 4) {
            let cause = format!("status has another length than {count} rows of 4 bytes");
            return Err(Fault::usage(cause, "give an int32 for each id").into());
        }
        if is_gather && of_rows.overlaps(of_ids)
            || of_status.is_some_and(|one| one.overlaps(of_ids) || one.overlaps(of_rows))
        {
            let remedy = "use memory of its own for each";
            return Err(Fault::usage("ids, rows or status share memory", remedy).into());
        }
        let mut buffers = vec![ids, rows];
        buffers.extend(status);
        Operation::start(buffers, move || {
            let _store = store;
            // SAFETY: the views are kept until this ended.
            let ids = unsafe { OwnedIds::copy(of_ids, wide) };
            let mut codes = vec![0; if of_status.is_some() { count } else { 0 }];
            let places = of_status.is_some().then_some(&mut codes[..]);
            let (report, word) = match what {
                // SAFETY: as above; ids and status lie elsewhere.
                Rows::Gather => (
                    table.gather(ids.get(), unsafe { of_rows.slice_mut() }, places)?,
                    "gather",
                ),
                Rows::Scatter(duplicates) => (
                    // SAFETY: as above.
                    table.scatter(ids.get(), unsafe { of_rows.slice() }, duplicates, places)?,
                    "scatter",
                ),
                Rows::Add(element) => (
                    // SAFETY: as above.
                    table.scatter_add(ids.get(), unsafe { of_rows.slice() }, element, places)?,
                    "scatter_add",
                ),
            };
            if let Some(memory) = of_status {
                // SAFETY: as above.
                let bytes = unsafe { memory.slice_mut() };
                for (to, code) in bytes.as_chunks_mut().0.iter_mut().zip(&codes) {
                    *to = code.to_le_bytes();
                }
            }
            verdict(report, word)
        })
    }
}

/// # Errors
/// The first row that failed.
fn verdict(report: RowReport, word: &str) -> Result<(), Fault> {
    let Some(first) = &report.first else {
        return Ok(());
    };
    let what = format!("{word} of {} rows", report.rows);
    let mut fault = Fault::row(
        first.status,
        first.row as u64,
        Some(first.id),
        &what,
        report.failed as u64,
    );
    if let Some(error) = &first.error {
        let of_command = Fault::of(error);
        fault.code = of_command.code;
        fault.cause = format!("{}: {}", fault.cause, of_command.cause);
        fault.remedy = of_command.remedy;
    }
    fault.errno = report.errno;
    Err(fault)
}

#[pymethods]
impl Table {
    #[new]
    fn new(store: Py<Store>, offset: u64, rows: u64, row_bytes: u64) -> PyResult<Self> {
        let table = Self {
            store,
            offset,
            rows,
            row_bytes,
            flights: Arc::default(),
        };
        table.get()?;
        let mut tables = lock(&table.store.get().tables);
        tables.retain(|one| one.strong_count() > 0);
        tables.push(Arc::downgrade(&table.flights));
        drop(tables);
        Ok(table)
    }

    fn gather(
        &self,
        ids: Py<View>,
        wide: bool,
        out: Py<View>,
        status: Option<Py<View>>,
    ) -> PyResult<Operation> {
        self.run(ids, out, status, wide, Rows::Gather)
    }

    fn scatter(
        &self,
        ids: Py<View>,
        wide: bool,
        source: Py<View>,
        status: Option<Py<View>>,
        unique: bool,
    ) -> PyResult<Operation> {
        let duplicates = match unique {
            true => Duplicates::Error,
            false => Duplicates::Last,
        };
        self.run(ids, source, status, wide, Rows::Scatter(duplicates))
    }

    fn scatter_add(
        &self,
        ids: Py<View>,
        wide: bool,
        source: Py<View>,
        status: Option<Py<View>>,
        dtype: &str,
    ) -> PyResult<Operation> {
        let element = element(dtype)?;
        self.run(ids, source, status, wide, Rows::Add(element))
    }

    /// Puts a gather into `stream` of the store's GPU; addresses are the GPU's. `buffers` is kept until it has
    /// ended, unless it is captured.
    #[pyo3(signature = (ids, wide, count, out, status, stream, buffers=None, array=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn gather_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        out: u64,
        status: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
        array: Option<&Array>,
    ) -> PyResult<GpuOperation> {
        let flights = &self.flights;
        flights.reap();
        flights.check()?;
        let (store, table) = self.get()?;
        let request = Request {
            ids,
            wide_ids: wide,
            count,
            out,
            out_stride: self.row_bytes,
            status,
        };
        let what = ("gather", count);
        let made = flights.launch(py, store, what, buffers, || {
            // SAFETY: the addresses are of the buffers, which are kept until the gather has ended; those that a
            // graph uses are its user's to keep.
            unsafe { table.gather_on_gpu(&request, stream) }
        })?;
        if let Some(array) = array {
            array.is_filled_by(stream, &made.flight);
        }
        Ok(made)
    }

    /// Puts a scatter into `stream`, or with `dtype` an addition; as `gather_on_gpu`.
    #[pyo3(signature = (ids, wide, count, rows, status, stream, buffers=None, dtype=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn change_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        rows: u64,
        status: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
        dtype: Option<&str>,
    ) -> PyResult<GpuOperation> {
        let flights = &self.flights;
        flights.reap();
        flights.check()?;
        let (store, table) = self.get()?;
        let element = dtype.map(element).transpose()?;
        let request = Request {
            ids,
            wide_ids: wide,
            count,
            out: rows,
            out_stride: self.row_bytes,
            status,
        };
        let word = if element.is_some() {
            "scatter_add"
        } else {
            "scatter"
        };
        flights.launch(py, store, (word, count), buffers, || {
            // SAFETY: as for a gather.
            unsafe {
                match element {
                    Some(element) => table.scatter_add_on_gpu(&request, element, stream),
                    None => table.scatter_on_gpu(&request, stream),
                }
            }
        })
    }

    /// Waits for the gathers on the GPU that were launched before, and raises the first failure that was not raised
    /// yet; of captured ones, that of their last run that ended.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::seconds(timeout)?;
        self.store.get().get()?;
        let under_way: Vec<Arc<Flight>> = lock(&self.flights.held)
            .iter()
            .map(|one| Arc::clone(&one.flight))
            .collect();
        for flight in under_way {
            if !wait::until(py, limit, |slice| flight.wait(slice))? {
                return Ok(false);
            }
        }
        self.flights.reap();
        self.flights.look_at_captured();
        self.flights.check()?;
        Ok(true)
    }

    /// Whether no gather is under way on the GPU.
    fn is_idle(&self) -> bool {
        self.flights.reap();
        self.flights.is_idle()
    }
}
