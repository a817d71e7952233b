//! The host's actions: it brings the controller up, aborts late commands, resets, deletes queues, shuts down. All of it
//! uses the core's machines, one step a turn, so that faults can strike in between.

use crate::account::Failure;
use crate::sabotage::Sabotage;
use crate::setup::{ADMIN_NS, GRACE_NS};
use crate::trace::Event;
use crate::world::World;
use nvme_core::BringupError;
use nvme_core::bringup::{self, BringupMachine};
use nvme_core::recovery::{AbortAttempt, QueueDeletion, RecoveryStep};
use nvme_core::shutdown::ShutdownMachine;
use nvme_core::spec::Qid;
use nvme_core::spec::register::{ALL_ONES, Csts, offset};

/// Sleep of a host that waits for nothing but a time-out.
pub(crate) const NAP_NS: u64 = 20_000_000;
/// The longest that an abort may take.
const ABORT_NS: u64 = 2 * GRACE_NS + NAP_NS;

/// The present work of the host.
pub(crate) enum Mode<'a> {
    /// The controller is disabled; it is brought up after this number of turns.
    Off { turns: u32 },
    /// The controller is being brought up, after this number of idle turns.
    Raising {
        machine: Box<BringupMachine<'a>>,
        since_ns: u64,
        pause: u32,
    },
    /// It works; this number of turns passes before a late command is handled.
    Up { patience: u32 },
    /// A command is being aborted.
    Aborting {
        attempt: AbortAttempt,
        queue: usize,
        id: u32,
        since_ns: u64,
    },
    /// No more commands are taken; the queues are deleted next, and then the controller is shut down or reset.
    Draining { hurry: bool, stop: Option<bool> },
    /// A queue is being deleted.
    Deleting {
        deletion: QueueDeletion,
        queue: usize,
        stop: Option<bool>,
        emptied: bool,
    },
    /// The controller is being shut down.
    Stopping {
        machine: ShutdownMachine,
        abrupt: bool,
    },
    /// The controller's registers read as all ones.
    Gone,
}

impl<'a> World<'a> {
    pub fn enter(&mut self, name: &'static str, mode: Mode<'a>, why: &str) {
        self.trace
            .add(self.now_ns, Event::Mode { name }, || why.to_owned());
        self.mode = mode;
    }

    /// Sleeps until the controller has something to do, at most until `until_ns`; longer if nothing will happen.
    pub fn sleep(&mut self, until_ns: u64) {
        let until_ns = until_ns.max(self.now_ns + 1);
        self.now_ns = match self.next_event {
            _ if self.ground.bells.is_rung() => self.now_ns + 1_000,
            Some(next) if next > self.now_ns => next.min(until_ns + NAP_NS),
            Some(_) => until_ns,
            None => until_ns + NAP_NS,
        };
    }

    /// Returns the time at which the controller can do something next; `u64::MAX` for never.
    pub fn next_work(&self) -> u64 {
        if self.ground.bells.is_rung() {
            return self.now_ns + 1_000;
        }
        // What was due before waits for room in a completion queue.
        let next = self.next_event.filter(|next| *next > self.now_ns);
        next.unwrap_or(u64::MAX)
    }

    /// Attends to late commands and the abort under way, after each operation.
    pub fn attend(&mut self) -> Result<(), Failure> {
        for queue in 0..self.queues.len() {
            if self.is_open() {
                self.expire(queue)?;
            }
        }
        match &mut self.mode {
            Mode::Up { .. } if !self.accounts.any_overdue() => Ok(()),
            Mode::Up { patience } if *patience > 0 => {
                *patience -= 1;
                Ok(())
            }
            Mode::Up { .. } => self.act(),
            Mode::Aborting { .. } => self.abort(),
            _ => Ok(()),
        }
    }

    /// Reacts to a late command: looks at CSTS, aborts, or resets.
    fn act(&mut self) -> Result<(), Failure> {
        let setup = &self.plan.setup;
        let (looks, aborts) = (setup.looks, setup.aborts);
        if looks {
            self.look()?;
        }
        if !self.is_open() {
            return Ok(());
        }
        if !aborts {
            return self.recover("a command is late");
        }
        for queue in 0..self.queues.len() {
            let Some(id) = self.accounts.overdue(queue) else {
                continue;
            };
            if self.sabotage == Sabotage::EarlyRelease {
                self.accounts.take_back(id);
            }
            let Some(record) = self.accounts.record(id) else {
                continue;
            };
            record.abortable = true;
            let attempt = AbortAttempt::new(Qid(queue as u16 + 1), record.cid, GRACE_NS);
            let since_ns = self.now_ns;
            self.enter(
                "abort",
                Mode::Aborting {
                    attempt,
                    queue,
                    id,
                    since_ns,
                },
                "",
            );
            return self.abort();
        }
        Ok(())
    }

