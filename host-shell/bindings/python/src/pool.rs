//! Threads that run what may wait for a device, so that Ctrl-C ends the caller's wait and not the transfer.
//!
//! They never attach to Python: a thread that does so while the interpreter ends would not come back.
// UNSAFETY: the pool of a process is a leaked pointer, so that a child of `fork` finds no lock that is held.
#![allow(unsafe_code)]

use crate::error::ExceptionParts;
use crate::fork;
use nvme_host::ProcessMark;
use nvme_host::lock::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limit of the threads of the pool, and so of the calls that wait for a device together; further calls wait in
/// a queue.
const MOST: usize = 64;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct JobLine {
    waiting: VecDeque<Work>,
    idle: usize,
    threads: usize,
}

struct ThreadPool {
    process: ProcessMark,
    line: Mutex<JobLine>,
    come: Condvar,
}

/// The pool of the process that made it. A child of `fork` has none of its threads, and makes its own.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());
/// Work of this process that was submitted to the pool and has not ended.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

fn pool() -> &'static ThreadPool {
    let known = POOL.load(Ordering::Acquire);
    // SAFETY: pools are leaked, so that a pointer to one stays valid.
    if let Some(pool) = unsafe { known.as_ref() }
        && pool.process == ProcessMark::here()
    {
        return pool;
    }
    let new = Box::into_raw(Box::new(ThreadPool {
        process: ProcessMark::here(),
        line: Mutex::default(),
        come: Condvar::new(),
    }));
    // Release on success: a thread that loads the pointer with acquire sees the whole pool. A child of `fork`
    // replaces the parent's pool, which it leaks: its threads do not exist in the child.
    match POOL.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            UNDER_WAY.store(0, Ordering::Relaxed);
            // SAFETY: just leaked.
            unsafe { &*new }
        }
        // Another thread was first.
        Err(_) => pool(),
    }
}

impl ThreadPool {
    fn serve(&'static self) {
        let mut line = lock(&self.line);
        loop {
            match line.waiting.pop_front() {
                Some(work) => {
                    drop(line);
                    work();
                    line = lock(&self.line);
                }
                None => {
                    line.idle += 1;
                    line = self.come.wait(line).unwrap_or_else(PoisonError::into_inner);
                    line.idle -= 1;
                }
            }
        }
    }

    fn give(&'static self, work: Work) -> std::io::Result<()> {
        let mut line = lock(&self.line);
        if line.idle <= line.waiting.len() && line.threads < MOST {
            let name = "nvme-gpu-py".to_owned();
            let thread = std::thread::Builder::new().name(name);
            let spawned = thread.spawn(|| self.serve());
            match spawned {
                Ok(_) => line.threads += 1,
                Err(error) if line.threads == 0 => return Err(error),
                Err(_) => {}
            }
        }
        line.waiting.push_back(work);
        self.come.notify_one();
        Ok(())
    }
}

/// A job of the pool: whether it has ended, and its result.
pub struct PoolJob {
    process: ProcessMark,
    state: Mutex<Option<Result<(), ExceptionParts>>>,
    is_done: AtomicBool,
    end: Condvar,
}

impl PoolJob {
    /// Runs `work` on a thread of the pool.
    ///
    /// # Errors
    /// Without a thread.
    pub fn start(
        work: impl FnOnce() -> Result<(), ExceptionParts> + Send + 'static,
    ) -> Result<Arc<Self>, ExceptionParts> {
        let job = Arc::new(Self {
            process: ProcessMark::here(),
            state: Mutex::new(None),
            is_done: AtomicBool::new(false),
            end: Condvar::new(),
        });
        let pool = pool();
        let of_work = Arc::clone(&job);
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
        let given = pool.give(Box::new(move || {
            let guard = AtEnd(of_work);
            let result = work();
            *lock(&guard.0.state) = Some(result);
        }));
        if let Err(source) = given {
            UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
            let call = "starting a thread";
            return Err(ExceptionParts::of(&nvme_host::Error::System {
                call,
                source,
            }));
        }
        Ok(job)
    }

    /// # Errors
    /// In a child of a fork: the thread that would end it is not there.
    pub fn check_process(&self) -> Result<(), ExceptionParts> {
        fork::check(self.process, "transfer")
    }

    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// Waits `limit` at most; returns true if it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while !self.is_done() {
            let Some(left) = limit.checked_sub(begin.elapsed()) else {
                return false;
            };
            let waited = self.end.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Returns the outcome; `Ok` while it has not ended.
    ///
    /// # Errors
    /// The error that ended it; as [`check_process`](Self::check_process).
    pub fn result(&self) -> Result<(), ExceptionParts> {
        self.check_process()?;
        lock(&self.state).clone().unwrap_or(Ok(()))
    }
}

/// Says that a job has ended, also when it panicked.
struct AtEnd(Arc<PoolJob>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        if state.is_none() {
            *state = Some(Err(ExceptionParts::of(&nvme_host::Error::internal(
                "a thread of the library panicked",
            ))));
        }
        // Release: pairs with the acquire in `is_done`. The result is stored before, so a thread that sees the
        // flag without the lock, such as a poll from Python, can take the outcome at once.
        self.0.is_done.store(true, Ordering::Release);
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
        self.0.end.notify_all();
    }
}

/// Returns the number of jobs of this process that have not ended. Jobs are counted before they are
/// submitted, so that 0 means that no thread of the pool will run anything more.
pub fn under_way() -> usize {
    pool();
    UNDER_WAY.load(Ordering::Acquire)
}
