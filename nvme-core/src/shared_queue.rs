//! A queue that any threads share: unrelated threads, divergent code, no owner and no resident helper.
//!
//! Command slots are apart from ring entries. A thread claims a slot or gets none: it never waits with a
//! slot. Only the holder of a slot takes a ticket, which names its ring entry; between ticket and
//! publication there is no wait on the controller and no return. That entry is always free: there are
//! fewer slots than entries, so among the tickets of one pass two had the same slot, the earlier of
//! them has completed, and the controller fetches in order (docs/memory-model.md has the proof, loom
//! checks it). A slow or lost command costs its slot, never the ring.
//!
//! Invariant: each command ends once, in the result cell that it named. The holder of the ring lock
//! rings for all commands published so far; the holder of the drain lock reads completions for all.

mod drain;
mod ring;
mod wait;

use crate::command::{Command, NO_ENTRY, entry_of, write_entries};
use crate::error::{ControllerFault, SubmitError};
use crate::group::{Group, Vote};
use crate::inflight::MAX_IN_FLIGHT;
use crate::outcome::{AbortReason, Outcome};
use crate::queue_pair::QueueMemory;
use crate::queue_state::{MAX_TAGS, QueueState, SharedState, SlotWord};
use crate::quiesced::Quiesced;
use crate::spec::{Cid, Sqe, Status};
use crate::sync::{AtomicU64, Order, Scope, fence};
pub use wait::Need;

// A result cell: the CID of its command above this bit, and dword 0 below it.
const CID_SHIFT: u32 = 32;
/// Completed: the status is above this bit, as in the completion, whose phase tag is here.
const DONE: u64 = 1 << 48;
/// Unless completed: the command is in flight, it was aborted, that was by the queue's deletion.
const PENDING: u64 = 1 << 63;
const ABORTED: u64 = 1 << 62;
const DELETED: u64 = 1 << 61;
/// Either says that the command has ended.
const ENDED: u64 = DONE | ABORTED;

/// Result cells: one for each token that may be out at a time, in memory that every user can reach.
///
/// A cell belongs to a command from submission until its end is seen; its index is the command's tag. Who
/// places commands gives each in flight a cell of its own. A cell that is in use is found when its command was
/// placed before ([`SubmitError::CellBusy`]), not when two commands are placed with it at the same moment: then
/// both are in flight, a token still sees the end of no command but its own, and one of the two may see none.
#[derive(Clone, Copy, Debug)]
pub struct Cells<'a>(&'a [AtomicU64]);

impl<'a> Cells<'a> {
    /// Cells over `words`, zeroed before their first use.
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

    /// As `set` when `when` holds; without a branch, unless there are no cells.
    #[inline(always)]
    fn set_if(&self, when: bool, index: u32, value: u64) {
        let inside = index < self.0.len() as u32;
        if let Some(cell) = self.0.get(if inside { index as usize } else { 0 }) {
            cell.store_if(when & inside, value);
        }
    }
}

/// A command in flight. Dropping it leaks the command's cell and buffer until the queue is recovered.
#[derive(Debug)]
#[must_use = "wait for the command: until it ends its buffer belongs to the controller"]
pub struct Token {
    cell: u32,
    ticket: u32,
    cid: Cid,
}

impl Token {
    /// The token of a command that was submitted elsewhere, from [`words`](Self::words).
    pub const fn from_words([cell, ticket, cid]: [u32; 3]) -> Self {
        Self {
            cell,
            ticket,
            cid: Cid(cid as u16),
        }
    }

    /// The token as words, to be kept where Rust values cannot be.
    pub const fn words(self) -> [u32; 3] {
        [self.cell, self.ticket, self.cid.0 as u32]
    }

    /// The command's identifier, for messages.
    pub const fn cid(&self) -> Cid {
        self.cid
    }

    /// The result cell.
    pub const fn cell(&self) -> u32 {
        self.cell
    }
}

/// What an attempt to drain did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Another group is draining.
    Busy,
    /// So many completions were taken.
    Took(u32),
}

