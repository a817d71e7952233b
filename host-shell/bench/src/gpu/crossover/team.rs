//! Threads that work on batches together: they spin while batches may come, and sleep otherwise.

use super::by_cpu::{BatchPlan, BatchState, DeadlineWait, RowWorker};
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The other threads beside the one that launches.
pub(super) struct HelperThreads {
    baton: Arc<TurnBaton>,
    threads: Vec<JoinHandle<()>>,
}

struct TurnBaton {
    shared: Arc<BatchState>,
    /// Number of threads that are awake; `None` at the end.
    awake: Mutex<Option<u32>>,
    changed: Condvar,
    plan: Mutex<BatchPlan>,
    /// Batches so far.
    turn: AtomicU64,
    /// Threads that are done with the batch.
    done: AtomicU32,
    /// Threads that spin.
    ready: AtomicU32,
    /// Number of threads that should be awake, for the threads that spin.
    wanted: AtomicU32,
}

impl HelperThreads {
    /// # Errors
    /// Without threads.
    pub fn start(shared: &Arc<BatchState>, workers: Vec<RowWorker>) -> Result<Self> {
        let baton = Arc::new(TurnBaton {
            shared: Arc::clone(shared),
            awake: Mutex::new(Some(0)),
            changed: Condvar::new(),
            plan: Mutex::new(BatchPlan::default()),
            turn: AtomicU64::new(0),
            done: AtomicU32::new(0),
            ready: AtomicU32::new(0),
            wanted: AtomicU32::new(0),
        });
        let mut team = Self {
            baton: Arc::clone(&baton),
            threads: Vec::new(),
        };
        for worker in workers {
            let baton = Arc::clone(&baton);
            let thread = std::thread::Builder::new()
                .name(format!("reader-{}", worker.number))
                .spawn(move || baton.serve(worker));
            let call = "starting a thread that reads rows";
            team.threads
                .push(thread.map_err(|source| Error::System { call, source })?);
        }
        Ok(team)
    }

    /// Returns the number of threads, including the one that launches.
    pub fn threads(&self) -> u32 {
        self.threads.len() as u32 + 1
    }

    /// Wakes the threads that work on batches of `threads` threads, and lets the others sleep. Returns when all of them
    /// have done so.
    ///
    /// # Errors
    /// Past the deadline.
    pub fn wake(&self, threads: u32) -> Result<()> {
        let wanted = threads.saturating_sub(1);
        *lock(&self.baton.awake) = Some(wanted);
        self.baton.wanted.store(wanted, Ordering::Release);
        self.baton.changed.notify_all();
        let mut wait = DeadlineWait::begin();
        // Acquire: pairs with the workers' increments. Once all are ready they spin on `turn`, so that waking
        // them is not part of the time that is measured.
        while self.baton.ready.load(Ordering::Acquire) != wanted {
            wait.look()?;
        }
        Ok(())
    }

    /// Begins a batch; the threads that are awake work on it.
    pub fn begin(&self, plan: BatchPlan) {
        self.baton.shared.begin(&plan);
        *lock(&self.baton.plan) = plan;
        self.baton.done.store(0, Ordering::Relaxed);
        // Release: pairs with the acquire of `turn` in `serve`. A worker that sees the new turn finds the plan
        // of this batch, and the count of finished workers reset to zero.
        self.baton.turn.fetch_add(1, Ordering::Release);
    }

    /// True if all other threads have finished the batch of `plan`. The acquire pairs with the release of
    /// each worker's count, so that the caller sees every row that they read into the slots.
    pub fn is_done(&self, plan: &BatchPlan) -> bool {
        self.baton.done.load(Ordering::Acquire) + 1 >= plan.threads
    }
}

impl Drop for HelperThreads {
    fn drop(&mut self) {
        *lock(&self.baton.awake) = None;
        self.baton.wanted.store(0, Ordering::Release);
        self.baton.changed.notify_all();
        for thread in self.threads.drain(..) {
            // The thread panics only if a lock is poisoned, and has ended then.
            let _ = thread.join();
        }
    }
}

impl TurnBaton {
    fn serve(&self, mut worker: RowWorker) {
        while self.is_wanted(worker.number) {
            let mut turn = self.turn.load(Ordering::Acquire);
            self.ready.fetch_add(1, Ordering::AcqRel);
            let mut looks = 0u32;
            while self.wanted.load(Ordering::Acquire) >= worker.number {
                let now = self.turn.load(Ordering::Acquire);
                if now == turn {
                    looks = looks.wrapping_add(1);
                    match looks.is_multiple_of(4096) {
                        true => std::thread::yield_now(),
                        false => std::hint::spin_loop(),
                    }
                    continue;
                }
                turn = now;
                let plan = *lock(&self.plan);
                if worker.number >= plan.threads {
                    continue;
                }
                let worked = worker.work(&self.shared, &plan, &mut || Ok(()));
                if let Err(error) = worked {
                    self.shared.fail(error);
                    worker.settle();
                }
                // Release: pairs with the acquire in `is_done`. The launching thread ends the batch when it has
                // seen all workers, and reads the index and the counters that they changed.
                self.done.fetch_add(1, Ordering::Release);
            }
            self.ready.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Sleeps until the worker is to be awake; `false` at the end.
    fn is_wanted(&self, number: u32) -> bool {
        let mut awake = lock(&self.awake);
        loop {
            match *awake {
                None => return false,
                Some(wanted) if wanted >= number => return true,
                Some(_) => {
                    let woken = self.changed.wait(awake);
                    awake = woken.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}
