//! `CollectiveQueue`, owned by a group of one.

use super::{End, IoQueue, Late};
use nvme_core::bringup::QueuePlan;
use nvme_core::group::LoneThread;
use nvme_core::queue_state::QueueState;
use nvme_core::spec::{Cid, Sqe};
use nvme_core::{
    ClosedQueue, CollectiveQueue, CommandData, CommandOutcome, ControllerFault, MemberCommand,
    QueueMemory, Quiesced, SubmitError,
};

/// Completions that a poll reads at once.
const READS: usize = 4;

/// A queue that one thread of a GPU owns.
pub struct Lane<'a, F> {
    plan: QueuePlan,
    /// Attaches to the queue's memory again, as each kernel does.
    memory: F,
    state: QueueState<'a>,
    /// `None` only during a handover.
    queue: Option<CollectiveQueue<'a, LoneThread>>,
}

impl<'a, F: Fn() -> QueueMemory<'a>> Lane<'a, F> {
    /// Takes over a queue that has a state already.
    pub fn new(plan: QueuePlan, memory: F, state: QueueState<'a>) -> Self {
        let queue = Some(CollectiveQueue::resume(LoneThread, memory(), state));
        Self {
            plan,
            memory,
            state,
            queue,
        }
    }

    fn queue(&mut self) -> &mut CollectiveQueue<'a, LoneThread> {
        let Self {
            memory,
            state,
            queue,
            ..
        } = self;
        queue.get_or_insert_with(|| CollectiveQueue::resume(LoneThread, memory(), *state))
    }
}

impl<'a, F: Fn() -> QueueMemory<'a>> IoQueue for Lane<'a, F> {
    fn plan(&self) -> QueuePlan {
        self.plan
    }

    fn submit(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        id: u32,
        deadline_ns: u64,
    ) -> Result<Cid, SubmitError> {
        let command = |_slot| MemberCommand::new(sqe, data, id);
        let placed = self.queue().submit(true, command, deadline_ns)?;
        placed.ok_or(SubmitError::QueueFull)
    }

    fn ring(&mut self) {
        self.queue().ring();
    }

    fn poll(&mut self, ended: &mut Vec<End>) -> Result<(), ControllerFault> {
        let mut take = || {
            self.queue().reap::<READS>(|done| {
                ended.push(End {
                    id: done.tag,
                    outcome: CommandOutcome::Completed(done.status),
                    late: Some(done.late),
                });
            })
        };
        while take()? > 0 {}
        // A queue that was refused reports it even if no entry has arrived since.
        self.state.fault().map_or(Ok(()), Err)
    }

    fn expire(&mut self, now_ns: u64, late: &mut Vec<Late>, _ended: &mut Vec<End>) {
        self.queue().expire(now_ns, |tag| late.push(Late::Id(tag)));
    }

    fn in_flight(&self) -> u32 {
        self.queue.as_ref().map_or(0, CollectiveQueue::in_flight)
    }

    fn depth(&self) -> u32 {
        self.state.slots()
    }

    fn refuses(&self) -> bool {
        self.state.fault().is_some()
    }

    fn close(&mut self) -> ClosedQueue {
        let closed = self.state.close();
        self.relaunch();
        closed
    }

    fn reclaim(&mut self, proof: &Quiesced<'_>, ended: &mut Vec<End>) {
        let reason = proof.reason();
        // The kernel's knowledge is written to the state first.
        self.relaunch();
        if let Some(queue) = self.queue.take() {
            queue.recover(proof, |tag| {
                ended.push(End {
                    id: tag,
                    outcome: CommandOutcome::Aborted(reason),
                    late: None,
                });
            });
        }
        self.queue();
    }

    fn restart(&mut self, _proof: &Quiesced<'_>) {}

    fn relaunch(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.suspend();
        }
        self.queue();
    }
}
