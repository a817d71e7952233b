//! A controller in use: its admin queue, its I/O queues and the clock. Shared by every handle.
//!
//! Queues come and go in `queues`, with the shutdown that ends all of them.
//!
//! Locks are taken in one order: admin, table of queues, then queues by ascending identifier.

mod effects;
mod events;
mod queues;
mod recover;
mod unlisted;
mod verify;
mod watch;

#[cfg(feature = "cuda")]
pub use verify::{FactsStanding, UserFacts};
pub(crate) use watch::IdentifyWatch;

use crate::controller::config::ControllerConfig;
use crate::controller::events::EventRequests;
use crate::controller::facts::DeviceFacts;
use crate::controller::queue_inner::{QueueCompletion, QueueInner};
use crate::device::Device;
use crate::device::interrupt::VectorEvents;
use crate::device::ring_memory::RingMemory;
use crate::dma::{CompletionView, DmaBuffer, MappedRegion, OwnedPair, ScratchPage};
use crate::error::{Error, Result};
use crate::lock::{lock, relax};
use nvme_core::bringup::{ControllerInfo, NamespaceInfo};
use nvme_core::spec::admin;
use nvme_core::spec::register::{ALL_ONES, Csts, offset};
use nvme_core::spec::{Cid, Nsid, Qid, Sqe};
use nvme_core::{CommandData, CommandOutcome};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Duration of a wait for CSTS.RDY after which the user is notified. CAP.TO permits up to two minutes, and a
/// program that is silent for so long looks as if it hung.
pub(crate) const LONG_WAIT: Duration = Duration::from_millis(250);
/// Interval in ns at which an idle queue reads CSTS. Each read of a register takes about a microsecond on the
/// bus, and all ones or CFS there are the only sign of a controller that is gone or has failed.
const HEALTH_NS: u64 = 10_000_000;

/// State for which one thread at a time is responsible: admin commands, reset, shutdown.
pub(crate) struct AdminSession {
    pub pair: OwnedPair,
    pub scratch: ScratchPage,
    pub info: ControllerInfo,
    /// The host memory buffer and its descriptor list, while the controller has them.
    pub host_memory: Option<(MappedRegion, DmaBuffer)>,
    /// Resets since the start.
    pub resets: u32,
    /// Requests for asynchronous events.
    pub events: EventRequests,
    /// The page by which facts are read again.
    pub facts_page: Option<DmaBuffer>,
    /// Reason why the session can no longer be used.
    pub failed: Option<String>,
}

/// Record of the last controller reset.
#[derive(Clone, Default)]
pub(crate) struct ResetRecord {
    pub cause: String,
    /// The command that was not answered, when that was the cause.
    pub expired: Option<(Qid, Cid)>,
    /// Duration of the reset, and the upper bound of each change of CSTS.RDY.
    pub took: Duration,
    pub at_most: Duration,
}

impl ResetRecord {
    /// Describes the reset, with its duration if that was long.
    pub fn in_words(&self) -> String {
        if self.took < LONG_WAIT {
            return "the controller was reset".to_owned();
        }
        format!(
            "the controller was reset, which took {:.1} s (CAP.TO allows {:.1} s for each change of CSTS.RDY)",
            self.took.as_secs_f64(),
            self.at_most.as_secs_f64()
        )
    }
}

pub(crate) type Table = BTreeMap<u16, Arc<Mutex<QueueInner>>>;

/// A controller in use.
pub struct ControllerSession {
    /// The transport.
    pub device: Arc<dyn Device>,
    /// The settings that the session was started with.
    pub config: ControllerConfig,
    /// The admin queue and its state.
    pub(crate) admin: Mutex<AdminSession>,
    /// The I/O queues by their identifier.
    pub(crate) queues: Mutex<Table>,
    /// Memory for the rings of I/O queues, if they do not lie in this process's memory.
    ring_memory: Option<Arc<RingMemory>>,
    pub(crate) interrupts: VectorEvents,
    start: Instant,
    /// Offset that tests add to the clock, in ns.
    #[cfg(test)]
    pub(crate) skipped_ns: AtomicU64,
    next_health_ns: AtomicU64,
    /// The admin completion queue, as threads see it that have not locked it.
    pub(crate) admin_view: CompletionView,
    closed: AtomicBool,
    last_reset: Mutex<ResetRecord>,
    /// Facts about the device on which handles rely.
    pub(crate) facts: DeviceFacts,
    /// Number of recoveries: commands that were aborted, and resets.
    pub(crate) recoveries: Arc<AtomicU64>,
}

