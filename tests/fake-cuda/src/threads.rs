//! Threads that are joined, and never detached.
//!
//! glibc 2.36's `pthread_detach`, which the drop of a handle calls, still reads the thread's memory after the thread can
//! have ended and freed it. Kernels are short and many, and now and then one of them ended the program.

use crate::lock;
use std::sync::Mutex;
use std::thread::{JoinHandle, ScopedJoinHandle};

/// Threads that nobody waits for, until they are seen to have ended.
static LEFT: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Leaves a thread alone. Joins those that were left earlier and have ended.
pub fn leave(thread: JoinHandle<()>) {
    let mut left = lock(&LEFT);
    left.push(thread);
    for ended in left.extract_if(.., |thread| thread.is_finished()) {
        // One that panicked has printed why.
        let _ = ended.join();
    }
}

/// Waits for all threads.
///
/// # Panics
/// As the first of them that did.
pub fn join_all(threads: Vec<ScopedJoinHandle<'_, ()>>) {
    let ends: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    if let Some(panic) = ends.into_iter().find_map(Result::err) {
        std::panic::resume_unwind(panic);
    }
}
