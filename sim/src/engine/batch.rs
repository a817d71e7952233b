//! One batch: the commands that a submission queue holds now, from fetch to completion. A batch
//! runs under the locks of both queues and under one guard of the DMA map, so its length is
//! bounded.

use crate::bus::queue::{
    CompletionQueue, DelayedCommand, PublishFaults, QueueStats, SubmissionQueue,
};
use crate::command::admin;
use crate::command::external_change;
use crate::command::nvm::{self, IoContext};
use crate::command::reply::CommandReply;
use crate::config::fault::Fault;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::memory::{DmaFault, MemorySpan};
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::sync::atomic::{AtomicU64, Ordering};
use nvme_spec::{Cqe, Sqe, Status};

/// Limit of the commands fetched in one batch: bounds the time for which locks are held.
pub(crate) const BATCH: u32 = 512;
/// Limit of the bytes staged in one batch, apart from those of its last command.
const MAX_STAGED: usize = 4 << 20;
/// Limit of the copies into a peer's memory that are carried out together. A call of the GPU's copy
/// engine costs as much time as some 100 KiB of data, which favours many copies for each call; but
/// the first completion waits for all of them, which favours few.
pub(crate) const MAX_DEFERRED: usize = 16;

/// A submission queue and its completion queue while they are served.
pub(crate) struct CommandBatch<'a, 'g> {
    pub device: &'a ControllerState,
    pub qid: u16,
    pub now_ns: u64,
    pub sq: &'a mut SubmissionQueue,
    pub cq: &'a mut CompletionQueue,
    pub sq_whole: Option<MemorySpan<'g>>,
    pub cq_whole: Option<MemorySpan<'g>>,
    /// True if some memory is reached by staged copies, whose size is limited.
    pub staged: bool,
    pub io: IoContext<'a, 'g>,
    pub stats: QueueStats,
    pub control: Option<&'a mut AdminState>,
}

