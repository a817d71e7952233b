//! A queue that any threads share: unrelated threads, divergent code, no owner and no resident helper.
//!
//! Command slots are apart from ring positions. A slot is claimed at once or not at all, so nobody
//! waits with something in hand; only the holder of a slot takes a ring position, and between
//! position and publication there is no wait and no way out. The position is always free: there are
//! fewer slots than entries, so among the positions of one lap two had the same slot, the earlier of
//! them has completed, and the controller fetches in order (docs/memory-model.md has the proof, loom
//! checks it). A slow or lost command costs its slot, never the ring.
//!
//! Invariant: each command ends once, in the result cell that it named. Whoever holds the ring lock
//! rings for everyone published so far; whoever holds the drain lock takes completions for everyone.

use crate::command::{Command, write_entries};
use crate::error::{ControllerFault, MapError, SubmitError, WaitError};
use crate::group::{Group, Here, Vote, unroll};
use crate::inflight::Quiesced;
use crate::queue_pair::{AbortReason, Outcome, QueueMemory};
use crate::queue_state::{MAX_TAGS, QueueState, SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::spec::{Cid, Sqe, Status};
use crate::sync::{AtomicU64, Order, Scope, fence};

/// Times the ring lock's holder looks again for those who came meanwhile; later ones ring by themselves.
const RING_ROUNDS: u32 = 16;
/// Passes over the completion queue under one hold of the drain lock.
const DRAIN_ROUNDS: u32 = 4;
/// How long after its deadline a wait still tries to drain once by itself.
const GRACE_NS: u64 = 100_000_000;

const PENDING: u64 = 1 << 63;
const DONE: u64 = 1 << 62;
const ABORTED: u64 = 1 << 61;

/// Result cells: one for each token that may be out at a time, in memory that every user can reach.
///
/// A cell belongs to a command from submission until its end is seen; its index is the command's tag.
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
        if let Some(cell) = self.get(index) {
            cell.store(value, Order::Relaxed, Scope::Gpu);
        }
    }
}

/// A command in flight. Dropping it leaks the command's cell and buffer until the queue is recovered.
#[derive(Debug)]
#[must_use = "wait for the command: until it ends its buffer belongs to the controller"]
pub struct Token {
    cell: u32,
    position: u32,
    cid: Cid,
}

impl Token {
    /// The token of a command that was submitted elsewhere, from [`words`](Self::words).
    pub const fn from_words([cell, position, cid]: [u32; 3]) -> Self {
        Self {
            cell,
            position,
            cid: Cid(cid as u16),
        }
    }

    /// The token as words, to be kept where Rust values cannot be.
    pub const fn words(self) -> [u32; 3] {
        [self.cell, self.position, self.cid.0 as u32]
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

/// Why a member's command is not placed.
#[derive(Clone, Copy)]
enum Why {
    Full,
    CellBusy,
    Map(MapError),
    Refused,
}

/// A queue that any threads share. Cheap to make anew from its words in every thread.
#[derive(Debug)]
pub struct SharedQueue<'a> {
    memory: QueueMemory<'a>,
    state: QueueState<'a>,
    cells: Cells<'a>,
}

impl<'a> SharedQueue<'a> {
    /// A queue over memory and state that belong together, as
    /// [`QueueWords::attach`](crate::handoff::QueueWords::attach) gives them.
    #[inline(always)]
    pub fn new(memory: QueueMemory<'a>, state: QueueState<'a>, cells: Cells<'a>) -> Self {
        Self {
            memory,
            state,
            cells,
        }
    }

    /// The queue's state, for counts.
    pub fn state(&self) -> &QueueState<'a> {
        &self.state
    }

