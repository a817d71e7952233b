//! The queues that exist, and the commands in flight with the memory that each may use. Queues
//! appear and disappear with the admin commands that have succeeded, never with those that were
//! only submitted.

use crate::auditor::Auditor;
use crate::buffers::AddressRange;
use crate::data_pointer::{Memory, PointerList};
use crate::finding::Rule;
use crate::ring::RingPositions;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use nvme_spec::admin::{QUEUE_CONTIGUOUS, opcode};
use nvme_spec::{CQE_BYTES, SQE_BYTES, Sqe};

/// A command in flight.
#[derive(Debug)]
pub(crate) struct InFlightCommand {
    pub owner: u64,
    /// Position in the submission queue.
    pub position: u64,
    pub sqe: Sqe,
    pub spans: Vec<AddressRange>,
    pub lists: Vec<PointerList>,
}

#[derive(Debug)]
pub(crate) struct SqState {
    pub ring: RingPositions,
    pub owner: u64,
    pub cqid: u16,
    /// Positions published by the doorbell, fetched, and known to the driver as fetched (from SQHD
    /// or from a completion).
    pub tail: u64,
    pub fetched: u64,
    pub reported: u64,
    pub in_flight: BTreeMap<u16, InFlightCommand>,
    /// Entries published and not fetched, with their content at the time when the doorbell
    /// published them.
    pub published: BTreeMap<u64, Sqe>,
    /// True if the driver has reused an identifier in flight, so that the controller's completions
    /// cannot be checked.
    pub ambiguous: bool,
}

#[derive(Debug)]
pub(crate) struct CqState {
    pub ring: RingPositions,
    pub owner: u64,
    /// Positions posted, and freed by the doorbell.
    pub posted: u64,
    pub head: u64,
    pub users: u32,
}

/// Reads the entry at a position of a physically contiguous submission ring.
pub(crate) fn entry(ring: RingPositions, position: u64, memory: Memory<'_>) -> Option<Sqe> {
    let offset = u64::from(ring.index(position)) * SQE_BYTES as u64;
    let mut at = ring.base?.wrapping_add(offset);
    let mut words = [0; SQE_BYTES / 8];
    for word in &mut words {
        *word = memory(at)?;
        at = at.wrapping_add(8);
    }
    Some(Sqe::from_words(words))
}

impl Auditor {
    /// Adds a queue pair whose creation was not seen: address (`None` if it is unknown) and entries
    /// of each ring.
    pub fn add_pair(&mut self, qid: u16, sq: (Option<u64>, u32), cq: (Option<u64>, u32)) {
        self.add_cq(qid, cq.0, cq.1);
        self.add_sq(qid, sq.0, sq.1, qid);
    }

    pub(crate) fn add_cq(&mut self, qid: u16, base: Option<u64>, entries: u32) {
        let (owner, ring) = (self.owner(), RingPositions { base, entries });
        self.claim_ring(qid, owner, ring, CQE_BYTES, true);
        self.doorbells.remove(&(qid, true));
        self.cqs.insert(
            qid,
            CqState {
                ring,
                owner,
                posted: 0,
                head: 0,
                users: 0,
            },
        );
    }

    pub(crate) fn add_sq(&mut self, qid: u16, base: Option<u64>, entries: u32, cqid: u16) {
        let (owner, ring) = (self.owner(), RingPositions { base, entries });
        self.claim_ring(qid, owner, ring, SQE_BYTES, false);
        self.doorbells.remove(&(qid, false));
        if let Some(cq) = self.cqs.get_mut(&cqid) {
            cq.users += 1;
        }
        self.sqs.insert(
            qid,
            SqState {
                ring,
                owner,
                cqid,
                tail: 0,
                fetched: 0,
                reported: 0,
                in_flight: BTreeMap::new(),
                published: BTreeMap::new(),
                ambiguous: false,
            },
        );
    }

    pub(crate) fn claim_ring(
        &mut self,
        qid: u16,
        owner: u64,
        ring: RingPositions,
        entry: usize,
        writes: bool,
    ) {
        let Some(base) = ring.base else { return };
        let span = AddressRange::new(base, u64::from(ring.entries) * entry as u64);
        if let Some(at) = self.buffers.claim(owner, span, writes) {
            self.find(Rule::BufferShared, qid, None, at);
        }
    }

    pub(crate) fn release_ring(&mut self, owner: u64, ring: RingPositions, entry: usize) {
        if let Some(base) = ring.base {
            let span = AddressRange::new(base, u64::from(ring.entries) * entry as u64);
            self.buffers.release(owner, span);
        }
    }

    pub(crate) fn release_command(&mut self, command: &InFlightCommand) {
        for span in &command.spans {
            self.buffers.release(command.owner, *span);
        }
        for list in &command.lists {
            self.buffers.release(command.owner, list.span());
        }
    }

    /// Applies an admin command that has succeeded: it may have created or deleted a queue.
    pub(crate) fn apply_admin_command(&mut self, sqe: &Sqe) {
        let qid = sqe.cdw10 as u16;
        let entries = (sqe.cdw10 >> 16) + 1;
        let base = (sqe.cdw11 & QUEUE_CONTIGUOUS != 0).then_some(sqe.dptr[0]);
        let mqes = self.capabilities.as_ref().map_or(1 << 16, |one| one.mqes);
        let size_is_bad = entries < 2 || entries > mqes;
        let refused = match sqe.opcode() {
            opcode::CREATE_IO_CQ => {
                let bad = qid == 0 || size_is_bad || self.cqs.contains_key(&qid);
                if !bad {
                    self.add_cq(qid, base, entries);
                }
                bad
            }
            opcode::CREATE_IO_SQ => {
                let cqid = (sqe.cdw11 >> 16) as u16;
                let bad = qid == 0
                    || size_is_bad
                    || self.sqs.contains_key(&qid)
                    || cqid == 0
                    || !self.cqs.contains_key(&cqid);
                if !bad {
                    self.add_sq(qid, base, entries, cqid);
                }
                bad
            }
            opcode::DELETE_IO_SQ => qid == 0 || !self.remove_sq(qid),
            opcode::DELETE_IO_CQ => qid == 0 || !self.remove_cq(qid),
            _ => false,
        };
        if refused {
            self.find(Rule::QueueAccepted, 0, Some(sqe.cid().0), u64::from(qid));
        }
    }

    /// Removes a submission queue with its commands. Returns true if it existed.
    pub(crate) fn remove_sq(&mut self, qid: u16) -> bool {
        let Some(sq) = self.sqs.remove(&qid) else {
            return false;
        };
        for command in sq.in_flight.values() {
            self.release_command(command);
        }
        self.release_ring(sq.owner, sq.ring, SQE_BYTES);
        self.doorbells.remove(&(qid, false));
        if let Some(cq) = self.cqs.get_mut(&sq.cqid) {
            cq.users = cq.users.saturating_sub(1);
        }
        true
    }

    /// Removes a completion queue. True if it existed and no submission queue used it.
    pub(crate) fn remove_cq(&mut self, qid: u16) -> bool {
        let Some(cq) = self.cqs.remove(&qid) else {
            return false;
        };
        self.release_ring(cq.owner, cq.ring, CQE_BYTES);
        self.doorbells.remove(&(qid, true));
        cq.users == 0
    }
}
