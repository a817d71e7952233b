//! A queue pair owned by a group: one thread, a warp or a block submits and reaps together.
//!
//! Invariant: every member holds the same positions and makes the same calls; members differ only in the
//! commands that they bring and in the completions that they read. Commands are matched by CID, so they may
//! complete in any order, and the queue is kept full rather than drained between batches.
//!
//! Threads that diverge use [`SharedQueue`](crate::SharedQueue) instead.

mod reap;

pub use reap::TaggedCompletion;

use crate::command::{MemberCommand, NO_ENTRY, ROW, entry_of, write_entries};
use crate::error::SubmitError;
use crate::group::ThreadGroup;
use crate::queue_pair::QueueMemory;
use crate::queue_state::{OwnedState, QueueState, SlotWord, slot_in};
use crate::quiesced::Quiesced;
use crate::spec::{Cid, Sqe};
use crate::sync::{AtomicU32, Order, Scope, fence};

/// Deadlines are kept in units of 2^10 ns, as 32 bits: waits of up to 36 minutes.
const TICK_SHIFT: u32 = 10;
/// Value of a deadline that never passes.
const NEVER: u32 = 0;

/// Converts a deadline to ticks. A deadline that would equal [`NEVER`] passes one tick later.
///
/// A tick is 1,024 ns. Comparing 32-bit ticks by their wrapped difference works as long as a deadline is less
/// than 2^31 ticks, about 36 minutes, away from the clock; further deadlines would look as if they had
/// passed.
#[inline(always)]
const fn ticks(deadline_ns: u64) -> u32 {
    match ((deadline_ns >> TICK_SHIFT) as u32, deadline_ns) {
        (_, u64::MAX) => NEVER,
        (NEVER, _) => NEVER + 1,
        (ticks, _) => ticks,
    }
}

/// A queue pair owned by the members of `G`. All members call every method together.
///
/// The order of calls: [`resume`](Self::resume) takes the queue from its words; then, in a loop,
/// [`submit`](Self::submit) places at most one command a member, [`ring`](Self::ring) publishes them with one
/// fence and one doorbell, [`reap`](Self::reap) collects completions, and [`expire`](Self::expire) reports
/// passed deadlines now and then; at last [`suspend`](Self::suspend) writes the positions back.
///
/// To overlap, [`publish`](Self::publish) fences the next commands while earlier ones run, and
/// [`ring_within`](Self::ring_within) rings for them when there is room. The host, after a reset, calls
/// `resume` and [`recover`](Self::recover).
#[derive(Debug)]
pub struct CollectiveQueue<'a, G> {
    group: G,
    memory: QueueMemory<'a>,
    state: OwnedState<'a>,
    /// Next ring position; position up to which entries are fenced; position up to which the doorbell was
    /// rung.
    tail: u32,
    published: u32,
    rung: u32,
    /// Position of the next completion to read.
    head: u32,
    /// Code of the fault that ended the queue's service, or 0.
    refused: u32,
    /// Position in the free ring of the next slot to take. The next slot to return goes to `free_head + slots
    /// - in_flight`.
    free_head: u32,
    in_flight: u32,
    /// Entry of the free ring that this member takes if all members take one; valid while
    /// `read_ahead` is true. It is loaded early, so that the claim does not wait for device memory.
    ahead: u32,
    read_ahead: bool,
    sq_doorbells: u32,
    cq_doorbells: u32,
}

impl<'a, G: ThreadGroup> CollectiveQueue<'a, G> {
    /// Takes over the queue with whatever is in flight. Every member passes the same words.
    ///
    /// The free ring is rebuilt from the slots' words, which alone survive a kernel: a slot whose pending bit
    /// is set stays in flight, whatever the kernel that submitted it did before it ended.
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
            // Entries between `rung` and `tail` are fenced again: a fence of an earlier kernel, by
            // another thread, need not cover this thread's doorbell. Without it the controller
            // could fetch entries that are not yet visible to it.
            published: rung,
            rung,
            head,
            refused: state.fault_code(),
            // The free ring and the number in flight follow from the slots, below.
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

    /// Returns the queue: writes the positions into the state, which already names the commands in flight.
    #[inline(always)]
    pub fn suspend(self) {
        if self.group.leads() {
            let put = |field: &AtomicU32, value| field.store(value, Order::Relaxed, Scope::Gpu);
            put(self.state.tail(), self.tail);
            put(self.state.rung(), self.rung);
            put(self.state.head(), self.head);
        }
    }