    /// Submits one command for each member of `group` and rings, or lets the one who rings do it.
    ///
    /// Never waits. When slots run out, members of higher rank get [`SubmitError::QueueFull`].
    ///
    /// # Errors
    /// [`SubmitError::CellBusy`], [`SubmitError::Map`], [`SubmitError::QueueFull`] (drain, then retry)
    /// and [`SubmitError::Refused`]; nothing is in flight then.
    #[inline(always)]
    pub fn try_submit<G: Group>(
        &self,
        group: &G,
        command: Command<'_>,
    ) -> Result<Token, SubmitError> {
        let fit = self.check(&command);
        let slot = self.claim(group, fit.is_none());
        let mut why = fit;
        let mut sqe = command.sqe;
        if fit.is_none() {
            match slot {
                None => why = Some(Why::Full),
                Some(slot) => match self.memory.lists.map(sqe, command.data, slot as usize) {
                    Ok(mapped) => sqe = mapped,
                    Err(error) => {
                        self.free(slot);
                        why = Some(Why::Map(error));
                    }
                },
            }
        }
        let placed = self.place(group, why.is_none(), slot.unwrap_or(0), sqe, &command);
        match why {
            None => Ok(placed),
            Some(Why::Full) => Err(SubmitError::QueueFull),
            Some(Why::CellBusy) => Err(SubmitError::CellBusy),
            Some(Why::Map(error)) => Err(SubmitError::Map(error)),
            Some(Why::Refused) => Err(match self.state.fault() {
                Some(fault) => SubmitError::Refused(fault),
                None => SubmitError::QueueFull,
            }),
        }
    }

    #[inline(always)]
    fn check(&self, command: &Command<'_>) -> Option<Why> {
        if self.state.fault_code() != 0 {
            return Some(Why::Refused);
        }
        let Some(cell) = self.cells.get(command.tag) else {
            return Some(Why::CellBusy);
        };
        match cell.load(Order::Relaxed, Scope::Gpu) & PENDING {
            0 => None,
            _ => Some(Why::CellBusy),
        }
    }

    /// Claims slots for the members that want one, in the order of ranks; `None` for those left over.
    #[inline(always)]
    fn claim<G: Group>(&self, group: &G, wants: bool) -> Option<u32> {
        let Vote {
            total: need,
            before,
            ..
        } = group.vote(wants);
        let words = self.state.free_words();
        // Each word is looked at once, from a start that differs between groups.
        let start = self.state.position().load(Order::Relaxed, Scope::Gpu) / 32;
        let (mut given, mut mine) = (0, None);
        for turn in 0..words {
            if given >= need {
                break;
            }
            let word = (start + turn) % words;
            let mut got = 0;
            if group.leads() {
                let free = self.state.free(word);
                let want = lowest(free.load(Order::Relaxed, Scope::Gpu), need - given);
                if want != 0 {
                    // Acquire: pairs with the release of the slot by the one who drained its command.
                    got = want & free.fetch_and(!want, Order::Acquire, Scope::Gpu);
                }
            }
            let got = group.broadcast(got);
            let count = got.count_ones();
            if wants && before >= given && before - given < count {
                mine = Some(word * 32 + nth(got, before - given));
            }
            given += count;
        }
        // The leader's acquire reaches the members here, before they touch their slots.
        group.sync();
        mine
    }

    #[inline(always)]
    fn free(&self, slot: u32) {
        // Release: pairs with the claim of the slot; its word and lists are not touched after this.
        self.state
            .free(slot / 32)
            .fetch_or(1 << (slot % 32), Order::Release, Scope::Gpu);
    }

    /// From claimed slots to a doorbell: positions, entries, marks. The token of a member that is not
    /// `ready` means nothing.
    #[inline(always)]
    fn place<G: Group>(
        &self,
        group: &G,
        ready: bool,
        slot: u32,
        sqe: Sqe,
        command: &Command<'_>,
    ) -> Token {
        let state = &self.state;
        let mut token = Token {
            cell: command.tag,
            position: 0,
            cid: Cid(0),
        };
        let vote = group.vote(ready);
        if vote.total == 0 {
            return token;
        }
        let mut first = 0;
        if group.leads() {
            // AcqRel: whoever has a later position also knows what the earlier ones knew, that is
            // that the entry's last user was fetched (lemma above).
            first = state
                .position()
                .fetch_add(vote.total, Order::AcqRel, Scope::Gpu);
        }
        token.position = group.broadcast(first).wrapping_add(vote.before);
        group.sync();
        let mut entry = None;
        if ready {
            let word = state.slot(slot);
            let next = SlotWord(word.load(Order::Relaxed, Scope::Gpu))
                .next(command.tag, command.wants_dw0);
            word.store(next.0, Order::Relaxed, Scope::Gpu);
            self.cells.set(command.tag, PENDING);
            token.cid = next.cid(slot);
            entry = Some((token.position & state.mask(), sqe.with_cid(token.cid)));
        }
        write_entries(group, &self.memory.sq, entry);
        // Members may have written words of this one's entry: the fence covers what happened before sync.
        group.sync();
        // Release: pairs with the acquire of the mark by whoever rings.
        fence(Order::Release, Scope::Gpu);
        if ready {
            let mark = token.position.wrapping_add(1);
            state
                .mark(token.position)
                .store(mark, Order::Relaxed, Scope::Gpu);
        }
        group.sync();
        self.ring(group);
        token
    }

