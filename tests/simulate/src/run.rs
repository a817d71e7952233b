//! One seed from beginning to end.

use crate::account::Failure;
use crate::bus::{Bells, Side};
use crate::fault::{Coverage, Kind};
use crate::host::Mode;
use crate::memory::{Area, Memory, PAGE};
use crate::plan::{Form, Op, Order, Plan, Verb};
use crate::queue::{IoQueue, Lane, Pair, Threads};
use crate::sabotage::Sabotage;
use crate::seed::Rng;
use crate::setup::{BLOCK_BYTES, BLOCKS, Driver, MAX_BLOCKS, QueueSetup, Setup, pick};
use crate::world::{Ground, World};
use nvme_core::bringup::QueuePlan;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words};
use nvme_core::spec::{PageSize, Qid};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{
    CommandSlot, ControllerIdentity, ListMemory, QueueMemory, QueuePair, ResultCells, SharedQueue,
    prp,
};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Controller, FaultPlan, ProtocolSide, Rule};
use nvme_tests::Bar;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Memory of both sides.
const MEMORY: u64 = 2400 * PAGE;
/// Number of turns after the last operation in which everything must have ended.
const TURNS: u32 = 20_000;

/// The result of a seed.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The fault that an oracle found.
    pub failure: Option<Failure>,
    /// Hash of everything that happened.
    pub hash: u64,
    /// Trace of the run, if one was asked for.
    pub lines: Vec<String>,
    /// Faults that were seen, by the state in which they struck.
    pub coverage: Coverage,
    /// Commands placed.
    pub commands: u32,
    /// Recoveries completed.
    pub recoveries: u32,
    /// Virtual time that passed.
    pub virtual_ns: u64,
}

/// The memory that runs use one after the other.
pub struct Arena(pub(crate) Memory);

impl Default for Arena {
    fn default() -> Self {
        Self(Memory::new(MEMORY))
    }
}

/// Addresses of a queue's rings and lists.
pub(crate) struct Parts {
    qid: u16,
    sq: Area,
    cq: Area,
    lists: Area,
    sq_entries: u32,
    cq_entries: u32,
    share: usize,
}

impl Parts {
    pub(crate) fn take(
        memory: &Memory,
        qid: u16,
        sq_entries: u32,
        cq_entries: u32,
        slots: u32,
    ) -> Self {
        let share = prp::list_words(PageSize::KIB4, u64::from(MAX_BLOCKS) * BLOCK_BYTES) + 1;
        let share = share.next_power_of_two();
        Self {
            qid,
            sq: memory.take(u64::from(sq_entries) * 64, PAGE),
            cq: memory.take(u64::from(cq_entries) * 16, PAGE),
            lists: memory.take(share as u64 * u64::from(slots) * 8, PAGE),
            sq_entries,
            cq_entries,
            share,
        }
    }

    pub(crate) fn memory<'a>(&self, memory: &'a Memory, bells: &'a Bells) -> QueueMemory<'a> {
        QueueMemory {
            sq: memory.sq_ring(self.sq, self.sq_entries),
            cq: memory.cq_ring(self.cq, self.cq_entries),
            sq_doorbell: bells.bell(self.qid, Side::Tail),
            cq_doorbell: bells.bell(self.qid, Side::Head),
            lists: ListMemory::new(memory.words(self.lists), PageSize::KIB4, self.share),
        }
    }

    /// Returns the queue's description as the host gives it to a kernel, with its state and its slots.
    pub(crate) fn words(
        &self,
        memory: &Memory,
        bells: &Bells,
        (state, slots): (u64, u32),
    ) -> QueueWords {
        QueueWords {
            sq: memory.address(self.sq),
            cq: memory.address(self.cq),
            sq_doorbell: bells.address(self.qid, Side::Tail),
            cq_doorbell: bells.address(self.qid, Side::Head),
            lists: memory.address(self.lists),
            lists_iova: self.lists.iova.0,
            state,
            entries: self.sq_entries,
            slots,
            list_words: self.share as u32,
            page_shift: 12,
            qid: self.qid.into(),
            ..QueueWords::default()
        }
    }

    pub(crate) fn plan(&self) -> QueuePlan {
        QueuePlan {
            qid: Qid(self.qid),
            sq_entries: self.sq_entries,
            sq_iova: self.sq.iova,
            cq_entries: self.cq_entries,
            cq_iova: self.cq.iova,
            vector: None,
        }
    }
}

/// State and cells of a queue that a GPU would use.
struct Shared {
    state: Vec<AtomicU32>,
    cells: Vec<AtomicU64>,
}

