//! The auditor's state of one controller: its queues, the commands in flight, and the memory that
//! each of them may use until it completes.

use crate::buffers::{AddressRange, BufferMap};
use crate::capabilities::ControllerCapabilities;
use crate::data_pointer::{Memory, PointerWalk};
use crate::finding::{Finding, ProtocolSide, Rule};
use crate::queues::{CqState, InFlightCommand, SqState, entry};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use nvme_spec::{Cqe, PageSize, Sqe};

/// Limit of the findings kept of each side; later ones are only counted.
const KEPT: usize = 256;

/// Watches one controller. Each method reports one event; they must be called in the order in which
/// the events happened.
///
/// A device that polls doorbells in memory sees only some of their values. It may report a doorbell
/// as late as it reads it; everything between two readings then counts as one move.
#[derive(Debug, Default)]
pub struct Auditor {
    pub(crate) capabilities: Option<ControllerCapabilities>,
    pub(crate) page: u64,
    pub(crate) sqs: BTreeMap<u16, SqState>,
    pub(crate) cqs: BTreeMap<u16, CqState>,
    /// Last value of each doorbell, by queue and side: a value that is reported again is not
    /// checked again.
    pub(crate) doorbells: BTreeMap<(u16, bool), u32>,
    pub(crate) buffers: BufferMap,
    owners: u64,
    commands: u64,
    completions: u64,
    findings: Vec<Finding>,
    /// Numbers of findings kept of the driver's side and of the controller's.
    kept: (usize, usize),
    found: u64,
}

impl Auditor {
    /// Makes an auditor that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the controller's own description of its limits, at first and after each change.
    /// Without it, commands, namespaces and data buffers are not checked, since every rule about
    /// them depends on it.
    pub fn describe(&mut self, capabilities: ControllerCapabilities) {
        self.capabilities = Some(capabilities);
    }

    /// Returns the findings, at most the first 256 of each side.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns the number of all findings, including those that were not kept.
    pub fn found(&self) -> u64 {
        self.found
    }

    /// Returns the numbers of commands fetched and of completions posted.
    pub fn seen(&self) -> (u64, u64) {
        (self.commands, self.completions)
    }

    pub(crate) fn find(&mut self, rule: Rule, qid: u16, cid: Option<u16>, value: u64) {
        if rule.side() == ProtocolSide::Controller && self.is_ambiguous(qid) {
            return;
        }
        self.found += 1;
        let kept = match rule.side() {
            ProtocolSide::Host => &mut self.kept.0,
            ProtocolSide::Controller => &mut self.kept.1,
        };
        if *kept < KEPT {
            *kept += 1;
            self.findings.push(Finding {
                rule,
                qid,
                cid,
                value,
                commands: self.commands,
            });
        }
    }

    /// True if the driver has used an identifier twice on queue `qid` or on the admin queue. A
    /// completion then names either of two commands, so that the controller's handling of them
    /// cannot be checked; the admin queue counts because it creates the others.
    fn is_ambiguous(&self, qid: u16) -> bool {
        let mut queues = [0, qid].into_iter().filter_map(|qid| self.sqs.get(&qid));
        queues.any(|sq| sq.ambiguous)
    }

    pub(crate) fn owner(&mut self) -> u64 {
        self.owners += 1;
        self.owners
    }

    /// Reports a controller reset of any kind: every queue is deleted, and the driver owns all
    /// memory again.
    pub fn reset(&mut self) {
        self.sqs.clear();
        self.cqs.clear();
        self.doorbells.clear();
        self.buffers.clear();
    }

    /// Reports that the controller is enabled, with pages of `page` and the admin rings at these
    /// addresses (`None` where an address is unknown).
    pub fn enable(&mut self, page: PageSize, asq: (Option<u64>, u32), acq: (Option<u64>, u32)) {
        self.reset();
        self.page = page.bytes();
        self.add_cq(0, acq.0, acq.1);
        self.add_sq(0, asq.0, asq.1, 0);
    }

    /// Records a doorbell value. Returns true if it differs from the last one, which was checked
    /// when it was first seen.
    fn is_news(&mut self, qid: u16, is_head: bool, value: u32) -> bool {
        self.doorbells.insert((qid, is_head), value).unwrap_or(0) != value
    }

