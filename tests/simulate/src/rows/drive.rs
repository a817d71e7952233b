//! The controller, two queues that a GPU uses, and the time between them; resets from beginning to end.

use crate::account::Failure;
use crate::bus::Bells;
use crate::memory::Memory;
use crate::setup::{ADMIN_NS, COMMAND_NS};
use crate::world::Admin;
use nvme_core::bringup::{self, BringupMachine, QueuePlan};
use nvme_core::group::{ExecContext, GroupOp, LoneThread};
use nvme_core::mem::DmaWords;
use nvme_core::{BringupError, Quiesced, SharedQueue};
use nvme_sim::Controller;
use nvme_tests::Bar;

/// The longest that a reset may take.
const RESET_NS: u64 = 10_000_000_000;
/// Attempts to reset the controller.
const ATTEMPTS: u32 = 4;

/// Both sides of the bus.
pub(super) struct Drive<'a> {
    pub memory: &'a Memory,
    pub sim: &'a Controller<&'a Memory>,
    pub bar: Bar<'a, &'a Memory>,
    pub bells: &'a Bells,
    pub plans: &'a [QueuePlan],
    pub page: DmaWords<'a>,
    pub admin: Admin<'a>,
    pub queues: [SharedQueue<'a>; 2],
    pub now_ns: u64,
    next_event: Option<u64>,
    /// True if the controller had something to do when it last worked.
    has_worked: bool,
}

/// A thread by itself at a moment of virtual time.
pub(super) struct At(pub u64);

impl ExecContext for At {
    fn now_ns(&self) -> u64 {
        self.0
    }

    fn pause(&self, _turn: u32) {}

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

/// The parts of a drive.
pub(super) struct Parts<'a> {
    pub memory: &'a Memory,
    pub bar: Bar<'a, &'a Memory>,
    pub bells: &'a Bells,
    pub plans: &'a [QueuePlan],
    pub page: DmaWords<'a>,
    pub admin: Admin<'a>,
    pub queues: [SharedQueue<'a>; 2],
}

impl<'a> Drive<'a> {
    pub fn new(parts: Parts<'a>, now_ns: u64) -> Self {
        Self {
            memory: parts.memory,
            sim: parts.bar.sim,
            bar: parts.bar,
            bells: parts.bells,
            plans: parts.plans,
            page: parts.page,
            admin: parts.admin,
            queues: parts.queues,
            now_ns,
            next_event: None,
            has_worked: false,
        }
    }

    /// Delivers doorbells, and lets the controller do what is due.
    pub fn work(&mut self, crawls: bool) {
        let is_rung = self.bells.is_rung();
        self.bells.deliver(self.sim.doorbells(), crawls, |_, _| ());
        let step = self.sim.step(self.now_ns);
        // A command that is due may wait for a free entry of a full completion queue: that is no work, and time passes.
        self.has_worked = is_rung || step.commands > 0;
        self.next_event = step.next_event_ns;
        self.sim.take_fired();
    }

    /// Lets time pass until the controller has something to do, `most_ns` at most.
    pub fn sleep(&mut self, most_ns: u64) {
        self.now_ns = self.wakes_ns(most_ns);
    }

    /// Returns the time at which the controller does something next, at most `most_ns` from now.
    pub fn wakes_ns(&self, most_ns: u64) -> u64 {
        let next = self.next_event.filter(|next| *next > self.now_ns);
        let most = self.now_ns + most_ns.max(1);
        match self.bells.is_rung() {
            true => self.now_ns + 1_000,
            false => next.map_or(most, |next| next.min(most)),
        }
    }

    /// Returns the longest sleep while all else rests. After the controller has done something it is short: threads
    /// look twice before those that wait for a slot submit, and no thread looks during a sleep, so that by long ones
    /// commands that wait for one of two slots would meet their deadline.
    pub fn longest_sleep_ns(&self) -> u64 {
        match self.has_worked {
            true => 1_000,
            false => COMMAND_NS / 16,
        }
    }

    /// Resets the controller and brings it up again: no earlier command is under way then.
    pub fn reset(&mut self) -> Result<(), Failure> {
        let since_ns = self.now_ns;
        for _ in 0..ATTEMPTS {
            match self.raise(since_ns) {
                Ok(()) => return Ok(()),
                Err(Raise::TooLong) => {
                    return Err(Failure::new("recovery", "a reset takes too long"));
                }
                Err(Raise::Failed) => {}
            }
        }
        Err(Failure::new("recovery", "the controller does not come up"))
    }

    fn raise(&mut self, since_ns: u64) -> Result<(), Raise> {
        let config = bringup::BringupConfig {
            queue_pairs: self.queues.len() as u32,
            plans: self.plans,
            command_timeout_ns: ADMIN_NS,
            ..bringup::BringupConfig::default()
        };
        let bar = self.bar;
        let mut machine = BringupMachine::new(&bar, config, self.page)?;
        loop {
            self.work(false);
            if self.now_ns - since_ns > RESET_NS {
                return Err(Raise::TooLong);
            }
            let step = machine.step(&bar, &mut self.admin, self.now_ns);
            match step? {
                bringup::BringupStep::Wait { until_ns } => {
                    self.sleep(until_ns.saturating_sub(self.now_ns));
                }
                bringup::BringupStep::Disabled(proof) => {
                    self.release(&proof);
                    machine.enable(proof);
                }
                bringup::BringupStep::HostMemory { .. } => machine.host_memory(None),
                bringup::BringupStep::Ready => return Ok(()),
            }
        }
    }

    /// Ends the commands of the queues, because the controller is proved to have stopped.
    fn release(&mut self, proof: &Quiesced<'_>) {
        while self.admin.reclaim(proof).is_some() {}
        self.admin.restart(proof);
        for queue in &self.queues {
            queue.recover(proof);
        }
        self.bells.clear();
    }
}

/// Cause of a bring-up that failed.
enum Raise {
    Failed,
    TooLong,
}

impl From<BringupError> for Raise {
    fn from(_: BringupError) -> Self {
        Self::Failed
    }
}
