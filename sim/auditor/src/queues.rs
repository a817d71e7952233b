//! The queues that exist, and the commands in flight with the memory that each may use. Queues
//! appear and disappear with the admin commands that have succeeded, never with those that were
//! only submitted.

use crate::auditor::Auditor;
use crate::finding::Rule;
use crate::lent::Span;
use crate::ring::Ring;
use crate::walk::{List, Memory};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use nvme_spec::admin::{QUEUE_CONTIGUOUS, opcode};
use nvme_spec::{CQE_BYTES, SQE_BYTES, Sqe};

/// A command in flight.
#[derive(Debug)]
pub(crate) struct Flight {
    pub owner: u64,
    /// Position in the submission queue.
    pub position: u64,
    pub sqe: Sqe,
    pub spans: Vec<Span>,
    pub lists: Vec<List>,
}

#[derive(Debug)]
pub(crate) struct Sq {
    pub ring: Ring,
    pub owner: u64,
    pub cqid: u16,
    /// Positions published by the doorbell, fetched, and known to the driver as fetched (from SQHD
    /// or from a completion).
    pub tail: u64,
    pub fetched: u64,
    pub reported: u64,
    pub flights: BTreeMap<u16, Flight>,
    /// Entries published and not fetched, as they were when the doorbell published them.
    pub published: BTreeMap<u64, Sqe>,
    /// The driver has reused an identifier in flight, so the controller's completions cannot be
    /// judged.
    pub doubtful: bool,
}

#[derive(Debug)]
pub(crate) struct Cq {
    pub ring: Ring,
    pub owner: u64,
    /// Positions posted, and freed by the doorbell.
    pub posted: u64,
    pub head: u64,
    pub users: u32,
}

/// Reads the entry at a position of a physically contiguous submission ring.
pub(crate) fn entry(ring: Ring, position: u64, memory: Memory<'_>) -> Option<Sqe> {
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
    /// Adds a queue pair whose creation was not seen: address (`None` where it is unknown) and
    /// entries of each ring.
    pub fn add_pair(&mut self, qid: u16, sq: (Option<u64>, u32), cq: (Option<u64>, u32)) {
        self.add_cq(qid, cq.0, cq.1);
        self.add_sq(qid, sq.0, sq.1, qid);
    }

    pub(crate) fn add_cq(&mut self, qid: u16, base: Option<u64>, entries: u32) {
        let (owner, ring) = (self.owner(), Ring { base, entries });
        self.lend_ring(qid, owner, ring, CQE_BYTES, true);
        self.bells.remove(&(qid, true));
        self.cqs.insert(
            qid,
            Cq {
                ring,
                owner,
                posted: 0,
                head: 0,
                users: 0,
            },
        );
    }

    pub(crate) fn add_sq(&mut self, qid: u16, base: Option<u64>, entries: u32, cqid: u16) {
        let (owner, ring) = (self.owner(), Ring { base, entries });
        self.lend_ring(qid, owner, ring, SQE_BYTES, false);
        self.bells.remove(&(qid, false));
        if let Some(cq) = self.cqs.get_mut(&cqid) {
            cq.users += 1;
        }
        self.sqs.insert(
            qid,
            Sq {
                ring,
                owner,
                cqid,
                tail: 0,
                fetched: 0,
                reported: 0,
                flights: BTreeMap::new(),
                published: BTreeMap::new(),
                doubtful: false,
            },
        );
    }

    pub(crate) fn lend_ring(
        &mut self,
        qid: u16,
        owner: u64,
        ring: Ring,
        entry: usize,
        writes: bool,
    ) {
        let Some(base) = ring.base else { return };
        let span = Span::new(base, u64::from(ring.entries) * entry as u64);
        if let Some(at) = self.lent.lend(owner, span, writes) {
            self.find(Rule::BufferShared, qid, None, at);
        }
    }

    pub(crate) fn return_ring(&mut self, owner: u64, ring: Ring, entry: usize) {
        if let Some(base) = ring.base {
            let span = Span::new(base, u64::from(ring.entries) * entry as u64);
            self.lent.give_back(owner, span);
        }
    }

    pub(crate) fn return_flight(&mut self, flight: &Flight) {
        for span in &flight.spans {
            self.lent.give_back(flight.owner, *span);
        }
        for list in &flight.lists {
            self.lent.give_back(flight.owner, list.span());
        }
    }

    /// Applies an admin command that has succeeded: it may have created or deleted a queue.
    pub(crate) fn took_effect(&mut self, sqe: &Sqe) {
        let qid = sqe.cdw10 as u16;
        let entries = (sqe.cdw10 >> 16) + 1;
        let base = (sqe.cdw11 & QUEUE_CONTIGUOUS != 0).then_some(sqe.dptr[0]);
        let mqes = self.account.as_ref().map_or(1 << 16, |one| one.mqes);
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

    /// Removes a submission queue with its commands. True if it existed.
    pub(crate) fn remove_sq(&mut self, qid: u16) -> bool {
        let Some(sq) = self.sqs.remove(&qid) else {
            return false;
        };
        for flight in sq.flights.values() {
            self.return_flight(flight);
        }
        self.return_ring(sq.owner, sq.ring, SQE_BYTES);
        self.bells.remove(&(qid, false));
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
        self.return_ring(cq.owner, cq.ring, CQE_BYTES);
        self.bells.remove(&(qid, true));
        cq.users == 0
    }
}
