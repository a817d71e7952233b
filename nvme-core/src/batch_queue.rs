//! A queue that a group owns for one batch of commands at a time: each member submits one command at most, and waits for
//! one entry of the completion ring.
//!
//! Invariant: between two batches nothing is in flight, so that tail and head are one position, each slot is free, and
//! member k has slot k. The identifier in a completion tells which command it ends: the member that reads it passes the
//! status to the member of that slot. Owners of a queue follow one another; the code that orders them orders its state.
//!
//! The order of calls: [`BatchQueue::take`], then [`submit`](BatchQueue::submit) and [`finish`](BatchQueue::finish) in
//! turns. Between the two, slot words lie in the group's own memory ([`BatchEnds`]), so that no load of the queue's state
//! lies between a completion and its data.
//!
//! A group may also go away after `submit`: the next one takes the queue, and [`resume`](BatchQueue::resume)s the batch
//! before it calls `finish`. It has at least as many members.

use crate::command::{MemberCommand, NO_ENTRY, entry_of, write_entries};
use crate::error::{ControllerFault, SubmitError};
use crate::group::{ExecContext, ThreadGroup};
use crate::queue_pair::QueueMemory;
use crate::queue_state::{OwnedState, PENDING, QueueState, SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::spec::{Sqe, Status};
use crate::sync::{AtomicU32, Order, Scope, fence};

/// Bit of a member's word: its command has ended, with the status in the bits below.
const ENDED: u32 = 1 << 16;

/// A word for each member of a group: the slot word of its command in flight, and later the
/// command's status. It lies in the group's own memory, so that no load of the queue's state delays
/// the copy.
#[derive(Clone, Copy, Debug)]
pub struct BatchEnds<'e>(pub &'e [AtomicU32]);

impl BatchEnds<'_> {
    #[inline(always)]
    fn put(&self, member: u32, word: u32) {
        if let Some(to) = self.0.get(member as usize) {
            to.store(word, Order::Relaxed, Scope::Cta);
        }
    }

    /// Takes the command of `member` out of flight; returns its slot word, as
    /// [`matches`](QueueState::matches) reads it.
    ///
    /// One atomic: of two completions with one CID only one finds the command pending.
    #[inline(always)]
    fn take(&self, member: u32) -> SlotWord {
        let word = self.0.get(member as usize);
        SlotWord(word.map_or(0, |word| {
            word.fetch_and(!PENDING, Order::Relaxed, Scope::Cta)
        }))
    }

    /// Returns the status that ended the command of `member`; `None` for one that did not end, or
    /// was not submitted. In both cases nothing is known of the command's data.
    #[inline(always)]
    pub fn status(&self, member: u32) -> Option<Status> {
        let word = self.0.get(member as usize)?;
        let word = word.load(Order::Relaxed, Scope::Cta);
        (word & (ENDED | PENDING) == ENDED).then_some(Status(word as u16))
    }
}

/// A queue that the members of `G` own; they call every method together.
#[derive(Debug)]
pub struct BatchQueue<'a, G> {
    group: G,
    memory: QueueMemory<'a>,
    state: OwnedState<'a>,
    /// Position of the next completion.
    first: u32,
    in_flight: u32,
    /// A fault, or commands of an earlier batch that have not ended.
    is_refused: bool,
    /// Word of the member's slot.
    word: SlotWord,
}

impl<'a, G: ThreadGroup> BatchQueue<'a, G> {
    /// Takes over a queue with nothing in flight.
    #[inline(always)]
    pub fn take(group: G, memory: QueueMemory<'a>, state: QueueState<'a>) -> Self {
        let state = OwnedState::of(state);
        // Four loads side by side: none waits for the answer of another.
        let tail = state.tail().load(Order::Relaxed, Scope::Gpu);
        let first = state.head().load(Order::Relaxed, Scope::Gpu);
        let fault = state.fault_code();
        let word = state.slot(group.rank()).load(Order::Relaxed, Scope::Gpu);
        Self {
            group,
            memory,
            state,
            first,
            in_flight: tail.wrapping_sub(first),
            is_refused: tail != first || fault != 0,
            word: SlotWord(word),
        }
    }

    /// Takes over the commands in flight that the queue's last owner submitted and did not wait for. Returns the tag of
    /// the member's command, if it has one.
    #[inline(always)]
    pub fn resume(&mut self, ends: BatchEnds<'_>) -> Option<u32> {
        let rank = self.group.rank();
        let is_own = rank < self.state.slots() && self.word.pending();
        ends.put(rank, if is_own { self.word.in_flight() } else { 0 });
        // More commands than members cannot be waited for.
        self.is_refused = self.in_flight > self.group.size();
        // Members read each other's completions: all words are there before the first is taken.
        self.group.sync();
        is_own.then(|| self.word.tag())
    }