    /// Rings for everyone published so far, unless another group is doing that; it will see what was
    /// published before this call.
    #[inline(always)]
    pub fn ring<G: Group>(&self, group: &G) {
        if group.size() >= 32 {
            self.ring_by::<G, 1>(group);
        } else {
            self.ring_by::<G, 8>(group);
        }
    }

    #[inline(always)]
    fn ring_by<G: Group, const MARKS: usize>(&self, group: &G) {
        let lock = self.state.ring_lock();
        let mut asked = 0;
        if group.leads() {
            // AcqRel: release, so that a holder that sees the count sees the marks; acquire, for what
            // the last holder left.
            asked = lock.fetch_add(1, Order::AcqRel, Scope::Gpu);
        }
        if group.broadcast(asked) != 0 {
            return;
        }
        let mut seen = 1;
        for _ in 0..RING_ROUNDS {
            self.ring_once::<G, MARKS>(group);
            let mut was = 0;
            if group.leads() {
                // AcqRel: release after the doorbell store, so that holders ring in order; acquire
                // of the marks of those who asked meanwhile.
                was = lock.compare_exchange(seen, 0, Order::AcqRel, Scope::Gpu);
            }
            let was = group.broadcast(was);
            if was == seen {
                return;
            }
            seen = was;
        }
        if group.leads() {
            // Release, as above. Those who asked since then ring when they wait.
            lock.swap(0, Order::Release, Scope::Gpu);
        }
    }

    /// One doorbell over every entry published without a gap. Under the ring lock.
    #[inline(always)]
    fn ring_once<G: Group, const MARKS: usize>(&self, group: &G) {
        let state = &self.state;
        let mut from = 0;
        if group.leads() {
            from = state.rung().load(Order::Relaxed, Scope::Gpu);
        }
        let from = group.broadcast(from);
        let mut to = from;
        // A lap holds fewer entries than the ring has: the scan ends.
        while to.wrapping_sub(from) <= state.mask() {
            let at = |k: usize| to.wrapping_add(k as u32 * group.size() + group.rank());
            let mut marks = [0; MARKS];
            // Acquire: pairs with the release fence before the mark. The fence of the doorbell is not
            // enough when another member rings; one member alone has that fence.
            let order = if group.size() == 1 {
                Order::Relaxed
            } else {
                Order::Acquire
            };
            unroll!(MARKS, k => { marks[k] = state.mark(at(k)).load(order, Scope::Gpu); });
            let mut found = 0;
            unroll!(MARKS, k => {
                if found == k as u32 * group.size() {
                    found += group.vote(marks[k] == at(k).wrapping_add(1)).leading;
                }
            });
            to = to.wrapping_add(found);
            if found < MARKS as u32 * group.size() {
                break;
            }
        }
        if to != from {
            group.sync();
            if group.leads() {
                // Before the doorbell: whoever sees a completion sees that it was rung.
                state.rung().store(to, Order::Relaxed, Scope::Gpu);
                self.memory.sq_doorbell.ring(to & state.mask());
            }
        }
    }

