//! Serves one submission queue: takes its doorbells, fetches, executes, posts.
//!
//! A batch holds the queue's lock and that of its completion queue; no command takes another one
//! unless it fails or writes through the cache.

use crate::admin::{self, Reply};
use crate::device::{Control, Device};
use crate::fault::Fault;
use crate::memory::{Dma, DmaFault, Span};
use crate::nvm::{self, Io};
use crate::queue::{CompletionQueue, Pending, Publish, QueueStats, SubmissionQueue};
use core::cmp::Reverse;
use core::sync::atomic::{AtomicU64, Ordering};
use nvme_core::spec::{Cqe, Sqe, Status};

/// Commands fetched in one batch at most: bounds how long locks are held.
pub(crate) const BATCH: u32 = 512;
/// Bytes copied in one batch at most, besides those of its last command.
const MAX_STAGED: usize = 4 << 20;

/// What serving a queue once did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    /// Commands fetched or completed.
    pub commands: u32,
    /// Completions posted to a queue with interrupts, and its vector.
    pub posted: u32,
    pub vector: u16,
}

impl Device {
    /// Whether `serve` would find something to do.
    #[inline]
    pub fn has_work(&self, qid: u16, now_ns: u64) -> bool {
        let slot = &self.slots[usize::from(qid)];
        self.doorbells.sq_tail(qid).load(Ordering::Relaxed) != slot.settled.load(Ordering::Relaxed)
            || slot.next_due_ns.load(Ordering::Relaxed) <= now_ns
            || (qid == 0 && self.attention.load(Ordering::Relaxed))
    }

    /// Serves `qid` once. The admin queue comes with the controller's state, an I/O queue without.
    pub fn serve(
        &self,
        qid: u16,
        dma: &Dma<'_>,
        now_ns: u64,
        control: Option<&mut Control>,
    ) -> Served {
        let slot = &self.slots[usize::from(qid)];
        let mut sq_held = slot.sq.lock();
        // Acquire: pairs with the driver's release before it rings: the entries are there.
        let tail = self.doorbells.sq_tail(qid).load(Ordering::Acquire);
        if !self.is_running() {
            return Served::default();
        }
        let Some(sq) = sq_held.as_mut() else {
            slot.settled.store(tail, Ordering::Relaxed);
            self.bad_doorbell(qid, false);
            return Served::default();
        };
        if !sq.take_tail(tail) {
            self.bad_doorbell(qid, true);
        }
        let mut cq_held = self.slots[usize::from(sq.cqid)].cq.lock();
        let Some(cq) = cq_held.as_mut() else {
            return Served::default();
        };
        // Acquire: pairs with the driver's release: it has read what it frees.
        let head = self.doorbells.cq_head(sq.cqid).load(Ordering::Acquire);
        if !cq.take_head(head) {
            self.bad_doorbell(sq.cqid, true);
        }
        cq.mend(dma);
        let first = cq.tail;
        let mut batch = Batch {
            device: self,
            qid,
            now_ns,
            sq_whole: sq.ring.whole(dma),
            cq_whole: cq.ring.whole(dma),
            staged: dma.staged_bytes().is_some(),
            io: Io {
                namespaces: &self.namespaces,
                dma,
                page: self.page(),
                max_bytes: self.max_bytes(),
                sgl: self.config.sgl,
                write_back: self.write_back.load(Ordering::Relaxed),
            },
            sq,
            cq,
            stats: QueueStats {
                batches: 1,
                ..QueueStats::default()
            },
            control,
        };
        let result = batch.run();
        let Batch { sq, cq, stats, .. } = batch;
        let waiting = sq.waiting() != 0;
        let stats = QueueStats {
            cq_full: u64::from(waiting && cq.space() == 0),
            ..stats
        };
        slot.stats.add(&stats);
        slot.settled
            .store(if waiting { u32::MAX } else { tail }, Ordering::Relaxed);
        let due = sq
            .pending
            .peek()
            .map_or(u64::MAX, |Reverse(first)| first.due_ns);
        let due = if cq.torn.is_some() { 0 } else { due };
        slot.next_due_ns.store(due, Ordering::Relaxed);
        let posted = cq.vector.map_or(0, |_| cq.ring.distance(first, cq.tail));
        let vector = cq.vector.unwrap_or(0);
        let commands = result.unwrap_or_else(|DmaFault(_)| {
            // Neither the entry nor a place to complain is within reach.
            self.fail();
            0
        });
        Served {
            commands,
            posted,
            vector,
        }
    }

