//! I/O queue pairs of a session: creation, deletion, and their end together with the controller. A queue that
//! cannot be deleted keeps its memory, because the controller may still write to it.

use super::{AdminSession, ControllerSession};
use crate::controller::queue_inner::{ExpiredCommands, QueueInner};
use crate::controller::statistics::QueueStatistics;
use crate::device::ring_memory::RingMemory;
use crate::dma::{OwnedPair, PairShape};
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::bringup::{ControllerInfo, QueuePlan};
use nvme_core::recovery::{DeletionStep, QueueDeletion};
use nvme_core::shutdown;
use nvme_core::spec::Qid;
use nvme_core::spec::admin::{self, QueueParams};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

impl ControllerSession {
    /// Creates the next I/O queue pair of `entries` entries, with its rings in `place` if there is one.
    pub(crate) fn create_queue(
        self: &Arc<Self>,
        entries: u32,
        place: Option<&Arc<RingMemory>>,
    ) -> Result<Arc<Mutex<QueueInner>>> {
        let mut admin = lock(&self.admin);
        let capabilities = admin.info.capabilities;
        let qid = self.free_qid(&admin.info)?;
        let shape = PairShape {
            qid,
            entries: entries.clamp(2, capabilities.max_entries),
            page: capabilities.page,
            max_bytes: self.max_transfer(&admin.info),
            sgl_bytes: admin.info.sgl_bytes,
            dstrd: capabilities.dstrd,
            vector: self.interrupts.vector(qid),
        };
        let pair = OwnedPair::new(&self.device, shape, place.or(self.ring_memory.as_ref()))?;
        self.create_at_controller(&mut admin, &pair.plan())?;
        let statistics = QueueStatistics::default();
        let inner = QueueInner {
            failed_reset: None,
            pair,
            backlog: VecDeque::new(),
            expired: ExpiredCommands::default(),
            statistics,
            #[cfg(feature = "cuda")]
            lent: None,
        };
        let inner = Arc::new(Mutex::new(inner));
        lock(&self.queues).insert(qid.0, Arc::clone(&inner));
        Ok(inner)
    }

    /// Returns the lowest identifier that no queue has.
    fn free_qid(&self, info: &ControllerInfo) -> Result<Qid> {
        let queues = lock(&self.queues);
        let most = info.queue_pairs.min(65_535) as u16;
        let free = (1..=most).find(|qid| !queues.contains_key(qid));
        free.map(Qid).ok_or_else(|| {
            Error::usage(
                format!("all {most} queue pairs that the controller grants are in use"),
                "use fewer queues",
            )
        })
    }

    /// Creates both queues of `plan`, or neither.
    fn create_at_controller(&self, admin: &mut AdminSession, plan: &QueuePlan) -> Result<()> {
        let qid = plan.qid;
        let cq = QueueParams {
            qid,
            entries: plan.cq_entries,
            iova: plan.cq_iova,
        };
        let sq = QueueParams {
            qid,
            entries: plan.sq_entries,
            iova: plan.sq_iova,
        };
        let create = admin::create_io_cq(cq, plan.vector);
        self.admin_locked(admin, "Create I/O Completion Queue", create, None)?;
        let create = admin::create_io_sq(sq, qid);
        let created = self.admin_locked(admin, "Create I/O Submission Queue", create, None);
        if created.is_err() {
            // Else the identifier stays in use. A second failure adds nothing to the first, so it is ignored.
            let delete = admin::delete_io_cq(qid);
            let _ = self.admin_locked(admin, "Delete I/O Completion Queue", delete, None);
        }
        created.map(drop)
    }

    /// Returns the longest transfer of one command, in bytes.
    pub fn max_transfer(&self, info: &ControllerInfo) -> u64 {
        info.max_transfer
            .unwrap_or(u64::MAX)
            .min(self.config.max_transfer)
    }

    /// Deletes a queue whose handle is going away. Commands in flight end with it: their buffers come
    /// back once the controller has deleted the submission queue. A queue that cannot be deleted
    /// stays, with its buffers, until shutdown or a reset.
    pub fn retire(&self, qid: Qid) {
        if self.closed.load(Ordering::Relaxed) {
            lock(&self.queues).remove(&qid.0);
            return;
        }
        let mut admin = lock(&self.admin);
        let Some(inner) = lock(&self.queues).get(&qid.0).cloned() else {
            return;
        };
        if admin.failed.is_none() && self.delete_queue(&mut admin, &inner) {
            lock(&self.queues).remove(&qid.0);
        }
    }

