//! The schedule of a seed: the operations in their order, all drawn before anything runs.
//!
//! A plan can be cut down: operations and traps do not depend on each other, so the shrinker may leave out any of them.

use crate::fault::{Kind, State, impossible};
use crate::seed::Rng;
use crate::setup::{BLOCKS, MAX_BLOCKS, Setup, pick};

/// The operation of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Read, checked against the model.
    Read,
    /// Write of new data.
    Write,
    /// A write with force unit access.
    WriteThrough,
    /// Compare with the data that the model says are there.
    Compare,
    /// Compare with other data.
    CompareOther,
    /// Write Zeroes.
    Zero,
    /// Flush.
    Flush,
    /// Read past the end.
    OutOfRange,
}

/// A command to be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The operation.
    pub verb: Verb,
    /// Block near which to look for blocks that no other command uses.
    pub lba: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Offset of its data in their first page, a multiple of 8.
    pub offset: u32,
    /// Form of its data pointer.
    pub form: Form,
}

/// The form in which a command says where its data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As one stretch, in PRPs.
    Stretch,
    /// A table of pages, in PRPs.
    Table,
    /// An SGL of two segments.
    Sgl,
}

impl Order {
    /// Draws one.
    pub fn draw(rng: &mut Rng) -> Self {
        let verb = match rng.below(64) {
            0..28 => Verb::Read,
            28..48 => Verb::Write,
            48..52 => Verb::WriteThrough,
            52..55 => Verb::Compare,
            55 => Verb::CompareOther,
            56..58 => Verb::Zero,
            58..63 => Verb::Flush,
            _ => Verb::OutOfRange,
        };
        let blocks = match rng.below(16) {
            0 => 1 + rng.below(u64::from(MAX_BLOCKS)),
            1..4 => 1 + rng.below(8),
            _ => 1 + rng.below(2),
        };
        let offset = match rng.below(4) {
            0 => rng.below(512) * 8,
            1 => 4088,
            _ => 0,
        };
        Self {
            verb,
            lba: rng.below(u64::from(BLOCKS)) as u32,
            blocks: blocks as u32,
            offset: offset as u32,
            form: pick(
                rng,
                &[
                    Form::Stretch,
                    Form::Stretch,
                    Form::Stretch,
                    Form::Table,
                    Form::Sgl,
                ],
            ),
        }
    }
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A command is placed in queue 0 or 1.
    Submit(u8, Order),
    /// Places commands like this one until the queue takes no more, then rings the doorbell.
    Fill(u8, Order),
    /// Publishes the placed commands.
    Ring(u8),
    /// Doorbells arrive, and the controller works.
    Step,
    /// The same, but of what was published to each queue only the first entry arrives.
    Crawl,
    /// Completions are taken.
    Poll(u8),
    /// Time passes.
    Advance(u32),
    /// Lets both sides work until nothing is in flight or a deadline has passed.
    Wait,
    /// The host looks at CSTS.
    Look,
    /// The kernel that uses the queue ends and another one begins.
    Relaunch(u8),
    /// The host waits until commands have ended (or does not, in a hurry), deletes the queues, and shuts the controller
    /// down (or resets it); then it brings it up again.
    Leave {
        /// Delete the queues with commands in flight.
        hurry: bool,
        /// Some(true or false) for an abrupt or a normal shutdown; `None` for a reset.
        stop: Option<bool>,
    },
}

/// A fault that waits for the driver to be in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// The state.
    pub state: State,
    /// Number of turns in that state before the trap fires.
    pub after: u32,
    /// The fault.
    pub kind: Kind,
    /// The queue that it happens to: 0 is the admin queue, 1 and 2 are for I/O.
    pub qid: u16,
    /// Any number, from which the fault derives its details.
    pub value: u64,
}