impl Shared {
    fn new(queue: &QueueSetup) -> Self {
        let count = match queue.driver {
            Driver::Pair => 0,
            Driver::Shared | Driver::Collective => words(queue.sq_entries),
        };
        Self {
            state: (0..count).map(|_| AtomicU32::new(0)).collect(),
            cells: (0..queue.slots + 2).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

fn io_queue<'a>(
    setup: &QueueSetup,
    parts: &'a Parts,
    shared: &'a Shared,
    memory: &'a Memory,
    bells: &'a Bells,
    identity: &ControllerIdentity,
) -> Box<dyn IoQueue + 'a> {
    let make = move || parts.memory(memory, bells);
    let qid = Qid(parts.qid);
    let state = || {
        let state = QueueState::new(&shared.state, qid, setup.sq_entries, setup.slots);
        state.expect("a queue that can be")
    };
    match setup.driver {
        Driver::Pair => Box::new(Pair::new(identity, qid, make(), setup.slots)),
        Driver::Shared => {
            state().init(identity, setup.start);
            make().cq.zero();
            let lanes = [(); 2]
                .map(|()| SharedQueue::new(make(), state(), ResultCells::new(&shared.cells)));
            Box::new(Threads::new(parts.plan(), lanes, shared.cells.len() as u32))
        }
        Driver::Collective => {
            state().init(identity, setup.start);
            make().cq.zero();
            Box::new(Lane::new(parts.plan(), make, state()))
        }
    }
}

/// One in this number of seeds runs under the protocol auditor, which doubles the time of a run.
const AUDITED: u64 = 16;

/// Returns the first rule that the driver has broken, whatever the controller did. Plans have commands past the
/// end of the namespace.
fn audited(sim: &Controller<&Memory>) -> Option<Failure> {
    let findings = sim.findings();
    let broken = findings
        .iter()
        .find(|one| one.rule.side() == ProtocolSide::Host && one.rule != Rule::LbaRange)?;
    Some(Failure::new("auditor", broken.to_string()))
}

pub(crate) fn config(setup: &Setup, seed: u64) -> Config {
    let bytes = u64::from(BLOCKS) * BLOCK_BYTES;
    let store = nvme_sim::MemoryStore::new(bytes).expect("a little memory");
    let mut faults = FaultPlan::on_demand();
    faults.seed = seed;
    Config {
        namespaces: vec![NamespaceConfig::new(BLOCK_BYTES as u32, Box::new(store))],
        max_queues: 2,
        mqes: 64,
        vectors: 3,
        write_cache: setup.cache_bytes > 0,
        cache_bytes: setup.cache_bytes,
        profile: setup.profile,
        ready_delay_ns: setup.ready_delay_ns,
        shutdown_delay_ns: setup.shutdown_delay_ns,
        faults,
        audit: seed.is_multiple_of(AUDITED),
        ..Config::empty()
    }
}

/// Runs a plan. With `lines` the trace comes as text, too.
pub fn run(arena: &mut Arena, plan: &Plan, sabotage: Sabotage, lines: bool) -> Run {
    arena.0.reset();
    let memory = &arena.0;
    let run = catch_unwind(AssertUnwindSafe(|| run_on(memory, plan, sabotage, lines)));
    run.unwrap_or_else(|panic| Run {
        failure: Some(of_panic(&*panic)),
        ..Run::default()
    })
}

/// Returns the failure for a panic, with its message.
pub(crate) fn of_panic(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    Failure::new("panic", text.unwrap_or_else(|| "no message".to_owned()))
}

fn run_on(memory: &Memory, plan: &Plan, sabotage: Sabotage, lines: bool) -> Run {
    let setup = &plan.setup;
    let sim = Controller::new(config(setup, plan.seed), memory).expect("a valid configuration");
    let (sq, cq) = setup.admin;
    let admin = Parts::take(memory, 0, sq, cq, 8);
    let parts = [0, 1].map(|index: usize| {
        let queue = &setup.queues[index];
        Parts::take(
            memory,
            index as u16 + 1,
            queue.sq_entries,
            queue.cq_entries,
            queue.slots,
        )
    });
    let bells = Bells::new([sq, setup.queues[0].sq_entries, setup.queues[1].sq_entries]);
    let shared = [0, 1].map(|index: usize| Shared::new(&setup.queues[index]));
    let page = memory.words(memory.take(PAGE, PAGE));
    let plans = [parts[0].plan(), parts[1].plan()];
    let identity = ControllerIdentity::new();
    let ground = Ground {
        memory,
        sim: &sim,
        bar: Bar {
            sim: &sim,
            identity: &identity,
        },
        bells: &bells,
        plans: &plans,
        page,
    };
    let slots = (0..8).map(|_| CommandSlot::new()).collect();
    let admin = QueuePair::new(&identity, Qid(0), admin.memory(memory, &bells), slots);
    let queues = (0..2)
        .map(|index| {
            io_queue(
                &setup.queues[index],
                &parts[index],
                &shared[index],
                memory,
                &bells,
                &identity,
            )
        })
        .collect();
    let mut world = World::new(plan, ground, admin, queues, sabotage, lines);
    let failure = world.play().err().or_else(|| audited(&sim));
    Run {
        failure,
        hash: world.trace.hash(),
        lines: world.trace.lines().to_vec(),
        coverage: world.coverage.clone(),
        commands: world.placed,
        recoveries: world.recovered,
        virtual_ns: world.now_ns - plan.setup.clock_ns,
    }
}

impl World<'_> {
    fn play(&mut self) -> Result<(), Failure> {
        for op in &self.plan.ops {
            self.apply(*op)?;
        }
        self.top_up()?;
        let quiet = self.recovered == 0 || self.coverage.total() == 0;
        if quiet && self.plan.commands > 0 {
            // No seed without a fault and a recovery.
            self.break_down()?;
        }
        self.make_peace();
        self.settle()?;
        if self.disturbed {
            self.recover("to see whether all is well")?;
            self.settle()?;
        }
        self.read_everything()?;
        if self.plan.cut_at_end {
            self.cut_power();
            self.disturbed = true;
            self.recover("power was lost at the end")?;
            self.settle()?;
            self.read_everything()?;
        }
        for _ in 0..TURNS {
            match self.mode {
                Mode::Off { .. } => return self.accounts.check_closed(),
                // At first, and when a duplicate that was not looked for led to one more reset.
                Mode::Up { .. } => self.leave(false, Some(false)),
                _ => self.turn()?,
            }
        }
        Err(Failure::new(
            "recovery",
            "the last shutdown did not come to an end",
        ))
    }

