//! One interface to the core's three drivers, so that one host can use any of them.

mod collective;
mod pair;
mod shared;

pub use collective::Lane;
pub use pair::Pair;
pub use shared::Threads;

use nvme_core::bringup::QueuePlan;
use nvme_core::spec::{Cid, Sqe};
use nvme_core::{ClosedQueue, CommandData, CommandOutcome, ControllerFault, Quiesced, SubmitError};

/// The end of a command, with the number that it was submitted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The number.
    pub id: u32,
    /// The outcome of the command.
    pub outcome: CommandOutcome,
    /// True if the command had been reported as expired before; `None` if the driver does not say.
    pub late: Option<bool>,
}

/// A command past its deadline, as its driver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// Names a command by the number that it was submitted with.
    Id(u32),
    /// The command's identifier.
    Cid(Cid),
}

/// An I/O queue of the host.
pub trait IoQueue {
    /// Returns the plan that creates it.
    fn plan(&self) -> QueuePlan;
    /// Places a command.
    fn submit(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        id: u32,
        deadline_ns: u64,
    ) -> Result<Cid, SubmitError>;
    /// Publishes the placed commands.
    fn ring(&mut self);
    /// Takes the completions that have arrived.
    fn poll(&mut self, ended: &mut Vec<End>) -> Result<(), ControllerFault>;
    /// Tells which commands are past their deadline, each once. It may find some that have ended.
    fn expire(&mut self, now_ns: u64, late: &mut Vec<Late>, ended: &mut Vec<End>);
    /// Commands that have not ended.
    fn in_flight(&self) -> u32;
    /// Returns the most commands that can be.
    fn depth(&self) -> u32;
    /// Returns whether the queue refuses commands because of an entry that the controller posted.
    fn refuses(&self) -> bool;
    /// Ends the commands in flight, on proof that the controller has stopped.
    fn reclaim(&mut self, proof: &Quiesced<'_>, ended: &mut Vec<End>);
    /// Takes no more commands until the queue is restarted.
    fn close(&mut self) -> ClosedQueue;
    /// Empties the rings for the queue to be created again.
    fn restart(&mut self, proof: &Quiesced<'_>);
    /// Replaces the queue's user: another one takes the queue over in its present state.
    fn relaunch(&mut self) {}
}