    fn delete_queue(&self, admin: &mut AdminSession, inner: &Mutex<QueueInner>) -> bool {
        let closed = lock(inner).pair.queue().close();
        let mut deletion = QueueDeletion::new(closed, self.timeout_ns());
        loop {
            self.admin_view.advance(&admin.pair);
            let AdminSession { pair, events, .. } = &mut *admin;
            let now_ns = self.now_ns();
            match deletion.step(pair.queue(), now_ns, |other| events.take(other)) {
                DeletionStep::Done => return true,
                DeletionStep::ResetNeeded(_) => return false,
                DeletionStep::Wait { .. } if self.is_gone() => return false,
                DeletionStep::Wait { until_ns } => self.sleep_until(until_ns),
                DeletionStep::Emptied(proof) => {
                    let mut inner = lock(inner);
                    // No call waits for these completions any more; reaping them returns the buffers.
                    let _ = inner.drain(|| self.now_ns());
                    while inner.pair.queue().reclaim(&proof).is_some() {}
                }
            }
        }
    }

    /// Performs a normal shutdown, once: the controller saves its state and stops accessing memory.
    pub fn shut_down(&self) -> Result<()> {
        // The swap decides which of several callers shuts down: a handle that is dropped on another thread, or
        // the session itself. SeqCst is stronger than needed; this runs once, and the admin lock below orders
        // everything else.
        if self.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let mut admin = lock(&self.admin);
        let queues: Vec<_> = lock(&self.queues).values().cloned().collect();
        if let Some(cause) = &admin.failed {
            let cause = cause.clone();
            self.keep_forever(&mut admin, &queues);
            return Err(Error::Gone { cause });
        }
        if admin.host_memory.is_some() {
            let take_back = nvme_core::spec::feature::host_memory_buffer(
                false,
                false,
                0,
                nvme_core::spec::Iova(0),
                0,
            );
            // Best effort: the shutdown below ends the controller's use of it too.
            let _ = self.admin_locked(
                &mut admin,
                "Set Features, Host Memory Buffer",
                take_back,
                None,
            );
        }
        self.last_events(&mut admin);
        let timeout_ms = admin.info.shutdown_timeout_ms;
        let mut machine =
            shutdown::ShutdownMachine::new(shutdown::ShutdownKind::Normal, timeout_ms);
        loop {
            match machine.step(self.device.registers(), self.now_ns()) {
                Ok(shutdown::ShutdownStep::Done(proof)) => {
                    for inner in &queues {
                        let mut inner = lock(inner);
                        while let Some(completion) = inner.pair.queue().reclaim(&proof) {
                            inner.backlog.push_back(completion.into());
                        }
                    }
                    while admin.pair.queue().reclaim(&proof).is_some() {}
                    admin.failed = Some("the controller was shut down".to_owned());
                    if machine.was_fatal() {
                        return Err(Error::device(
                            "the controller reported a fatal error (CSTS.CFS) and was reset in place of a shutdown",
                            "what it had not flushed may be lost; see `nvme-gpu error-log`",
                        ));
                    }
                    return Ok(());
                }
                Ok(shutdown::ShutdownStep::Wait { until_ns }) => self.sleep_until(until_ns),
                Err(error) => {
                    self.keep_forever(&mut admin, &queues);
                    admin.failed = Some(error.to_string());
                    let cause = self.device.gone();
                    return Err(Error::Gone {
                        cause: cause.unwrap_or_else(|| format!("shutdown: {error}")),
                    });
                }
            }
        }
    }

    /// Leaks memory that the controller may still write to, unless the controller is gone.
    fn keep_forever(&self, admin: &mut AdminSession, queues: &[Arc<Mutex<QueueInner>>]) {
        if self.device.gone().is_some() {
            return;
        }
        admin.pair.keep_forever();
        if let Some(memory) = admin.host_memory.take() {
            std::mem::forget(memory);
        }
        for inner in queues {
            lock(inner).pair.keep_forever();
        }
    }
}