    /// Reports that the tail doorbell of submission queue `qid` reads `value`. The entries that it
    /// publishes are in flight from now on; they are read where the ring is known and `memory`
    /// reaches it.
    pub fn sq_doorbell(&mut self, qid: u16, value: u32, memory: Memory<'_>) {
        if !self.is_news(qid, false, value) {
            return;
        }
        let Some(sq) = self.sqs.get_mut(&qid) else {
            return self.find(Rule::DoorbellAbsent, qid, None, u64::from(value));
        };
        if value >= sq.ring.entries {
            return self.find(Rule::DoorbellRange, qid, None, u64::from(value));
        }
        // A ring of n entries holds n - 1, so that full and empty differ. The driver learns the
        // head from completions alone: the limit is the head that these have reported, and not the
        // position that the device has reached.
        let limit = sq.reported + u64::from(sq.ring.entries) - 1;
        let mut from = sq.tail;
        let mut tail = sq.ring.first_from(from, value);
        if tail > limit {
            // The device continues from the value of the doorbell, so the auditor does too: the
            // alternative would report every later entry as an error.
            tail = sq.ring.first_from(sq.fetched, value);
            from = tail.min(from);
            let withdrawn: Vec<u64> = sq.published.range(tail..).map(|(at, _)| *at).collect();
            for at in withdrawn {
                self.withdraw(qid, at);
            }
            self.find(Rule::TailDoorbell, qid, None, u64::from(value));
        }
        let Some(sq) = self.sqs.get_mut(&qid) else {
            return;
        };
        let ring = sq.ring;
        sq.tail = tail;
        for at in from..tail {
            let Some(sqe) = entry(ring, at, memory) else {
                return;
            };
            let walk = self.check_command(qid, &sqe, memory);
            self.admit(qid, at, &sqe, walk);
            if let Some(sq) = self.sqs.get_mut(&qid) {
                sq.published.insert(at, sqe);
            }
        }
    }

    /// Removes a command that was published but not fetched.
    fn withdraw(&mut self, qid: u16, position: u64) {
        let Some(sq) = self.sqs.get_mut(&qid) else {
            return;
        };
        let Some(sqe) = sq.published.remove(&position) else {
            return;
        };
        let cid = sqe.cid().0;
        let in_flight = &mut sq.in_flight;
        if in_flight
            .get(&cid)
            .is_some_and(|one| one.position == position)
            && let Some(command) = in_flight.remove(&cid)
        {
            self.release_command(&command);
        }
    }

    /// Reports that the head doorbell of completion queue `qid` reads `value`.
    pub fn cq_doorbell(&mut self, qid: u16, value: u32) {
        let is_news = self.is_news(qid, true, value);
        let violation = match self.cqs.get_mut(&qid) {
            None => Rule::DoorbellAbsent,
            Some(cq) if value >= cq.ring.entries => Rule::DoorbellRange,
            Some(cq) => {
                let head = cq.ring.first_from(cq.head, value);
                if head <= cq.posted {
                    // The value may have pointed past the posted entries when it was written, which
                    // was reported then. Once they are posted it is valid, and the head has to
                    // follow it, or every later value would be an error.
                    cq.head = head;
                    return;
                }
                Rule::HeadDoorbell
            }
        };
        if is_news {
            self.find(violation, qid, None, u64::from(value));
        }
    }

    /// Reports a write to an offset behind the registers that belongs to no queue's doorbell.
    pub fn stray_doorbell(&mut self, offset: u64) {
        self.find(Rule::DoorbellAbsent, u16::MAX, None, offset);
    }

    /// Reports that the device has fetched `sqe` from entry `index` of submission queue `qid`.
    /// `memory` reads the memory that the device can read at that moment.
    pub fn fetched(&mut self, qid: u16, index: u32, sqe: &Sqe, memory: Memory<'_>) {
        if let Some(at) = self.fetch(qid, index, sqe) {
            let walk = self.check_command(qid, sqe, memory);
            self.admit(qid, at, sqe, walk);
        }
    }

