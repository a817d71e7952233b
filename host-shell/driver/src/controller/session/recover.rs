//! Drives the core's bring-up and recovery state machines: start, abort of one command, controller reset.
//!
//! Every command ends exactly once: an expired one is aborted, or ends with the reset; the other commands in flight end
//! as "aborted by reset" and may be sent again.

use super::{AdminSession, ControllerSession, LONG_WAIT, ResetRecord};
use crate::controller::notice::ControllerNotice;
use crate::controller::queue_inner::QueueInner;
use crate::dma::{DmaBuffer, MappedRegion};
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::bringup::{
    self, BringupMachine, BringupStep, HostMemoryPages, QueuePlan, ReadyWait,
};
use nvme_core::recovery::{self, AbortAttempt};
use nvme_core::spec::feature::HmbDescriptor;
use nvme_core::spec::{Cid, Qid};
use nvme_core::{BringupError, Quiesced};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Deadline in ns of an Abort, and then of the aborted command, before the controller is reset. An Abort is
/// best effort in the specification: a controller may ignore it, and then only the reset ends the command.
const GRACE_NS: u64 = 200_000_000;

impl ControllerSession {
    /// Ends the expired command `cid` of queue `qid`: by Abort, else by a controller reset.
    pub(crate) fn recover(&self, qid: Qid, cid: Cid) -> Result<()> {
        let mut admin = lock(&self.admin);
        let Some(inner) = lock(&self.queues).get(&qid.0).cloned() else {
            return Ok(());
        };
        if !lock(&inner).pair.queue().is_in_flight(cid) {
            // A reset for another command came first.
            return Ok(());
        }
        let mut attempt = AbortAttempt::new(qid, cid, GRACE_NS);
        let account = loop {
            let (drained, in_flight) = {
                let mut inner = lock(&inner);
                let drained = inner.drain(|| self.now_ns());
                (drained, inner.pair.queue().is_in_flight(cid))
            };
            if let Err(fault) = drained {
                self.reset_locked(&mut admin, &fault.to_string(), None)?;
                break format!("{fault}");
            }
            let now_ns = self.now_ns();
            self.admin_view.advance(&admin.pair);
            let AdminSession { pair, events, .. } = &mut *admin;
            match attempt.step(pair.queue(), in_flight, now_ns, |other| events.take(other)) {
                recovery::RecoveryStep::Ended => {
                    self.note_abort(qid, cid);
                    break "it was aborted".to_owned();
                }
                recovery::RecoveryStep::Wait { until_ns } => self.sleep_until(until_ns),
                recovery::RecoveryStep::ResetNeeded(cause) => {
                    let others = self.in_flight_besides(&inner);
                    self.reset_locked(&mut admin, &in_words(cause), Some((qid, cid)))?;
                    break format!(
                        "abort: {}; {}; its queues were created again; {others} other commands were ended with it",
                        in_words(cause),
                        self.last_reset().in_words()
                    );
                }
            }
        };
        lock(&inner).expired.add(cid, account);
        Ok(())
    }

    /// Ends command `cid` of a queue that a GPU drives by Abort, or returns the cause for a reset. `in_flight`
    /// reaps completions and returns true if the command is still in flight.
    #[cfg(feature = "cuda")]
    pub fn abort_lent(
        &self,
        qid: Qid,
        cid: Cid,
        mut in_flight: impl FnMut() -> bool,
    ) -> Option<String> {
        let mut admin = lock(&self.admin);
        let mut attempt = AbortAttempt::new(qid, cid, GRACE_NS);
        loop {
            self.admin_view.advance(&admin.pair);
            let AdminSession { pair, events, .. } = &mut *admin;
            let is_there = in_flight();
            match attempt.step(pair.queue(), is_there, self.now_ns(), |other| {
                events.take(other)
            }) {
                recovery::RecoveryStep::Ended => {
                    self.note_abort(qid, cid);
                    return None;
                }
                recovery::RecoveryStep::Wait { until_ns } => self.sleep_until(until_ns),
                recovery::RecoveryStep::ResetNeeded(cause) => return Some(in_words(cause)),
            }
        }
    }

    fn note_abort(&self, qid: Qid, cid: Cid) {
        self.recoveries.fetch_add(1, Ordering::Relaxed);
        let device = self.device.name();
        tracing::warn!(target: "nvme_gpu", device, queue = qid.0, "command {cid} got no answer and was aborted");
    }

    fn in_flight_besides(&self, one: &Arc<Mutex<QueueInner>>) -> u32 {
        let queues: Vec<_> = lock(&self.queues).values().cloned().collect();
        let all: u32 = queues
            .iter()
            .map(|inner| lock(inner).pair.queue().in_flight())
            .sum();
        all.saturating_sub(u32::from(lock(one).pair.queue().in_flight() > 0))
    }

