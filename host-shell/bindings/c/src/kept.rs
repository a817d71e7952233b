//! Work of calls that returned before it had ended, with what it uses.

use nvme_kv::on_gpu::UnfinishedWork;
use std::sync::{Mutex, PoisonError};

static UNFINISHED: Mutex<Vec<UnfinishedWork>> = Mutex::new(Vec::new());

/// Keeps `work` until it has ended, and frees what has.
pub fn keep(work: UnfinishedWork) {
    let mut kept = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
    kept.retain(|one| !one());
    kept.push(work);
}
