//! The work of the threads: submit, wait or reap, check, again.

use crate::rounds::{Mode, PATIENCE_NS, Round};
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::queue_state::QueueState;
use nvme_core::{
    CollectiveQueue, CommandOutcome, MemberCommand, QueueMemory, ResultCells, SharedQueue,
    WaitError,
};
use nvme_tests::Rng;
use nvme_tests::team::{Clock, InStep, Spin};
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of tokens that a thread holds at a time, at most.
const TOKENS: u32 = 3;
/// Number of values that a tag of a collective can carry.
const NUMBERS: u64 = 1 << 25;

/// Commands with their expected ends. Until the command has ended, no other command uses buffer
/// `place`.
pub trait Port: Sync {
    /// Returns command `number`.
    fn command(&self, place: u32, number: u64) -> MemberCommand<'_>;

    /// Checks the end of command `number`.
    fn ended(&self, place: u32, number: u64, outcome: CommandOutcome) -> Result<(), String>;
}

/// A thread's work: how many commands ended.
type Work<'a> = Box<dyn FnOnce() -> Result<u64, String> + Send + 'a>;

/// One queue; every thread makes its own view of it.
pub struct Queue<'a> {
    pub memory: &'a (dyn Fn() -> QueueMemory<'a> + Sync),
    pub state: QueueState<'a>,
    pub cells: ResultCells<'a>,
}

impl<'a> Queue<'a> {
    fn shared(&self) -> SharedQueue<'a> {
        SharedQueue::new((self.memory)(), self.state, self.cells)
    }
}

/// Buffers, and cells, that a round needs for a queue.
pub fn places(round: &Round) -> u32 {
    match round.mode {
        Mode::Shared => round.threads as u32 * TOKENS,
        Mode::Teams => 2 * round.threads as u32 * TOKENS,
        Mode::Collective => round.slots,
    }
}

/// Starts the threads of one queue, waits for them, and returns how many commands ended.
pub fn drive(
    round: &Round,
    index: usize,
    queue: &Queue<'_>,
    port: &impl Port,
    stop: &AtomicBool,
) -> Result<u64, String> {
    let seed = round.seed ^ index as u64;
    let mut works: Vec<Work<'_>> = Vec::new();
    match round.mode {
        Mode::Shared => {
            for thread in 0..round.threads as u32 {
                works.push(Box::new(move || {
                    let rng = Rng::new(seed + u64::from(thread));
                    let stopped = || stop.load(Ordering::Relaxed);
                    let here = Clock::default();
                    submit(&queue.shared(), &here, thread, rng, port, stopped)
                }));
            }
        }
        Mode::Teams => {
            for team in 0..2 {
                for (rank, member) in (0..).zip(Spin::<1>::of(round.threads)) {
                    works.push(Box::new(move || {
                        let rng = Rng::new(seed + u64::from(team));
                        let here = InStep(&member, Clock::default());
                        let stopped = || uniform(&member, stop);
                        let thread = team * round.threads as u32 + rank;
                        submit(&queue.shared(), &here, thread, rng, port, stopped)
                    }));
                }
            }
        }
        Mode::Collective if round.wide => {
            for member in Spin::<1>::of(round.threads) {
                let work = move || own::<1, 4>(queue, &member, seed, port, stop);
                works.push(Box::new(work));
            }
        }
        Mode::Collective => {
            for member in Spin::<1>::of(round.threads) {
                let work = move || own::<1, 1>(queue, &member, seed, port, stop);
                works.push(Box::new(work));
            }
        }
    }
    let parts: Vec<Result<u64, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = works.into_iter().map(|work| scope.spawn(work)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
            .collect()
    });
    let mut sum = 0;
    for part in parts {
        sum += part?;
    }
    let (left, fault) = (queue.state.in_flight(), queue.state.fault());
    match (left, fault) {
        (0, None) => Ok(sum),
        _ => Err(format!("{left} commands left in flight, fault {fault:?}")),
    }
}

/// Broadcasts the leader's decision to stop, so that all members decide alike.
fn uniform<const READS: u32>(member: &Spin<READS>, stop: &AtomicBool) -> bool {
    member.broadcast(u32::from(stop.load(Ordering::Relaxed))) != 0
}

/// Runs one thread of a shared queue: up to [`TOKENS`] commands at a time, waited for in either
/// order.
fn submit(
    queue: &SharedQueue<'_>,
    here: &impl ExecContext,
    thread: u32,
    mut rng: Rng,
    port: &impl Port,
    stopped: impl Fn() -> bool,
) -> Result<u64, String> {
    let (mut count, mut next) = (0, 0u64);
    let mut tokens = Vec::new();
    while !stopped() {
        let burst = 1 + rng.below(u64::from(TOKENS)) as u32;
        for k in 0..burst {
            next += 1;
            let (place, number) = (thread * TOKENS + k, u64::from(thread) << 40 | next);
            let deadline_ns = here.now_ns() + PATIENCE_NS;
            let token = queue.submit(here, port.command(place, number), deadline_ns);
            let token = token.map_err(|error| format!("command {number:#x}: {error}"))?;
            tokens.push((place, number, token));
        }
        if rng.below(2) == 0 {
            tokens.reverse();
        }
        for (place, number, token) in tokens.drain(..) {
            let deadline_ns = here.now_ns() + PATIENCE_NS;
            let end = queue.wait(here, token, deadline_ns);
            let (outcome, _) = end.map_err(|(error, token)| match error {
                WaitError::TimedOut => format!("command {number:#x} never ended: {token:?}"),
                WaitError::Refused => format!("the queue was refused: {:?}", queue.fault()),
            })?;
            port.ended(place, number, outcome)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Runs one member of a team that owns the queue and keeps it full. Each slot has its buffer.
fn own<const READS: u32, const ENTRIES: usize>(
    queue: &Queue<'_>,
    member: &Spin<READS>,
    seed: u64,
    port: &impl Port,
    stop: &AtomicBool,
) -> Result<u64, String> {
    let mut rng = Rng::new(seed + 1000 * u64::from(member.rank()));
    let mut queue = CollectiveQueue::resume(member.clone(), (queue.memory)(), queue.state);
    let clock = Clock::default();
    let (mut count, mut next, mut wrong) = (0, 0u64, None);
    let mut since = clock.now_ns();
    loop {
        let stopped = uniform(member, stop);
        if stopped && queue.in_flight() == 0 {
            break;
        }
        if !stopped {
            let wants = rng.below(8) > 0;
            next += 1;
            let number = (next * u64::from(member.size()) + u64::from(member.rank())) % NUMBERS;
            let command = |slot| {
                let mut command = port.command(slot, number);
                command.tag = number as u32;
                command
            };
            // A full queue is no error here: the next turn tries again.
            let _ = queue.submit(wants, command, 0);
            queue.ring();
        }
        let reaped = queue.reap::<ENTRIES>(|end| {
            let slot = u32::from(end.cid.0 & 0xFFF);
            let ended = port.ended(
                slot,
                u64::from(end.tag),
                CommandOutcome::Completed(end.status),
            );
            wrong = wrong.take().or(ended.err());
            count += 1;
        });
        match reaped {
            Ok(0) => {
                let waited = clock.now_ns() - since;
                assert!(waited < PATIENCE_NS, "nothing ended for {waited} ns");
                clock.pause(20);
            }
            Ok(_) => since = clock.now_ns(),
            Err(fault) => panic!("the queue was refused: {fault}"),
        }
    }
    queue.suspend();
    wrong.map_or(Ok(count), Err)
}