    /// Reports a fetch like [`fetched`](Self::fetched), for an observer that sees neither the entry
    /// nor its data pointer but the memory that they led the device to: (address, bytes) in order.
    pub fn fetched_spans(&mut self, qid: u16, sqe: &Sqe, spans: &[(u64, u64)]) {
        let sq = self.sqs.get(&qid);
        let index = sq.map_or(0, |sq| sq.ring.index(sq.fetched));
        if let Some(at) = self.fetch(qid, index, sqe) {
            // The fields of an admin command are unknown here: judging zeroes would report false
            // errors.
            if qid != 0 {
                self.check_fields(qid, sqe);
            }
            let mut walk = PointerWalk::default();
            let spans = spans
                .iter()
                .map(|(at, bytes)| AddressRange::new(*at, *bytes));
            walk.spans.extend(spans);
            self.admit(qid, at, sqe, walk);
        }
    }

    /// Advances the fetch position. Returns it if the command is not in flight yet.
    fn fetch(&mut self, qid: u16, index: u32, sqe: &Sqe) -> Option<u64> {
        self.commands += 1;
        let cid = Some(sqe.cid().0);
        let Some(sq) = self.sqs.get_mut(&qid) else {
            self.find(Rule::UnknownQueue, qid, cid, u64::from(qid));
            return None;
        };
        let at = sq.fetched;
        let (early, expected) = (at >= sq.tail, sq.ring.index(at));
        let as_published = sq.published.get(&at).map(|published| published == sqe);
        sq.fetched += 1;
        if early {
            self.find(Rule::FetchedEarly, qid, cid, u64::from(index));
        } else if expected != index {
            self.find(Rule::EntryOrder, qid, cid, u64::from(index));
        }
        match as_published {
            Some(true) => {
                if let Some(sq) = self.sqs.get_mut(&qid) {
                    sq.published.remove(&at);
                }
                None
            }
            Some(false) => {
                self.withdraw(qid, at);
                self.find(Rule::EntryChanged, qid, cid, u64::from(index));
                Some(at)
            }
            None => Some(at),
        }
    }

    /// Adds a command, and the memory that it may use, to those in flight.
    fn admit(&mut self, qid: u16, position: u64, sqe: &Sqe, walk: PointerWalk) {
        let cid = sqe.cid().0;
        let owner = self.owner();
        if let Some((rule, value)) = walk.violation {
            self.find(rule, qid, Some(cid), value);
        }
        // Opcode bits 1:0 are the direction of the data: bit 1 is set for controller to host.
        let to_host = sqe.opcode() & 2 != 0;
        let mut conflict = None;
        for span in &walk.spans {
            conflict = conflict.or(self.buffers.claim(owner, *span, to_host));
        }
        for list in &walk.lists {
            conflict = conflict.or(self.buffers.claim(owner, list.span(), false));
        }
        let command = InFlightCommand {
            owner,
            position,
            sqe: *sqe,
            spans: walk.spans,
            lists: walk.lists,
        };
        let sq = self.sqs.get_mut(&qid);
        let before = sq.and_then(|sq| sq.in_flight.insert(cid, command));
        if let Some(before) = before {
            self.release_command(&before);
            self.find(Rule::CidReused, qid, Some(cid), u64::from(cid));
            if let Some(sq) = self.sqs.get_mut(&qid) {
                sq.ambiguous = true;
            }
        } else if let Some(at) = conflict {
            self.find(Rule::BufferShared, qid, Some(cid), at);
        }
    }

    /// Reports that the device moves data of command `cid` of submission queue `qid`, first at
    /// address `at`.
    pub fn moved(&mut self, qid: u16, cid: u16, at: u64) {
        let in_flight = self
            .sqs
            .get(&qid)
            .is_some_and(|sq| sq.in_flight.contains_key(&cid));
        if !in_flight {
            self.find(Rule::DataLate, qid, Some(cid), at);
        }
    }

