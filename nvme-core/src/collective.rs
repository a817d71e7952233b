//! A queue that a group owns: one thread, a warp or a block submits and reaps together.
//!
//! Invariant: every member holds the same positions; members differ only in the commands that they
//! bring and in the completions that they read. Commands are matched by CID, so they may complete in
//! any order, and the queue is kept full rather than drained between batches.

mod reap;

pub use reap::TaggedCompletion;

use crate::command::{Command, NO_ENTRY, ROW, entry_of, write_entries};
use crate::error::SubmitError;
use crate::group::Group;
use crate::queue_pair::QueueMemory;
use crate::queue_state::{OwnedState, QueueState, SlotWord, slot_in};
use crate::quiesced::Quiesced;
use crate::spec::{Cid, Sqe};
use crate::sync::{AtomicU32, Order, Scope, fence};

/// Deadlines are kept in units of 2^10 ns, as 32 bits: waits of up to 36 minutes.
const TICK_SHIFT: u32 = 10;
/// The deadline that never passes.
const NEVER: u32 = 0;

/// A deadline as it is kept. One that would look as [`NEVER`] passes a tick later.
#[inline(always)]
const fn ticks(deadline_ns: u64) -> u32 {
    match ((deadline_ns >> TICK_SHIFT) as u32, deadline_ns) {
        (_, u64::MAX) => NEVER,
        (NEVER, _) => NEVER + 1,
        (ticks, _) => ticks,
    }
}

/// A queue owned by the members of `G`.
///
/// Every method is called by all members together.
#[derive(Debug)]
pub struct Collective<'a, G> {
    group: G,
    memory: QueueMemory<'a>,
    state: OwnedState<'a>,
    /// Next ring position, up to where entries are visible, and up to where the doorbell was rung.
    tail: u32,
    published: u32,
    rung: u32,
    /// Head of the completion ring.
    head: u32,
    /// Code of the fault that ended the queue's service, or 0.
    refused: u32,
    /// Free ring: the next slot to take. The next to return is `free_head + slots - in_flight`.
    free_head: u32,
    in_flight: u32,
    /// What the free ring holds for this member if all take one, where that was read.
    ahead: u32,
    read_ahead: bool,
    sq_doorbells: u32,
    cq_doorbells: u32,
}

impl<'a, G: Group> Collective<'a, G> {
    /// Takes the queue over, with whatever is in flight. Every member calls it with the same words.
    #[inline(always)]
    pub fn resume(group: G, memory: QueueMemory<'a>, state: QueueState<'a>) -> Self {
        let state = OwnedState::of(state);
        let field = |word: &AtomicU32| {
            let value = match group.leads() {
                true => word.load(Order::Relaxed, Scope::Gpu),
                false => 0,
            };
            group.broadcast(value)
        };
        let tail = field(state.tail());
        let rung = field(state.rung());
        let head = field(state.head());
        group.sync();
        let mut all = Self {
            group,
            memory,
            state,
            tail,
            // A fence of an earlier kernel is not relied on.
            published: rung,
            rung,
            head,
            refused: state.fault_code(),
            free_head: 0,
            in_flight: 0,
            ahead: 0,
            read_ahead: false,
            sq_doorbells: 0,
            cq_doorbells: 0,
        };
        all.collect_free();
        all
    }

    /// Fills the free ring with the slots that are not in flight.
    #[inline(always)]
    fn collect_free(&mut self) {
        let (state, size) = (self.state, self.group.size());
        let mut free = 0;
        let mut first = 0;
        while first < state.slots() {
            let slot = first + self.group.rank();
            first += size;
            let word = SlotWord(state.slot(slot).load(Order::Relaxed, Scope::Gpu));
            let is_free = slot < state.slots() && !word.pending();
            let vote = self.group.vote(is_free);
            if is_free {
                state.free_ring(free + vote.before).store(
                    word.free(slot),
                    Order::Relaxed,
                    Scope::Cta,
                );
            }
            free += vote.total;
        }
        self.in_flight = state.slots() - free;
        self.group.sync();
    }

    /// Gives the queue back: the state says what is in flight.
    #[inline(always)]
    pub fn suspend(self) {
        if self.group.leads() {
            let put = |field: &AtomicU32, value| field.store(value, Order::Relaxed, Scope::Gpu);
            put(self.state.tail(), self.tail);
            put(self.state.rung(), self.rung);
            put(self.state.head(), self.head);
        }
    }