    /// Returns the group.
    #[inline(always)]
    pub fn group(&self) -> &G {
        &self.group
    }

    /// Returns the number of commands that have not ended.
    #[inline(always)]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the limit of commands in flight.
    #[inline(always)]
    pub fn depth(&self) -> u32 {
        self.state.slots()
    }

    /// Returns the number of entries, 0 to 3, up to the next multiple of four, at which a group's entries
    /// fill whole lines of memory. A group that first submits this number of commands writes full lines
    /// afterwards, which costs the bus the fewest bytes.
    #[inline(always)]
    pub fn misaligned_by(&self) -> u32 {
        self.tail.wrapping_neg() % ROW
    }

    /// Returns the doorbell writes so far: submission queue, completion queue.
    #[inline(always)]
    pub fn doorbells(&self) -> [u32; 2] {
        [self.sq_doorbells, self.cq_doorbells]
    }

    /// Places one command for each member with `wants`; the controller sees them after [`ring`](Self::ring).
    ///
    /// `command` makes the member's command for its slot (a number below [`depth`](Self::depth) that belongs
    /// to this command until it ends). It runs only on members that were granted a slot.
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
        command: impl FnOnce(u32) -> MemberCommand<'d>,
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
        // Every value is initialised on every path: a register that is undefined on one path stays allocated
        // for as long as the caller's loop runs.
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

    /// Returns the entry of the free ring for a member with `before` takers of lower rank.
    #[inline(always)]
    fn free_slot(&self, before: u32) -> u32 {
        // The read-ahead entry is that of the member's rank. With fewer takers the member's index
        // is lower, and that entry belongs to another member. Such a member loads its own entry
        // instead.
        if self.read_ahead && before == self.group.rank() {
            return self.ahead;
        }
        let place = self.state.free_ring(self.free_head.wrapping_add(before));
        place.load(Order::Relaxed, Scope::Cta)
    }

    /// Loads the entry that this member takes if all members take one. It is done after a submit or reap, so
    /// that the next submit does not wait for the load.
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

    /// Returns slots that no command was placed in to the end of the free ring.
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

    /// Returns the position in the free ring of the next slot to return.
    #[inline(always)]
    fn free_end(&self) -> u32 {
        self.free_head
            .wrapping_add(self.state.slots() - self.in_flight)
    }

    /// Publishes all submitted commands: one fence and one doorbell store, by the leader.
    #[inline(always)]
    pub fn ring(&mut self) {
        self.publish();
        self.ring_within(self.state.slots());
    }

    /// Makes the submitted commands visible to the controller, for a doorbell that is rung later: one fence,
    /// by the leader. Commands can so be prepared while earlier ones run.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.tail != self.published {
            self.published = self.tail;
            // Every member has written some words of the entries. The barrier orders those stores before the
            // leader's fence, which therefore covers them (fences are cumulative); without it the controller
            // could fetch a half-written entry.
            self.group.sync();
            if self.group.leads() {
                // Release: pairs with the controller's fetch; the doorbell store comes after it in program
                // order. Entries, lists and written data must be visible before it, or the controller fetches
                // what lay there before.
                fence(Order::Release, Scope::Sys);
            }
        }
    }

    /// Rings for published commands, as long as at most `depth` commands are at the controller.
    ///
    /// Only the leader stores the doorbell, after a fence that `publish` or a wide `reap` made; every member
    /// moves its own copy of `rung`, so that no broadcast is needed.
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

    /// Calls `late` once with the tag of each command whose deadline has passed, on some member; returns the
    /// number of such commands.
    ///
    /// The commands stay in flight: their memory is not free before they complete. The call reads every slot,
    /// so callers make it now and then, not in each turn.
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
                // The difference wraps, so the comparison stays right when the 32-bit clock of
                // ticks overflows between the submission and this call. A plain comparison would
                // expire every command at the wrap.
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
            // Another member may take these slots out of flight next; the barrier orders the stores above
            // before that.
            self.group.sync();
        }
        count
    }

    /// Ends every command in flight as aborted, calls `end` with the tag of each, and empties the queue for
    /// the controller to create again; returns `false` when the proof does not cover this queue.
    ///
    /// Afterwards nothing is in flight. `end` does not see completions that a kernel had read when it died,
    /// whether or not the kernel had passed them to its caller: their commands have ended too.
    ///
    /// Only for a host thread that is the whole group.
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
