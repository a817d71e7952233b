//! The threads of a null controller. They check the protocol and move no data, so that the cost of the protocol alone
//! is measured.
use super::queue::{NullQueue, ProtocolFault};
use super::{DriveModel, NullController};
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Passes without work after which a thread lets others run.
pub(super) const IDLE_SPINS: u32 = 10_000;

/// Counts of a run.
#[derive(Clone, Debug, Default)]
pub struct NullCounts {
    /// Commands completed.
    pub commands: u64,
    /// Looks at a queue that found entries.
    pub batches: u64,
    /// Seconds that the threads spent in passes with work, added up.
    pub busy_seconds: f64,
    /// Seconds that the threads ran, added up.
    pub seconds: f64,
    /// Fault that stopped the controller, if one did.
    pub fault: Option<ProtocolFault>,
}

impl NullCounts {
    /// Returns the share of the time since its first command that it was busy, 0 to 1.
    pub fn busy(&self) -> f64 {
        self.busy_seconds / self.seconds.max(1e-9)
    }
}

struct NullState {
    stop: AtomicBool,
    fault: Mutex<Option<ProtocolFault>>,
    /// Number of commands done so far, for threads that poll it.
    commands: AtomicU64,
}

/// A null controller at work. Stops on drop.
pub struct RunningNull {
    shared: Arc<NullState>,
    threads: Vec<JoinHandle<NullCounts>>,
    _pages: Arc<DmaPages>,
}

impl NullController {
    /// Starts `threads` threads (at most one for each queue) on empty rings.
    ///
    /// # Errors
    /// [`Error::System`] when threads cannot be started.
    pub fn start(&self, threads: usize, model: Option<DriveModel>) -> Result<RunningNull> {
        self.clear();
        RunningNull::start(self, threads, model, false)
    }

    /// Starts as [`start`](Self::start) does, but never waits for room in a completion ring: for a driver that ignores
    /// completions.
    pub fn start_heedless(&self, threads: usize) -> Result<RunningNull> {
        self.clear();
        RunningNull::start(self, threads, None, true)
    }
}

impl RunningNull {
    fn start(
        null: &NullController,
        threads: usize,
        model: Option<DriveModel>,
        heedless: bool,
    ) -> Result<Self> {
        let shared = Arc::new(NullState {
            stop: AtomicBool::new(false),
            fault: Mutex::default(),
            commands: AtomicU64::new(0),
        });
        let mut running = Self {
            shared: Arc::clone(&shared),
            threads: Vec::new(),
            _pages: Arc::clone(null.pages()),
        };
        let count = threads.clamp(1, null.shape().queues as usize);
        for index in 0..count {
            let queues: Vec<NullQueue> = (index as u32..null.shape().queues)
                .step_by(count)
                .map(|queue| NullQueue::new(null, queue, model, heedless))
                .collect();
            let (shared, pages) = (Arc::clone(&shared), Arc::clone(null.pages()));
            let thread = std::thread::Builder::new()
                .name(format!("null-{index}"))
                .spawn(move || {
                    let account = serve(queues, &shared);
                    drop(pages);
                    account
                })
                .map_err(|source| Error::System {
                    call: "starting a null controller thread",
                    source,
                })?;
            running.threads.push(thread);
        }
        Ok(running)
    }

    /// Returns the number of threads at work.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Returns the fault that stopped it, if one did.
    pub fn fault(&self) -> Option<ProtocolFault> {
        lock(&self.shared.fault).clone()
    }

    /// Returns the number of commands completed so far; it lags behind by at most one pass.
    pub fn commands(&self) -> u64 {
        self.shared.commands.load(Ordering::Relaxed)
    }

    /// Stops the threads and adds up their counts.
    pub fn stop(mut self) -> NullCounts {
        self.halt()
    }

    fn halt(&mut self) -> NullCounts {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut sum = NullCounts::default();
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed why.
            let Ok(part) = thread.join() else { continue };
            sum.commands += part.commands;
            sum.batches += part.batches;
            sum.busy_seconds += part.busy_seconds;
            sum.seconds += part.seconds;
        }
        sum.fault = lock(&self.shared.fault).take();
        sum
    }
}

impl Drop for RunningNull {
    fn drop(&mut self) {
        self.halt();
    }
}

