//! The host's machines while no commands are taken, one step a turn.

use crate::account::Failure;
use crate::host::{Mode, NAP_NS};
use crate::sabotage::Sabotage;
use crate::setup::ADMIN_NS;
use crate::world::World;
use nvme_core::bringup::{self, BringupMachine};
use nvme_core::recovery::{DeletionStep, QueueDeletion};
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::register::{ALL_ONES, offset};
use nvme_core::{BringupError, Quiesced};

/// The longest time of a bring-up: three waits of a second for CSTS.RDY, and its commands.
const RAISE_NS: u64 = 3_000_000_000 + 16 * (ADMIN_NS + NAP_NS);
/// Failed attempts in a row after which the power is turned off and on.
const ATTEMPTS: u32 = 4;

impl<'a> World<'a> {
    /// Runs one turn in which no commands are taken.
    pub fn turn(&mut self) -> Result<(), Failure> {
        self.work()?;
        // If the mode was replaced meanwhile, the new one stays.
        let mode = std::mem::replace(&mut self.mode, Mode::Off { turns: u32::MAX });
        let next = self.step(mode)?;
        if let (Mode::Off { turns: u32::MAX }, Some(mode)) = (&self.mode, next) {
            self.mode = mode;
        }
        Ok(())
    }

    /// Returns the mode that continues, or `None` when another one was entered.
    fn step(&mut self, mode: Mode<'a>) -> Result<Option<Mode<'a>>, Failure> {
        match mode {
            Mode::Off { turns: 0 } => {
                self.recovering = false;
                self.raise("it was off")?;
                Ok(None)
            }
            Mode::Off { turns } => {
                self.now_ns += 100_000;
                Ok(Some(Mode::Off { turns: turns - 1 }))
            }
            Mode::Gone => self.step_gone(),
            Mode::Raising {
                machine,
                pause: pause @ 1..,
                ..
            } => {
                self.now_ns = self
                    .next_work()
                    .clamp(self.now_ns + 1, self.now_ns + 50_000);
                let (since_ns, pause) = (self.now_ns, pause - 1);
                Ok(Some(Mode::Raising {
                    machine,
                    since_ns,
                    pause,
                }))
            }
            Mode::Raising {
                machine, since_ns, ..
            } => self.step_raising(machine, since_ns),
            Mode::Draining { hurry, stop } => self.step_draining(hurry, stop),
            Mode::Deleting { .. } => self.step_deleting(mode),
            Mode::Stopping { machine, abrupt } => self.step_stopping(machine, abrupt),
            Mode::Up { .. } | Mode::Aborting { .. } => Ok(Some(mode)),
        }
    }

    fn step_gone(&mut self) -> Result<Option<Mode<'a>>, Failure> {
        self.now_ns += 1_000_000;
        if self.ground.sim.read32(offset::CSTS) == ALL_ONES {
            return Ok(Some(Mode::Gone));
        }
        self.raise("it is back")?;
        Ok(None)
    }

    /// Ends the commands of the drivers, because the controller is proved to have stopped.
    fn release(&mut self, proof: &Quiesced<'_>) -> Result<(), Failure> {
        while self.admin.reclaim(proof).is_some() {}
        self.admin.restart(proof);
        for queue in 0..self.queues.len() {
            self.reclaim(queue, proof)?;
            if self.sabotage != Sabotage::NoRestart {
                self.queues[queue].restart(proof);
            }
        }
        self.ground.bells.clear();
        Ok(())
    }

