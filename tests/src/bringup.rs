//! The loop that drives a bring-up to its end, for tests that bring controllers up.

use nvme_core::bringup::{BringupMachine, BringupStep, HostMemoryPages};
use nvme_core::{BringupError, Quiesced, RegisterAccess};

/// The parts that a bring-up needs: an admin queue, a clock, and the queues that a reset empties.
pub trait Host {
    /// Makes one step of `machine` at the present time, with the admin queue.
    ///
    /// # Errors
    /// As [`BringupMachine::step`].
    fn step<'r>(
        &mut self,
        machine: &mut BringupMachine<'_>,
        registers: &'r dyn RegisterAccess,
    ) -> Result<BringupStep<'r>, BringupError>;

    /// Moves the clock, at most to `until_ns`.
    fn wait(&mut self, until_ns: u64);

    /// The controller accesses no memory: reclaims and restarts every queue.
    fn disabled(&mut self, proof: &Quiesced<'_>);

    /// Returns the memory that the controller gets of at least `minimum` bytes.
    fn host_memory(&mut self, preferred: u64, minimum: u64) -> Option<HostMemoryPages> {
        let _ = (preferred, minimum);
        None
    }
}

/// Steps `machine` until the controller works.
///
/// # Errors
/// The first that a step returns.
pub fn bring_up(
    machine: &mut BringupMachine<'_>,
    registers: &dyn RegisterAccess,
    host: &mut impl Host,
) -> Result<(), BringupError> {
    loop {
        match host.step(machine, registers)? {
            BringupStep::Wait { until_ns } => host.wait(until_ns),
            BringupStep::Disabled(proof) => {
                host.disabled(&proof);
                machine.enable(proof);
            }
            BringupStep::HostMemory { preferred, minimum } => {
                machine.host_memory(host.host_memory(preferred, minimum));
            }
            BringupStep::Ready => return Ok(()),
        }
    }
}
