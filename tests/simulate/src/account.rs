//! Checks every command: it ends exactly once, with a status that is allowed, in time, and with the right data.

mod verdict;

use crate::buffers::Pool;
use crate::model::Model;
use crate::plan::{Order, Verb};
use crate::queue::End;
use nvme_core::CommandOutcome;
use nvme_core::spec::Cid;
use nvme_sim::{Fault, FiredFault};
use std::collections::VecDeque;
use verdict::{check_status, is_aborted};

/// A fault that an oracle found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which oracle.
    pub oracle: &'static str,
    /// Text about what the oracle saw.
    pub text: String,
}

impl Failure {
    /// Returns whether `other` is the same failure with other numbers.
    pub fn is_like(&self, other: &Self) -> bool {
        let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
        self.oracle == other.oracle && words(&self.text) == words(&other.text)
    }

    /// Returns a failure of `oracle`.
    pub fn new(oracle: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { oracle, text }
    }
}

/// A command that was placed.
#[derive(Clone, Debug)]
pub struct Record {
    /// The order as it was drawn, with the blocks that it got.
    pub order: Order,
    /// I/O queue, 0 or 1.
    pub queue: usize,
    /// Identifier of the command.
    pub cid: Cid,
    /// Index of its buffer, and the first word and the number of words of its data.
    pub buffer: Option<(usize, usize, usize)>,
    /// Deadline of the command.
    pub deadline_ns: u64,
    /// The expected result of a Compare, if it is certain.
    pub same: Option<bool>,
    /// The fault that the command has met.
    pub fault: Option<Fault>,
    /// True if its deadline was reported as passed.
    pub expired: bool,
    /// An Abort was sent for it, or its queue was being deleted.
    pub abortable: bool,
    /// Number of power cuts before the command was placed.
    pub cuts: u32,
    /// The model's clock when it was placed.
    pub stamp: u64,
    /// True if the second part of its fault has already arrived.
    pub laid: bool,
    /// True if the command has ended.
    pub ended: bool,
}

/// A command that has completed and whose data may still move: its memory and blocks stay with it.
struct Haunted {
    queue: usize,
    cid: Cid,
    id: u32,
}

/// The accounts of all commands.
pub struct Accounts<'a> {
    records: Vec<Record>,
    /// Commands that are not expired yet, by queue, by deadline.
    awaited: [VecDeque<u32>; 2],
    haunted: Vec<Haunted>,
    /// Echoes that were posted and may lie unread in the completion ring: a queue that reads one is refused.
    echoes: Vec<(usize, Cid)>,
    /// The buffers.
    pub pool: Pool<'a>,
    /// The blocks.
    pub model: Model,
    /// Power cuts so far.
    pub cuts: u32,
    /// Commands in flight.
    pub open: u32,
}

fn writes(verb: Verb) -> bool {
    matches!(verb, Verb::Write | Verb::WriteThrough | Verb::Zero)
}

/// Returns whether the command reserves blocks.
fn locks(verb: Verb) -> bool {
    !matches!(verb, Verb::Flush | Verb::OutOfRange)
}

impl<'a> Accounts<'a> {
    /// Makes the accounts, without commands.
    pub fn new(pool: Pool<'a>, model: Model) -> Self {
        Self {
            records: Vec::with_capacity(256),
            awaited: Default::default(),
            haunted: Vec::new(),
            echoes: Vec::new(),
            pool,
            model,
            cuts: 0,
            open: 0,
        }
    }

    /// Returns the number of the next command, from 1 on.
    pub fn next_id(&self) -> u32 {
        self.records.len() as u32 + 1
    }

    /// Returns the record of a command.
    pub fn record(&mut self, id: u32) -> Option<&mut Record> {
        self.records.get_mut((id as usize).wrapping_sub(1))
    }

    /// Notes that a command was placed; its number is [`next_id`](Self::next_id).
    pub fn placed(&mut self, record: Record) {
        self.awaited[record.queue].push_back(self.next_id());
        self.records.push(record);
        self.open += 1;
    }

    /// Frees the blocks and the buffer of a command that was prepared and not placed.
    pub fn forget(&mut self, order: &Order, buffer: Option<(usize, usize, usize)>) {
        if locks(order.verb) {
            self.model
                .unlock(order.lba, order.blocks, writes(order.verb));
        }
        if let Some((buffer, start, len)) = buffer {
            self.pool.give(buffer, start, len);
        }
    }