    /// Reports that the device is about to post `cqe` to entry `index` of completion queue `cqid`.
    /// `whole` is true if no part of the entry becomes visible after its phase tag.
    pub fn posted(
        &mut self,
        cqid: u16,
        index: Option<u32>,
        cqe: &Cqe,
        whole: bool,
        memory: Memory<'_>,
    ) {
        self.completions += 1;
        let (cid, sqid) = (cqe.cid, cqe.sqid);
        let find = |this: &mut Self, rule, value| this.find(rule, sqid, Some(cid), value);
        let Some(cq) = self.cqs.get_mut(&cqid) else {
            return find(self, Rule::UnknownQueue, u64::from(cqid));
        };
        let at = cq.ring.index(cq.posted);
        let full = cq.posted + 1 >= cq.head + u64::from(cq.ring.entries);
        let phase = (cq.posted / u64::from(cq.ring.entries)).is_multiple_of(2);
        cq.posted += 1;
        if let Some(index) = index.filter(|index| *index != at) {
            find(self, Rule::EntryOrder, u64::from(index));
        }
        if full {
            find(self, Rule::CqOverrun, u64::from(at));
        }
        if cqe.phase() != phase {
            find(self, Rule::PhaseTag, u64::from(cqe.phase_status));
        }
        if !whole {
            find(self, Rule::TornEntry, u64::from(at));
        }
        let Some(sq) = self.sqs.get_mut(&sqid).filter(|sq| sq.cqid == cqid) else {
            return find(self, Rule::UnknownQueue, u64::from(sqid));
        };
        // A device cannot complete a command that it has not fetched: a published one is not a
        // candidate yet.
        let fetched = sq.fetched;
        let known = sq
            .in_flight
            .get(&cid)
            .is_some_and(|one| one.position < fetched);
        let command = known.then(|| sq.in_flight.remove(&cid)).flatten();
        // The head in a completion lies behind the command that it completes. It may be older than
        // a head reported before, because completions of several queues are not ordered among each
        // other.
        let least = command.as_ref().map_or(0, |one| one.position + 1);
        let sqhd = u32::from(cqe.sqhd);
        let head = (sqhd < sq.ring.entries)
            .then(|| sq.ring.last_until(sq.fetched, sqhd))
            .flatten()
            .filter(|head| *head >= least);
        // A completion proves that its command was fetched, whatever head it carries. So the driver
        // may reuse that entry from now on, and the limit of the tail doorbell moves.
        sq.reported = sq.reported.max(head.unwrap_or(0)).max(least);
        if head.is_none() {
            find(self, Rule::SqHead, u64::from(sqhd));
        }
        let Some(command) = command else {
            return find(self, Rule::UnknownCommand, u64::from(cid));
        };
        for list in &command.lists {
            if let Some(at) = list.changed(memory) {
                find(self, Rule::ListChanged, at);
            }
        }
        self.release_command(&command);
        if sqid == 0 && cqe.status().is_success() {
            self.apply_admin_command(&command.sqe);
        }
    }

    /// Reports a completion whose other fields are unknown; see [`posted`](Self::posted).
    pub fn completed(&mut self, cqid: u16, cid: u16, success: bool) {
        self.completions += 1;
        let Some(cq) = self.cqs.get_mut(&cqid) else {
            return self.find(Rule::UnknownQueue, cqid, Some(cid), u64::from(cqid));
        };
        cq.posted += 1;
        let mut here = self.sqs.iter_mut().filter(|(_, sq)| sq.cqid == cqid);
        let found = here.find_map(|(qid, sq)| Some((*qid, sq.in_flight.remove(&cid)?)));
        let Some((sqid, command)) = found else {
            return self.find(Rule::UnknownCommand, cqid, Some(cid), u64::from(cid));
        };
        self.release_command(&command);
        if sqid == 0 && success {
            self.apply_admin_command(&command.sqe);
        }
    }

    /// Treats every fetched entry as known to the driver, for an observer that cannot see the heads
    /// that completions report.
    pub fn reports_all(&mut self, qid: u16) {
        if let Some(sq) = self.sqs.get_mut(&qid) {
            sq.reported = sq.fetched;
        }
    }

    /// Returns the number of commands fetched and not completed, Asynchronous Event Requests
    /// included.
    pub fn in_flight(&self) -> usize {
        self.sqs.values().map(|sq| sq.in_flight.len()).sum()
    }
}
