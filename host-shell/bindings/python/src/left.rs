//! Keeps orphaned transfers and their buffers alive until they complete.

use nvme_host::lock::lock;
use nvme_kv::on_gpu::UnfinishedWork;
use pyo3::prelude::*;
use std::sync::Mutex;

/// A transfer with the buffers that it uses.
pub trait BufferedTransfer: Send {
    fn is_done(&self) -> bool;
}

static LEFT: Mutex<Vec<Box<dyn BufferedTransfer>>> = Mutex::new(Vec::new());

/// Keeps `one` until it has ended.
pub fn keep(one: impl BufferedTransfer + 'static) {
    lock(&LEFT).push(Box::new(one));
}

/// As [`keep`], for work that says itself whether it has ended.
pub fn keep_work(work: UnfinishedWork) {
    keep(work);
}

impl BufferedTransfer for UnfinishedWork {
    fn is_done(&self) -> bool {
        self()
    }
}

/// Frees the transfers that have ended. With the GIL held.
pub fn reap() {
    let over: Vec<_> = {
        let mut left = lock(&LEFT);
        left.extract_if(.., |one| one.is_done()).collect()
    };
    // Outside the lock: buffers may run code of Python when they go.
    drop(over);
}

/// Returns the number of buffers that are kept alive for orphaned transfers.
#[pyfunction]
pub fn kept_buffers() -> usize {
    reap();
    lock(&LEFT).len()
}
