//! Waiting on a shared queue: submit, wait, and both in one loop, by a group that stays together.
//!
//! These are three separate loops because their live values differ: a kernel that only waits holds no
//! command, one that only submits holds no result, and each is compiled to the registers that it needs.

use super::{CommandToken, DrainResult, SharedQueue, ended};
use crate::command::MemberCommand;
use crate::error::{SubmitError, WaitError};
use crate::group::{BusTraffic, ExecContext, GroupOp, ThreadGroup};
use crate::outcome::CommandOutcome;
use crate::spec::Sqe;
use crate::sync::{Order, Scope};
use crate::trace::TraceEvent;

/// Time after its deadline during which a wait still tries to drain once on its own, in nanoseconds.
const GRACE_NS: u64 = 100_000_000;
/// Pauses that a thread adds when it found the queue full.
const PATIENCE: u32 = 4;

impl<'a> SharedQueue<'a> {
    /// Submits a command, draining while the queue is full, until `deadline_ns`.
    ///
    /// # Errors
    /// As [`place`](Self::place); [`SubmitError::QueueFull`] when no slot became free in time.
    #[inline(always)]
    pub fn submit<H: ExecContext>(
        &self,
        here: &H,
        command: MemberCommand<'_>,
        deadline_ns: u64,
    ) -> Result<CommandToken, SubmitError> {
        let (token, why) = self.submit_if(here, true, command, deadline_ns);
        why.map_or(Ok(token), Err)
    }

    /// Submits as [`submit`](Self::submit) does, for the threads with `wants`; the others help. The token is
    /// meaningless for those, and with an error.
    #[inline(always)]
    pub fn submit_if<H: ExecContext>(
        &self,
        here: &H,
        wants: bool,
        command: MemberCommand<'_>,
        deadline_ns: u64,
    ) -> (CommandToken, Option<SubmitError>) {
        here.converged(
            self.key(),
            SubmitWait {
                queue: self,
                here,
                wants,
                command,
                deadline_ns,
            },
        )
    }

    /// Waits for the outcome of this command, as [`poll`](Self::poll) returns it, and helps to ring and to
    /// drain meanwhile.
    ///
    /// Threads that wait together return together, once none of them needs to wait.
    ///
    /// # Errors
    /// [`WaitError`] with the token; the command stays in flight. A time-out is reported only after a drain
    /// that began after `deadline_ns` has found nothing.
    #[inline(always)]
    pub fn wait<H: ExecContext>(
        &self,
        here: &H,
        token: CommandToken,
        deadline_ns: u64,
    ) -> Result<(CommandOutcome, u32), (WaitError, CommandToken)> {
        let value = self.wait_for(here, &token, WaitNeed::End, deadline_ns);
        match value {
            0 => Err((self.why_not(), token)),
            _ => Ok(ended(value)),
        }
    }

    /// Waits as [`wait`](Self::wait) does, for threads with different needs: all of them drain until those
    /// that need an end have it. Returns `None` for a thread that needs no end and has seen none; its command
    /// stays in flight.
    ///
    /// # Errors
    /// [`WaitError`], for threads that need their end: the command stays in flight.
    #[inline(always)]
    pub fn wait_together<H: ExecContext>(
        &self,
        here: &H,
        token: &CommandToken,
        need: WaitNeed,
        deadline_ns: u64,
    ) -> Option<Result<(CommandOutcome, u32), WaitError>> {
        match (self.wait_for(here, token, need, deadline_ns), need) {
            (0, WaitNeed::End) => Some(Err(self.why_not())),
            (0, _) => None,
            (value, _) => Some(Ok(ended(value))),
        }
    }

    /// Returns the value of the command's cell; 0 when the wait timed out or was not needed.
    #[inline(always)]
    fn wait_for<H: ExecContext>(
        &self,
        here: &H,
        token: &CommandToken,
        need: WaitNeed,
        deadline_ns: u64,
    ) -> u64 {
        here.converged(
            self.key(),
            CommonWait {
                queue: self,
                here,
                token,
                need,
                deadline_ns,
            },
        )
    }