    fn abort(&mut self) -> Result<(), Failure> {
        let Mode::Aborting {
            queue,
            id,
            since_ns,
            ..
        } = self.mode
        else {
            return Ok(());
        };
        self.poll(queue)?;
        let in_flight = self.accounts.record(id).is_some_and(|record| !record.ended);
        let Mode::Aborting { attempt, .. } = &mut self.mode else {
            return Ok(());
        };
        let step = attempt.step(&mut self.admin, in_flight, self.now_ns, drop);
        let took = self.now_ns - since_ns;
        if took > ABORT_NS && matches!(step, RecoveryStep::Wait { .. }) {
            return Err(Failure::new(
                "deadline",
                format!("an abort takes {took} ns"),
            ));
        }
        match step {
            RecoveryStep::Wait { .. } => Ok(()),
            RecoveryStep::Ended => {
                let patience = self.plan.setup.patience;
                self.enter("up", Mode::Up { patience }, "the command has ended");
                Ok(())
            }
            RecoveryStep::ResetNeeded(_) => self.recover("the abort did not help"),
        }
    }

    /// Looks at CSTS.
    pub fn look(&mut self) -> Result<(), Failure> {
        let csts = self.ground.sim.read32(offset::CSTS);
        let bits = Csts(csts);
        let well = csts != ALL_ONES && !bits.cfs() && bits.rdy();
        if well {
            return Ok(());
        }
        if !self.disturbed {
            return Err(Failure::new(
                "recovery",
                format!("CSTS is {csts:#x} and nothing was wrong"),
            ));
        }
        self.recover("CSTS says so")
    }

    /// Works until nothing is in flight, or a deadline has passed, or the host has something else to do.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let mut nap_ns = 1_000;
        for _ in 0..200 {
            for queue in &mut self.queues {
                queue.ring();
            }
            self.work()?;
            for queue in 0..self.queues.len() {
                if self.is_open() {
                    self.poll(queue)?;
                }
            }
            let aborting = matches!(self.mode, Mode::Aborting { .. });
            if !self.is_open() || self.accounts.open == 0 && !aborting {
                return Ok(());
            }
            let deadlines =
                [0, 1].map(|queue| self.accounts.next_deadline(queue).unwrap_or(u64::MAX));
            let mut until_ns = deadlines[0].min(deadlines[1]);
            if aborting || self.accounts.any_overdue() {
                until_ns = until_ns.min(self.now_ns + 500_000);
            }
            if until_ns <= self.now_ns {
                // The driver is asked next, and its clock may be coarse.
                self.now_ns += 2_000;
                return Ok(());
            }
            let mut next = self.next_work().max(self.now_ns + 1);
            if self.next_event.is_some_and(|next| next <= self.now_ns) {
                // A queue that waits for room hides the times at which others have work.
                nap_ns *= 2;
                next = next.min(self.now_ns + nap_ns);
            }
            self.now_ns = next.min(until_ns);
            if self.now_ns == until_ns {
                return self.work();
            }
        }
        Ok(())
    }

    /// Resets the controller and brings it up again.
    pub fn recover(&mut self, why: &str) -> Result<(), Failure> {
        self.recovering = true;
        self.raise(why)
    }

    pub fn raise(&mut self, why: &str) -> Result<(), Failure> {
        let config = bringup::BringupConfig {
            queue_pairs: self.queues.len() as u32,
            plans: self.ground.plans,
            command_timeout_ns: ADMIN_NS,
            ..bringup::BringupConfig::default()
        };
        match BringupMachine::new(&self.ground.bar, config, self.ground.page) {
            Ok(machine) => {
                let machine = Box::new(machine);
                let since_ns = self.now_ns;
                let pause = if self.recovering {
                    self.plan.setup.patience / 2
                } else {
                    0
                };
                let mode = Mode::Raising {
                    machine,
                    since_ns,
                    pause,
                };
                self.enter("raise", mode, why);
            }
            Err(BringupError::DeviceGone) => self.enter("gone", Mode::Gone, why),
            Err(error) => {
                return Err(Failure::new(
                    "recovery",
                    format!("bring-up begins with {error:?}"),
                ));
            }
        }
        Ok(())
    }

    /// Ends commands in an orderly way, deletes the queues, shuts down or resets.
    pub fn leave(&mut self, hurry: bool, stop: Option<bool>) {
        for queue in &mut self.queues {
            queue.ring();
        }
        self.enter("drain", Mode::Draining { hurry, stop }, "");
    }
}
