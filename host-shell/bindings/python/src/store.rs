//! Stores: opening and closing, and transfers of bytes. Calls that may wait run on threads that never attach to
//! Python, so that Ctrl-C and other threads are served meanwhile.
// UNSAFETY: threads of the pool and the GPU use memory by address; its owners are kept until they have ended.
#![allow(unsafe_code)]

use crate::error::{ExceptionParts, OrRaise};
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::left;
use crate::operation::PyOperation;
use crate::pool::PoolJob;
use crate::process;
use crate::view::PyView;
use crate::wait::{self, CommonDeadline};
use nvme_host::ProcessMark;
use nvme_host::StoreOptions;
use nvme_host::cuda::{Gpu, KernelArgument, QueueTier, RowsOptions};
use nvme_host::lock::lock;
use nvme_host::store::{FileIo, GdsUse, GpuOptions};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub type Open = Arc<nvme_host::Store>;

/// Object that uses a store and keeps its device open.
pub trait AtClose: Send + Sync {
    /// Drops the store after waiting for transfers under way, `limit` at most.
    fn close(&self, limit: Duration);
}

impl<T: Send> AtClose for Mutex<Option<T>> {
    fn close(&self, _: Duration) {
        let value = lock(self).take();
        drop(value);
    }
}

/// A drive, a file, or several of them as one range of bytes.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Store")]
pub struct PyStore {
    process: ProcessMark,
    open: Mutex<Option<Open>>,
    gpu: Option<Arc<Gpu>>,
    tables: Mutex<Vec<Weak<LaunchedTransfers>>>,
    /// Objects that keep the device open, and are closed first.
    above: Mutex<Vec<Weak<dyn AtClose>>>,
    /// The end of the device's use, after a call that Ctrl-C has ended.
    closing: Mutex<Option<Arc<PoolJob>>>,
    /// Reads and writes of bytes on the GPU.
    flights: Arc<LaunchedTransfers>,
    /// Calls that use the device.
    calls: AtomicU64,
}

impl PyStore {
    /// Returns the store for a call that uses the device, which is counted.
    ///
    /// # Errors
    /// As [`look`](Self::look).
    pub fn get(&self) -> Result<Open, ExceptionParts> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.look()
    }

    /// Returns the store, while it is open and in the process that opened it.
    ///
    /// # Errors
    /// When it is not.
    fn look(&self) -> Result<Open, ExceptionParts> {
        process::check(self.process, "store")?;
        lock(&self.open).clone().ok_or_else(|| {
            ExceptionParts::usage("the store is closed", "open it again, or close it later")
        })
    }

    /// Registers `flights`, for whose operations `close` waits.
    pub fn add_table(&self, flights: &Arc<LaunchedTransfers>) {
        let mut tables = lock(&self.tables);
        tables.retain(|one| one.strong_count() > 0);
        tables.push(Arc::downgrade(flights));
    }

    /// Registers an object that `close` closes first.
    pub fn at_close(&self, one: &Arc<dyn AtClose>) {
        let mut above = lock(&self.above);
        above.retain(|one| one.strong_count() > 0);
        above.push(Arc::downgrade(one));
    }

    /// Waits for the launches of the store and its tables until `deadline`, and releases those that have ended. Tables
    /// are forgotten unless Ctrl-C ends the wait.
    fn wait_for_launches(&self, py: Python<'_>, deadline: &CommonDeadline) -> PyResult<()> {
        let tables = lock(&self.tables).clone();
        let of_tables = tables.iter().filter_map(Weak::upgrade);
        for table in of_tables.chain([Arc::clone(&self.flights)]) {
            for flight in table.under_way() {
                wait::until(py, deadline.left(), |slice| flight.wait(slice))?;
            }
            table.reap();
        }
        lock(&self.tables).clear();
        left::reap();
        Ok(())
    }

    /// # Errors
    /// For a store without a GPU.
    pub fn gpu(&self) -> Result<Arc<Gpu>, ExceptionParts> {
        self.gpu.clone().ok_or_else(|| {
            ExceptionParts::usage(
                "the store was opened without a GPU",
                "open it with gpu=0, or use memory of the host",
            )
        })
    }
}

fn file_io_of(name: &str) -> PyResult<FileIo> {
    match name {
        "auto" => Ok(FileIo::Auto),
        "uring" => Ok(FileIo::Uring),
        "pread" => Ok(FileIo::Pread),
        other => {
            let cause = format!("file_io is '{other}'");
            Err(ExceptionParts::usage(cause, "use 'auto', 'uring' or 'pread'").into())
        }
    }
}

