//! A queue pair that any threads share: unrelated threads, divergent code, no owner and no resident helper.
//!
//! Command slots and ring entries are separate. A thread claims a slot or gets none: it never waits while it
//! holds a slot. Only the holder of a slot takes a ticket, which names its ring entry; between ticket and
//! publication it neither waits for the controller nor returns. That entry is always free: there are fewer
//! slots than entries, so among the tickets of one pass two had the same slot, the earlier of them has
//! completed, and the controller fetches in order (docs/memory-model.md has the proof, loom checks it). A
//! slow or lost command costs its slot, never the ring.
//!
//! Invariant: each command ends once, in the result cell that it named. The holder of the ring lock rings for
//! all commands published so far; the holder of the drain lock reads completions for all.

mod drain;
mod ring;
mod wait;

use crate::command::{MemberCommand, NO_ENTRY, entry_of, write_entries};
use crate::error::{ControllerFault, SubmitError};
use crate::group::{GroupVote, ThreadGroup};
use crate::inflight::MAX_IN_FLIGHT;
use crate::outcome::{AbortReason, CommandOutcome};
use crate::queue_pair::QueueMemory;
use crate::queue_state::{MAX_TAGS, QueueState, SharedState, SlotWord};
use crate::quiesced::Quiesced;
use crate::spec::{Cid, Sqe, Status};
use crate::sync::{AtomicU64, Order, Scope, fence};
pub use wait::WaitNeed;

// Layout of a result cell: the CID of its command above this bit, and dword 0 below it.
const CID_SHIFT: u32 = 32;
/// The phase tag's bit, set in a cell once its command completed; the status is above it, as in the
/// completion. A cell is one word, so that status and end cannot be seen apart.
const DONE: u64 = 1 << 48;
/// Bits of a cell without `DONE`: in flight; aborted; aborted by the queue's deletion.
const PENDING: u64 = 1 << 63;
const ABORTED: u64 = 1 << 62;
const DELETED: u64 = 1 << 61;
/// Either bit means that the command has ended.
const ENDED: u64 = DONE | ABORTED;

/// Result cells, in memory that every user can reach: one for each token that may be outstanding.
///
/// A cell belongs to a command from submission until its end is seen; its index is the command's tag. The
/// submitter chooses a cell that no command in flight uses. A cell of an earlier command is detected
/// ([`SubmitError::CellBusy`]); two commands placed with one cell at the same moment are not. Then both are
/// in flight, a token still sees the end of no command but its own, and one of the two may never see its end.
#[derive(Clone, Copy, Debug)]
pub struct ResultCells<'a>(&'a [AtomicU64]);

impl<'a> ResultCells<'a> {
    /// Makes cells over `words`, zeroed before their first use.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self(words)
    }

    #[inline(always)]
    fn get(&self, index: u32) -> Option<&'a AtomicU64> {
        self.0.get(index as usize).filter(|_| index < MAX_TAGS)
    }

    #[inline(always)]
    fn set(&self, index: u32, value: u64) {
        if let Some(cell) = self.0.get(index as usize) {
            cell.store(value, Order::Relaxed, Scope::Gpu);
        }
    }

    /// Does `set` if `when` is true; without a branch, unless there are no cells.
    #[inline(always)]
    fn set_if(&self, when: bool, index: u32, value: u64) {
        let inside = index < self.0.len() as u32;
        if let Some(cell) = self.0.get(if inside { index as usize } else { 0 }) {
            cell.store_if(when & inside, value);
        }
    }
}

/// A command in flight. A dropped token leaks the command's cell and buffer until the queue is recovered.
#[derive(Debug)]
#[must_use = "wait for the command: until it ends its buffer belongs to the controller"]
pub struct CommandToken {
    cell: u32,
    ticket: u32,
    cid: Cid,
}

impl CommandToken {
    /// Makes the token of a command that was submitted elsewhere, from its [`words`](Self::words).
    pub const fn from_words([cell, ticket, cid]: [u32; 3]) -> Self {
        Self {
            cell,
            ticket,
            cid: Cid(cid as u16),
        }
    }

    /// Returns the token as words, to be kept where Rust values cannot be.
    pub const fn words(self) -> [u32; 3] {
        [self.cell, self.ticket, self.cid.0 as u32]
    }

    /// Returns the command's identifier, for messages.
    pub const fn cid(&self) -> Cid {
        self.cid
    }

    /// Returns the index of the result cell.
    pub const fn cell(&self) -> u32 {
        self.cell
    }
}

/// The result of an attempt to drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainResult {
    /// Another group is draining at this moment.
    Busy,
    /// This number of completions was taken.
    Took(u32),
}

/// The number that stands for no slot: one past the largest.
const NO_SLOT: u32 = MAX_IN_FLIGHT;

