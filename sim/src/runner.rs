//! Threads that drive a controller in real time by polling its doorbell memory. Idle threads first
//! spin, then yield, then sleep, so that an idle controller costs little processor time.

use crate::controller::Controller;
use crate::event::EventFd;
use crate::memory::HostMemory;
use std::io::Result as IoResult;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

/// Number of idle passes over the queues after which a thread yields, and after which it sleeps. A
/// pass takes well under a microsecond, so a driver that waits for each command still meets a
/// spinning thread.
const YIELD_AFTER: u32 = 200;
const SLEEP_AFTER: u32 = 10_000;
/// Idle passes from one look at the queues of other threads to the next: some microseconds. More
/// frequent looks would take work from threads that are about to see it, and move its cache lines.
const LOOK_AFTER: u32 = 16;
/// Longest sleep, and so the additional latency of the first command after a pause.
const MAX_SLEEP: Duration = Duration::from_micros(500);
/// Longest sleep of a thread that is woken by a signal when there is work.
const LONG_SLEEP: Duration = Duration::from_millis(100);

/// Threads that serve one controller. Dropping it stops them.
///
/// Queue `q` is served by thread `q % threads`. An idle thread also serves other threads' I/O queues that it
/// has seen waiting twice, since their thread may have lost its core for milliseconds. The first thread
/// keeps the clock.
pub struct Runner {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    wake_events: Vec<Arc<EventFd>>,
    sleep_long: Arc<AtomicBool>,
}

impl Runner {
    /// Starts `threads` (at least 1) threads.
    ///
    /// # Panics
    /// If the operating system is out of threads; [`try_start`](Self::try_start) returns that as
    /// an error.
    pub fn start(controller: Arc<Controller<HostMemory>>, threads: usize) -> Self {
        Self::try_start(controller, threads).expect("a thread for the simulated controller")
    }

    /// Starts `threads` (at least 1) threads, or returns the error of the operating system.
    pub fn try_start(controller: Arc<Controller<HostMemory>>, threads: usize) -> IoResult<Self> {
        let count = threads.max(1);
        let mut runner = Self {
            stop: Arc::default(),
            threads: Vec::with_capacity(count),
            wake_events: Vec::with_capacity(count),
            sleep_long: Arc::default(),
        };
        let started = Instant::now();
        for index in 0..count {
            let controller = controller.clone();
            let wake_event = Arc::new(EventFd::new()?);
            runner.wake_events.push(wake_event.clone());
            let wait = IdleWait {
                stop: runner.stop.clone(),
                sleep_long: runner.sleep_long.clone(),
                wake_event,
            };
            let name = std::format!("nvme-sim-{index}");
            // An error drops the runner, which stops the threads that were started before.
            runner
                .threads
                .push(std::thread::Builder::new().name(name).spawn(move || {
                    serve(&controller, &wait, index, count, started);
                })?);
        }
        Ok(runner)
    }

    /// Returns the eventfds that wake the threads, one each: thread i serves every queue q with q %
    /// threads = i.
    pub(crate) fn wake_events(&self) -> &[Arc<EventFd>] {
        &self.wake_events
    }

    /// Sets whether every later doorbell write and change of CC is followed by a signal, so that
    /// idle threads may sleep longer.
    pub(crate) fn sleep_long(&self, yes: bool) {
        self.sleep_long.store(yes, Ordering::Relaxed);
    }

    /// Wakes every thread.
    pub(crate) fn wake(&self) {
        self.wake_events
            .iter()
            .for_each(|wake_event| wake_event.signal());
    }

    /// Stops the threads and waits for them. The controller keeps its state.
    pub fn stop(self) {}
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
        for thread in self.threads.drain(..) {
            // A panic of a thread has printed its message; the caller of drop cannot handle it.
            let _ = thread.join();
        }
    }
}

/// State that a thread checks while it is idle.
struct IdleWait {
    stop: Arc<AtomicBool>,
    sleep_long: Arc<AtomicBool>,
    wake_event: Arc<EventFd>,
}