/// The whole schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed that the plan was drawn from.
    pub seed: u64,
    /// The configuration of the two sides.
    pub setup: Setup,
    /// The operations, in order.
    pub ops: Vec<Op>,
    /// The faults that wait for a state.
    pub traps: Vec<Trap>,
    /// Commands to submit at least, after `ops` if need be.
    pub commands: u32,
    /// True if power fails once more at the end, before the blocks are read for the last time.
    pub cut_at_end: bool,
}

/// Operations of a plan.
const OPS: usize = 460;
/// Commands of a seed.
pub const COMMANDS: u32 = 200;

impl Plan {
    /// Returns the plan of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut setup = Setup::draw(&mut rng);
        let mut ops: Vec<Op> = (0..OPS).map(|_| draw_op(&mut rng)).collect();
        let mut traps = Vec::new();
        for _ in 0..1 + rng.below(3) {
            let state = draw_state(&mut rng);
            let kind = draw_trap(&mut rng, state, &mut traps);
            if matches!(kind, Kind::Echo | Kind::LateData) && state != State::BringUp {
                // A late event needs a fault that began it before.
                traps.push(trap(&mut rng, State::InFlight, kind));
            }
            match state {
                State::TimedOut | State::Aborting => {
                    (setup.aborts, setup.patience) = (true, pick(&mut rng, &[6, 20, 40]));
                    let kind = pick(&mut rng, &[Kind::Drop, Kind::Late, Kind::Stubborn]);
                    traps.push(trap(&mut rng, State::InFlight, kind));
                }
                State::Recovering => {
                    let state = pick(&mut rng, &[State::Idle, State::InFlight, State::Full]);
                    traps.push(trap(&mut rng, state, Kind::Reset));
                }
                State::Draining | State::ShutDown => {
                    let at = rng.below(ops.len() as u64) as usize;
                    ops[at] = leave(&mut rng);
                }
                _ => {}
            }
        }
        if rng.below(4) == 0 {
            let at = rng.below(ops.len() as u64) as usize;
            ops[at] = leave(&mut rng);
        }
        Self {
            seed,
            setup: setup.with_clock(seed),
            ops,
            traps,
            commands: COMMANDS,
            cut_at_end: rng.below(4) == 0,
        }
    }
}

/// Returns any state; states that pass quickly are drawn more often.
fn draw_state(rng: &mut Rng) -> State {
    match rng.below(13) {
        9..12 => State::TimedOut,
        12 => State::Draining,
        any => State::ALL[any as usize],
    }
}

fn draw_op(rng: &mut Rng) -> Op {
    let queue = rng.below(2) as u8;
    match rng.below(128) {
        0..56 => Op::Submit(queue, Order::draw(rng)),
        56..72 => Op::Ring(queue),
        72..84 => Op::Step,
        84..90 => Op::Crawl,
        90..110 => Op::Poll(queue),
        110..119 => Op::Advance(rng.below(60_000) as u32),
        119..122 => Op::Fill(queue, Order::draw(rng)),
        122..125 => Op::Wait,
        125 => Op::Advance(rng.below(2_000_000) as u32),
        126 => Op::Look,
        _ => Op::Relaunch(queue),
    }
}

fn leave(rng: &mut Rng) -> Op {
    Op::Leave {
        hurry: rng.below(3) == 0,
        stop: pick(rng, &[Some(false), Some(false), Some(true), None]),
    }
}

fn draw_trap(rng: &mut Rng, state: State, traps: &mut Vec<Trap>) -> Kind {
    let possible: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| impossible(*kind, state).is_none())
        .collect();
    let kind = pick(rng, &possible);
    traps.push(trap(rng, state, kind));
    kind
}

fn trap(rng: &mut Rng, state: State, kind: Kind) -> Trap {
    let queue = 1 + rng.below(2) as u16;
    let qid = match state {
        State::BringUp | State::Recovering | State::ShutDown => 0,
        State::Aborting | State::Draining if rng.below(2) == 0 => 0,
        _ => queue,
    };
    Trap {
        state,
        after: pick(rng, &[0, 1, 2, 3, 5, 9, 30, 100]),
        kind,
        qid,
        value: rng.word(),
    }
}