/// A queue pair that any threads share. Every thread makes its own view of the words, which is cheap.
///
/// The order of calls, for each command: [`submit`](Self::submit), then [`wait`](Self::wait) with the token;
/// or [`run`](Self::run), which is both in one loop. Without a wait: [`place`](Self::place),
/// [`ring`](Self::ring), and later [`drain`](Self::drain) and [`poll`](Self::poll).
///
/// Threads that have no command help with [`help_out`](Self::help_out), or take part in
/// [`submit_if`](Self::submit_if) and [`wait_together`](Self::wait_together) so that their warp stays
/// converged. The host, after a reset, calls [`recover`](Self::recover).
#[derive(Debug)]
pub struct SharedQueue<'a> {
    memory: QueueMemory<'a>,
    state: SharedState<'a>,
    cells: ResultCells<'a>,
}

impl<'a> SharedQueue<'a> {
    /// Makes a view of a queue over memory and state that belong together, as
    /// [`QueueWords::attach`](crate::handoff::QueueWords::attach) returns them.
    #[inline(always)]
    pub fn new(memory: QueueMemory<'a>, state: QueueState<'a>, cells: ResultCells<'a>) -> Self {
        Self {
            memory,
            state: SharedState::of(state),
            cells,
        }
    }

    /// Returns the queue's state, for counts.
    pub fn state(&self) -> &QueueState<'a> {
        &self.state
    }

    /// Places one command for each member of `group`; the next call that rings or helps rings for it.
    ///
    /// Never waits. If there are too few slots, members of higher rank get [`SubmitError::QueueFull`].
    ///
    /// # Errors
    /// [`SubmitError::CellBusy`], [`SubmitError::Map`], [`SubmitError::QueueFull`] (drain, then retry) and
    /// [`SubmitError::Refused`]; the member's command is not in flight then.
    #[inline(always)]
    pub fn place<G: ThreadGroup>(
        &self,
        group: &G,
        command: MemberCommand<'_>,
    ) -> Result<CommandToken, SubmitError> {
        let (token, why) = self.place_some(group, true, || command);
        why.map_or(Ok(token), Err)
    }

    /// Places commands as [`place`](Self::place) does, for the members with `wants`. With an error the token
    /// is meaningless.
    #[inline(always)]
    fn place_some<'d, G: ThreadGroup>(
        &self,
        group: &G,
        wants: bool,
        command: impl Fn() -> MemberCommand<'d>,
    ) -> (CommandToken, Option<SubmitError>) {
        let command = command();
        // These loads and the claim do not depend on each other, so their latencies overlap.
        let fault = self.state.fault_code();
        let cell = self.cells.get(command.tag);
        let cell = cell.map_or(PENDING, |cell| cell.load(Order::Relaxed, Scope::Gpu));
        let slot = self.claim(group, wants, command.tag);
        let busy = cell & (PENDING | ENDED) == PENDING;
        let mut why = match (slot, fault, busy) {
            _ if !wants => Some(SubmitError::QueueFull),
            (_, 1.., _) => Some(SubmitError::Refused),
            (_, _, true) => Some(SubmitError::CellBusy),
            (NO_SLOT, ..) => Some(SubmitError::QueueFull),
            _ => None,
        };
        let mut sqe = command.sqe;
        if why.is_none() {
            let error;
            (sqe, error) = self.memory.lists.map(sqe, command.data, slot as usize);
            why = error.map(SubmitError::Map);
        }
        if why.is_some() && slot != NO_SLOT {
            self.free(slot);
        }
        let goal = (command.tag, command.wants_dw0);
        (self.publish(group, why.is_none(), slot, sqe, goal), why)
    }

    /// Claims a slot for each member with `wants`, in the order of ranks; [`NO_SLOT`] for the remaining
    /// members.
    ///
    /// `hint` spreads groups over the words of free bits: a group that submits again tries the word that it
    /// used before.
    #[inline(always)]
    fn claim<G: ThreadGroup>(&self, group: &G, wants: bool, hint: u32) -> u32 {
        let words = self.state.free_words();
        let GroupVote {
            total: need,
            before: rank,
            ..
        } = group.vote(wants);
        let home = group.broadcast(spread(hint / 32, words));
        let mut mine = NO_SLOT;
        let mut given = 0;
        let mut turn = 0;
        // Each word is tried once; the first word, the group's usual one, without a load before the claim.
        while given < need && turn < words {
            let mut word = home + turn;
            if word >= words {
                word -= words;
            }
            let mut got = 0;
            if group.leads() {
                got = self.claim_bits(word, need - given, hint, turn == 0);
            }
            let got = group.broadcast(got);
            if wants && rank >= given && rank - given < got.count_ones() {
                mine = word * 32 + nth(got, rank - given);
            }
            given += got.count_ones();
            turn += 1;
            if given < need && turn < words {
                turn += self.skip_empty(group, home, turn);
            }
        }
        // The leader's acquire is passed on to the members by this barrier, before they touch their slots.
        group.sync();
        mine
    }

    /// Claims up to `need` free bits of a word and returns them.
    #[inline(always)]
    fn claim_bits(&self, word: u32, need: u32, hint: u32, blind: bool) -> u32 {
        let free = self.state.free_bits(word);
        // A guess of one bit is right most of the time, and saves the load.
        // A whole warp takes whatever is free in the word; a lone thread guesses its bit; everyone else loads
        // the word and takes the lowest free bits.
        let mut want = match (need, blind) {
            (32.., _) => u32::MAX,
            (1, true) => 1 << (hint % 32),
            _ => lowest(free.load(Order::Relaxed, Scope::Gpu), need),
        };
        // Two attempts: a failed first one returns the bits that are free, from which the second one chooses.
        let mut got = 0;
        for _ in 0..2 {
            if want == 0 {
                break;
            }
            // Acquire: pairs with the release of the slot after its command's result was delivered; the
            // slot's word and lists may be reused only after that.
            let was = free.fetch_and(!want, Order::Acquire, Scope::Gpu);
            got = was & want;
            if got != 0 {
                break;
            }
            want = lowest(was & !want, need);
        }
        got
    }

    /// Counts the empty words from `home + turn` on, one load by each member.
    #[inline(always)]
    fn skip_empty<G: ThreadGroup>(&self, group: &G, home: u32, turn: u32) -> u32 {
        let words = self.state.free_words();
        let at = turn + group.rank();
        let mut empty = true;
        if at < words {
            let word = home + at;
            let word = if word >= words { word - words } else { word };
            empty = self.state.free_bits(word).load(Order::Relaxed, Scope::Gpu) == 0;
        }
        group.vote(empty).leading
    }

    #[inline(always)]
    fn free(&self, slot: u32) {
        // Release: pairs with the acquire of the next claim of the slot; its word and lists are not
        // touched after this. With relaxed order the next holder's list could be overwritten by
        // this command's.
        self.state
            .free_bits(slot / 32)
            .fetch_or(1 << (slot % 32), Order::Release, Scope::Gpu);
    }

    /// Publishes the commands of claimed slots for the next doorbell: takes tickets, writes entries, stores
    /// sequence numbers. The token of a member that is not `ready` is meaningless.
    #[inline(always)]
    fn publish<G: ThreadGroup>(
        &self,
        group: &G,
        ready: bool,
        slot: u32,
        sqe: Sqe,
        (tag, wants_dw0): (u32, bool),
    ) -> CommandToken {
        let state = &self.state;
        let mut token = CommandToken {
            cell: tag,
            ticket: 0,
            cid: Cid(0),
        };
        let vote = group.vote(ready);
        if vote.total == 0 {
            return token;
        }
        let mut first = 0;
        if group.leads() {
            first = state
                .next_ticket()
                .fetch_add(vote.total, Order::Relaxed, Scope::Gpu);
            self.wait_until_entry_reusable(first.wrapping_add(vote.total));
        }
        token.ticket = group.broadcast(first).wrapping_add(entry_of(group, vote));
        group.sync();
        let (mut index, mut sqe) = (NO_ENTRY, sqe);
        if ready {
            let word = state.slot(slot);
            let next = SlotWord(word.load(Order::Relaxed, Scope::Gpu)).next(tag, wants_dw0);
            word.store(next.0, Order::Relaxed, Scope::Gpu);
            token.cid = next.cid(slot);
            self.cells
                .set(tag, PENDING | u64::from(token.cid.0) << CID_SHIFT);
            index = token.ticket & state.mask();
            sqe = sqe.with_cid(token.cid);
        }
        write_entries(group, &self.memory.sq, index, sqe);
        // Other members may have written words of this member's entry. The barrier orders those stores before
        // this member's fence, which therefore covers them; a sequence number without that would publish a
        // half-written entry.
        group.sync();
        // Release: pairs with the acquire of the sequence number by the holder of the ring lock, which rings
        // for this thread. Without it the doorbell could cover an entry whose words are not visible yet.
        fence(Order::Release, Scope::Gpu);
        if ready {
            let sequence = token.ticket.wrapping_add(1);
            state
                .sequence(token.ticket)
                .store(sequence, Order::Relaxed, Scope::Gpu);
        }
        token
    }

    /// Returns once the ring entries of the tickets before `end` are known to be free.
    ///
    /// The controller has fetched them: fewer than `entries` commands hold slots, the commands before `end`
    /// that hold none have completed, and entries are fetched in order. The loop spins only until completions
    /// that another group has read already are counted; it never waits for the controller.
    #[inline(always)]
    fn wait_until_entry_reusable(&self, end: u32) {
        // Position of the last command that used one of these entries before. Positions wrap, so
        // the comparison below uses their difference. A plain comparison would let an entry be
        // overwritten at the wrap.
        let past = end.wrapping_sub(self.state.mask() + 1);
        // Acquire: pairs with the release of every group that counted completions. The new entry is written
        // after them, and so after the controller has fetched the old one at this place.
        while (self
            .state
            .read()
            .load(Order::Acquire, Scope::Gpu)
            .wrapping_sub(past) as i32)
            < 0
        {
            crate::sync::spin();
        }
    }

    /// Returns the outcome of the command and dword 0 of its completion (0 unless the command wants it), or
    /// `None` until its completion has been drained.
    #[inline(always)]
    pub fn poll(&self, token: &CommandToken) -> Option<(CommandOutcome, u32)> {
        let value = self.result(token);
        (value != 0).then(|| ended(value))
    }

    /// Returns the cell's value once the token's own command has ended, else 0.
    #[inline(always)]
    fn result(&self, token: &CommandToken) -> u64 {
        self.cells.get(token.cell).map_or(0, |cell| {
            let value = cell.load(Order::Relaxed, Scope::Gpu);
            match (value & ENDED != 0) & ((value >> CID_SHIFT) as u16 == token.cid.0) {
                false => 0,
                // Acquire: pairs with the release fence of the thread that delivered the result; the
                // command's data is visible after it. Relaxed before this point, because on a GPU an acquire
                // empties the cache of the waiting thread, which is too costly for each poll.
                true => cell.load(Order::Acquire, Scope::Gpu),
            }
        })
    }

    /// True if a command with this result cell is in flight; for tests of the queue's users.
    pub fn is_under_way(&self, cell: u32) -> bool {
        let cell = self.cells.get(cell);
        cell.is_some_and(|cell| {
            cell.load(Order::Relaxed, Scope::Gpu) & (PENDING | ENDED) == PENDING
        })
    }

    /// Ends every command in flight as aborted and empties the queue for the controller to create again.
    /// Returns the number of those commands; `None` when the proof does not cover this queue.
    ///
    /// A command whose completion was read, but not delivered because the kernel died in between, ends as
    /// aborted, too.
    ///
    /// Only for the host, while no kernel uses the queue.
    pub fn recover(&self, proof: &Quiesced<'_>) -> Option<u32> {
        self.state.is_covered(proof).then(|| {
            let mut ended = 0;
            let end = match proof.reason() {
                AbortReason::ControllerReset => ABORTED,
                AbortReason::QueueDeleted => ABORTED | DELETED,
            };
            self.state.reclaim(|slot, word| {
                let cid = u64::from(word.cid(slot).0) << CID_SHIFT;
                let cell = self.cells.get(word.tag());
                let cell =
                    cell.filter(|cell| cell.load(Order::Relaxed, Scope::Gpu) == PENDING | cid);
                if let Some(cell) = cell {
                    cell.store(end | cid, Order::Relaxed, Scope::Gpu);
                }
                ended += u32::from(cell.is_some() || word.pending());
            });
            self.memory.cq.zero();
            ended
        })
    }

    /// Returns the fault that made the queue refuse commands, if any.
    pub fn fault(&self) -> Option<ControllerFault> {
        self.state.fault()
    }
}