fn serve(
    controller: &Controller<HostMemory>,
    wait: &IdleWait,
    index: usize,
    threads: usize,
    started: Instant,
) {
    let now_ns = || started.elapsed().as_nanos() as u64;
    let mut idle = 0u32;
    let mut now = now_ns();
    let mut others = OtherQueues::new(controller, index, threads);
    while !wait.stop.load(Ordering::Relaxed) {
        let next = controller.next_event_ns();
        // Reading the clock costs as much as a spinning pass over idle queues, so such passes read
        // it once in 64. Passes that yield or sleep are long, and read it each time.
        if next.is_some() || idle.is_multiple_of(64) || idle >= YIELD_AFTER {
            now = now_ns();
        }
        if index == 0 {
            controller.tick(now);
        } else {
            // The first thread keeps the clock and may sleep longer than coalescing may delay an
            // interrupt. So every thread raises the interrupts that are due in its own passes.
            controller.raise_due(now);
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
        if handled == 0 && idle % LOOK_AFTER == LOOK_AFTER - 1 {
            handled = others.serve(controller, now_ns());
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
            let steps = u64::from(idle - SLEEP_AFTER);
            let pause = match wait.sleep_long.load(Ordering::Relaxed) {
                true => Duration::from_micros(steps * 50 + 20).min(LONG_SLEEP),
                false => Duration::from_micros(steps / 4 + 20).min(MAX_SLEEP),
            };
            if wait.wake_event.wait(pause.min(until.unwrap_or(pause))) {
                wait.wake_event.clear();
            }
        }
    }
}

/// The I/O queues of the other threads, as an idle thread sees them.
struct OtherQueues {
    index: usize,
    threads: usize,
    /// For each queue whether it had work at the last look.
    waited: Vec<bool>,
}

impl OtherQueues {
    fn new(controller: &Controller<HostMemory>, index: usize, threads: usize) -> Self {
        Self {
            index,
            threads,
            waited: std::vec![false; usize::from(controller.max_qid()) + 1],
        }
    }

    /// Serves the queues that had work at the last look and still have it. Returns the number of
    /// commands.
    fn serve(&mut self, controller: &Controller<HostMemory>, now: u64) -> u32 {
        let mut handled = 0;
        if self.threads == 1 {
            return handled;
        }
        for qid in 1..=controller.highest_qid() {
            let number = usize::from(qid);
            if number % self.threads == self.index {
                continue;
            }
            let has_work = controller.has_work(qid, now);
            if has_work && self.waited[number] {
                handled += controller.serve_if_free(qid, now);
            }
            self.waited[number] = has_work;
        }
        handled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::{Config, NamespaceConfig};
    use crate::medium::latency::LatencyProfile;
    use crate::medium::store::{BlockStore, MemoryStore, NullStore};
    use crate::testing::judge;
    use nvme_spec::admin::{self, QueueParams};
    use nvme_spec::register::{Cc, offset};
    use nvme_spec::{Cid, Iova, Lba, Nsid, Qid, Sqe, Status, nvm};
    use std::boxed::Box;
    use std::sync::atomic::AtomicU64;

    const ENTRIES: u64 = 8;

    /// A driver on one queue pair that waits for every command.
    struct SimpleDriver {
        controller: Arc<Controller<HostMemory>>,
        words: Arc<[AtomicU64]>,
    }

    impl SimpleDriver {
        fn new(profile: LatencyProfile) -> Self {
            Self::over(Box::new(NullStore::new(1 << 30)), profile)
        }

        fn over(store: Box<dyn BlockStore + Send + Sync>, profile: LatencyProfile) -> Self {
            let words: Arc<[AtomicU64]> = (0..1 << 14).map(|_| AtomicU64::new(0)).collect();
            let memory = HostMemory::new();
            memory.share(0, words.clone()).unwrap();
            let mut config = Config::empty();
            config.profile = profile;
            config.audit = true;
            config.namespaces.push(NamespaceConfig::new(512, store));
            Self {
                controller: Arc::new(Controller::new(config, memory).unwrap()),
                words,
            }
        }

        fn run(&self, qid: u16, count: u64, sqe: Sqe) -> u64 {
            let index = count % ENTRIES;
            let (sq, cq) = (u64::from(qid) * 0x2000, u64::from(qid) * 0x2000 + 0x1000);
            for (i, word) in sqe.to_words().into_iter().enumerate() {
                self.words[(sq / 8 + index * 8) as usize + i].store(word, Ordering::Relaxed);
            }
            let doorbells = self.controller.doorbells();
            let next = (index + 1) % ENTRIES;
            doorbells.sq_tail(qid).store(next as u32, Ordering::Release);
            let phase = 1 - count / ENTRIES % 2;
            let word = &self.words[(cq / 8 + index * 2) as usize + 1];
            let mut upper = word.load(Ordering::Acquire);
            while upper >> 48 & 1 != phase {
                std::thread::yield_now();
                upper = word.load(Ordering::Acquire);
            }
            doorbells.cq_head(qid).store(next as u32, Ordering::Release);
            upper >> 49
        }

        fn start(&self) {
            let size = (ENTRIES - 1) as u32;
            self.controller.write32(offset::AQA, size << 16 | size);
            self.controller.write64(offset::ASQ, 0);
            self.controller.write64(offset::ACQ, 0x1000);
            let mut cc = Cc(0);
            cc.set_iosqes(6);
            cc.set_iocqes(4);
            cc.set_en(true);
            self.controller.write32(offset::CC, cc.0);
        }

        fn create(&self, qid: u16, count: u64) {
            let at = |iova| QueueParams {
                qid: Qid(qid),
                entries: 8,
                iova: Iova(iova),
            };
            let base = u64::from(qid) * 0x2000;
            assert_eq!(
                self.run(0, count, admin::create_io_cq(at(base + 0x1000), None)),
                0
            );
            assert_eq!(
                self.run(0, count + 1, admin::create_io_sq(at(base), Qid(qid))),
                0
            );
        }
    }

    impl Drop for SimpleDriver {
        fn drop(&mut self) {
            judge(&self.controller.findings(), &[], &[]);
        }
    }

    #[test]
    fn an_idle_thread_serves_a_queue_whose_thread_does_not_run() {
        let simple = SimpleDriver::new(LatencyProfile::NONE);
        let runner = Runner::start(simple.controller.clone(), 1);
        simple.start();
        simple.create(1, 0);
        simple.create(2, 2);
        runner.stop();
        let controller = &simple.controller;
        let sqe = nvm::read(Nsid(1), Lba(0), 1).with_prps(0x1_0000, 0);
        for (i, word) in sqe.to_words().into_iter().enumerate() {
            simple.words[0x2000 / 8 + i].store(word, Ordering::Relaxed);
        }
        let ring = |tail| {
            let doorbells = controller.doorbells();
            doorbells.sq_tail(1).store(tail, Ordering::Release);
        };
        let (mut own, mut other) = (
            OtherQueues::new(controller, 1, 2),
            OtherQueues::new(controller, 0, 2),
        );
        assert_eq!(other.serve(controller, 0), 0);
        ring(1);
        assert_eq!(own.serve(controller, 0), 0, "its own queue");
        assert_eq!(other.serve(controller, 0), 0, "its thread may come");
        assert_eq!(own.serve(controller, 0), 0, "its own queue");
        assert_eq!(other.serve(controller, 0), 1);
        assert_eq!(other.serve(controller, 0), 0, "it is done");
        assert_eq!(controller.queue_stats(1).commands, 1);
        let mut alone = OtherQueues::new(controller, 0, 1);
        assert_eq!(alone.serve(controller, 0), 0);
    }

    #[test]
    fn threads_serve_their_queues_until_stopped() {
        let simple = SimpleDriver::new(LatencyProfile::NONE);
        let runner = Runner::start(simple.controller.clone(), 2);
        simple.start();
        simple.create(1, 0);
        simple.create(2, 2);
        std::thread::scope(|scope| {
            for qid in [1, 2] {
                let simple = &simple;
                scope.spawn(move || {
                    for count in 0..2000 {
                        let data = 0x1_0000 + u64::from(qid) * 0x1000;
                        let sqe = nvm::read(Nsid(1), Lba(count), 1).with_prps(data, 0);
                        assert_eq!(simple.run(qid, count, sqe), 0);
                    }
                });
            }
        });
        runner.stop();
        let stats = |qid| simple.controller.queue_stats(qid).commands;
        assert_eq!((stats(1), stats(2)), (2000, 2000));
        simple
            .controller
            .doorbells()
            .sq_tail(1)
            .store(1, Ordering::Release);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(stats(1), 2000, "no thread steps any more");
    }

    #[test]
    fn latency_is_real_time_under_a_runner() {
        let simple = SimpleDriver::new(LatencyProfile {
            read_ns: 3_000_000,
            ..LatencyProfile::NONE
        });
        let runner = Runner::start(simple.controller.clone(), 1);
        simple.start();
        simple.create(1, 0);
        let started = Instant::now();
        let sqe = nvm::read(Nsid(1), Lba(0), 1).with_prps(0x1_0000, 0);
        for count in 0..8 {
            assert_eq!(simple.run(1, count, sqe), 0);
        }
        // A thread that was put aside after its look at the clock makes a command look shorter.
        let elapsed = started.elapsed();
        assert!(elapsed >= Duration::from_millis(8 * 3 / 2), "{elapsed:?}");
        drop(runner);
    }

    #[test]
    fn disabling_while_threads_serve_stops_every_access() {
        let simple = SimpleDriver::new(LatencyProfile::NONE);
        let _runner = Runner::start(simple.controller.clone(), 2);
        for _ in 0..20 {
            for word in simple.words.iter() {
                word.store(0, Ordering::Relaxed);
            }
            simple.start();
            simple.create(1, 0);
            for i in 0..7 {
                let sqe = nvm::flush(Nsid(1)).with_cid(Cid(i as u16));
                for (w, word) in sqe.to_words().into_iter().enumerate() {
                    simple.words[0x400 + i * 8 + w].store(word, Ordering::Relaxed);
                }
            }
            simple
                .controller
                .doorbells()
                .sq_tail(1)
                .store(7, Ordering::Release);
            simple.controller.write32(offset::CC, 0);
            assert_eq!(simple.controller.read32(offset::CSTS) & 1, 0);
            let cq = || {
                simple.words[0x600..0x610]
                    .iter()
                    .map(|word| word.load(Ordering::Relaxed))
            };
            let before: Vec<u64> = cq().collect();
            std::thread::sleep(Duration::from_micros(200));
            assert_eq!(cq().collect::<Vec<_>>(), before);
        }
    }

    /// Format NVM and Sanitize run while two threads write and read: every command ends, with success or with the
    /// status of the operation in progress, and at the end all earlier data is erased.
    #[test]
    fn erasing_under_load_loses_no_command() {
        let store = MemoryStore::new(64 << 20).unwrap();
        let simple = SimpleDriver::over(Box::new(store), LatencyProfile::NONE);
        let runner = Runner::start(simple.controller.clone(), 2);
        simple.start();
        simple.create(1, 0);
        simple.create(2, 2);
        let stop = AtomicBool::new(false);
        // Of either block size.
        let last = (64 << 20) / 4096 - 1;
        let (word, data) = (&simple.words[0x1_8000 / 8], 0x1_8000);
        word.store(u64::MAX, Ordering::Relaxed);
        let write = nvm::write(Nsid(1), Lba(5), 1).with_prps(data, 0);
        assert_eq!(simple.run(1, 0, write), 0);
        std::thread::scope(|scope| {
            let load = [1u16, 2].map(|qid| {
                let (simple, stop) = (&simple, &stop);
                // The first command of queue 1 was the write.
                let first = u64::from(qid == 1);
                scope.spawn(move || {
                    let mut seen = [0u64; 3];
                    for count in first.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let data = 0x1_0000 + u64::from(qid) * 0x1000;
                        let sqe = match count % 2 {
                            0 => nvm::write(Nsid(1), Lba(last), 1),
                            _ => nvm::read(Nsid(1), Lba(count % 1000), 1),
                        };
                        let status = Status(simple.run(qid, count, sqe.with_prps(data, 0)) as u16);
                        let known = [
                            Status::SUCCESS,
                            Status::FORMAT_IN_PROGRESS,
                            Status::SANITIZE_IN_PROGRESS,
                        ];
                        let which = known.iter().position(|one| one.is(status));
                        seen[which.unwrap_or_else(|| panic!("{status}"))] += 1;
                    }
                    seen
                })
            });
            let mut count = 4;
            let mut admin = |sqe: Sqe| {
                let status = simple.run(0, count, sqe);
                count += 1;
                Status(status as u16)
            };
            for round in 0..6u8 {
                let format = admin::format_nvm(Nsid::ALL, round % 2, 1 + round % 2);
                assert!(admin(format).is_success());
                let sanitize = admin::sanitize(admin::SanitizeFields::new(match round % 3 {
                    0 => admin::SanitizeAction::BlockErase,
                    1 => admin::SanitizeAction::CryptoErase,
                    _ => admin::SanitizeAction::Overwrite,
                }));
                assert!(admin(sanitize).is_success());
                // The next format succeeds when the operation is over.
                let started = Instant::now();
                loop {
                    let status = admin(admin::format_nvm(Nsid(1), 0, 0));
                    if status.is_success() {
                        break;
                    }
                    assert!(status.is(Status::SANITIZE_IN_PROGRESS), "{status}");
                    assert!(
                        started.elapsed() < Duration::from_secs(60),
                        "it does not end"
                    );
                    std::thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
            let seen = load.map(|thread| thread.join().expect("the load"));
            assert!(seen.iter().all(|seen| seen[0] > 0), "{seen:?}");
        });
        let controller = &simple.controller;
        let mut left = [7; 8];
        controller.device.namespaces[0]
            .store
            .read_at(5 * 512, &mut left)
            .unwrap();
        assert_eq!(left, [0; 8], "what was written before is gone");
        runner.stop();
    }
}
