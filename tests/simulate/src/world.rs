//! Both sides, the time between them, and every operation of a schedule.

use crate::account::{Accounts, Failure};
use crate::buffers::Pool;
use crate::bus::{Bells, Side};
use crate::fault::{Coverage, Kind, State};
use crate::host::Mode;
use crate::memory::Memory;
use crate::model::Model;
use crate::plan::{Op, Plan, Trap};
use crate::queue::{End, IoQueue, Late};
use crate::sabotage::Sabotage;
use crate::setup::{BLOCKS, Driver};
use crate::trace::{Event, Trace};
use nvme_core::bringup::QueuePlan;
use nvme_core::mem::DmaWords;
use nvme_core::{CommandSlot, QueuePair};
use nvme_sim::Controller;
use nvme_tests::Bar;

/// The admin queue's buffers are numbers that are never looked at.
pub(crate) type Admin<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

/// Memory, controller and plans of a run, which a [`World`] borrows.
pub(crate) struct Ground<'a> {
    pub memory: &'a Memory,
    pub sim: &'a Controller<&'a Memory>,
    pub bar: Bar<'a, &'a Memory>,
    pub bells: &'a Bells,
    pub plans: &'a [QueuePlan],
    pub page: DmaWords<'a>,
}

/// A run under way.
pub(crate) struct World<'a> {
    pub plan: &'a Plan,
    pub ground: Ground<'a>,
    pub admin: Admin<'a>,
    pub queues: Vec<Box<dyn IoQueue + 'a>>,
    pub accounts: Accounts<'a>,
    pub mode: Mode<'a>,
    pub now_ns: u64,
    pub trace: Trace,
    pub coverage: Coverage,
    pub sabotage: Sabotage,
    /// A fault has fired since the controller came up.
    pub disturbed: bool,
    /// Set while the controller is off the bus: number of turns until it is back, and whether power was lost meanwhile.
    pub away: Option<(u32, bool)>,
    /// True if the controller has come up before, so that this is a recovery.
    pub recovering: bool,
    /// Attempts to bring the controller up that failed in a row.
    pub failures: u32,
    /// Commands placed.
    pub placed: u32,
    /// Recoveries that were completed.
    pub recovered: u32,
    /// The traps of the plan that wait, each with the number of turns that are left.
    traps: Vec<(Trap, u32)>,
    pub late: Vec<Late>,
    pub ended: Vec<End>,
    /// Time at which the controller has something to do next.
    pub next_event: Option<u64>,
    refusals: usize,
}

impl<'a> World<'a> {
    pub fn new(
        plan: &'a Plan,
        ground: Ground<'a>,
        admin: Admin<'a>,
        queues: Vec<Box<dyn IoQueue + 'a>>,
        sabotage: Sabotage,
        lines: bool,
    ) -> Self {
        let pool = Pool::new(ground.memory);
        let model = Model::new(plan.setup.cache_bytes > 0);
        Self {
            plan,
            admin,
            queues,
            accounts: Accounts::new(pool, model),
            mode: Mode::Off { turns: 0 },
            now_ns: plan.setup.clock_ns,
            trace: Trace::new(lines),
            coverage: Coverage::default(),
            sabotage,
            disturbed: false,
            away: None,
            recovering: false,
            failures: 0,
            placed: 0,
            recovered: 0,
            traps: plan.traps.iter().map(|trap| (*trap, trap.after)).collect(),
            late: Vec::new(),
            ended: Vec::new(),
            next_event: None,
            refusals: 0,
            ground,
        }
    }

    /// Returns the state of the driver.
    pub fn state(&self) -> State {
        match &self.mode {
            Mode::Off { .. } | Mode::Stopping { .. } => State::ShutDown,
            Mode::Raising { .. } if !self.recovering => State::BringUp,
            Mode::Raising { .. } | Mode::Gone => State::Recovering,
            Mode::Draining { .. } | Mode::Deleting { .. } => State::Draining,
            Mode::Aborting { .. } => State::Aborting,
            Mode::Up { .. } if self.accounts.any_overdue() => State::TimedOut,
            Mode::Up { .. } => {
                let mut queues = self.queues.iter();
                if queues.any(|queue| queue.in_flight() >= queue.depth()) {
                    State::Full
                } else if self.accounts.open > 0 {
                    State::InFlight
                } else {
                    State::Idle
                }
            }
        }
    }

    /// Returns whether the host takes commands.
    pub fn is_open(&self) -> bool {
        matches!(self.mode, Mode::Up { .. } | Mode::Aborting { .. })
    }

    /// Returns the coarseness of the clock of `queue`.
    pub fn grain_ns(&self, queue: usize) -> u64 {
        match self.plan.setup.queues[queue].driver {
            Driver::Collective => 1024,
            Driver::Pair | Driver::Shared => 0,
        }
    }