    /// Submits the commands that the plan still owes.
    fn top_up(&mut self) -> Result<(), Failure> {
        let mut rng = Rng::new(!self.plan.seed);
        let mut turns = 0;
        while self.placed < self.plan.commands {
            let queue = rng.below(2) as u8;
            let order = Order::draw(&mut rng);
            self.apply(Op::Submit(queue, order))?;
            if turns % 6 == 5 {
                self.apply(Op::Wait)?;
            }
            turns += 1;
            if turns > TURNS {
                return Err(Failure::new("recovery", "commands are not taken any more"));
            }
        }
        Ok(())
    }

    /// Causes one more fault that requires a reset, with commands in flight.
    fn break_down(&mut self) -> Result<(), Failure> {
        let kinds = [Kind::Cfs, Kind::Restart, Kind::PowerCut, Kind::Removal];
        let mut rng = Rng::new(self.plan.seed ^ 1);
        for queue in [0, 1] {
            self.apply(Op::Fill(queue, Order::draw(&mut rng)))?;
        }
        self.strike(pick(&mut rng, &kinds), 3)
    }

    /// Runs until the controller is up and nothing is in flight.
    fn settle(&mut self) -> Result<(), Failure> {
        for turn in 0..TURNS {
            if !self.is_open() {
                self.turn()?;
                continue;
            }
            self.wait()?;
            self.attend()?;
            let up = matches!(self.mode, Mode::Up { .. });
            if up && self.accounts.open == 0 {
                if !self.accounts.any_haunted() {
                    return Ok(());
                }
                self.now_ns = self.next_event.unwrap_or(0).max(self.now_ns + 1000);
                if turn % 64 == 63 {
                    // The controller has no room to post the echo, because a store to the head doorbell was lost.
                    self.recover("an echo does not come")?;
                }
            }
        }
        Err(Failure::new(
            "recovery",
            "nothing wrong any more, and it does not come to rest",
        ))
    }

    /// Reads every block, on both queues in turn, with no fault left: all must be well.
    fn read_everything(&mut self) -> Result<(), Failure> {
        const STEP: u32 = 8;
        let before = self.recovered;
        for (turn, lba) in (0..BLOCKS).step_by(STEP as usize).enumerate() {
            let order = Order {
                verb: Verb::Read,
                lba,
                blocks: STEP,
                offset: 0,
                form: Form::Stretch,
            };
            if !self.submit(turn % 2, order)? {
                self.settle()?;
                if !self.submit(turn % 2, order)? {
                    return Err(Failure::new("recovery", "an idle queue takes no command"));
                }
            }
        }
        self.settle()?;
        // An echo of the bring-up's commands may still arrive; the loop does not look for it.
        if self.recovered != before {
            return Err(Failure::new("recovery", "trouble with nothing wrong"));
        }
        Ok(())
    }
}