/// Decodes a cell's value after the command has ended.
#[inline(always)]
fn ended(value: u64) -> (CommandOutcome, u32) {
    let outcome = match (value & DONE, value & DELETED) {
        (DONE, _) => CommandOutcome::Completed(Status((value >> 49) as u16)),
        (_, 0) => CommandOutcome::Aborted(AbortReason::ControllerReset),
        _ => CommandOutcome::Aborted(AbortReason::QueueDeleted),
    };
    (outcome, value as u32)
}

/// Returns a number below `count` that differs between neighbouring values of `hint`.
///
/// A multiplication by 2^32 divided by the golden ratio moves neighbouring hints far apart; the upper half of
/// the second product scales the result to `count` without a division.
#[inline(always)]
fn spread(hint: u32, count: u32) -> u32 {
    let mixed = hint.wrapping_mul(0x9E37_79B9);
    ((u64::from(mixed) * u64::from(count)) >> 32) as u32
}

/// Returns the `count` lowest bits that are set in `word`.
#[inline(always)]
fn lowest(word: u32, count: u32) -> u32 {
    if count >= word.count_ones() {
        return word;
    }
    let mut rest = word;
    for _ in 0..count {
        rest &= rest.wrapping_sub(1);
    }
    word & !rest
}

/// Returns the index of the set bit of `word` that has `rank` set bits below it.
#[inline(always)]
fn nth(word: u32, rank: u32) -> u32 {
    if word == u32::MAX {
        return rank;
    }
    let mut rest = word;
    for _ in 0..rank {
        rest &= rest.wrapping_sub(1);
    }
    rest.trailing_zeros()
}
