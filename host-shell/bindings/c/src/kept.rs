//! Work of calls that returned before it had ended, with what it uses.

use crate::process::PerProcess;
use nvme_host::lock::lock;
use nvme_kv::on_gpu::UnfinishedWork;
use std::sync::{Mutex, MutexGuard};

/// That of a parent is left alone by a child of `fork`.
static UNFINISHED: PerProcess<Mutex<Vec<UnfinishedWork>>> = PerProcess::new(Mutex::new(Vec::new()));

fn of_process() -> MutexGuard<'static, Vec<UnfinishedWork>> {
    lock(UNFINISHED.get(|| Mutex::new(Vec::new())))
}

/// Keeps `work` until it has ended.
pub fn keep(work: UnfinishedWork) {
    of_process().push(work);
}

/// Frees what has ended.
pub fn reap() {
    let ended: Vec<UnfinishedWork> = of_process().extract_if(.., |one| one()).collect();
    // Without the lock: what is dropped may unmap memory, which takes a while.
    drop(ended);
}