impl ControllerSession {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        config: ControllerConfig,
        ring_memory: Option<Arc<RingMemory>>,
        interrupts: VectorEvents,
        admin: AdminSession,
        facts: DeviceFacts,
    ) -> Self {
        Self {
            device,
            config,
            admin_view: admin.pair.completion_view(),
            admin: Mutex::new(admin),
            queues: Mutex::default(),
            ring_memory,
            interrupts,
            start: Instant::now(),
            #[cfg(test)]
            skipped_ns: AtomicU64::new(0),
            next_health_ns: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            last_reset: Mutex::default(),
            facts,
            recoveries: Arc::default(),
        }
    }

    /// Returns the memory for the rings of I/O queues, if they do not lie in this process's memory.
    #[cfg(feature = "cuda")]
    pub fn ring_memory(&self) -> Option<&Arc<RingMemory>> {
        self.ring_memory.as_ref()
    }

    /// Returns the nanoseconds since the start of the session: the clock whose values the core receives.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        let now_ns = self.start.elapsed().as_nanos() as u64;
        #[cfg(test)]
        let now_ns = now_ns + self.skipped_ns.load(Ordering::Relaxed);
        now_ns
    }

    /// Returns the time-out of a command in nanoseconds.
    #[inline]
    pub fn timeout_ns(&self) -> u64 {
        u64::try_from(self.config.timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    /// True if the caller has asked for an end.
    pub fn is_interrupted(&self) -> bool {
        self.config
            .stop
            .as_ref()
            .is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// Looks at CSTS, not more often than every 10 ms over all queues.
    pub fn check_health(&self, now_ns: u64) -> Result<()> {
        let due = self.next_health_ns.load(Ordering::Relaxed);
        if now_ns < due {
            return Ok(());
        }
        self.next_health_ns
            .store(now_ns + HEALTH_NS, Ordering::Relaxed);
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Gone {
                cause: "the controller was shut down".to_owned(),
            });
        }
        match self.device.registers().read32(offset::CSTS) {
            ALL_ONES => {
                let cause = self.absence();
                lock(&self.admin)
                    .failed
                    .get_or_insert_with(|| cause.clone());
                Err(Error::Gone { cause })
            }
            csts if Csts(csts).cfs() => {
                self.reset("the controller reports a fatal error (CSTS.CFS)")
            }
            // Disabled for good, or by a reset that is under way: in that case taking the lock
            // waits for its end. An error that was stored meanwhile is then the cause to report.
            csts if !Csts(csts).rdy() => match lock(&self.admin).failed.clone() {
                Some(cause) => Err(Error::Gone { cause }),
                None => Ok(()),
            },
            _ => self.glance_at_events(),
        }
    }

    /// Sends one admin command and waits for its end. The buffer comes back when it succeeded.
    ///
    /// A command that is not answered in time costs a controller reset: an admin queue that does not answer could not
    /// carry an Abort either. An answer that is seen after the deadline costs one, too; a queue that the command
    /// created, for example, is gone with the reset.
    pub fn admin(
        &self,
        what: &str,
        sqe: Sqe,
        buffer: Option<DmaBuffer>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        let mut admin = lock(&self.admin);
        self.admin_locked(&mut admin, what, sqe, buffer)
    }

    /// Sends a command as [`admin`](Self::admin) does, without data and with the deadline `timeout` in place of the
    /// usual one; `watch` sends queries meanwhile.
    pub(crate) fn admin_for(
        &self,
        what: &str,
        sqe: Sqe,
        timeout: Duration,
        watch: &mut IdentifyWatch<'_>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let mut admin = lock(&self.admin);
        self.admin_within(&mut admin, timeout_ns, what, (sqe, None), Some(watch))
    }

    pub(crate) fn admin_locked(
        &self,
        admin: &mut AdminSession,
        what: &str,
        sqe: Sqe,
        buffer: Option<DmaBuffer>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        self.admin_within(admin, self.timeout_ns(), what, (sqe, buffer), None)
    }

    fn admin_within(
        &self,
        admin: &mut AdminSession,
        timeout_ns: u64,
        what: &str,
        (sqe, buffer): (Sqe, Option<DmaBuffer>),
        watch: Option<&mut IdentifyWatch<'_>>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        if let Some(cause) = &admin.failed {
            return Err(Error::Gone {
                cause: cause.clone(),
            });
        }
        let effect = self.facts.effect_of(&sqe);
        self.with_effect(effect, || {
            self.exchange(admin, timeout_ns, what, (sqe, buffer), watch)
        })
    }

    /// Sends an admin command and waits for its end.
    fn exchange(
        &self,
        admin: &mut AdminSession,
        timeout_ns: u64,
        what: &str,
        (sqe, buffer): (Sqe, Option<DmaBuffer>),
        mut watch: Option<&mut IdentifyWatch<'_>>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        let deadline_ns = self.now_ns().saturating_add(timeout_ns);
        let data = data_of(buffer.as_ref());
        let queue = admin.pair.queue();
        let cid = queue
            .submit(sqe, data, buffer, deadline_ns)
            .map_err(|rejected| {
                Error::device(format!("{what}: {}", rejected.error), "try again")
            })?;
        queue.ring();
        let mut spins = 0;
        loop {
            self.admin_view.advance(&admin.pair);
            let ended = admin.pair.queue().poll();
            // Read after the poll: an answer that came after the deadline never counts as in time.
            let is_late = self.now_ns() >= deadline_ns;
            let answered = match ended {
                Ok(Some(completion)) if completion.cid == cid => {
                    if !is_late {
                        self.tend_events(admin);
                        return finish(what, completion.into());
                    }
                    true
                }
                Ok(Some(other)) => {
                    let other = match &mut watch {
                        Some(watch) => watch.take(other),
                        None => Some(other),
                    };
                    if let Some(other) = other {
                        admin.events.take(other);
                    }
                    false
                }
                Ok(None) => false,
                Err(fault) => {
                    self.reset_locked(admin, &fault.to_string(), None)?;
                    return Err(Error::device(
                        format!("{what}: {fault}"),
                        "the controller was reset; try again",
                    ));
                }
            };
            if self.is_gone() {
                let cause = self.absence();
                admin.failed.get_or_insert_with(|| cause.clone());
                return Err(Error::Gone { cause });
            }
            if is_late {
                let timeout_ms = timeout_ns / 1_000_000;
                return Err(self.end_late(admin, (sqe.opcode(), cid), timeout_ms, answered));
            }
            if self.is_interrupted() {
                return Err(Error::Interrupted);
            }
            if let Some(watch) = &mut watch {
                watch.ask(&self.device, self.now_ns(), &mut admin.pair);
            }
            spins += 1;
            relax(spins);
        }
    }

    /// Resets the controller to end an admin command whose deadline has passed, and returns the resulting
    /// error.
    fn end_late(
        &self,
        admin: &mut AdminSession,
        (opcode, cid): (u8, Cid),
        timeout_ms: u64,
        answered: bool,
    ) -> Error {
        let how = match answered {
            true => "was answered after its deadline",
            false => "got no answer",
        };
        let cause = format!("admin command {opcode:#04x} {how}");
        let account = match self.reset_locked(admin, &cause, Some((Qid::ADMIN, cid))) {
            Ok(()) if answered => {
                format!("the answer came too late; {}", self.last_reset().in_words())
            }
            Ok(()) => format!("{}; that ended it", self.last_reset().in_words()),
            Err(error) => format!("and the reset failed: {error}"),
        };
        Error::Timeout {
            qid: Qid::ADMIN,
            cid,
            timeout_ms,
            account,
        }
    }

    /// Returns the record of the last controller reset.
    pub(crate) fn last_reset(&self) -> ResetRecord {
        lock(&self.last_reset).clone()
    }

    pub(crate) fn note_reset(&self, reset: ResetRecord) {
        *lock(&self.last_reset) = reset;
    }

    /// Records that namespace `info` was formatted, and has these properties from now on. Handles
    /// that were made before are refused.
    pub(crate) fn formatted(&self, info: NamespaceInfo) {
        let mut admin = lock(&self.admin);
        let known = admin.info.namespaces.iter_mut();
        for known in known.filter(|known| known.nsid == info.nsid) {
            *known = info;
        }
        self.facts.tell(info);
    }

    /// Returns the reason why registers read as all ones.
    pub(crate) fn absence(&self) -> String {
        self.device.gone().unwrap_or_else(|| {
            let name = self.device.name();
            format!("{name}: registers read as all ones, the device is gone")
        })
    }

    /// True if registers read as all ones; reads one at most every 10 ms.
    pub(crate) fn is_gone(&self) -> bool {
        let now_ns = self.now_ns();
        if now_ns < self.next_health_ns.load(Ordering::Relaxed) {
            return false;
        }
        self.next_health_ns
            .store(now_ns + HEALTH_NS, Ordering::Relaxed);
        self.device.registers().read32(offset::CSTS) == ALL_ONES
    }

    /// Sleeps until `until_ns`, but never longer than 100 us: an embedded controller is faster than the core
    /// expects of a device.
    pub fn sleep_until(&self, until_ns: u64) {
        let left = until_ns.saturating_sub(self.now_ns()).min(100_000);
        std::thread::sleep(Duration::from_nanos(left));
    }

    /// Returns the identify structure `cns` of `nsid`, 4,096 bytes.
    pub fn identify(&self, what: &str, cns: u8, nsid: Nsid) -> Result<DmaBuffer> {
        let buffer = DmaBuffer::new(&self.device, nvme_core::spec::identify::IDENTIFY_BYTES)?;
        let (_, buffer) = self.admin(what, admin::identify(cns, nsid), Some(buffer))?;
        buffer.ok_or_else(|| Error::internal(format!("{what} lost its buffer")))
    }
}

/// Returns the whole buffer, or nothing, as a command's data.
fn data_of(buffer: Option<&DmaBuffer>) -> CommandData<'static> {
    buffer.map_or(CommandData::None, |buffer| CommandData::Contiguous {
        iova: buffer.iova(),
        len: buffer.len() as u64,
    })
}

fn finish(what: &str, done: QueueCompletion) -> Result<(u32, Option<DmaBuffer>)> {
    match done.outcome {
        CommandOutcome::Completed(status) if status.is_success() => Ok((done.dw0, done.buffer)),
        CommandOutcome::Completed(status) => Err(Error::Command {
            what: what.to_owned(),
            status,
        }),
        CommandOutcome::Aborted(_) => Err(Error::device(
            format!("{what} was ended by a controller reset"),
            "try again",
        )),
    }
}
