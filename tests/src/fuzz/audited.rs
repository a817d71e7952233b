//! The auditor of a controller that lies: a new auditor for each reset, and none after a lie that it cannot see.

use crate::audit::driver_is_right;
use nvme_auditor::{Auditor, ControllerCapabilities};
use nvme_core::spec::register::{Aqa, Cc};
use nvme_core::spec::{Cqe, PageSize, Sqe};

/// Reads a word of memory as the controller does.
type Memory<'a> = &'a dyn Fn(u64) -> Option<u64>;

/// Everything that was seen since the last reset.
pub struct Audited {
    is_audited: bool,
    /// `None` after the driver got an input that the auditor did not see.
    auditor: Option<Auditor>,
    /// Tail and head doorbell of each queue as they were seen last; values of deleted queues remain.
    bells: [(u32, u32); 2],
}

impl Audited {
    /// Creates an auditor that has seen no queue yet, or none if `is_audited` is false.
    pub fn new(is_audited: bool) -> Self {
        Self {
            is_audited,
            auditor: is_audited.then(|| {
                let mut auditor = Auditor::new();
                auditor.describe(ControllerCapabilities::unrestricted(&[1]));
                auditor
            }),
            bells: [(0, 0); 2],
        }
    }

    /// Judges the driver up to here.
    ///
    /// # Panics
    /// If the driver broke a rule that no lie explains.
    pub fn judge(&self) {
        if let Some(auditor) = &self.auditor {
            driver_is_right(auditor.findings());
        }
    }

    /// Notes that the controller has forgotten its queues.
    pub fn reset(&mut self) {
        self.judge();
        *self = Self::new(self.is_audited);
    }

    /// Stops the audit: the driver got an input that no doorbell, entry or completion shows.
    pub fn lose(&mut self) {
        self.judge();
        self.auditor = None;
    }

    /// Notes that the driver has enabled the controller with these admin queue registers.
    pub fn enable(&mut self, cc: Cc, (aqa, asq, acq): (u32, u64, u64)) {
        let aqa = Aqa(aqa);
        let entries = [aqa.asqs_z(), aqa.acqs_z()].map(|entries_z| u32::from(entries_z) + 1);
        if let (Some(auditor), Some(page)) = (&mut self.auditor, PageSize::from_mps(cc.mps())) {
            auditor.enable(page, (Some(asq), entries[0]), (Some(acq), entries[1]));
        }
    }

    pub fn doorbells(&mut self, qid: u16, tail: u32, head: u32, memory: Memory<'_>) {
        let before = std::mem::replace(&mut self.bells[usize::from(qid)], (tail, head));
        let Some(auditor) = &mut self.auditor else {
            return;
        };
        if tail != before.0 {
            auditor.sq_doorbell(qid, tail, memory);
        }
        if head != before.1 {
            auditor.cq_doorbell(qid, head);
        }
    }

    pub fn fetched(&mut self, qid: u16, index: u32, sqe: &Sqe, memory: Memory<'_>) {
        if let Some(auditor) = &mut self.auditor {
            auditor.fetched(qid, index, sqe, memory);
        }
    }

    pub fn posted(&mut self, qid: u16, index: u32, cqe: &Cqe, memory: Memory<'_>) {
        if let Some(auditor) = &mut self.auditor {
            auditor.posted(qid, Some(index), cqe, true, memory);
        }
    }
}