    /// Takes the completions that are there, for everyone, unless another group is doing that.
    #[inline(always)]
    pub fn drain<G: Group>(&self, group: &G) -> Drained {
        let lock = self.state.drain_lock();
        let mut taken = 1;
        if group.leads() && lock.load(Order::Relaxed, Scope::Gpu) == 0 {
            // Acquire: pairs with the release of the last holder, for the head.
            taken = lock.swap(1, Order::Acquire, Scope::Gpu);
        }
        if group.broadcast(taken) != 0 {
            return Drained::Busy;
        }
        let took = if group.size() >= 16 {
            self.drain_by::<G, 2>(group)
        } else {
            self.drain_by::<G, 8>(group)
        };
        if group.leads() {
            // Release: the next holder sees the head, and rings its doorbell after this one's.
            lock.store(0, Order::Release, Scope::Gpu);
        }
        Drained::Took(took)
    }

    #[inline(always)]
    fn drain_by<G: Group, const ENTRIES: usize>(&self, group: &G) -> u32 {
        let state = &self.state;
        let mut start = 0;
        if group.leads() {
            start = state.head().load(Order::Relaxed, Scope::Gpu);
        }
        let start = group.broadcast(start);
        let mut head = start;
        for _ in 0..DRAIN_ROUNDS {
            let found = self.drain_once::<G, ENTRIES>(group, head);
            head = head.wrapping_add(found);
            if found < ENTRIES as u32 * group.size() {
                break;
            }
        }
        head.wrapping_sub(start)
    }