    /// Takes the buffer of a command in flight away from it, as no driver may.
    pub(crate) fn take_back(&mut self, id: u32) {
        let record = &mut self.records[id as usize - 1];
        if let Some((buffer, start, len)) = record.buffer.take() {
            self.pool.give(buffer, start, len);
        }
    }

    /// Returns whether late data or echoes may still arrive.
    pub fn any_haunted(&self) -> bool {
        !self.haunted.is_empty()
    }

    /// Returns the number of the command in flight that has this identifier.
    pub fn in_flight(&self, queue: usize, cid: Cid) -> Option<u32> {
        let find = |record: &Record| !record.ended && record.queue == queue && record.cid == cid;
        self.records.iter().rposition(find).map(|at| at as u32 + 1)
    }

    /// Returns whether a late echo of this identifier may still arrive, or lie unread in the ring.
    pub fn is_haunted(&self, queue: usize, cid: Cid) -> bool {
        let same = |one: &Haunted| one.queue == queue && one.cid == cid;
        self.haunted.iter().any(same) || self.echoes.contains(&(queue, cid))
    }

    /// Notes that a command of an I/O queue has met a fault, as the controller reports.
    pub fn fired(&mut self, fired: FiredFault) {
        let (queue, cid) = (usize::from(fired.qid) - 1, Cid(fired.cid));
        match fired.what {
            Fault::Echo(0) | Fault::LateData(0) => {
                let same = |one: &Haunted| one.queue == queue && one.cid == cid;
                if let Some(at) = self.haunted.iter().position(same) {
                    let haunted = self.haunted.swap_remove(at);
                    self.leave(haunted.id);
                    if fired.what == Fault::Echo(0) {
                        self.echoes.push((queue, cid));
                    }
                } else if let Some(id) = self.in_flight(queue, cid) {
                    // The driver has not even seen the first part.
                    self.records[id as usize - 1].laid = true;
                }
            }
            what => {
                if let Some(id) = self.in_flight(queue, cid) {
                    self.records[id as usize - 1].fault = Some(what);
                }
            }
        }
    }

    /// Forgets the commands of `queue` that could have had late data or echoes: the controller has forgotten them.
    pub fn laid_to_rest(&mut self, queue: usize) {
        self.echoes.retain(|(of, _)| *of != queue);
        let (gone, rest) = std::mem::take(&mut self.haunted)
            .into_iter()
            .partition(|one| one.queue == queue);
        self.haunted = rest;
        let gone: Vec<Haunted> = gone;
        gone.iter().for_each(|one| self.leave(one.id));
    }

    /// Gives the memory and the blocks of a command back.
    fn leave(&mut self, id: u32) {
        let record = &self.records[id as usize - 1];
        let (order, buffer, ended) = (record.order, record.buffer, record.ended);
        if !ended {
            return;
        }
        if locks(order.verb) {
            self.model
                .unlock(order.lba, order.blocks, writes(order.verb));
        }
        if let Some((buffer, start, len)) = buffer {
            self.pool.give(buffer, start, len);
        }
    }

    /// Notes that a command's deadline was reported as passed, at `now_ns`; the resolution of the driver's clock is
    /// `grain_ns`.
    pub fn expired(&mut self, id: u32, now_ns: u64, grain_ns: u64) -> Result<(), Failure> {
        let Some(record) = self.record(id).filter(|record| !record.ended) else {
            return Err(Failure::new(
                "account",
                format!("command {id} expired and is not in flight"),
            ));
        };
        if record.expired {
            return Err(Failure::new(
                "account",
                format!("command {id} expired twice"),
            ));
        }
        if now_ns + grain_ns < record.deadline_ns {
            return Err(Failure::new(
                "deadline",
                format!("command {id} expired too early"),
            ));
        }
        record.expired = true;
        Ok(())
    }