    /// Submits a command and waits for its end: [`submit`](Self::submit) and [`wait`](Self::wait) in one
    /// loop, which a GPU runs faster. `command` makes the same command whenever it is called.
    ///
    /// # Errors
    /// `Ok(Err(..))` as `submit`, `Err(..)` as `wait`.
    #[inline(always)]
    #[allow(clippy::type_complexity)]
    pub fn run<'d, H: ExecContext>(
        &self,
        here: &H,
        command: impl Fn() -> MemberCommand<'d>,
        deadline_ns: u64,
    ) -> Result<Result<(CommandOutcome, u32), SubmitError>, (WaitError, CommandToken)> {
        let (value, token, why) = here.converged(
            self.key(),
            RunWait {
                queue: self,
                here,
                command,
                deadline_ns,
            },
        );
        match (why, value) {
            (Some(error), _) => Ok(Err(error)),
            (None, 0) => Err((self.why_not(), token)),
            (None, _) => Ok(Ok(ended(value))),
        }
    }

    /// Takes part in the queue's upkeep without waiting: rings for published commands, and drains.
    #[inline(always)]
    pub fn help_out<H: ExecContext>(&self, here: &H) -> DrainResult {
        here.converged(self.key(), HelpWait { queue: self, here })
    }

    /// True if the entry of `ticket` has not been rung for.
    #[inline(always)]
    fn unrung(&self, ticket: u32) -> bool {
        let rung = self.state.rung().load(Order::Relaxed, Scope::Gpu);
        rung.wrapping_sub(ticket) as i32 <= 0
    }

    /// True if any placed command has not been rung for.
    #[inline(always)]
    fn anything_unrung(&self) -> bool {
        let placed = self.state.next_ticket().load(Order::Relaxed, Scope::Gpu);
        placed != self.state.rung().load(Order::Relaxed, Scope::Gpu)
    }

    /// Rings if a member with `wants` asks for it, and drains.
    #[inline(always)]
    fn help<G: ThreadGroup>(&self, here: &impl ExecContext, group: &G, wants: bool) -> DrainResult {
        let on_bus = |traffic: BusTraffic| here.on_bus_access(traffic);
        if group.vote(wants).total > 0 {
            self.ring_observed(group, &on_bus);
        }
        self.drain_observed(group, &on_bus)
    }

    /// Returns the trace event of a command that was placed.
    #[inline(always)]
    fn placed(&self, token: &CommandToken, sqe: &Sqe) -> TraceEvent {
        TraceEvent::submitted(self.state.qid(), token.cid, sqe.opcode(), sqe.nsid)
    }

    /// Returns the trace event of a command at the moment its thread stops waiting for it.
    #[inline(always)]
    fn end_of(&self, token: &CommandToken, value: u64, here: &impl ExecContext) -> TraceEvent {
        let (qid, cid) = (self.state.qid(), token.cid);
        match (value, ended(value).0) {
            (0, _) => TraceEvent::expired(qid, cid, here.now_ns()),
            (_, CommandOutcome::Completed(status)) => TraceEvent::completed(qid, cid, status, 0),
            (_, CommandOutcome::Aborted(_)) => TraceEvent::reclaimed(qid, cid),
        }
    }

    #[inline(always)]
    fn why_not(&self) -> WaitError {
        match self.state.fault_code() {
            0 => WaitError::TimedOut,
            _ => WaitError::Refused,
        }
    }

    /// Returns the key that members of one group share, the address of this queue's state, for
    /// [`ExecContext::converged`].
    #[inline(always)]
    pub fn key(&self) -> u64 {
        core::ptr::from_ref(self.state.next_ticket()).addr() as u64
    }
}

/// The need of a thread in a common wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitNeed {
    /// The thread has no command, and helps the others.
    Help,
    /// The thread takes its command's end if it is known when the other threads' needs are met.
    Look,
    /// The thread waits until its command has ended.
    End,
}

struct SubmitWait<'q, 'a, 'd, H> {
    queue: &'q SharedQueue<'a>,
    here: &'q H,
    wants: bool,
    command: MemberCommand<'d>,
    deadline_ns: u64,
}

impl<H: ExecContext> GroupOp for SubmitWait<'_, '_, '_, H> {
    type Output = (CommandToken, Option<SubmitError>);

    #[inline(always)]
    fn run<G: ThreadGroup>(self, group: &G) -> Self::Output {
        let queue = self.queue;
        let mut turn = PATIENCE;
        let mut token = CommandToken::from_words([0; 3]);
        let mut why = self.wants.then_some(SubmitError::QueueFull);
        loop {
            let late = self.here.now_ns() >= self.deadline_ns;
            let wants = why == Some(SubmitError::QueueFull);
            let placed = queue.place_some(group, wants, || self.command);
            if wants {
                (token, why) = placed;
                if why.is_none() {
                    self.here.record(|| queue.placed(&token, &self.command.sqe));
                }
            }
            let again = why == Some(SubmitError::QueueFull) && !late;
            if group.vote(again).total == 0 {
                queue.ring_observed(group, &|traffic| self.here.on_bus_access(traffic));
                return (token, why);
            }
            let drained = queue.help(self.here, group, queue.anything_unrung());
            turn = PATIENCE + next_turn(drained, turn - PATIENCE);
            self.here.pause(turn);
        }
    }
}