    /// One wide read of the completion ring. Under the drain lock.
    #[inline(always)]
    fn drain_once<G: Group, const ENTRIES: usize>(&self, group: &G, head: u32) -> u32 {
        let state = &self.state;
        let cq = &self.memory.cq;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let mut uppers = [0; ENTRIES];
        unroll!(ENTRIES, k => { uppers[k] = cq.upper(at(k) & state.mask(), Order::Relaxed); });
        let mut found = 0;
        unroll!(ENTRIES, k => {
            if found == k as u32 * group.size() {
                // No entry a whole lap ahead passes for new: there are fewer commands than entries.
                let new = phase_of(uppers[k]) == state.phase(at(k));
                found += group.vote(new).leading;
            }
        });
        if found == 0 {
            return 0;
        }
        let mut ends = [SlotWord::NONE; ENTRIES];
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                match state.take(uppers[k], group.size() == 1) {
                    Ok(word) => ends[k] = word,
                    Err(code) => state.refuse(code),
                }
            }
        });
        group.sync();
        // AcqRel, by every member. Acquire: pairs with the controller's write of the phase tags; dwords
        // 0-1 and the data are visible after it. Release: pairs with the acquire of a cell, and of a
        // slot; and the reads of the entries are over before the head doorbell gives them back.
        fence(Order::AcqRel, Scope::Sys);
        let rung = state.rung().load(Order::Relaxed, Scope::Gpu);
        let mut dw0s = [0; ENTRIES];
        let mut wants_dw0 = false;
        unroll!(ENTRIES, k => { wants_dw0 |= ends[k].wants_dw0(); });
        let late_reads = group.vote(wants_dw0).total > 0;
        if late_reads {
            unroll!(ENTRIES, k => {
                if ends[k].wants_dw0() {
                    dw0s[k] = cq.lower(at(k) & state.mask()) as u32;
                }
            });
            group.sync();
        }
        if group.leads() {
            let next = head.wrapping_add(found);
            state.head().store(next, Order::Relaxed, Scope::Gpu);
            if state.owes(next, state.freed().load(Order::Relaxed, Scope::Gpu)) {
                state.freed().store(next, Order::Relaxed, Scope::Gpu);
                if late_reads {
                    self.memory.cq_doorbell.ring(next & state.mask());
                } else {
                    self.memory.cq_doorbell.ring_fenced(next & state.mask());
                }
            }
        }
        unroll!(ENTRIES, k => {
            if ends[k].pending() {
                if let Err(code) = state.check_head(uppers[k], at(k).wrapping_add(1), rung) {
                    state.refuse(code);
                }
                let status = u64::from(status_of(uppers[k]).0);
                let result = DONE | status << 32 | u64::from(dw0s[k]);
                self.cells.set(ends[k].tag(), result);
                // Relaxed: the fence above released what was done with the slot.
                let slot = slot_of(uppers[k]);
                state
                    .free(slot / 32)
                    .fetch_or(1 << (slot % 32), Order::Relaxed, Scope::Gpu);
            }
        });
        found
    }

    /// The end of the command, if it has been drained: how it ended and dword 0 of its completion (0
    /// unless the command asked for it).
    #[inline(always)]
    pub fn poll(&self, token: &Token) -> Option<(Outcome, u32)> {
        let value = self.result(token);
        (value & DONE != 0).then(|| ended(value))
    }

    #[inline(always)]
    fn result(&self, token: &Token) -> u64 {
        // Acquire: pairs with the release fence of whoever drained; the command's data is visible.
        self.cells
            .get(token.cell)
            .map_or(0, |cell| cell.load(Order::Acquire, Scope::Gpu))
    }

    /// Waits for this command's own end, as [`poll`](Self::poll) gives it, helping to ring and to drain
    /// meanwhile.
    ///
    /// # Errors
    /// [`WaitError`] with the token; the command stays in flight. A timeout is reported only after a
    /// drain that began after `deadline_ns`.
    #[inline(always)]
    pub fn wait<H: Here>(
        &self,
        here: &H,
        token: Token,
        deadline_ns: u64,
    ) -> Result<(Outcome, u32), (WaitError, Token)> {
        let mut turn = 0;
        let mut over = false;
        let value = loop {
            let value = self.result(&token);
            if value & DONE != 0 || over || self.state.fault_code() != 0 {
                break value;
            }
            let now = here.now_ns();
            let group = here.beside(self.key());
            let drained = self.help(&group, token.position);
            if now >= deadline_ns {
                // A drain of our own began after the deadline: look once more, then give up.
                over = drained != Drained::Busy || now >= deadline_ns.saturating_add(GRACE_NS);
            } else {
                turn = if drained == Drained::Took(0) {
                    turn + 1
                } else {
                    0
                };
                here.pause(turn);
            }
        };
        if value & DONE != 0 {
            return Ok(ended(value));
        }
        Err((
            self.state
                .fault()
                .map_or(WaitError::TimedOut, WaitError::Refused),
            token,
        ))
    }

    /// Rings when `position` was not rung yet, and drains.
    #[inline(always)]
    fn help<G: Group>(&self, group: &G, position: u32) -> Drained {
        let rung = self.state.rung().load(Order::Relaxed, Scope::Gpu);
        let waits = rung.wrapping_sub(position) as i32 <= 0;
        if group.vote(waits).total > 0 {
            self.ring(group);
        }
        self.drain(group)
    }

    /// Submits, draining while the queue is full, until `deadline_ns`.
    ///
    /// # Errors
    /// As [`try_submit`](Self::try_submit); [`SubmitError::QueueFull`] when no slot became free in time.
    #[inline(always)]
    pub fn submit<H: Here>(
        &self,
        here: &H,
        command: Command<'_>,
        deadline_ns: u64,
    ) -> Result<Token, SubmitError> {
        let mut turn = 0;
        loop {
            let group = here.beside(self.key());
            match self.try_submit(&group, command) {
                Err(SubmitError::QueueFull) if here.now_ns() < deadline_ns => {}
                result => return result,
            }
            let group = here.beside(self.key());
            if self.drain(&group) == Drained::Took(0) {
                here.pause(turn);
                turn += 1;
            } else {
                here.pause(0);
            }
        }
    }

    /// What threads of one group have in common: this queue.
    #[inline(always)]
    fn key(&self) -> u64 {
        u64::from(self.state.qid().0) | core::ptr::from_ref(self.state.position()).addr() as u64
    }

    /// Ends every command in flight as aborted and empties the queue for the controller to create
    /// again; `None` when the proof is of another queue. Returns how many there were.
    ///
    /// For the host, while no kernel uses the queue.
    pub fn recover(&self, proof: &Quiesced) -> Option<u32> {
        proof.covers(self.state.qid()).then(|| {
            let mut ended = 0;
            self.state.reclaim(|cell| {
                self.cells.set(cell, DONE | ABORTED);
                ended += 1;
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
    let outcome = match value & ABORTED {
        0 => Outcome::Done(Status((value >> 32) as u16 & 0x7FFF)),
        _ => Outcome::Aborted(AbortReason::ControllerReset),
    };
    (outcome, value as u32)
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