    /// Checks, after the driver of `queue` was asked, that it named every command past its deadline.
    pub fn check_deadlines(
        &mut self,
        queue: usize,
        now_ns: u64,
        grain_ns: u64,
    ) -> Result<(), Failure> {
        while let Some(id) = self.awaited[queue].front() {
            let record = &self.records[*id as usize - 1];
            if record.ended || record.expired {
                self.awaited[queue].pop_front();
            } else if record.deadline_ns + grain_ns <= now_ns {
                let text =
                    format!("command {id} is past its deadline and the driver does not say so");
                return Err(Failure::new("deadline", text));
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the earliest deadline of `queue` that was not reported yet.
    pub fn next_deadline(&self, queue: usize) -> Option<u64> {
        let alive = |id: &&u32| {
            let record = &self.records[**id as usize - 1];
            !record.ended && !record.expired
        };
        let first = self.awaited[queue].iter().find(alive)?;
        Some(self.records[*first as usize - 1].deadline_ns)
    }

    /// Returns the first command of `queue` that is past its deadline and in flight.
    pub fn overdue(&self, queue: usize) -> Option<u32> {
        let find = |record: &Record| !record.ended && record.expired && record.queue == queue;
        self.records.iter().position(find).map(|at| at as u32 + 1)
    }

    /// Returns whether any command is overdue.
    pub fn any_overdue(&self) -> bool {
        self.records
            .iter()
            .any(|record| !record.ended && record.expired)
    }

    /// Notes that every command of `queue` in flight may end as aborted.
    pub fn abortable(&mut self, queue: usize) {
        let mine = |record: &&mut Record| !record.ended && record.queue == queue;
        self.records
            .iter_mut()
            .filter(mine)
            .for_each(|record| record.abortable = true);
    }

    /// Records the end of a command; `proven` if the driver returned it on proof that the controller has stopped.
    pub fn ended(&mut self, queue: usize, end: End, proven: bool) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure::new("account", text));
        let cuts = self.cuts;
        let id = end.id;
        let Some(record) = self.record(id) else {
            return wrong(format!("command {id} ended and never began"));
        };
        if record.ended {
            return wrong(format!("command {id} ended twice"));
        }
        if record.queue != queue {
            return wrong(format!("command {id} ended on the other queue"));
        }
        if end.late.is_some_and(|late| late != record.expired) {
            return wrong(format!("command {id}: late is {:?}", end.late));
        }
        record.ended = true;
        let record = record.clone();
        self.open -= 1;
        match end.outcome {
            CommandOutcome::Aborted(_) if !proven => {
                return wrong(format!("command {id} ended as aborted without a proof"));
            }
            CommandOutcome::Aborted(_) => {}
            CommandOutcome::Completed(status) => {
                check_status(id, &record, status, record.cuts != cuts)?
            }
        }
        if let Some((buffer, start, len)) = record.buffer
            && !self.pool.is_whole_beside(buffer, start, len)
        {
            return Err(Failure::new(
                "canary",
                format!("data beside the buffer of command {id}"),
            ));
        }
        self.take_effect(id, &record, end.outcome)?;
        let later =
            !record.laid && matches!(record.fault, Some(Fault::Echo(_) | Fault::LateData(_)));
        // An aborted command has no second part.
        if later && matches!(end.outcome, CommandOutcome::Completed(status) if !is_aborted(status))
        {
            if let Some((buffer, ..)) = record.buffer {
                self.pool.unmap(buffer);
            }
            self.haunted.push(Haunted {
                queue,
                cid: record.cid,
                id,
            });
        } else {
            self.leave(id);
        }
        Ok(())
    }

    /// Checks an address that the controller could not access: only late data of an ended command may be refused.
    pub fn refused(&self, iova: u64) -> Result<(), Failure> {
        let of = |haunted: &Haunted| {
            let buffer = self.records[haunted.id as usize - 1].buffer;
            buffer.is_some_and(|(buffer, ..)| self.pool.holds(buffer, iova))
        };
        if self.haunted.iter().any(of) {
            return Ok(());
        }
        let text = format!("the controller reached for {iova:#x}, which is not lent to it");
        Err(Failure::new("memory", text))
    }

    /// Checks at the end that every command has ended, and that nothing was written outside of lent memory.
    pub fn check_closed(&self) -> Result<(), Failure> {
        if let Some(id) = self.records.iter().position(|record| !record.ended) {
            return Err(Failure::new(
                "account",
                format!("command {} never ended", id + 1),
            ));
        }
        match self.pool.spoilt() {
            Some(buffer) => Err(Failure::new(
                "canary",
                format!("free buffer {buffer} was written to"),
            )),
            None => Ok(()),
        }
    }
}
