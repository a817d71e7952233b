//! Reports the events that a driver can observe to a protocol auditor: doorbells, fetches,
//! completions.
//!
//! Only with [`Config::audit`](crate::Config): otherwise queues have no [`QueueWatch`], and the fast
//! path is compiled without it. A completion is reported before its entry is written, and the
//! events of a queue under its lock, so that the auditor never sees an effect before its cause.

use crate::bus::ring::QueueRing;
use crate::memory::{Dma, SpinLock};
use alloc::sync::Arc;
use alloc::vec::Vec;
use nvme_auditor::{Auditor, ControllerCapabilities, Finding};
use nvme_spec::{Cqe, PageSize, Sqe};

/// The protocol auditor of one controller.
#[derive(Clone, Default)]
pub(crate) struct AuditObserver(Arc<SpinLock<Auditor>>);

impl AuditObserver {
    /// Returns the reporter of the events of queue `qid`.
    pub fn watch(&self, qid: u16) -> QueueWatch {
        QueueWatch {
            observer: self.clone(),
            qid,
        }
    }

    /// Reports the controller's capabilities and namespaces, at first and after each change.
    pub fn describe(&self, capabilities: ControllerCapabilities) {
        self.0.lock().describe(capabilities);
    }

    pub fn enable(&self, page: PageSize, asq: &QueueRing, acq: &QueueRing) {
        let ring = |ring: &QueueRing| (Some(ring.run(0, 1).0), ring.entries);
        self.0.lock().enable(page, ring(asq), ring(acq));
    }

    pub fn reset(&self) {
        self.0.lock().reset();
    }

    /// Reports the tail doorbell of a queue that does not exist.
    pub fn absent(&self, qid: u16, value: u32, dma: &Dma<'_>) {
        self.0.lock().sq_doorbell(qid, value, &|at| word(dma, at));
    }

    /// Reports a write behind the registers that is no doorbell.
    pub fn stray(&self, offset: usize) {
        self.0.lock().stray_doorbell(offset as u64);
    }

    pub fn findings(&self) -> Vec<Finding> {
        self.0.lock().findings().to_vec()
    }

    /// Returns the numbers of commands and completions checked.
    pub fn seen(&self) -> (u64, u64) {
        self.0.lock().seen()
    }
}

/// Reports the events of one queue.
#[derive(Clone)]
pub(crate) struct QueueWatch {
    observer: AuditObserver,
    qid: u16,
}

impl QueueWatch {
    #[cold]
    pub fn tail(&self, value: u32, dma: &Dma<'_>) {
        let mut auditor = self.observer.0.lock();
        auditor.sq_doorbell(self.qid, value, &|at| word(dma, at));
    }

    #[cold]
    pub fn head(&self, value: u32) {
        self.observer.0.lock().cq_doorbell(self.qid, value);
    }

    #[cold]
    pub fn fetched(&self, index: u32, sqe: &Sqe, dma: &Dma<'_>) {
        let mut auditor = self.observer.0.lock();
        auditor.fetched(self.qid, index, sqe, &|at| word(dma, at));
    }

    /// Reports that data of `sqe` moves after its completion.
    #[cold]
    pub fn moved(&self, sqe: &Sqe) {
        let mut auditor = self.observer.0.lock();
        auditor.moved(self.qid, sqe.cid().0, sqe.dptr[0]);
    }

    #[cold]
    pub fn posted(&self, index: u32, cqe: &Cqe, whole: bool, dma: &Dma<'_>) {
        let mut auditor = self.observer.0.lock();
        auditor.posted(self.qid, Some(index), cqe, whole, &|at| word(dma, at));
    }
}

fn word(dma: &Dma<'_>, at: u64) -> Option<u64> {
    dma.words::<1>(at).ok().map(|[word]| word)
}

impl core::fmt::Debug for QueueWatch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("QueueWatch")
            .field("qid", &self.qid)
            .finish_non_exhaustive()
    }
}