    #[cold]
    fn refused(&self, qid: u16, sqe: &Sqe, status: Status) {
        self.logs.lock().failed(qid, sqe, status);
    }

    #[cold]
    pub(crate) fn bad_doorbell(&self, qid: u16, exists: bool) {
        self.logs.lock().bad_doorbell(qid, exists);
        self.attention.store(true, Ordering::Relaxed);
    }
}

struct Batch<'a, 'g> {
    device: &'a Device,
    qid: u16,
    now_ns: u64,
    sq: &'a mut SubmissionQueue,
    cq: &'a mut CompletionQueue,
    sq_whole: Option<Span<'g>>,
    cq_whole: Option<Span<'g>>,
    /// Some memory is reached by copies, whose size is watched.
    staged: bool,
    io: Io<'a, 'g>,
    stats: QueueStats,
    control: Option<&'a mut Control>,
}

impl<'g> Batch<'_, 'g> {
    fn run(&mut self) -> Result<u32, DmaFault> {
        let mut handled = 0;
        if let Some(control) = self.control.as_deref_mut() {
            control.aborts = 0;
        }
        let timed = self.qid != 0 && !self.device.pacing.is_none();
        let plain = self.control.is_none() && !timed && self.device.faults.is_empty();
        let count = self.sq.waiting().min(BATCH);
        if self.staged {
            self.cq.ring.settle_last(self.io.dma);
        }
        if plain {
            let count = count.min(self.cq.space());
            let words = |span: Option<Span<'g>>| span.and_then(|span| span.as_words());
            if let (Some(sq), Some(cq), false) =
                (words(self.sq_whole), words(self.cq_whole), self.staged)
            {
                self.plain(count, sq, cq);
                return Ok(count);
            }
            for _ in 0..count {
                if self.is_full() {
                    break;
                }
                handled += 1;
                let sqe = self.sq.fetch(self.sq_whole, self.io.dma)?;
                let result = self.io.execute(&sqe, &mut self.sq.scratch, &mut self.stats);
                let status = match result {
                    Ok(()) => Status::SUCCESS,
                    Err(status) => self.refused(&sqe, status),
                };
                self.post(&sqe, status, 0, None)?;
            }
        } else {
            for _ in 0..count {
                let held = self.sq.pending.len() >= self.sq.pending.capacity().max(1);
                if self.cq.space() == 0 || (held && self.device.delays()) || self.is_full() {
                    break;
                }
                let sqe = self.sq.fetch(self.sq_whole, self.io.dma)?;
                handled += 1;
                self.admit(sqe, timed)?;
                if !self.device.is_running() {
                    return Ok(handled);
                }
            }
        }
        while self.cq.space() != 0
            && !self.is_full()
            && let Some(Reverse(first)) = self.sq.pending.peek()
            && first.due_ns <= self.now_ns
        {
            if let Some(Reverse(Pending { sqe, fault, .. })) = self.sq.pending.pop() {
                self.complete(&sqe, fault)?;
                handled += 1;
            }
        }
        self.events()?;
        Ok(handled)
    }

    /// Whether enough was copied for one batch.
    fn is_full(&self) -> bool {
        self.staged && self.io.dma.staged_bytes() > Some(MAX_STAGED)
    }

    /// The fast path: `count` commands from one contiguous ring to another, without faults or time.
    /// Indices and counts live in registers until the end.
    fn plain(&mut self, count: u32, sq_words: &[AtomicU64], cq_words: &[AtomicU64]) {
        let Self {
            io,
            sq,
            cq,
            qid,
            device,
            ..
        } = self;
        let (mut head, mut tail, mut phase) = (sq.head, cq.tail, cq.phase);
        let mut stats = QueueStats::default();
        let sqid = u64::from(*qid) << 16;
        for _ in 0..count {
            let entry = &sq_words[head as usize * 8..][..8];
            let sqe = Sqe::from_words(core::array::from_fn(|i| entry[i].load(Ordering::Relaxed)));
            head = sq.ring.next(head);
            let status = match io.execute(&sqe, &mut sq.scratch, &mut stats) {
                Ok(()) => Status::SUCCESS,
                Err(status) => {
                    stats.errors += 1;
                    device.refused(*qid, &sqe, status);
                    status
                }
            };
            let upper = u64::from(head as u16)
                | sqid
                | u64::from(sqe.cid().0) << 32
                | u64::from(status.0 << 1 | u16::from(phase)) << 48;
            let out = &cq_words[tail as usize * 2..][..2];
            out[0].store(0, Ordering::Relaxed);
            // Release: as in CompletionQueue::post.
            out[1].store(upper, Ordering::Release);
            tail = cq.ring.next(tail);
            phase ^= tail == 0;
        }
        (sq.head, cq.tail, cq.phase) = (head, tail, phase);
        stats.commands = u64::from(count);
        stats.batches = self.stats.batches;
        self.stats = stats;
    }

    /// Decides when a command completes and what goes wrong with it.
    fn admit(&mut self, sqe: Sqe, timed: bool) -> Result<(), DmaFault> {
        let mut due_ns = self.now_ns;
        if timed {
            let (work, bytes) = nvm::work(&self.io, &sqe);
            due_ns = self.device.pacing.due_ns(self.now_ns, work, bytes);
        }
        let fault = match self.device.faults.is_empty() {
            true => None,
            false => self.device.faults.of_command(self.qid, sqe.opcode()),
        };
        match fault {
            Some(Fault::Drop) => return Ok(()),
            Some(Fault::Cfs) => {
                self.device.fail();
                return Ok(());
            }
            Some(Fault::AllOnes) => {
                self.device.go();
                return Ok(());
            }
            Some(Fault::Delay(ns)) => due_ns = due_ns.saturating_add(ns),
            _ => {}
        }
        if due_ns <= self.now_ns && fault != Some(Fault::Reorder) {
            return self.complete(&sqe, fault);
        }
        let order = self.sq.fetched;
        self.sq.fetched += 1;
        self.sq.pending.push(Reverse(Pending {
            due_ns,
            order,
            sqe,
            fault,
        }));
        Ok(())
    }

    /// Executes a command that is due and posts its completion.
    fn complete(&mut self, sqe: &Sqe, fault: Option<Fault>) -> Result<(), DmaFault> {
        let mut dw0 = 0;
        let result = match (fault, self.control.as_deref_mut()) {
            (Some(Fault::Status(status)), _) => Err(status),
            (_, None) => self.io.execute(sqe, &mut self.sq.scratch, &mut self.stats),
            (_, Some(control)) => match admin::execute(self.device, control, self.io.dma, sqe) {
                Ok(Reply::Done(value)) => {
                    dw0 = value;
                    Ok(())
                }
                Ok(Reply::Held) => return Ok(()),
                Err(refusal) => {
                    dw0 = refusal.dw0;
                    Err(refusal.status)
                }
            },
        };
        let status = match result {
            Ok(()) => Status::SUCCESS,
            Err(status) => self.refused(sqe, status),
        };
        self.post(sqe, status, dw0, fault)
    }

    fn refused(&mut self, sqe: &Sqe, status: Status) -> Status {
        self.stats.errors += 1;
        self.device.refused(self.qid, sqe, status);
        status
    }

    #[inline]
    fn post(
        &mut self,
        sqe: &Sqe,
        status: Status,
        dw0: u32,
        fault: Option<Fault>,
    ) -> Result<(), DmaFault> {
        self.stats.commands += 1;
        let mut cqe = Cqe {
            dw0,
            dw1: 0,
            sqhd: self.sq.head as u16,
            sqid: self.qid,
            cid: sqe.cid().0,
            phase_status: status.0 << 1,
        };
        let mut publish = Publish::default();
        let mut times = 1;
        match fault {
            None => {}
            Some(Fault::WrongCid(cid)) => cqe.cid = cid,
            Some(Fault::BadSqhd(sqhd)) => cqe.sqhd = sqhd,
            Some(Fault::WrongPhase) => publish.wrong_phase = true,
            Some(Fault::TornCqe) => publish.torn = true,
            Some(Fault::Duplicate) => times = self.cq.space().min(2),
            Some(_) => {}
        }
        for _ in 0..times {
            self.cq.post(self.cq_whole, self.io.dma, cqe, publish)?;
        }
        Ok(())
    }

    /// Completes event requests with the events that wait.
    fn events(&mut self) -> Result<(), DmaFault> {
        let Some(control) = self.control.as_deref_mut() else {
            return Ok(());
        };
        if !self.device.attention.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let mut posts = 0;
        while self.cq.space() != 0 {
            let (cid, dw0, status) = if let Some(cid) = control.aborted_events.pop() {
                (cid, 0, Status::ABORT_REQUESTED)
            } else if control.event_requests.is_empty() {
                break;
            } else {
                let event = self.device.logs.lock().take_event();
                let Some(event) = event else { break };
                (control.event_requests.remove(0), event, Status::SUCCESS)
            };
            let cqe = Cqe {
                dw0,
                dw1: 0,
                sqhd: self.sq.head as u16,
                sqid: 0,
                cid,
                phase_status: status.0 << 1,
            };
            self.cq
                .post(self.cq_whole, self.io.dma, cqe, Publish::default())?;
            posts += 1;
        }
        self.stats.commands += posts;
        // A full queue keeps the rest waiting: look again at the next step.
        if self.cq.space() == 0 {
            self.device.attention.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{FaultRule, When};
    use crate::latency::Profile;
    use crate::testing::{DATA, Driver, ENTRIES, config, sq_at};
    use alloc::vec::Vec;
    use nvme_core::spec::register::{ALL_ONES, offset};
    use nvme_core::spec::{Lba, Nsid, admin};

    /// Completions as (CID, status code).
    type Done = Vec<(u16, u16)>;

    fn read() -> Sqe {
        nvme_core::spec::nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0)
    }

    fn with(what: Fault, nth: u64) -> Driver {
        let mut config = config();
        let when = When {
            nth: Some(nth),
            ..When::default()
        };
        config.faults.rules.push(FaultRule { when, what });
        Driver::with_queue(config)
    }

    /// Three reads in one batch, and the completions of a first and a second step.
    fn three(driver: &mut Driver) -> (Done, Done) {
        let first = driver.push(1, read());
        driver.push(1, read());
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        let relative = |done: Vec<(u16, u16)>| {
            done.into_iter()
                .map(|(cid, code)| (cid.wrapping_sub(first), code))
                .collect::<Vec<_>>()
        };
        let before = relative(driver.drain(1));
        driver.now_ns += 10_000;
        driver.step();
        (before, relative(driver.drain(1)))
    }

    #[test]
    fn each_fault_does_what_its_name_says() {
        let error = Status::UNRECOVERED_READ_ERROR;
        let run = |what| three(&mut with(what, 2));
        assert_eq!(run(Fault::Drop), ([(0, 0), (2, 0)].into(), [].into()));
        assert_eq!(
            run(Fault::Delay(10_000)),
            ([(0, 0), (2, 0)].into(), [(1, 0)].into())
        );
        assert_eq!(
            run(Fault::Reorder),
            ([(0, 0), (2, 0), (1, 0)].into(), [].into())
        );
        assert_eq!(run(Fault::Duplicate).0, [(0, 0), (1, 0), (1, 0), (2, 0)]);
        assert_eq!(
            run(Fault::Status(error)).0,
            [(0, 0), (1, error.code()), (2, 0)]
        );
        assert_eq!(
            run(Fault::WrongPhase).0,
            [(0, 0)],
            "the driver stops at the stale phase"
        );
        let mut driver = with(Fault::WrongCid(0xABCD), 2);
        let cids: Vec<_> = three(&mut driver).0;
        assert_eq!(cids.len(), 3);
        assert_ne!(cids[1].0, 1);
    }

    #[test]
    fn a_bad_queue_head_is_reported_and_a_torn_entry_is_mended_later() {
        let mut driver = with(Fault::BadSqhd(0xFFF0), 1);
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        assert_eq!(driver.pop(1).map(|cqe| cqe.sqhd), Some(0xFFF0));

        let mut driver = with(Fault::TornCqe, 1);
        driver.fill(crate::testing::cq_at(1), 0xA0, 8);
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        assert_eq!(driver.peek(1).map(|cqe| cqe.dw0), Some(0xA0A0_A0A0));
        driver.step();
        assert_eq!(driver.peek(1).map(|cqe| cqe.dw0), Some(0));
    }

    #[test]
    fn fatal_faults_stop_everything() {
        let mut driver = with(Fault::Cfs, 1);
        assert_eq!(three(&mut driver), ([].into(), [].into()));
        assert!(driver.csts().cfs());
        let mut driver = with(Fault::AllOnes, 1);
        assert_eq!(three(&mut driver), ([].into(), [].into()));
        assert_eq!(driver.controller.read32(offset::CSTS), ALL_ONES);
        assert_eq!(driver.controller.read64(offset::CAP), u64::MAX);
        driver.controller.write32(offset::CC, 0);
        driver.controller.power_cut();
        driver.enable();
    }

    #[test]
    fn a_full_completion_queue_stops_fetching_until_its_head_moves() {
        let mut driver = Driver::with_queue(config());
        // A second submission queue on the same completion queue makes more work than it holds.
        let sq = admin::create_io_sq(Driver::params(2, sq_at(2)), nvme_core::spec::Qid(1));
        assert_eq!(driver.admin(sq), Ok(0));
        for qid in [1, 2] {
            for _ in 0..ENTRIES - 1 {
                driver.push(qid, read());
            }
            driver.ring(qid);
        }
        assert_eq!(driver.step(), ENTRIES - 1);
        assert_eq!(driver.step(), 0);
        assert!(driver.controller.queue_stats(2).cq_full > 0);
        let last = driver.drain(1).len();
        assert_eq!(last as u32, ENTRIES - 1);
        assert_eq!(
            driver.step(),
            ENTRIES - 1,
            "the second queue goes on without a new doorbell"
        );
        assert_eq!(driver.drain(1).len() as u32, ENTRIES - 1);
    }

    #[test]
    fn sqhd_follows_every_wrap() {
        let mut driver = Driver::with_queue(config());
        for i in 0..100u32 {
            driver.push(1, read());
            driver.ring(1);
            driver.step();
            let cqe = driver.pop(1).unwrap();
            assert_eq!(u32::from(cqe.sqhd), (i + 1) % ENTRIES);
        }
    }

    #[test]
    fn impossible_doorbells_are_events_and_change_nothing() {
        let mut driver = Driver::with_queue(config());
        driver.push(0, admin::async_event_request());
        driver.ring(0);
        driver.step();
        for value in [ENTRIES, u32::MAX] {
            driver
                .controller
                .doorbells()
                .sq_tail(1)
                .store(value, Ordering::Release);
            assert_eq!(driver.step(), 0);
        }
        driver.step();
        let event = driver.pop(0).expect("an event");
        assert_eq!(
            event.dw0, 0x0001_0100,
            "error event: invalid doorbell value, log page 1"
        );
        driver.ring(1);
        assert_eq!(driver.io(read()), Ok(0));
        driver
            .controller
            .doorbells()
            .cq_head(1)
            .store(9999, Ordering::Release);
        assert_eq!(driver.io(read()), Ok(0));
        // A queue that does not exist.
        driver
            .controller
            .doorbells()
            .sq_tail(3)
            .store(1, Ordering::Release);
        driver.controller.write32(offset::DOORBELLS + 0x800, 1);
        driver.step();
        assert!(driver.csts().rdy() && !driver.csts().cfs());
    }

    #[test]
    fn rings_outside_the_map_are_fatal_and_nothing_worse() {
        let mut driver = Driver::with_queue(config());
        let far = admin::QueueParams {
            iova: nvme_core::spec::Iova(1 << 50),
            ..Driver::params(2, 0)
        };
        assert_eq!(
            driver.admin(admin::create_io_sq(far, nvme_core::spec::Qid(1))),
            Ok(0)
        );
        driver
            .controller
            .doorbells()
            .sq_tail(2)
            .store(1, Ordering::Release);
        driver.step();
        assert!(driver.csts().cfs());
        driver.controller.write32(offset::CC, 0);
        driver.enable();
    }

    #[test]
    fn completions_come_when_the_profile_says() {
        let mut config = config();
        config.profile = Profile {
            read_ns: 1000,
            parallelism: 2,
            ..Profile::NONE
        };
        let mut driver = Driver::with_queue(config);
        for _ in 0..4 {
            driver.push(1, read());
        }
        driver.ring(1);
        assert_eq!(driver.controller.step(0).next_event_ns, Some(1000));
        let mut done = Vec::new();
        for now_ns in [999, 1000, 1499, 1500, 2000, 2500] {
            driver.now_ns = now_ns;
            driver.step();
            done.push(driver.drain(1).len());
        }
        assert_eq!(done, [0, 1, 0, 1, 1, 1]);
        assert_eq!(driver.controller.step(3000).next_event_ns, None);
    }

    #[test]
    fn refused_commands_take_no_bandwidth_and_a_reset_ends_the_backlog() {
        let mut config = config();
        config.profile = Profile {
            bytes_per_us: 1,
            ..Profile::NONE
        };
        let mut driver = Driver::with_queue(config);
        let refused = nvme_core::spec::nvm::read(Nsid(1), Lba(0), 2048).with_prps(DATA, 0);
        assert_eq!(driver.io(refused), Err(Status::INVALID_FIELD));
        driver.push(1, read());
        driver.ring(1);
        assert_eq!(driver.controller.step(0).next_event_ns, Some(512_000));
        driver.controller.write32(offset::CC, 0);
        driver.enable();
        driver.create_pair(1);
        driver.push(1, read());
        driver.ring(1);
        assert_eq!(driver.controller.step(0).next_event_ns, Some(512_000));
    }

    #[test]
    fn the_same_plan_gives_the_same_run() {
        let run = || {
            let mut config = config();
            config.profile = Profile::NVME_GEN5;
            config.faults.seed = 42;
            for what in [Fault::Drop, Fault::Reorder, Fault::Delay(77_000)] {
                let when = When {
                    per_million: Some(100_000),
                    ..When::default()
                };
                config.faults.rules.push(FaultRule { when, what });
            }
            let mut driver = Driver::with_queue(config);
            let mut log = Vec::new();
            for _ in 0..60 {
                driver.push(1, read());
                driver.ring(1);
                driver.now_ns += 9_000;
                driver.step();
                log.push((driver.now_ns, driver.drain(1)));
            }
            log
        };
        assert_eq!(run(), run());
    }
}
