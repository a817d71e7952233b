//! `QueuePair`, whose buffer is the command's number.

use super::{End, IoQueue, Late};
use nvme_core::bringup::QueuePlan;
use nvme_core::spec::{Cid, Qid, Sqe};
use nvme_core::{
    ClosedQueue, CommandCompletion, CommandData, CommandSlot, ControllerFault, ControllerIdentity,
    QueueMemory, QueuePair, Quiesced, SubmitError,
};

type Queue<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

/// A queue pair.
pub struct Pair<'a>(Queue<'a>);

impl<'a> Pair<'a> {
    /// Returns an empty pair with `slots` command slots.
    pub fn new(
        identity: &ControllerIdentity,
        qid: Qid,
        memory: QueueMemory<'a>,
        slots: u32,
    ) -> Self {
        let slots = (0..slots).map(|_| CommandSlot::new()).collect();
        Self(QueuePair::new(identity, qid, memory, slots))
    }
}

fn end(done: CommandCompletion<u32>) -> End {
    End {
        id: done.buffer,
        outcome: done.outcome,
        late: Some(done.late),
    }
}

impl IoQueue for Pair<'_> {
    fn plan(&self) -> QueuePlan {
        QueuePlan {
            qid: self.0.qid(),
            sq_entries: self.0.sq().entries(),
            sq_iova: self.0.sq().iova(),
            cq_entries: self.0.cq().entries(),
            cq_iova: self.0.cq().iova(),
            vector: None,
        }
    }

    fn submit(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        id: u32,
        deadline_ns: u64,
    ) -> Result<Cid, SubmitError> {
        let placed = self.0.submit(sqe, data, id, deadline_ns);
        placed.map_err(|rejected| rejected.error)
    }

    fn ring(&mut self) {
        self.0.ring();
    }

    fn poll(&mut self, ended: &mut Vec<End>) -> Result<(), ControllerFault> {
        while let Some(done) = self.0.poll()? {
            ended.push(end(done));
        }
        Ok(())
    }

    fn expire(&mut self, now_ns: u64, late: &mut Vec<Late>, _ended: &mut Vec<End>) {
        while let Some(cid) = self.0.expire(now_ns) {
            late.push(Late::Cid(cid));
        }
    }

    fn in_flight(&self) -> u32 {
        self.0.in_flight()
    }

    fn depth(&self) -> u32 {
        self.0.depth()
    }

    fn refuses(&self) -> bool {
        false
    }

    fn close(&mut self) -> ClosedQueue {
        self.0.close()
    }

    fn reclaim(&mut self, proof: &Quiesced<'_>, ended: &mut Vec<End>) {
        while let Some(done) = self.0.reclaim(proof) {
            ended.push(end(done));
        }
    }

    fn restart(&mut self, proof: &Quiesced<'_>) {
        self.0.restart(proof);
    }
}