    /// Resets the controller and creates every queue again.
    pub fn reset(&self, cause: &str) -> Result<()> {
        let mut admin = lock(&self.admin);
        self.reset_locked(&mut admin, cause, None)
    }

    pub(crate) fn reset_locked(
        &self,
        admin: &mut AdminSession,
        cause: &str,
        expired: Option<(Qid, Cid)>,
    ) -> Result<()> {
        if let Some(cause) = &admin.failed {
            return Err(Error::Gone {
                cause: cause.clone(),
            });
        }
        let table: Vec<_> = lock(&self.queues).values().cloned().collect();
        let mut inners: Vec<_> = table.iter().map(|inner| lock(inner)).collect();
        let plans: Vec<QueuePlan> = inners.iter().map(|inner| inner.pair.plan()).collect();
        #[cfg(feature = "cuda")]
        for lent in inners.iter_mut().filter_map(|inner| inner.lent.as_mut()) {
            lent.stop();
        }
        admin.resets += 1;
        self.recoveries.fetch_add(1, Ordering::Relaxed);
        let device = self.device.name();
        let span = tracing::warn_span!(target: "nvme_gpu", "controller_reset", device, cause);
        let _span = span.enter();
        tracing::warn!(target: "nvme_gpu", device, "the controller is reset: {cause}");
        let mut reset = ResetRecord {
            cause: cause.to_owned(),
            expired,
            ..ResetRecord::default()
        };
        self.note_reset(reset.clone());
        let begin = Instant::now();
        let run = BringupRun {
            session: self,
            plans: &plans,
            cause: Some(match expired {
                Some((qid, cid)) => format!(
                    "command {cid} of queue {qid} got no answer in {} ms",
                    self.timeout_ns() / 1_000_000
                ),
                None => cause.to_owned(),
            }),
        };
        let result = run.run(admin, &mut inners);
        reset.took = begin.elapsed();
        reset.at_most = Duration::from_millis(admin.info.capabilities.ready_timeout_ms.into());
        let took_ms = reset.took.as_millis() as u64;
        self.note_reset(reset);
        let result = result
            .map_err(|error| self.device.gone().unwrap_or_else(|| error.to_string()))
            .and_then(|()| all_created(admin, plans.len()))
            .and_then(|()| self.read_unlisted(admin));
        match &result {
            Ok(()) => {
                self.facts.observe_all(&admin.info);
                tracing::info!(target: "nvme_gpu", device, took_ms, "the controller works again");
            }
            Err(error) => {
                tracing::error!(target: "nvme_gpu", device, took_ms, "the controller reset failed: {error}");
            }
        }
        // Kernels compare the facts of their namespace before they pass the gate; queues of the host compare them
        // before they submit.
        #[cfg(feature = "cuda")]
        for lent in inners.iter_mut().filter_map(|inner| inner.lent.as_mut()) {
            lent.resume(result.is_ok());
        }
        result.map_err(|error| {
            let cause = format!("{cause}; the controller reset failed: {error}");
            admin.failed = Some(cause.clone());
            for inner in &mut inners {
                inner.failed_reset = Some(cause.clone());
            }
            Error::Gone { cause }
        })
    }

    /// Performs the first bring-up, while there are no queues.
    pub(crate) fn bring_up(
        &self,
        admin: &mut AdminSession,
    ) -> std::result::Result<(), BringupError> {
        BringupRun {
            session: self,
            plans: &[],
            cause: None,
        }
        .run(admin, &mut [])
    }
}

/// Checks that all queues exist again.
fn all_created(admin: &AdminSession, queues: usize) -> std::result::Result<(), String> {
    match admin.info.created as usize {
        created if created == queues => Ok(()),
        created => Err(format!(
            "only {created} of {queues} queues could be created again"
        )),
    }
}

/// One run of the bring-up machine.
struct BringupRun<'a> {
    session: &'a ControllerSession,
    plans: &'a [QueuePlan],
    /// Cause of the reset; `None` in the first bring-up.
    cause: Option<String>,
}

