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
use crate::group::{Act, Group, Here, unroll};
use crate::inflight::{MAX_IN_FLIGHT, Quiesced};
use crate::queue_pair::{AbortReason, Outcome, QueueMemory};
use crate::queue_state::{MAX_TAGS, QueueState, SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::spec::{Cid, Sqe, Status};
use crate::sync::{AtomicU64, Order, Scope, fence};

/// Times the ring lock's holder looks again for those who came meanwhile; later ones ring by themselves.
const RING_ROUNDS: u32 = 16;
/// Marks that a member looks at together: several loads are under way at once.
const MARKS: usize = 2;
/// The largest [`Group::READS`].
const ENTRIES: usize = 8;
/// Passes over the completion queue under one hold of the drain lock.
const DRAIN_ROUNDS: u32 = 4;
/// How much longer those pause who found the queue full.
const PATIENCE: u32 = 4;
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
        if let Some(cell) = self.0.get(index as usize) {
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

/// No slot: one past the largest.
const NO_SLOT: u32 = MAX_IN_FLIGHT;

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

    /// Places one command for each member of `group`; whoever helps next rings for it.
    ///
    /// Never waits. When slots run out, members of higher rank get [`SubmitError::QueueFull`].
    ///
    /// # Errors
    /// [`SubmitError::CellBusy`], [`SubmitError::Map`], [`SubmitError::QueueFull`] (drain, then retry)
    /// and [`SubmitError::Refused`]; nothing is in flight then.
    #[inline(always)]
    pub fn place<G: Group>(&self, group: &G, command: Command<'_>) -> Result<Token, SubmitError> {
        // Issued together: their latencies overlap.
        let fault = self.state.fault_code();
        let cell = self.cells.get(command.tag);
        let cell = cell.map_or(PENDING, |cell| cell.load(Order::Relaxed, Scope::Gpu));
        let slot = self.claim(group, command.tag);
        let mut why = match (slot, fault, cell & PENDING) {
            (_, 1.., _) => Some(Why::Refused),
            (_, _, 1..) => Some(Why::CellBusy),
            (NO_SLOT, ..) => Some(Why::Full),
            _ => None,
        };
        let mut sqe = command.sqe;
        if why.is_none() {
            match self.memory.lists.map(sqe, command.data, slot as usize) {
                Ok(mapped) => sqe = mapped,
                Err(error) => why = Some(Why::Map(error)),
            }
        }
        if why.is_some() && slot != NO_SLOT {
            self.free(slot);
        }
        let placed = self.put(group, why.is_none(), slot, sqe, &command);
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

    /// Claims a slot for each member, in the order of ranks; [`NO_SLOT`] for those left over. `hint`
    /// spreads groups over the words: a group that comes back looks first where it was before.
    #[inline(always)]
    fn claim<G: Group>(&self, group: &G, hint: u32) -> u32 {
        let words = self.state.free_words();
        let need = group.size();
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
            let rank = group.rank();
            if rank >= given && rank - given < got.count_ones() {
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
        let free = self.state.free(word);
        // A guess of one bit is mostly right, and saves the look.
        let mut want = match (need, blind) {
            (32.., _) => u32::MAX,
            (1, true) => 1 << (hint % 32),
            _ => lowest(free.load(Order::Relaxed, Scope::Gpu), need),
        };
        // Two tries: the first one tells what is free.
        let mut got = 0;
        for _ in 0..2 {
            if want == 0 {
                break;
            }
            // Acquire: pairs with the release of the slot by the one who drained its command.
            let was = free.fetch_and(!want, Order::Acquire, Scope::Gpu);
            got = was & want;
            if got != 0 {
                break;
            }
            want = lowest(was & !want, need);
        }
        let kept = lowest(got, need);
        if kept != got {
            // Relaxed: carries on the release of whoever freed these slots.
            free.fetch_or(got & !kept, Order::Relaxed, Scope::Gpu);
        }
        kept
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
            empty = self.state.free(word).load(Order::Relaxed, Scope::Gpu) == 0;
        }
        group.vote(empty).leading
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
    fn put<G: Group>(
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
            first = state
                .position()
                .fetch_add(vote.total, Order::Relaxed, Scope::Gpu);
            self.fetched(first.wrapping_add(vote.total));
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
        token
    }

    /// Sees to it that the controller has fetched the last users of the entries before `end`.
    ///
    /// It has: fewer than `entries` commands hold slots, those before `end` that hold none have
    /// completed, and entries are fetched in order. Only the news may still be under way, so this
    /// waits for nobody.
    #[inline(always)]
    fn fetched(&self, end: u32) {
        let past = end.wrapping_sub(self.state.mask() + 1);
        // Acquire: pairs with the release fence before the head was stored. Modulo 2^31, as the head is.
        while ((self
            .state
            .head()
            .load(Order::Acquire, Scope::Gpu)
            .wrapping_sub(past)
            << 1) as i32)
            < 0
        {
            crate::sync::spin();
        }
    }

    /// Rings for everyone published so far, unless another group is doing that; then it looks again. A
    /// mark that it still misses is rung by the one who waits for it.
    #[inline(always)]
    pub fn ring<G: Group>(&self, group: &G) {
        let lock = self.state.ring_lock();
        let mut asked = 0;
        if group.leads() {
            // Acquire: pairs with the release of the last holder, for what was rung.
            asked = lock.fetch_add(1, Order::Acquire, Scope::Gpu);
        }
        if group.broadcast(asked) != 0 {
            return;
        }
        let mut seen = 1;
        for _ in 0..RING_ROUNDS {
            self.ring_once(group);
            let mut was = 0;
            if group.leads() {
                // Release: after the doorbell store, so that holders ring in order.
                was = lock.compare_exchange(seen, 0, Order::Release, Scope::Gpu);
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
    fn ring_once<G: Group>(&self, group: &G) {
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
                // Release: pairs with the controller's fetch. Acquire: of the marks, where one member alone
                // has read them.
                fence(Order::AcqRel, Scope::Sys);
                self.memory.sq_doorbell.ring_fenced(to & state.mask());
            }
        }
    }

    /// Takes the completions that are there, for everyone, unless another group is doing that.
    #[inline(always)]
    pub fn drain<G: Group>(&self, group: &G) -> Drained {
        let lock = self.state.drain();
        let mut was = 1;
        if group.leads() {
            was = lock.load(Order::Relaxed, Scope::Gpu);
            if was & 1 == 0 {
                // Relaxed: the head is in the word itself, and the rest is ordered by completions.
                was = lock.fetch_or(1, Order::Relaxed, Scope::Gpu);
            }
        }
        let was = group.broadcast(was);
        if was & 1 != 0 {
            return Drained::Busy;
        }
        let start = was >> 1;
        let (mut head, mut rang) = (start, false);
        for _ in 0..DRAIN_ROUNDS {
            let found = self.drain_once(group, head);
            let next = head.wrapping_add(found);
            rang |= self.state.gives_back(head, next);
            head = next;
            if found < G::READS * group.size() {
                break;
            }
        }
        if group.leads() {
            // Release: the next holder rings the head doorbell after this one did.
            let order = if rang { Order::Release } else { Order::Relaxed };
            lock.store(head << 1, order, Scope::Gpu);
        }
        Drained::Took(head.wrapping_sub(start))
    }

    /// One wide read of the completion ring. Under the drain lock.
    #[inline(always)]
    fn drain_once<G: Group>(&self, group: &G, head: u32) -> u32 {
        let state = &self.state;
        let cq = &self.memory.cq;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let mut uppers = [0; ENTRIES];
        // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data are
        // visible after it. Several reads in flight at once are fenced together instead.
        let order = if G::READS == 1 {
            Order::Acquire
        } else {
            Order::Relaxed
        };
        unroll!(ENTRIES, k => {
            // The phase of what is not read is the wrong one.
            uppers[k] = u64::from(!state.phase(at(k))) << 48;
            if (k as u32) < G::READS {
                uppers[k] = cq.upper(at(k) & state.mask(), order);
            }
        });
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
        let (mut wants_dw0, mut fault) = (false, 0);
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                ends[k] = state.strike(uppers[k]);
            }
        });
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                if state.fits(uppers[k], ends[k]) {
                    wants_dw0 |= ends[k].wants_dw0();
                } else {
                    fault = state.judge(uppers[k], ends[k]);
                    ends[k] = SlotWord::NONE;
                }
            }
        });
        group.sync();
        // By every member. Release: pairs with the acquire of a cell, and of a slot; and the reads of the
        // entries are over before the head doorbell gives them back. Acquire: for reads without it.
        let scope = if G::READS == 1 {
            Scope::Gpu
        } else {
            Scope::Sys
        };
        fence(Order::AcqRel, scope);
        let next = head.wrapping_add(found);
        let rung = state.rung().load(Order::Relaxed, Scope::Gpu);
        if group.leads() {
            // Before any slot is free: see `fetched`.
            state.head().store(next, Order::Relaxed, Scope::Gpu);
        }
        group.sync();
        unroll!(ENTRIES, k => {
            if ends[k].pending() {
                if !state.head_fits(uppers[k], at(k).wrapping_add(1), rung) {
                    fault = QueueState::bad_head(uppers[k]);
                }
                let mut result = DONE | u64::from(status_of(uppers[k]).0) << 32;
                if ends[k].wants_dw0() {
                    result |= cq.lower(at(k) & state.mask()) & u64::from(u32::MAX);
                }
                self.cells.set(ends[k].tag(), result);
                // Relaxed: the fence above released what was done with the slot.
                let slot = slot_of(uppers[k]);
                state
                    .free(slot / 32)
                    .fetch_or(1 << (slot % 32), Order::Relaxed, Scope::Gpu);
            }
        });
        if fault != 0 {
            state.refuse(fault);
        }
        if state.gives_back(head, next) {
            let late_reads = group.vote(wants_dw0).total > 0;
            group.sync();
            if group.leads() {
                if late_reads || G::READS == 1 {
                    self.memory.cq_doorbell.ring(next & state.mask());
                } else {
                    self.memory.cq_doorbell.ring_fenced(next & state.mask());
                }
            }
        }
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
        let (mut turn, mut over) = (0, false);
        loop {
            let value = self.result(&token);
            if value & DONE != 0 {
                return Ok(ended(value));
            }
            if over || self.state.fault_code() != 0 {
                return Err((self.why_not(), token));
            }
            let late = here.now_ns() >= deadline_ns;
            let drained = self.help_out(here, Some(token.position));
            over = late && self.gave_up(here, drained, deadline_ns);
            turn = next_turn(drained, turn);
            here.pause(turn);
        }
    }

    /// Rings when somebody's `position` was not rung yet, and drains. What every wait does meanwhile.
    #[inline(always)]
    fn help<G: Group>(&self, group: &G, position: Option<u32>) -> Drained {
        let rung = self.state.rung().load(Order::Relaxed, Scope::Gpu);
        let waits = match position {
            Some(position) => rung.wrapping_sub(position) as i32 <= 0,
            None => rung != self.state.position().load(Order::Relaxed, Scope::Gpu),
        };
        if group.vote(waits).total > 0 {
            self.ring(group);
        }
        self.drain(group)
    }

    /// Submits a command, draining while the queue is full, until `deadline_ns`.
    ///
    /// # Errors
    /// As [`place`](Self::place); [`SubmitError::QueueFull`] when no slot became free in time.
    #[inline(always)]
    pub fn submit<H: Here>(
        &self,
        here: &H,
        command: Command<'_>,
        deadline_ns: u64,
    ) -> Result<Token, SubmitError> {
        let mut turn = 0;
        loop {
            let placed = here.together(
                self.key(),
                Place {
                    queue: self,
                    command,
                },
            );
            let full = matches!(placed, Err(SubmitError::QueueFull));
            if !full || here.now_ns() >= deadline_ns {
                if placed.is_ok() {
                    here.together(self.key(), Ring { queue: self });
                }
                return placed;
            }
            let drained = self.help_out(here, None);
            turn = next_turn(drained, turn);
            here.pause(turn + PATIENCE);
        }
    }

    /// Submits a command and waits for its end: as [`submit`](Self::submit) and [`wait`](Self::wait),
    /// in less code.
    ///
    /// # Errors
    /// `Ok(Err(..))` as `submit`, `Err(..)` as `wait`.
    #[inline(always)]
    #[allow(clippy::type_complexity)]
    pub fn run<H: Here>(
        &self,
        here: &H,
        command: Command<'_>,
        deadline_ns: u64,
    ) -> Result<Result<(Outcome, u32), SubmitError>, (WaitError, Token)> {
        let mut token = None;
        let (mut turn, mut over) = (0, false);
        loop {
            match &token {
                None => match here.together(
                    self.key(),
                    Place {
                        queue: self,
                        command,
                    },
                ) {
                    Ok(placed) => token = Some(placed),
                    Err(SubmitError::QueueFull) if !over => {}
                    Err(error) => return Ok(Err(error)),
                },
                Some(placed) => {
                    let value = self.result(placed);
                    if value & DONE != 0 {
                        return Ok(Ok(ended(value)));
                    }
                    if over || self.state.fault_code() != 0 {
                        break;
                    }
                }
            }
            let late = here.now_ns() >= deadline_ns;
            let position = token.as_ref().map(|token| token.position);
            let drained = self.help_out(here, position);
            over = late && self.gave_up(here, drained, deadline_ns);
            turn = next_turn(drained, turn);
            // Without a slot there is nothing to be first at.
            here.pause(if token.is_none() {
                turn + PATIENCE
            } else {
                turn
            });
        }
        match token {
            Some(token) => Err((self.why_not(), token)),
            None => Ok(Err(SubmitError::QueueFull)),
        }
    }

    /// After the deadline: whether a drain of our own has found nothing since, or there is no getting one.
    #[inline(always)]
    fn gave_up<H: Here>(&self, here: &H, drained: Drained, deadline_ns: u64) -> bool {
        drained == Drained::Took(0) || here.now_ns() >= deadline_ns.saturating_add(GRACE_NS)
    }

    #[inline(always)]
    fn why_not(&self) -> WaitError {
        self.state
            .fault()
            .map_or(WaitError::TimedOut, WaitError::Refused)
    }

    /// Takes part in the queue's upkeep without waiting for anything: rings for what was published (when
    /// `position` is given: only when that was not rung yet), and drains.
    #[inline(always)]
    pub fn help_out<H: Here>(&self, here: &H, position: Option<u32>) -> Drained {
        here.together(
            self.key(),
            Help {
                queue: self,
                position,
            },
        )
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

struct Place<'q, 'a, 'd> {
    queue: &'q SharedQueue<'a>,
    command: Command<'d>,
}

impl Act for Place<'_, '_, '_> {
    type Output = Result<Token, SubmitError>;

    #[inline(always)]
    fn act<G: Group>(self, group: &G) -> Self::Output {
        self.queue.place(group, self.command)
    }
}

struct Ring<'q, 'a> {
    queue: &'q SharedQueue<'a>,
}

impl Act for Ring<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn act<G: Group>(self, group: &G) {
        self.queue.ring(group);
    }
}

struct Help<'q, 'a> {
    queue: &'q SharedQueue<'a>,
    position: Option<u32>,
}

impl Act for Help<'_, '_> {
    type Output = Drained;

    #[inline(always)]
    fn act<G: Group>(self, group: &G) -> Drained {
        self.queue.help(group, self.position)
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

/// The longer nothing happens, and the longer others do it, the longer the pauses.
#[inline(always)]
fn next_turn(drained: Drained, turn: u32) -> u32 {
    match drained {
        Drained::Took(1..) => 0,
        _ => turn + 1,
    }
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