fn serve(mut queues: Vec<NullQueue>, shared: &NullState) -> NullCounts {
    let mut account = NullCounts::default();
    let begin = Instant::now();
    let (mut first, mut mark, mut idle) = (None, begin, 0u32);
    while !shared.stop.load(Ordering::Relaxed) {
        let mut handled = 0;
        for queue in &mut queues {
            let result = match queue.is_timed() {
                false => queue.serve(),
                true => queue.serve_timed(begin.elapsed().as_nanos() as u64 * 1000),
            };
            match result {
                Ok(0) => {}
                Ok(count) => {
                    handled += u64::from(count);
                    account.batches += 1;
                }
                Err(fault) => {
                    lock(&shared.fault).get_or_insert(fault);
                    shared.stop.store(true, Ordering::Relaxed);
                    break;
                }
            }
        }
        let now = Instant::now();
        if handled > 0 {
            first.get_or_insert(mark);
            account.busy_seconds += (now - mark).as_secs_f64();
            account.commands += handled;
            shared.commands.fetch_add(handled, Ordering::Relaxed);
            idle = 0;
        } else {
            idle = idle.saturating_add(1);
            match idle {
                0..IDLE_SPINS => std::hint::spin_loop(),
                _ => std::thread::yield_now(),
            }
        }
        mark = now;
    }
    account.seconds = first.map_or(0.0, |first| (mark - first).as_secs_f64());
    account
}

#[cfg(test)]
// UNSAFETY: rings of a null controller, written as a driver does.
#[allow(unsafe_code)]
mod tests {
    use super::super::{NullLoad, NullShape, feed};
    use super::*;
    use std::time::Duration;

    fn null(queues: u32, entries: u32, dstrd: u8) -> NullController {
        NullController::new(NullShape {
            queues,
            entries,
            dstrd,
            data_bytes: 4096,
        })
        .unwrap()
    }

    fn wait_for(running: &RunningNull, done: impl Fn(&RunningNull) -> bool) {
        let begin = Instant::now();
        while !done(running) {
            assert!(begin.elapsed() < Duration::from_secs(20), "no answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_command_is_answered_once_and_in_order() {
        let shapes = [
            (1, 2, 0, 1),
            (3, 16, 0, 15),
            (5, 64, 4, 40),
            (1, 1024, 4, 512),
        ];
        let ways = shapes.into_iter().flat_map(|it| [(it, true), (it, false)]);
        for ((queues, entries, dstrd, depth), thorough) in ways {
            let null = null(queues, entries, dstrd);
            let running = null.start(2, None).unwrap();
            let fed = feed(
                &null,
                NullLoad {
                    threads: 2,
                    depth,
                    commands: 2_000,
                    thorough,
                },
            )
            .unwrap();
            let account = running.stop();
            assert_eq!(account.fault, None);
            assert_eq!(fed.commands, 2_000 * u64::from(queues));
            assert_eq!(account.commands, fed.commands);
            assert!(account.busy() > 0.0);
        }
    }

    #[test]
    fn what_a_driver_does_wrong_stops_it_with_a_reason() {
        let bad = |prepare: &dyn Fn(&NullController, &RunningNull)| {
            let null = null(2, 8, 0);
            let running = null.start(1, None).unwrap();
            prepare(&null, &running);
            wait_for(&running, |running| running.fault().is_some());
            running.stop().fault.unwrap()
        };
        let ring = |null: &NullController, index: u32, value: u32| {
            null.word(null.words(index).sq_doorbell)
                .store(value, Ordering::Release);
        };
        let fault = bad(&|null, _| {
            // SAFETY: the pointer is the first entry of the second ring.
            unsafe { (null.words(1).sq as usize as *mut u64).write_volatile(0x7F) };
            ring(null, 1, 1);
        });
        assert_eq!(fault.qid, 2);
        assert!(fault.what.contains("opcode 0x7f"), "{}", fault.what);
        let fault = bad(&|null, _| ring(null, 0, 8));
        assert!(fault.what.contains("tail doorbell of 8"), "{}", fault.what);
        // Seven completions fit without a read of the head doorbell; the eighth needs one. A head of 8 is
        // beyond the seven that were posted, so the controller must stop with that as its fault.
        let fault = bad(&|null, running| {
            ring(null, 0, 7);
            wait_for(running, |running| running.commands() == 7);
            null.word(null.words(0).cq_doorbell)
                .store(8, Ordering::Release);
            ring(null, 0, 0);
        });
        assert!(fault.what.contains("head doorbell"), "{}", fault.what);
    }

    #[test]
    fn a_model_keeps_its_latency_and_its_rate() {
        let null = null(1, 256, 0);
        let model = DriveModel {
            latency_ns: 2_000_000,
            rate: 1e5,
            bytes: 512,
        };
        let running = null.start(1, Some(model)).unwrap();
        let begin = Instant::now();
        let fed = feed(
            &null,
            NullLoad {
                threads: 1,
                depth: 200,
                commands: 1_000,
                thorough: true,
            },
        )
        .unwrap();
        // 1,000 commands at 100,000 per second take 10 ms at least, and 2 ms for the first.
        assert!(begin.elapsed() >= Duration::from_millis(11));
        assert_eq!(fed.commands, 1_000);
        assert_eq!(running.stop().fault, None);
        // SAFETY: the data memory, which is not written any more.
        let byte = unsafe { (null.data() as usize as *const u8).read() };
        assert_eq!(byte, 0xA5, "the data was moved");
    }
}