    /// The members.
    #[inline(always)]
    pub fn group(&self) -> &G {
        &self.group
    }

    /// Commands that have not ended.
    #[inline(always)]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The most commands that can be in flight.
    #[inline(always)]
    pub fn depth(&self) -> u32 {
        self.state.slots()
    }

    /// Entries up to where a group's entries lie in whole lines of memory: with so many first, each full
    /// group costs the bus the fewest bytes. 0 to 3.
    #[inline(always)]
    pub fn misaligned_by(&self) -> u32 {
        self.tail.wrapping_neg() % ROW
    }

    /// Doorbells rung so far: submission queue, completion queue.
    #[inline(always)]
    pub fn doorbells(&self) -> [u32; 2] {
        [self.sq_doorbells, self.cq_doorbells]
    }

    /// Places one command for each member that `wants` to; the controller sees them after
    /// [`ring`](Self::ring). `command` makes the member's command for the slot it was given (below
    /// [`depth`](Self::depth), no other command's until this one ends).
    ///
    /// `deadline_ns` is for [`expire`](Self::expire): at most 36 minutes after the time that is called with,
    /// or `u64::MAX` for none.
    ///
    /// Returns the CID, or `None` to a member that wanted none.
    ///
    /// # Errors
    /// To a member: [`SubmitError::QueueFull`] (reap, then retry), [`SubmitError::Map`]; its command is
    /// not placed. [`SubmitError::Refused`] to all.
    #[inline(always)]
    pub fn submit<'d>(
        &mut self,
        wants: bool,
        command: impl FnOnce(u32) -> Command<'d>,
        deadline_ns: u64,
    ) -> Result<Option<Cid>, SubmitError> {
        if self.refused != 0 {
            return Err(SubmitError::Refused);
        }
        let state = self.state;
        let room = state.slots() - self.in_flight;
        let wish = self.group.vote(wants);
        let gets = wants && wish.before < room;
        let granted = wish.total.min(room);
        let mut why = Some(SubmitError::QueueFull);
        // Whole whatever happens: what is left undefined is kept in registers as long as a loop goes on.
        let (mut free, mut sqe, mut tag, mut wants_dw0) = (0, Sqe::ZERO, 0, false);
        if gets {
            free = self.free_slot(wish.before);
            let slot = slot_in(free);
            let command = command(slot);
            let lists = &self.memory.lists;
            let error;
            (sqe, error) = lists.map(command.sqe, command.data, slot as usize);
            why = error.map(SubmitError::Map);
            (tag, wants_dw0) = (command.tag, command.wants_dw0);
        }
        let vote = self.group.vote(why.is_none());
        if vote.total < granted {
            self.return_slots(gets && why.is_some(), free);
        }
        let (mut index, mut cid) = (NO_ENTRY, Cid(0));
        if why.is_none() {
            let slot = slot_in(free);
            let next = SlotWord::freed(free).next(tag, wants_dw0);
            state.slot(slot).store(next.0, Order::Relaxed, Scope::Cta);
            state
                .deadline(slot)
                .store(ticks(deadline_ns), Order::Relaxed, Scope::Cta);
            index = self.tail.wrapping_add(entry_of(&self.group, vote)) & state.mask();
            cid = next.cid(slot);
            sqe = sqe.with_cid(cid);
        }
        write_entries(&self.group, &self.memory.sq, index, sqe);
        self.free_head = self.free_head.wrapping_add(granted);
        self.tail = self.tail.wrapping_add(vote.total);
        self.in_flight += vote.total;
        self.look_ahead();
        match why {
            None => Ok(Some(cid)),
            Some(_) if !wants => Ok(None),
            Some(error) => Err(error),
        }
    }

    /// What the free ring holds for the member before which `before` others take one.
    #[inline(always)]
    fn free_slot(&self, before: u32) -> u32 {
        // With fewer members that take one, or a ring that was too short, what was read ahead is another's.
        if self.read_ahead && before == self.group.rank() {
            return self.ahead;
        }
        let place = self.state.free_ring(self.free_head.wrapping_add(before));
        place.load(Order::Relaxed, Scope::Cta)
    }

    /// Reads the slot that this member takes next if all take one, while there is something else to do.
    #[inline(always)]
    fn look_ahead(&mut self) {
        let free = self.state.slots() - self.in_flight;
        self.read_ahead = free >= self.group.size();
        if self.read_ahead {
            let place = self
                .state
                .free_ring(self.free_head.wrapping_add(self.group.rank()));
            self.ahead = place.load(Order::Relaxed, Scope::Cta);
        }
    }

    /// Returns slots that were taken for nothing to the end of the free ring.
    #[inline(always)]
    fn return_slots(&self, mine: bool, free: u32) {
        let end = self.free_end();
        let vote = self.group.vote(mine);
        if mine {
            self.state.free_ring(end.wrapping_add(vote.before)).store(
                free,
                Order::Relaxed,
                Scope::Cta,
            );
        }
        self.group.sync();
    }

    /// Where the next free slot goes in the free ring.
    #[inline(always)]
    fn free_end(&self) -> u32 {
        self.free_head
            .wrapping_add(self.state.slots() - self.in_flight)
    }

    /// Publishes what was submitted: one fence, one doorbell store, by the leader.
    #[inline(always)]
    pub fn ring(&mut self) {
        self.publish();
        self.ring_within(self.state.slots());
    }

    /// Makes what was submitted visible to the controller, for a doorbell that follows: one fence, by
    /// the leader. Commands can be prepared in this way while the ones before them are under way.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.tail != self.published {
            self.published = self.tail;
            // Every member has written its words; the leader's fence covers them.
            self.group.sync();
            if self.group.leads() {
                // Release: pairs with the controller's fetch, by the doorbell store that follows.
                fence(Order::Release, Scope::Sys);
            }
        }
    }

    /// Rings for what was published, as far as no more than `depth` commands are at the controller.
    #[inline(always)]
    pub fn ring_within(&mut self, depth: u32) {
        let ready = self.published.wrapping_sub(self.rung);
        let room = depth.saturating_sub(self.rung.wrapping_sub(self.head));
        let count = ready.min(room);
        if count != 0 {
            self.rung = self.rung.wrapping_add(count);
            self.sq_doorbells += 1;
            if self.group.leads() {
                let tail = self.rung & self.state.mask();
                self.memory.sq_doorbell.ring_fenced(tail);
            }
        }
    }

    /// Calls `late` with the tag of each command whose deadline has passed, once, on some member; returns
    /// how many there were. The commands stay in flight. Looks at every slot: call it now and then.
    #[inline(always)]
    pub fn expire(&mut self, now_ns: u64, mut late: impl FnMut(u32)) -> u32 {
        let state = self.state;
        let now = (now_ns >> TICK_SHIFT) as u32;
        let mut count = 0;
        let mut first = 0;
        while first < state.slots() {
            let slot = first + self.group.rank();
            first += self.group.size();
            let mut expired = false;
            if slot < state.slots() {
                let word = SlotWord(state.slot(slot).load(Order::Relaxed, Scope::Cta));
                let deadline = state.deadline(slot).load(Order::Relaxed, Scope::Cta);
                let passed = deadline != NEVER && now.wrapping_sub(deadline) as i32 >= 0;
                expired = word.pending() && !word.expired() && passed;
                if expired {
                    state
                        .slot(slot)
                        .store(word.expire().0, Order::Relaxed, Scope::Cta);
                    late(word.tag());
                }
            }
            count += self.group.vote(expired).total;
        }
        if count != 0 {
            // Another member may take these slots out of flight next.
            self.group.sync();
        }
        count
    }

    /// Ends every command in flight as aborted, calls `end` with the tag of each, and empties the queue for
    /// the controller to create again; `false` when the proof does not cover this queue.
    ///
    /// Afterwards nothing of the queue is in flight. `end` is not given the tags of completions that a kernel had
    /// taken when it died, whether or not it had passed them on: their commands have ended too.
    ///
    /// For a host thread that is the group alone.
    pub fn recover(self, proof: &Quiesced<'_>, mut end: impl FnMut(u32)) -> bool {
        if !self.state.is_covered(proof) {
            return false;
        }
        self.state.reclaim(|_, word| {
            if word.pending() {
                end(word.tag());
            }
        });
        self.memory.cq.zero();
        true
    }
}