/// No slot: one past the largest.
const NO_SLOT: u32 = MAX_IN_FLIGHT;

/// A queue that any threads share. Every thread makes its own view of the words: that is cheap.
#[derive(Debug)]
pub struct SharedQueue<'a> {
    memory: QueueMemory<'a>,
    state: SharedState<'a>,
    cells: Cells<'a>,
}

impl<'a> SharedQueue<'a> {
    /// A queue over memory and state that belong together, as
    /// [`QueueWords::attach`](crate::handoff::QueueWords::attach) gives them.
    #[inline(always)]
    pub fn new(memory: QueueMemory<'a>, state: QueueState<'a>, cells: Cells<'a>) -> Self {
        Self {
            memory,
            state: SharedState::of(state),
            cells,
        }
    }

    /// The queue's state, for counts.
    pub fn state(&self) -> &QueueState<'a> {
        &self.state
    }

    /// Places one command for each member of `group`; the next call that rings or helps rings for it.
    ///
    /// Never waits. When slots run out, members of higher rank get [`SubmitError::QueueFull`].
    ///
    /// # Errors
    /// [`SubmitError::CellBusy`], [`SubmitError::Map`], [`SubmitError::QueueFull`] (drain, then retry)
    /// and [`SubmitError::Refused`]; nothing is in flight then.
    #[inline(always)]
    pub fn place<G: Group>(&self, group: &G, command: Command<'_>) -> Result<Token, SubmitError> {
        let (token, why) = self.place_some(group, true, || command);
        why.map_or(Ok(token), Err)
    }

    /// As [`place`](Self::place), for the members that want to. The token means nothing where there is
    /// a reason against it.
    #[inline(always)]
    fn place_some<'d, G: Group>(
        &self,
        group: &G,
        wants: bool,
        command: impl Fn() -> Command<'d>,
    ) -> (Token, Option<SubmitError>) {
        let command = command();
        // Issued together: their latencies overlap.
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

    /// Claims a slot for each member that wants one, in the order of ranks; [`NO_SLOT`] for those left
    /// over. `hint` spreads groups over the words: a group that comes back looks first where it was before.
    #[inline(always)]
    fn claim<G: Group>(&self, group: &G, wants: bool, hint: u32) -> u32 {
        let words = self.state.free_words();
        let Vote {
            total: need,
            before: rank,
            ..
        } = group.vote(wants);
        let home = group.broadcast(spread(hint / 32, words));
        let mut mine = NO_SLOT;
        let mut given = 0;
        let mut turn = 0;
        // Each word is looked at once: the one at home without a look before.
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
        // The leader's acquire reaches the members here, before they touch their slots.
        group.sync();
        mine
    }

    /// Up to `need` free bits of a word, now ours.
    #[inline(always)]
    fn claim_bits(&self, word: u32, need: u32, hint: u32, blind: bool) -> u32 {
        let free = self.state.free_bits(word);
        // A guess of one bit is mostly right, and saves the look.
        let mut want = match (need, blind) {
            (32.., _) => u32::MAX,
            (1, true) => 1 << (hint % 32),
            _ => lowest(free.load(Order::Relaxed, Scope::Gpu), need),
        };
        // Two tries: the first one returns what is free.
        let mut got = 0;
        for _ in 0..2 {
            if want == 0 {
                break;
            }
            // Acquire: pairs with the release of the slot when its command's end was delivered.
            let was = free.fetch_and(!want, Order::Acquire, Scope::Gpu);
            got = was & want;
            if got != 0 {
                break;
            }
            want = lowest(was & !want, need);
        }
        got
    }

    /// How many words from `home + turn` on are empty, as far as one look by every member reaches.
    #[inline(always)]
    fn skip_empty<G: Group>(&self, group: &G, home: u32, turn: u32) -> u32 {
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
        // Release: pairs with the claim of the slot; its word and lists are not touched after this.
        self.state
            .free_bits(slot / 32)
            .fetch_or(1 << (slot % 32), Order::Release, Scope::Gpu);
    }

    /// Publishes the commands of claimed slots, for the next doorbell: tickets, entries, sequence numbers. The
    /// token of a member that is not `ready` means nothing.
    #[inline(always)]
    fn publish<G: Group>(
        &self,
        group: &G,
        ready: bool,
        slot: u32,
        sqe: Sqe,
        (tag, wants_dw0): (u32, bool),
    ) -> Token {
        let state = &self.state;
        let mut token = Token {
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
        // Members may have written words of this one's entry: the fence covers what happened before sync.
        group.sync();
        // Release: pairs with the acquire of the sequence number by the holder of the ring lock.
        fence(Order::Release, Scope::Gpu);
        if ready {
            let sequence = token.ticket.wrapping_add(1);
            state
                .sequence(token.ticket)
                .store(sequence, Order::Relaxed, Scope::Gpu);
        }
        token
    }

    /// Returns once it is known that the controller has fetched the entries in whose place those before
    /// `end` are written.
    ///
    /// It has fetched them: fewer than `entries` commands hold slots, those before `end` that hold none have
    /// completed, and entries are fetched in order. Spins only until completions that another group has
    /// read already are counted; never on the controller.
    #[inline(always)]
    fn wait_until_entry_reusable(&self, end: u32) {
        let past = end.wrapping_sub(self.state.mask() + 1);
        // Acquire: pairs with the release of all who counted.
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

    /// The end of the command, if it has been drained: how it ended and dword 0 of its completion (0
    /// unless the command asked for it).
    #[inline(always)]
    pub fn poll(&self, token: &Token) -> Option<(Outcome, u32)> {
        let value = self.result(token);
        (value != 0).then(|| ended(value))
    }

    /// The cell's value once the token's own command has ended, else 0.
    #[inline(always)]
    fn result(&self, token: &Token) -> u64 {
        self.cells.get(token.cell).map_or(0, |cell| {
            let value = cell.load(Order::Relaxed, Scope::Gpu);
            match (value & ENDED != 0) & ((value >> CID_SHIFT) as u16 == token.cid.0) {
                false => 0,
                // Acquire: pairs with the release fence of the thread that delivered; the command's data is visible.
                // Only now: on a GPU it empties the cache of the waiting thread.
                true => cell.load(Order::Acquire, Scope::Gpu),
            }
        })
    }

    /// Whether a command with this result cell is in flight, for tests of those who use the queue.
    pub fn is_under_way(&self, cell: u32) -> bool {
        let cell = self.cells.get(cell);
        cell.is_some_and(|cell| {
            cell.load(Order::Relaxed, Scope::Gpu) & (PENDING | ENDED) == PENDING
        })
    }

    /// Ends every command in flight as aborted and empties the queue for the controller to create
    /// again; `None` when the proof does not cover this queue. Returns how many there were.
    ///
    /// A command whose completion was read, but not delivered because the kernel died in between,
    /// ends as aborted too.
    ///
    /// For the host, while no kernel uses the queue.
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

    /// The fault that refused the queue, if any.
    pub fn fault(&self) -> Option<ControllerFault> {
        self.state.fault()
    }
}

/// What a cell's value says of a command that has ended.
#[inline(always)]
fn ended(value: u64) -> (Outcome, u32) {
    let outcome = match (value & DONE, value & DELETED) {
        (DONE, _) => Outcome::Completed(Status((value >> 49) as u16)),
        (_, 0) => Outcome::Aborted(AbortReason::ControllerReset),
        _ => Outcome::Aborted(AbortReason::QueueDeleted),
    };
    (outcome, value as u32)
}

/// A number below `count` that differs between neighbouring values of `hint`.
#[inline(always)]
fn spread(hint: u32, count: u32) -> u32 {
    let mixed = hint.wrapping_mul(0x9E37_79B9);
    ((u64::from(mixed) * u64::from(count)) >> 32) as u32
}

/// The `count` lowest bits that are set in `word`.
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

/// The index of the bit that is set in `word` after `rank` others.
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