    fn step_raising(
        &mut self,
        mut machine: Box<BringupMachine<'a>>,
        since_ns: u64,
    ) -> Result<Option<Mode<'a>>, Failure> {
        let took = self.now_ns - since_ns;
        let bar = self.ground.bar;
        let step = machine.step(&bar, &mut self.admin, self.now_ns);
        if took > RAISE_NS {
            return Err(Failure::new(
                "deadline",
                format!("a bring-up takes {took} ns: {step:?}"),
            ));
        }
        match step {
            Ok(bringup::BringupStep::Wait { until_ns }) => self.sleep(until_ns),
            Ok(bringup::BringupStep::Disabled(proof)) => {
                self.release(&proof)?;
                machine.enable(proof);
            }
            Ok(bringup::BringupStep::HostMemory { .. }) => machine.host_memory(None),
            Ok(bringup::BringupStep::Ready) => {
                let created = machine.info().created;
                if created < self.ground.plans.len() as u32 {
                    // A torn completion may have granted too few queues.
                    if !self.disturbed {
                        return Err(Failure::new(
                            "recovery",
                            format!("{created} queues were created"),
                        ));
                    }
                    self.recover("too few queues")?;
                    return Ok(None);
                }
                self.recovered += u32::from(self.recovering);
                (self.recovering, self.disturbed, self.failures) = (true, false, 0);
                let patience = self.plan.setup.patience;
                self.enter("up", Mode::Up { patience }, "");
                return Ok(None);
            }
            Err(error) => {
                self.failed(error)?;
                return Ok(None);
            }
        }
        Ok(Some(Mode::Raising {
            machine,
            since_ns,
            pause: 0,
        }))
    }

    /// Handles a bring-up that ended with an error: the queues take no commands, and the host tries
    /// again.
    fn failed(&mut self, error: BringupError) -> Result<(), Failure> {
        if !self.disturbed {
            let text = format!("bring-up ends with {error:?} and nothing was wrong");
            return Err(Failure::new("recovery", text));
        }
        self.failures += 1;
        if self.failures >= ATTEMPTS && self.away.is_none() {
            self.failures = 0;
            self.cut_power();
        }
        self.recover("bring-up failed")
    }

    fn step_draining(
        &mut self,
        hurry: bool,
        stop: Option<bool>,
    ) -> Result<Option<Mode<'a>>, Failure> {
        for queue in 0..self.queues.len() {
            self.poll(queue)?;
            self.expire(queue)?;
            self.queues[queue].ring();
        }
        if self.accounts.any_overdue() {
            self.recover("a command is late while the queues are drained")?;
            return Ok(None);
        }
        if self.accounts.open == 0 || hurry {
            self.accounts.abortable(0);
            let deletion = QueueDeletion::new(self.queues[0].close(), ADMIN_NS);
            return Ok(Some(Mode::Deleting {
                deletion,
                queue: 0,
                stop,
                emptied: false,
            }));
        }
        let deadlines = [0, 1].map(|queue| self.accounts.next_deadline(queue).unwrap_or(u64::MAX));
        let next = self.next_work().max(self.now_ns + 1);
        self.now_ns = next
            .min(deadlines[0])
            .min(deadlines[1])
            .max(self.now_ns + 1);
        Ok(Some(Mode::Draining { hurry, stop }))
    }

    fn step_deleting(&mut self, mode: Mode<'a>) -> Result<Option<Mode<'a>>, Failure> {
        let Mode::Deleting {
            mut deletion,
            queue,
            stop,
            mut emptied,
        } = mode
        else {
            return Ok(Some(mode));
        };
        for one in 0..self.queues.len() {
            self.poll(one)?;
        }
        match deletion.step(&mut self.admin, self.now_ns, drop) {
            DeletionStep::Wait { until_ns } => self.sleep(until_ns),
            DeletionStep::Emptied(proof) => {
                emptied = true;
                self.poll(queue)?;
                self.reclaim(queue, &proof)?;
            }
            DeletionStep::ResetNeeded(_) => {
                self.recover("a queue could not be deleted")?;
                return Ok(None);
            }
            DeletionStep::Done if queue + 1 < self.queues.len() => {
                self.accounts.abortable(queue + 1);
                let deletion = QueueDeletion::new(self.queues[queue + 1].close(), ADMIN_NS);
                return Ok(Some(Mode::Deleting {
                    deletion,
                    queue: queue + 1,
                    stop,
                    emptied: false,
                }));
            }
            DeletionStep::Done => {
                let Some(abrupt) = stop else {
                    self.recover("queues are to be created again")?;
                    return Ok(None);
                };
                let kind = if abrupt {
                    ShutdownKind::Abrupt
                } else {
                    ShutdownKind::Normal
                };
                // The last doorbells arrive before CC.SHN does.
                self.ground.bells.mend();
                let machine = ShutdownMachine::new(kind, 100);
                self.enter("stop", Mode::Stopping { machine, abrupt }, "");
                return Ok(None);
            }
        }
        Ok(Some(Mode::Deleting {
            deletion,
            queue,
            stop,
            emptied,
        }))
    }

    fn step_stopping(
        &mut self,
        mut machine: ShutdownMachine,
        abrupt: bool,
    ) -> Result<Option<Mode<'a>>, Failure> {
        let bar = self.ground.bar;
        match machine.step(&bar, self.now_ns) {
            Ok(shutdown::ShutdownStep::Wait { until_ns }) => {
                self.sleep(until_ns);
                return Ok(Some(Mode::Stopping { machine, abrupt }));
            }
            Ok(shutdown::ShutdownStep::Done(proof)) => {
                self.release(&proof)?;
                if !abrupt && !self.disturbed {
                    self.accounts.model.saved();
                }
                self.enter("off", Mode::Off { turns: 4 }, "");
            }
            Err(_) if !self.disturbed => {
                return Err(Failure::new(
                    "recovery",
                    "a shutdown failed and nothing was wrong",
                ));
            }
            Err(error) => {
                let why = format!("{error:?}");
                self.recover(&why)?;
            }
        }
        Ok(None)
    }
}
