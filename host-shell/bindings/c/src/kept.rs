//! Work of calls that returned before it had ended, with what it uses.

use crate::process::PerProcess;
use nvme_kv::on_gpu::UnfinishedWork;
use std::sync::{Mutex, PoisonError};

/// That of a parent is left alone by a child of `fork`.
static UNFINISHED: PerProcess<Mutex<Vec<UnfinishedWork>>> = PerProcess::new(Mutex::new(Vec::new()));

fn of_process() -> std::sync::MutexGuard<'static, Vec<UnfinishedWork>> {
    let kept = UNFINISHED.get(|| Mutex::new(Vec::new()));
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps `work` until it has ended.
pub fn keep(work: UnfinishedWork) {
    of_process().push(work);
}

/// Frees what has ended.
pub fn reap() {
    of_process().retain(|one| !one());
}