fn gds_of(name: &str) -> PyResult<GdsUse> {
    match name {
        "off" => Ok(GdsUse::Off),
        "auto" => Ok(GdsUse::Auto),
        "require" => Ok(GdsUse::Require),
        other => {
            let cause = format!("gds is '{other}'");
            Err(ExceptionParts::usage(cause, "use 'off', 'auto' or 'require'").into())
        }
    }
}

fn tier_of(number: u32) -> PyResult<QueueTier> {
    match number {
        1 => Ok(QueueTier::Direct),
        2 => Ok(QueueTier::GpuMemory),
        3 => Ok(QueueTier::GpuRings),
        _ => {
            let cause = format!("gpu_tier is {number}");
            Err(ExceptionParts::usage(cause, "use 1, 2, 3, or None for the default").into())
        }
    }
}

#[pymethods]
impl PyStore {
    #[new]
    #[pyo3(signature = (device, *, gpu=None, queues=8, depth=64, timeout_ms=5000, allow_write=false, read_only=false, nsid=1, gpu_queues=16, gpu_blocks=32, gpu_tier=None, file_io="auto", gds="off"))]
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
        gpu_blocks: u32,
        gpu_tier: Option<u32>,
        file_io: &str,
        gds: &str,
    ) -> PyResult<Self> {
        let of_gpu = |index| GpuOptions {
            index,
            rows: RowsOptions {
                queues: gpu_queues,
                stations: gpu_blocks,
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
            file_io: file_io_of(file_io)?,
            gpu: gpu.map(of_gpu),
            tier: gpu_tier.map(tier_of).transpose()?,
            gds: gds_of(gds)?,
            ..StoreOptions::default()
        };
        left::reap();
        // A device that is opened after Ctrl-C is closed by the thread that opened it.
        let device = device.to_owned();
        let store = wait::of(py, move || Ok(nvme_host::Store::open(&device, &options)?))?;
        Ok(Self {
            process: ProcessMark::here(),
            gpu: store.gpu().cloned(),
            open: Mutex::new(Some(Arc::new(store))),
            tables: Mutex::default(),
            above: Mutex::default(),
            closing: Mutex::default(),
            flights: Arc::default(),
            calls: AtomicU64::new(0),
        })
    }

    /// Returns the number of calls that used the device, or tried to.
    #[getter]
    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    #[getter]
    fn is_open(&self) -> bool {
        self.look().is_ok()
    }

    /// Returns the number of the GPU that gathers; None without one.
    #[getter]
    fn gpu_index(&self) -> Option<u32> {
        self.gpu.as_ref().map(|gpu| gpu.index())
    }

    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.look()?.len())
    }

    /// Returns the first byte and the length of each member of a joined store; of all of another one.
    fn member_offsets(&self) -> PyResult<Vec<(u64, u64)>> {
        Ok(self.get()?.member_offsets())
    }

    #[getter]
    fn block_bytes(&self) -> PyResult<u32> {
        Ok(self.look()?.block_bytes())
    }

    /// Returns the data path, as JSON.
    fn path(&self, py: Python<'_>) -> PyResult<String> {
        let open = self.look()?;
        let path = py.detach(|| serde_json::to_string(&open.path()));
        Ok(path.unwrap_or_default())
    }

    /// Returns the counters, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let open = self.look()?;
        let stats = py.detach(|| serde_json::to_string(&open.stats()));
        Ok(stats.unwrap_or_default())
    }

    /// Returns for each member what would move its bytes better, as JSON.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        let open = self.look()?;
        let advice = py.detach(|| serde_json::to_string(&open.explain()));
        Ok(advice.unwrap_or_default())
    }

    fn read(&self, view: Py<PyView>, offset: u64) -> PyResult<PyOperation> {
        let store = self.get()?;
        let to = view.get().of_host("the destination", true)?;
        within(&store, offset, to.bytes)?;
        fill(view, move |data| store.read_at(offset, data))
    }

    fn write(&self, view: Py<PyView>, offset: u64, durable: bool) -> PyResult<PyOperation> {
        let store = self.get()?;
        let from = view.get().of_host("the source", false)?;
        within(&store, offset, from.bytes)?;
        PyOperation::start(vec![view], move || {
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
        let store = self.get()?;
        let used = Arc::clone(&store);
        let buffer = match is_write {
            true => KernelArgument::read("buf", address, bytes, 1),
            false => KernelArgument::written("buf", address, bytes, 1),
        };
        self.gpu()?.judge(stream, &buffer).or_raise()?;
        let word = if is_write { "write" } else { "read" };
        // SAFETY: the address is of the buffers, which are kept until the transfer has ended; that of a graph is its
        // user's to keep.
        self.flights.launch(
            py,
            store,
            (word, bytes, bytes),
            buffers,
            FailureReport::Table,
            || unsafe {
                match is_write {
                    true => used.write_from_gpu(offset, bytes, address, stream),
                    false => used.read_on_gpu(offset, bytes, address, stream),
                }
            },
        )
    }

    /// Reads as [`move_on_gpu`](Self::move_on_gpu) does, by cuFile; returns true if it did, and has ended then.
    fn read_by_cufile(
        &self,
        py: Python<'_>,
        offset: u64,
        bytes: u64,
        address: u64,
        stream: u64,
    ) -> PyResult<bool> {
        let store = self.get()?;
        let buffer = KernelArgument::written("buf", address, bytes, 1);
        self.gpu()?.judge(stream, &buffer).or_raise()?;
        // SAFETY: the caller keeps the buffer of the address, and the read has ended when this returns.
        py.detach(|| unsafe { store.read_by_cufile_after(stream, offset, bytes, address) })
            .or_raise()
    }

    fn flush(&self) -> PyResult<PyOperation> {
        let store = self.get()?;
        PyOperation::start(Vec::new(), move || Ok(store.flush()?))
    }

    /// Orders all later work of stream `then` after all present work of stream `first`: both are streams of the
    /// store's GPU.
    fn order(&self, py: Python<'_>, first: u64, then: u64) -> PyResult<()> {
        self.get()?;
        if first != then {
            let gpu = self.gpu()?;
            py.detach(|| gpu.order(first, then)).or_raise()?;
        }
        Ok(())
    }

    /// Waits for gathers on the GPU, `timeout` seconds at most, and closes. Transfers that are still under way
    /// keep their buffers, and the device, until they have ended. Ctrl-C ends the wait: the store is closed all the same,
    /// and another call continues the wait.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if self.process != ProcessMark::here() {
            return Ok(());
        }
        let deadline = CommonDeadline::after(wait::seconds(timeout)?);
        let open = lock(&self.open).take();
        let waited = self.wait_for_launches(py, &deadline);
        if let Some(open) = open {
            let above = std::mem::take(&mut *lock(&self.above));
            let limit = match waited {
                Ok(()) => deadline.left().unwrap_or(Duration::MAX),
                Err(_) => Duration::ZERO,
            };
            let limit = CommonDeadline::after(Some(limit));
            let job = PoolJob::start(move || {
                for one in above.iter().filter_map(Weak::upgrade) {
                    one.close(limit.left().unwrap_or(Duration::MAX));
                }
                drop(open);
                Ok(())
            })?;
            *lock(&self.closing) = Some(job);
        }
        waited?;
        let closing = lock(&self.closing).clone();
        if let Some(job) = closing {
            wait::until(py, None, |slice| job.wait(slice))?;
            lock(&self.closing).take();
            job.result()?;
        }
        Ok(())
    }
}

impl Drop for PyStore {
    fn drop(&mut self) {
        // In a child of a fork no thread holds the lock, which is taken with the GIL alone.
        let open = lock(&self.open).take();
        wait::drop_elsewhere(self.process, Some((open, self.gpu.take())));
    }
}

/// Starts to fill `view` by `read`.
pub fn fill(
    view: Py<PyView>,
    read: impl FnOnce(&mut [u8]) -> nvme_host::Result<()> + Send + 'static,
) -> PyResult<PyOperation> {
    let to = view.get().of_host("the destination", true)?;
    PyOperation::start(vec![view], move || {
        // SAFETY: the view is kept until this ended.
        read(unsafe { to.slice_mut() })?;
        Ok(())
    })
}

/// # Errors
/// When the range ends past the store.
fn within(store: &Open, offset: u64, bytes: usize) -> Result<(), ExceptionParts> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= store.len() => Ok(()),
        _ => Err(ExceptionParts::usage(
            format!(
                "{bytes} bytes at {offset} do not lie inside the store's {} bytes",
                store.len()
            ),
            "check offset and length, which are in bytes",
        )),
    }
}
