//! The threads that compute, of one process: a child of `fork` has none of its parent's, and makes its own.
// UNSAFETY: the threads of a process are a leaked pointer, as those of `pool` are.
#![allow(unsafe_code)]

use crate::error::ExceptionParts;
use nvme_host::ProcessMark;
use rayon::prelude::*;
use std::sync::atomic::{AtomicPtr, Ordering};

struct ComputeThreads {
    process: ProcessMark,
    pool: rayon::ThreadPool,
}

static THREADS: AtomicPtr<ComputeThreads> = AtomicPtr::new(std::ptr::null_mut());

/// Runs `work`, whose parallel parts run on the thread pool of this process: one thread for each core, or
/// `RAYON_NUM_THREADS`. Returns its result.
///
/// # Errors
/// Without threads.
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, ExceptionParts> {
    Ok(threads()?.pool.install(work))
}

/// Calls `work` for each whole chunk of `size` elements of `all`, with its number, on the threads
/// of the caller's [`run`].
pub fn each_chunk<T: Send>(all: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let chunks = all.par_chunks_mut(size.max(1)).enumerate();
    chunks.for_each(|(number, chunk)| work(number, chunk));
}

fn threads() -> Result<&'static ComputeThreads, ExceptionParts> {
    let known = THREADS.load(Ordering::Acquire);
    // SAFETY: leaked, so that a pointer to one stays valid.
    if let Some(threads) = unsafe { known.as_ref() }
        && threads.process == ProcessMark::here()
    {
        return Ok(threads);
    }
    let named =
        rayon::ThreadPoolBuilder::new().thread_name(|index| format!("nvme-compute-{index}"));
    let pool = named.build().map_err(|error| {
        let source = std::io::Error::other(error.to_string());
        let call = "starting threads";
        ExceptionParts::of(&nvme_host::Error::System { call, source })
    })?;
    let new = Box::into_raw(Box::new(ComputeThreads {
        process: ProcessMark::here(),
        pool,
    }));
    // Release on success: a thread that loads the pointer with acquire sees the whole pool. A child of `fork`
    // replaces the parent's pool, whose threads do not exist in the child.
    match THREADS.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just leaked.
        Ok(_) => Ok(unsafe { &*new }),
        Err(_) => {
            // Another thread was first. SAFETY: made above, and seen by no other.
            drop(unsafe { Box::from_raw(new) });
            threads()
        }
    }
}
