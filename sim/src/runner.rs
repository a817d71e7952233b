//! Threads that drive a controller in real time by polling its doorbell memory.

use crate::controller::Controller;
use crate::memory::HostMemory;
use std::io::Result as IoResult;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

/// Passes over the queues without work after which a thread lets others run, and after which it
/// sleeps. A pass takes well under a microsecond, so a driver that waits for each command still
/// meets a spinning thread.
const YIELD_AFTER: u32 = 2_000;
const SLEEP_AFTER: u32 = 10_000;
/// The longest sleep: the latency of the first command after a pause.
const MAX_SLEEP: Duration = Duration::from_micros(500);

/// Threads that serve one controller. Dropping it stops them.
///
/// Queue `q` is served by thread `q % threads`, so that a queue pair has one server at a time; the
/// first thread also keeps the clock.
pub struct Runner {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Runner {
    /// Starts `threads` (at least 1) threads.
    ///
    /// # Panics
    /// When the operating system has no more threads; [`try_start`](Self::try_start) says so instead.
    pub fn start(controller: Arc<Controller<HostMemory>>, threads: usize) -> Self {
        Self::try_start(controller, threads).expect("a thread for the simulated controller")
    }

    /// Starts `threads` (at least 1) threads, or says why there are none.
    pub fn try_start(controller: Arc<Controller<HostMemory>>, threads: usize) -> IoResult<Self> {
        let count = threads.max(1);
        let mut runner = Self {
            stop: Arc::default(),
            threads: Vec::with_capacity(count),
        };
        let started = Instant::now();
        for index in 0..count {
            let (controller, stop) = (controller.clone(), runner.stop.clone());
            let name = std::format!("nvme-sim-{index}");
            // A failure drops the runner, which stops the threads that are there already.
            runner
                .threads
                .push(std::thread::Builder::new().name(name).spawn(move || {
                    serve(&controller, &stop, index, count, started);
                })?);
        }
        Ok(runner)
    }

    /// Stops the threads and waits for them. The controller keeps its state.
    pub fn stop(self) {}
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed why; there is nothing to add here.
            let _ = thread.join();
        }
    }
}

fn serve(
    controller: &Controller<HostMemory>,
    stop: &AtomicBool,
    index: usize,
    threads: usize,
    started: Instant,
) {
    let now_ns = || started.elapsed().as_nanos() as u64;
    let mut idle = 0u32;
    let mut now = now_ns();
    while !stop.load(Ordering::Relaxed) {
        let next = controller.next_event_ns();
        if next.is_some() || idle % 64 == 0 {
            now = now_ns();
        }
        if index == 0 {
            controller.tick(now);
        }
        let mut handled = 0;
        let all = idle % 64 == 63;
        let last = if all {
            controller.max_qid()
        } else {
            controller.highest_qid()
        };
        for qid in (index..=usize::from(last)).step_by(threads) {
            handled += controller.serve(qid as u16, now);
        }
        if handled != 0 {
            idle = 0;
            continue;
        }
        idle = idle.saturating_add(1);
        if idle < YIELD_AFTER {
            core::hint::spin_loop();
        } else if idle < SLEEP_AFTER {
            std::thread::yield_now();
        } else {
            let until = next.map(|next| Duration::from_nanos(next.saturating_sub(now_ns())));
            let pause = Duration::from_micros(u64::from(idle - SLEEP_AFTER) / 4 + 20);
            std::thread::sleep(pause.min(MAX_SLEEP).min(until.unwrap_or(MAX_SLEEP)));
        }
    }
}