struct CommonWait<'q, 'a, H> {
    queue: &'q SharedQueue<'a>,
    here: &'q H,
    token: &'q CommandToken,
    need: WaitNeed,
    deadline_ns: u64,
}

impl<H: ExecContext> GroupOp for CommonWait<'_, '_, H> {
    type Output = u64;

    /// Returns the cell's value, 0 when the wait timed out.
    #[inline(always)]
    fn run<G: ThreadGroup>(self, group: &G) -> u64 {
        let queue = self.queue;
        let (mut looks, mut turn, mut given_up) = (self.need != WaitNeed::Help, 0, false);
        let mut value = 0;
        loop {
            if looks {
                value = queue.result(self.token);
                looks = value == 0 && !given_up && queue.state.fault_code() == 0;
                if !looks && (value != 0 || self.need == WaitNeed::End) {
                    self.here
                        .record(|| queue.end_of(self.token, value, self.here));
                }
            }
            let waits = looks && self.need == WaitNeed::End;
            if group.vote(waits).total == 0 {
                return value;
            }
            let now = self.here.now_ns();
            let unrung = looks && queue.unrung(self.token.ticket);
            let drained = queue.help(self.here, group, unrung);
            // After the deadline: either a drain that began since has found nothing, or the drain lock could
            // not be had within the grace time. Giving up earlier could lose a completion that is already in
            // the ring.
            let over = now >= self.deadline_ns.saturating_add(GRACE_NS);
            given_up = now >= self.deadline_ns && (drained == DrainResult::Took(0) || over);
            turn = next_turn(drained, turn);
            self.here.pause(turn);
        }
    }
}

struct RunWait<'q, 'a, H, F> {
    queue: &'q SharedQueue<'a>,
    here: &'q H,
    command: F,
    deadline_ns: u64,
}

impl<'d, H: ExecContext, F: Fn() -> MemberCommand<'d>> GroupOp for RunWait<'_, '_, H, F> {
    type Output = (u64, CommandToken, Option<SubmitError>);

    #[inline(always)]
    fn run<G: ThreadGroup>(self, group: &G) -> Self::Output {
        let queue = self.queue;
        let (mut token, mut why) = (
            CommandToken::from_words([0; 3]),
            Some(SubmitError::QueueFull),
        );
        let (mut value, mut turn, mut given_up) = (0, 0, false);
        loop {
            let now = self.here.now_ns();
            let wants = why == Some(SubmitError::QueueFull);
            let mut rings = false;
            if group.vote(wants).total > 0 {
                let placed = queue.place_some(group, wants, &self.command);
                if wants {
                    (token, why) = placed;
                    rings = why.is_none();
                    if rings {
                        let sqe = || (self.command)().sqe;
                        self.here.record(|| queue.placed(&token, &sqe()));
                    }
                }
            }
            let mut waits = why.is_none();
            if waits && !rings {
                let was = value;
                value = queue.result(&token);
                waits = value == 0 && !given_up && queue.state.fault_code() == 0;
                if (was == 0) != (value == 0) {
                    self.here.record(|| queue.end_of(&token, value, self.here));
                }
                rings = waits && queue.unrung(token.ticket);
            }
            if why == Some(SubmitError::QueueFull) && now < self.deadline_ns {
                waits = true;
                rings = queue.anything_unrung();
            }
            if group.vote(waits).total == 0 {
                if why.is_none() && value == 0 {
                    self.here.record(|| queue.end_of(&token, value, self.here));
                }
                return (value, token, why);
            }
            let drained = queue.help(self.here, group, rings);
            // After the deadline: either a drain that began since has found nothing, or the drain
            // lock could not be had within the grace time. Before that, a completion that came in
            // time could still lie unread in the ring.
            let over = now >= self.deadline_ns.saturating_add(GRACE_NS);
            given_up = now >= self.deadline_ns && (drained == DrainResult::Took(0) || over);
            turn = next_turn(drained, turn);
            self.here.pause(turn);
        }
    }
}

struct HelpWait<'q, 'a, H> {
    queue: &'q SharedQueue<'a>,
    here: &'q H,
}

impl<H: ExecContext> GroupOp for HelpWait<'_, '_, H> {
    type Output = DrainResult;

    #[inline(always)]
    fn run<G: ThreadGroup>(self, group: &G) -> DrainResult {
        self.queue
            .help(self.here, group, self.queue.anything_unrung())
    }
}

/// Lengthens the pauses while nothing is drained, or while other groups do the draining.
#[inline(always)]
fn next_turn(drained: DrainResult, turn: u32) -> u32 {
    match drained {
        DrainResult::Took(1..) => 0,
        _ => turn + 1,
    }
}