impl BringupRun<'_> {
    fn run(
        &self,
        admin: &mut AdminSession,
        inners: &mut [MutexGuard<'_, QueueInner>],
    ) -> std::result::Result<(), BringupError> {
        let session = self.session;
        let registers = session.device.registers();
        let config = bringup::BringupConfig {
            queue_pairs: session.config.queue_pairs,
            plans: self.plans,
            command_timeout_ns: session.timeout_ns(),
            made_for: Some(admin.info.capabilities),
            ..bringup::BringupConfig::default()
        };
        let AdminSession {
            pair,
            scratch,
            info,
            host_memory,
            events,
            ..
        } = admin;
        let mut machine = BringupMachine::new(registers, config, scratch.words())?;
        let interrupted = || self.cause.is_none() && session.is_interrupted();
        let mut wait = LongWait::default();
        loop {
            let step = machine.step(registers, pair.queue(), session.now_ns())?;
            if let Some(long) = wait.look(machine.ready_wait()) {
                session.config.notify.tell(&ControllerNotice::Waiting {
                    cause: self.cause.clone(),
                    ready: long.ready,
                    at_most: Duration::from_millis(long.at_most_ms.into()),
                });
            }
            match step {
                BringupStep::Ready => break,
                BringupStep::Wait { .. } if interrupted() => {
                    return Err(BringupError::CommandTimeout { opcode: 0 });
                }
                BringupStep::Wait { .. } if session.is_gone() => {
                    return Err(BringupError::DeviceGone);
                }
                BringupStep::Wait { until_ns } => session.sleep_until(until_ns),
                BringupStep::Disabled(proof) => {
                    inners.iter_mut().for_each(|inner| end_all(inner, &proof));
                    while let Some(ended) = pair.queue().reclaim(&proof) {
                        events.take(ended);
                    }
                    pair.queue().restart(&proof);
                    machine.enable(proof);
                }
                BringupStep::HostMemory { preferred, minimum } => {
                    let page = machine.info().capabilities.page.bytes();
                    if host_memory.is_none() {
                        *host_memory = lend(session, page, preferred, minimum);
                    }
                    machine.host_memory(host_memory.as_ref().map(|lent| described(lent, page)));
                }
            }
        }
        *info = machine.info().clone();
        if self.cause.is_none() {
            session.facts.begin(info);
        }
        session.admin_view.advance(pair);
        events.begin(pair.queue(), info);
        Ok(())
    }
}

/// Finds the waits for CSTS.RDY that are long, each once.
#[derive(Default)]
struct LongWait {
    current: Option<(ReadyWait, Instant)>,
    is_told: bool,
}

impl LongWait {
    /// Returns `wait` when it has just become a long one.
    fn look(&mut self, wait: Option<ReadyWait>) -> Option<ReadyWait> {
        let wait = wait?;
        let begin = match self.current {
            Some((current, begin)) if current == wait => begin,
            _ => {
                self.current = Some((wait, Instant::now()));
                self.is_told = false;
                return None;
            }
        };
        if self.is_told || begin.elapsed() < LONG_WAIT {
            return None;
        }
        self.is_told = true;
        Some(wait)
    }
}

/// Ends every command of a queue that the controller no longer accesses, and prepares the queue for the next
/// enabling.
fn end_all(inner: &mut QueueInner, proof: &Quiesced<'_>) {
    while let Some(done) = inner.pair.queue().reclaim(proof) {
        inner.backlog.push_back(done.into());
    }
    inner.pair.queue().restart(proof);
    #[cfg(feature = "cuda")]
    if let Some(lent) = &mut inner.lent {
        lent.end(proof);
    }
}

/// Describes the host memory buffer in the controller's terms.
fn described((region, list): &(MappedRegion, DmaBuffer), page: u64) -> HostMemoryPages {
    HostMemoryPages {
        pages: (region.len() as u64 / page) as u32,
        list: list.iova(),
        entries: 1,
    }
}

/// Allocates the host memory buffer that a controller asks for, in pages of `page` bytes: its preferred size,
/// within the configured limit.
///
/// `None` is no error: the controller works without the buffer, only slower, and the user is notified.
fn lend(
    session: &ControllerSession,
    page: u64,
    preferred: u64,
    minimum: u64,
) -> Option<(MappedRegion, DmaBuffer)> {
    let most = session.config.max_host_memory;
    let bytes = preferred.min(most);
    if bytes == 0 {
        return None;
    }
    if bytes < minimum {
        let notice = ControllerNotice::HostMemory { minimum, most };
        session.config.notify.tell(&notice);
        return None;
    }
    let region = MappedRegion::new(&session.device, usize::try_from(bytes).ok()?).ok()?;
    let mut list = DmaBuffer::new(&session.device, size_of::<HmbDescriptor>()).ok()?;
    let pages = (region.len() as u64 / page) as u32;
    let descriptor = HmbDescriptor {
        address: region.iova().0,
        pages,
        reserved: 0,
    };
    list.as_mut_slice().copy_from_slice(descriptor.as_bytes());
    Some((region, list))
}

fn in_words(cause: recovery::ResetCause) -> String {
    match cause {
        recovery::ResetCause::AdminFull => "the admin queue was full".to_owned(),
        recovery::ResetCause::AdminDead => "not answered".to_owned(),
        recovery::ResetCause::Refused(status) => format!("refused with {status}"),
        recovery::ResetCause::NoCompletion => "answered, but the command did not end".to_owned(),
        recovery::ResetCause::OtherAdmin => "sent to another controller's admin queue".to_owned(),
    }
}