    /// Submits one command for each member that `wants` to, and rings. `command` makes the member's.
    ///
    /// # Errors
    /// To a member: [`SubmitError::QueueFull`] where there are fewer slots than members, [`SubmitError::Map`]; its
    /// command is not submitted. [`SubmitError::Refused`] to all, after a fault and while commands of an earlier batch
    /// have not ended.
    #[inline(always)]
    pub fn submit<'d>(
        &mut self,
        ends: BatchEnds<'_>,
        wants: bool,
        command: impl FnOnce() -> MemberCommand<'d>,
    ) -> Result<(), SubmitError> {
        let (state, slot) = (self.state, self.group.rank());
        if self.is_refused {
            ends.put(slot, 0);
            return Err(SubmitError::Refused);
        }
        let (mut why, mut sqe) = (Some(SubmitError::QueueFull), Sqe::ZERO);
        if wants && slot < state.slots() {
            let command = command();
            let lists = &self.memory.lists;
            let (mapped, error) = lists.map(command.sqe, command.data, slot as usize);
            why = error.map(SubmitError::Map);
            let next = self.word.next(command.tag, false);
            sqe = mapped.with_cid(next.cid(slot));
            if why.is_none() {
                self.word = next;
                state.slot(slot).store(next.0, Order::Relaxed, Scope::Gpu);
            }
        }
        ends.put(
            slot,
            if why.is_none() {
                self.word.in_flight()
            } else {
                0
            },
        );
        let vote = self.group.vote(why.is_none());
        let mut index = NO_ENTRY;
        if why.is_none() {
            index = self.first.wrapping_add(entry_of(&self.group, vote)) & state.mask();
        }
        write_entries(&self.group, &self.memory.sq, index, sqe);
        self.in_flight = vote.total;
        // Every member has written its entry and its words; the leader's fence covers them.
        self.group.sync();
        if self.group.leads() && vote.total != 0 {
            let tail = self.first.wrapping_add(vote.total);
            state.tail().store(tail, Order::Relaxed, Scope::Gpu);
            state.rung().store(tail, Order::Relaxed, Scope::Gpu);
            // Release: pairs with the controller's fetch, by the doorbell store that follows. The barrier
            // above makes the other members' entries part of what this one fence orders; without it the
            // controller could fetch old entries.
            fence(Order::Release, Scope::Sys);
            self.memory.sq_doorbell.ring_fenced(tail & state.mask());
        }
        match why {
            Some(error) if wants => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits until every command of the batch has ended, or the deadline has passed; `ends` holds their statuses
    /// afterwards. Returns the number of commands that have not ended; if it is not 0, the queue refuses commands until
    /// it was recovered. Does not wait for commands of an earlier batch.
    ///
    /// # Errors
    /// To all: the controller broke the protocol. Commands without a status may still be under way.
    #[inline(always)]
    pub fn finish(
        &mut self,
        ends: BatchEnds<'_>,
        here: &impl ExecContext,
        deadline_ns: u64,
    ) -> Result<u32, ControllerFault> {
        if self.is_refused {
            return self.unfinished();
        }
        let (state, count) = (self.state, self.in_flight);
        let rank = self.group.rank();
        let upper = (rank < count)
            .then(|| self.await_entry(here, deadline_ns))
            .flatten();
        // Acquire: pairs with the controller's write of the phase tag. Without it the lower half of the
        // entry, or the data that the command moved, could be read from before the completion.
        fence(Order::Acquire, Scope::Sys);
        let ended = upper.is_some_and(|upper| self.end(ends, upper));
        let vote = self.group.vote(ended);
        // Every end is in its word, and every read of the ring is over before the leader rings.
        self.group.sync();
        // A member that gave up may have done so before an entry that a later member saw.
        let next = self.first.wrapping_add(vote.leading);
        if self.group.leads() {
            state.head().store(next, Order::Relaxed, Scope::Gpu);
            if state.passes_quarter(self.first, next) {
                // Release: every member's read of its entry comes before the controller may overwrite it. A
                // doorbell that overtook a read would let that member end its command by the entry of the
                // next pass.
                fence(Order::Release, Scope::Sys);
                self.memory.cq_doorbell.ring_fenced(next & state.mask());
            }
        }
        self.first = next;
        self.in_flight = count.wrapping_sub(vote.total);
        self.is_refused = self.in_flight != 0;
        match self.is_refused {
            true => self.unfinished(),
            false => Ok(0),
        }
    }

    #[inline(always)]
    fn unfinished(&self) -> Result<u32, ControllerFault> {
        match self.state.fault() {
            None => Ok(self.in_flight),
            Some(fault) => Err(fault),
        }
    }

    /// Polls the member's entry of the completion ring; returns its upper word once it is new, `None` past the deadline.
    #[inline(always)]
    fn await_entry(&self, here: &impl ExecContext, deadline_ns: u64) -> Option<u64> {
        let position = self.first.wrapping_add(self.group.rank());
        let mut turn = 0;
        loop {
            let upper = self.memory.cq.upper(position, Order::Relaxed);
            if phase_of(upper) == self.state.phase(position) {
                return Some(upper);
            }
            if here.now_ns() >= deadline_ns {
                return None;
            }
            // The load crosses the bus: a longer pause saves nothing.
            here.pause(turn & 1);
            turn += 1;
        }
    }

    /// Passes the status in the member's entry to the member whose command it ended. Returns false, and refuses the
    /// queue, if it can be no end of a command of this batch.
    #[inline(always)]
    fn end(&self, ends: BatchEnds<'_>, upper: u64) -> bool {
        let (state, slot) = (self.state, slot_of(upper));
        let completed = self.first.wrapping_add(self.group.rank() + 1);
        let rung = self.first.wrapping_add(self.in_flight);
        // Words beyond the group's are not of this batch, whatever a completion names.
        let word = match slot < self.group.size() {
            true => ends.take(slot),
            false => SlotWord::NONE,
        };
        let is_right = state.matches(upper, word) && state.is_possible(upper, completed, rung);
        if is_right {
            state
                .slot(slot)
                .store(word.unused().0, Order::Relaxed, Scope::Gpu);
            ends.put(slot, ENDED | u32::from(status_of(upper).0));
        } else {
            if word.pending() {
                ends.put(slot, word.0);
            }
            state.refuse(state.classify_fault(upper, word));
        }
        is_right
    }
}