impl<'g> CommandBatch<'_, 'g> {
    pub fn run(&mut self) -> Result<u32, DmaFault> {
        let mut handled = 0;
        if let Some(control) = self.control.as_deref_mut() {
            control.aborts = 0;
        }
        let timed = self.qid != 0 && !self.device.pacing.is_none();
        let is_fast = self.control.is_none() && !timed && self.device.faults.is_empty();
        let count = self.sq.waiting().min(BATCH);
        if self.staged {
            self.cq.ring.write_back_last(self.io.dma);
        }
        if is_fast {
            let count = count.min(self.cq.space());
            let words = |span: Option<MemorySpan<'g>>| span.and_then(|span| span.as_words());
            if let (Some(sq), Some(cq), false) =
                (words(self.sq_whole), words(self.cq_whole), self.staged)
            {
                match self.sq.watch.is_some() {
                    true => self.run_fast::<true>(count, sq, cq),
                    false => self.run_fast::<false>(count, sq, cq),
                }
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
                let delayed = self.sq.pending.len() - self.sq.late_part;
                let no_room = delayed >= self.sq.pending.capacity().max(1);
                if self.cq.space() == 0 || (no_room && self.device.delays()) || self.is_full() {
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
        handled += self.complete_due()?;
        self.events()?;
        Ok(handled)
    }

    /// Completes the delayed commands that are due. Returns their number.
    fn complete_due(&mut self) -> Result<u32, DmaFault> {
        let mut completed = 0;
        while self.cq.space() != 0
            && !self.is_full()
            && !self.waits_for_a_change()
            && let Some(Reverse(first)) = self.sq.pending.peek()
            && first.due_ns <= self.now_ns
        {
            if let Some(Reverse(DelayedCommand { sqe, fault, .. })) = self.sq.pending.pop() {
                self.complete(&sqe, fault)?;
                completed += 1;
            }
        }
        Ok(completed)
    }

    /// True if another host is about to change the device. A command that was executed before the
    /// change must complete after the change's event, so that the driver learns of it first.
    fn waits_for_a_change(&self) -> bool {
        self.control.is_none() && self.device.external.is_pending()
    }

    /// True if the batch has staged its limit of bytes.
    fn is_full(&self) -> bool {
        self.staged && self.io.dma.staged_bytes() > Some(MAX_STAGED)
    }

    /// Executes `count` commands from one contiguous ring to another, without faults or delays.
    /// Indices and counters stay in local variables, hence in registers, until the end.
    fn run_fast<const WATCHED: bool>(
        &mut self,
        count: u32,
        sq_words: &[AtomicU64],
        cq_words: &[AtomicU64],
    ) {
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
        let entry = |head: u32| {
            let entry = &sq_words[head as usize * 8..][..8];
            Sqe::from_words(core::array::from_fn(|i| entry[i].load(Ordering::Relaxed)))
        };
        // A prefetch two commands ahead hides most of the memory's latency: a copy of a random 4
        // KiB of 1 GiB takes 320 ns in place of 560. One command ahead hides less.
        let ahead = if io.can_prefetch() { count } else { 0 };
        if ahead > 1 {
            io.prefetch(&entry(sq.ring.next(head)));
        }
        // A completion promises that the data has arrived. So completions of reads into a peer's
        // memory wait for their copies; those of later commands wait too, because entries are
        // posted in order.
        io.dma.defer_copies();
        let mut deferred: Vec<(u32, Sqe, u64)> = Vec::new();
        let post = |tail: u32, upper: u64| {
            if WATCHED && let Some(watch) = &cq.watch {
                watch.posted(tail, &Cqe::from_words(0, upper), true, io.dma);
            }
            let out = &cq_words[tail as usize * 2..][..2];
            out[0].store(0, Ordering::Relaxed);
            // Release: the data and dwords 0 and 1 before the phase tag, as in
            // CompletionQueue::post.
            out[1].store(upper, Ordering::Release);
        };
        for done in 0..count {
            let sqe = entry(head);
            if WATCHED && let Some(watch) = &sq.watch {
                watch.fetched(head, &sqe, io.dma);
            }
            head = sq.ring.next(head);
            if done + 2 < ahead {
                io.prefetch(&entry(sq.ring.next(head)));
            }
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
            let place = tail;
            tail = cq.ring.next(tail);
            phase ^= tail == 0;
            let copies = io.dma.deferred();
            if copies == 0 {
                post(place, upper);
                continue;
            }
            deferred.push((place, sqe, upper));
            if copies < MAX_DEFERRED && done + 1 < count {
                continue;
            }
            let good = io.dma.copy_deferred();
            for (place, sqe, mut upper) in deferred.drain(..) {
                if !good && upper >> 49 == 0 {
                    let status = Status::DATA_TRANSFER_ERROR;
                    stats.errors += 1;
                    device.refused(*qid, &sqe, status);
                    upper |= u64::from(status.0) << 49;
                }
                post(place, upper);
            }
        }
        (sq.head, cq.tail, cq.phase) = (head, tail, phase);
        stats.commands = u64::from(count);
        stats.batches = self.stats.batches;
        self.stats = stats;
    }

    /// Determines the completion time of a command and the fault to inject into it.
    fn admit(&mut self, sqe: Sqe, timed: bool) -> Result<(), DmaFault> {
        let mut due_ns = self.now_ns;
        if timed {
            let (work, bytes) = nvm::work(&self.io, &sqe);
            due_ns = self.device.pacing.due_ns(self.now_ns, work, bytes);
        }
        let fault = match self.device.faults.is_empty() {
            true => None,
            false => {
                let whole = self.control.is_none() && nvm::needs_no_list(&self.io, &sqe);
                let cid = sqe.cid().0;
                self.device
                    .faults
                    .of_command(self.qid, sqe.opcode(), cid, whole)
            }
        };
        match fault {
            Some(Fault::Drop) => return Ok(()),
            Some(Fault::Cfs) => {
                self.device.fail();
                return Ok(());
            }
            Some(Fault::AllOnes) => {
                self.device.leave_bus();
                return Ok(());
            }
            Some(Fault::Delay(ns) | Fault::Stubborn(ns)) => due_ns = due_ns.saturating_add(ns),
            _ => {}
        }
        if due_ns <= self.now_ns && fault != Some(Fault::Reorder) {
            return self.complete(&sqe, fault);
        }
        self.delay(sqe, due_ns, fault);
        Ok(())
    }

    fn delay(&mut self, sqe: Sqe, due_ns: u64, fault: Option<Fault>) {
        let order = self.sq.fetched;
        self.sq.fetched += 1;
        self.sq.late_part += usize::from(fault.is_some_and(Fault::is_late_part));
        self.sq.pending.push(Reverse(DelayedCommand {
            due_ns,
            order,
            sqe,
            fault,
        }));
    }

    /// Carries out the part of an echo or of late data that follows the command's completion.
    #[cold]
    fn late_part(&mut self, sqe: &Sqe, fault: Fault) -> Result<(), DmaFault> {
        self.device.faults.note(self.qid, sqe.cid().0, fault);
        self.sq.late_part -= 1;
        if fault == Fault::Echo(0) {
            return self.post(sqe, Status::SUCCESS, 0, None);
        }
        if let Some(watch) = &self.sq.watch {
            watch.moved(sqe);
        }
        // The completion was posted before, so the status has no place to be reported.
        let _ = self.io.execute(sqe, &mut self.sq.scratch, &mut self.stats);
        Ok(())
    }

    /// Executes a command that is due and posts its completion.
    fn complete(&mut self, sqe: &Sqe, fault: Option<Fault>) -> Result<(), DmaFault> {
        let mut dw0 = 0;
        match fault {
            Some(after) if after.is_late_part() => return self.late_part(sqe, after),
            Some(Fault::External(change)) if self.control.is_none() => {
                let result = self.io.execute(sqe, &mut self.sq.scratch, &mut self.stats);
                let status = result.err().unwrap_or(Status::SUCCESS);
                self.device.external.push(change);
                self.device.attention.store(true, Ordering::Relaxed);
                self.delay(*sqe, self.now_ns + 1, Some(Fault::Status(status)));
                return Ok(());
            }
            Some(Fault::Echo(ns)) => self.delay(*sqe, self.now_ns + ns, Some(Fault::Echo(0))),
            Some(Fault::LateData(ns))
                if self.control.is_none() && nvm::needs_no_list(&self.io, sqe) =>
            {
                self.delay(*sqe, self.now_ns + ns, Some(Fault::LateData(0)));
                return self.post(sqe, Status::SUCCESS, 0, None);
            }
            _ => {}
        }
        let result = match (fault, self.control.as_deref_mut()) {
            // The later part of a change by another host: the command was executed before the
            // change.
            (Some(Fault::Status(Status::SUCCESS)), _) => Ok(()),
            (Some(Fault::Status(status)), _) if !status.is_success() => Err(status),
            (_, None) => self.io.execute(sqe, &mut self.sq.scratch, &mut self.stats),
            (_, Some(control)) => match admin::execute(self.device, control, self.io.dma, sqe) {
                Ok(CommandReply::Done(value)) => {
                    dw0 = value;
                    Ok(())
                }
                Ok(CommandReply::Held) => return Ok(()),
                Err(refusal) => {
                    dw0 = refusal.dw0;
                    Err(refusal.status)
                }
            },
        };
        let status = match (result, fault) {
            // Hints alone: the command was executed, and succeeds with them.
            (Ok(()), Some(Fault::Status(status))) => status,
            (Ok(()), _) => Status::SUCCESS,
            (Err(status), _) => self.refused(sqe, status),
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
        let mut publish = PublishFaults::default();
        let mut times = 1;
        match fault {
            None => {}
            Some(Fault::WrongCid(cid)) => cqe.cid = cid,
            Some(Fault::FlippedCid(bits)) => cqe.cid ^= bits,
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

    /// Completes Asynchronous Event Requests with the events that wait.
    fn events(&mut self) -> Result<(), DmaFault> {
        let Some(control) = self.control.as_deref_mut() else {
            return Ok(());
        };
        let device = self.device;
        if !self.device.attention.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        external_change::apply(device, control);
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
                .post(self.cq_whole, self.io.dma, cqe, PublishFaults::default())?;
            posts += 1;
        }
        device.external.finish();
        self.stats.commands += posts;
        // A full completion queue leaves events waiting, and no doorbell announces them: the next
        // step has to try again.
        if self.cq.space() == 0 {
            self.device.attention.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