    /// Executes one operation of the plan; while the controller is not up, a turn of the bring-up instead.
    pub fn apply(&mut self, op: Op) -> Result<(), Failure> {
        self.spring()?;
        if !self.is_open() {
            return self.turn();
        }
        match op {
            Op::Submit(queue, order) => {
                self.submit(usize::from(queue), order)?;
            }
            Op::Fill(queue, order) => {
                let mut next = order;
                while self.submit(usize::from(queue), next)? {
                    next.lba = (next.lba + 7) % BLOCKS;
                }
                self.queues[usize::from(queue)].ring();
            }
            Op::Ring(queue) => self.queues[usize::from(queue)].ring(),
            Op::Step => self.work()?,
            Op::Crawl => self.work_at(true)?,
            Op::Poll(queue) => self.poll(usize::from(queue))?,
            Op::Advance(ns) => self.now_ns += u64::from(ns),
            Op::Wait => self.wait()?,
            Op::Look => self.look()?,
            Op::Relaunch(queue) => self.queues[usize::from(queue)].relaunch(),
            Op::Leave { hurry, stop } => self.leave(hurry, stop),
        }
        self.attend()
    }

    /// Fires the traps that wait for this state.
    pub fn spring(&mut self) -> Result<(), Failure> {
        if self.traps.is_empty() && self.away.is_none() {
            return Ok(());
        }
        if let Some((turns, power)) = self.away {
            self.away = Some((turns.saturating_sub(1), power));
            if turns == 0 {
                self.come_back();
            }
        }
        let state = self.state();
        let mut at = 0;
        while at < self.traps.len() {
            let (trap, left) = &mut self.traps[at];
            if trap.state != state {
                at += 1;
            } else if *left > 0 {
                *left -= 1;
                at += 1;
            } else {
                let trap = *trap;
                self.traps.remove(at);
                self.fire(trap)?;
            }
        }
        Ok(())
    }

    /// Stops all faults from now on.
    pub fn make_peace(&mut self) {
        self.traps.clear();
        self.ground.sim.disarm();
        self.ground.bells.mend();
        if self.away.is_some() {
            self.come_back();
        }
    }

    fn fire(&mut self, trap: Trap) -> Result<(), Failure> {
        let sim = self.ground.sim;
        if let Some(fault) = trap.kind.armed(trap.value) {
            sim.arm(trap.qid, fault);
            return Ok(());
        }
        match trap.kind {
            Kind::LostTail => self.ground.bells.lose(trap.qid, Side::Tail),
            Kind::LostHead => self.ground.bells.lose(trap.qid, Side::Head),
            kind => return self.strike(kind, trap.value as u32 % 60),
        }
        Ok(())
    }

    /// Causes a fault of the controller now; a controller that leaves the bus is back after `turns` turns.
    pub fn strike(&mut self, kind: Kind, turns: u32) -> Result<(), Failure> {
        let (sim, state) = (self.ground.sim, self.state());
        match kind {
            Kind::Cfs => sim.fail(),
            Kind::AllOnes | Kind::Removal => {
                sim.unplug();
                self.away = Some((turns, kind == Kind::Removal));
            }
            Kind::Restart => {
                sim.function_reset();
                self.hear_nothing();
            }
            Kind::PowerCut => self.cut_power(),
            _ => {}
        }
        self.saw(kind, state);
        if kind == Kind::Reset {
            return self.recover("a reset that was asked for");
        }
        Ok(())
    }

    /// Forgets doorbells and late data: nothing that is under way reaches a controller that restarts.
    fn hear_nothing(&mut self) {
        self.ground.bells.clear();
        self.accounts.laid_to_rest(0);
        self.accounts.laid_to_rest(1);
    }

    pub fn cut_power(&mut self) {
        self.ground.sim.power_cut();
        self.away = None;
        self.accounts.cuts += 1;
        self.accounts.model.power_cut();
        self.hear_nothing();
    }

    fn come_back(&mut self) {
        if let Some((_, true)) = self.away.take() {
            self.cut_power();
        } else {
            self.ground.sim.plug_in();
        }
    }

    fn saw(&mut self, kind: Kind, state: State) {
        self.disturbed = true;
        self.coverage.hit(kind, state);
        let (kind_number, state_number) = (kind as u8, state as u8);
        let event = Event::Fired {
            kind: kind_number,
            state: state_number,
        };
        self.trace
            .add(self.now_ns, event, || format!("{kind:?} in {state:?}"));
    }

    /// Delivers doorbells, and lets the controller do what is due.
    pub fn work(&mut self) -> Result<(), Failure> {
        self.work_at(false)
    }

    fn work_at(&mut self, crawls: bool) -> Result<(), Failure> {
        let sim = self.ground.sim;
        let state = self.state();
        if self.away.is_some() {
            self.ground.bells.clear();
        }
        let mut lost = Vec::new();
        self.ground
            .bells
            .deliver(sim.doorbells(), crawls, |qid, side| lost.push((qid, side)));
        for (_, side) in lost {
            let kind = if side == Side::Tail {
                Kind::LostTail
            } else {
                Kind::LostHead
            };
            self.saw(kind, state);
        }
        let stepped = sim.step(self.now_ns);
        self.next_event = stepped.next_event_ns;
        if stepped.commands > 0 {
            let event = Event::Worked {
                commands: stepped.commands,
            };
            self.trace.add(self.now_ns, event, || "");
        }
        let refused = self.ground.memory.refused();
        for fired in sim.take_fired() {
            if let Some(kind) = Kind::of(fired.what) {
                self.saw(kind, state);
            }
            for iova in refused.iter().skip(self.refusals) {
                self.accounts.refused(*iova)?;
            }
            self.refusals = refused.len();
            if fired.qid != 0 {
                self.accounts.fired(fired);
            }
        }
        for iova in refused.iter().skip(self.refusals) {
            self.accounts.refused(*iova)?;
        }
        self.refusals = refused.len();
        Ok(())
    }
}
