//! `SharedQueue`, used by two lanes in turn; each thread of a GPU makes such a view of the queue.

use super::{End, IoQueue, Late};
use nvme_core::bringup::QueuePlan;
use nvme_core::group::{ExecContext, GroupOp, LoneThread};
use nvme_core::spec::{Cid, Sqe};
use nvme_core::{
    ClosedQueue, CommandData, CommandToken, ControllerFault, DrainResult, MemberCommand, Quiesced,
    SharedQueue, SubmitError,
};

/// A command that a lane waits for: the number of its cell is its index in the table.
struct Held {
    id: u32,
    token: CommandToken,
    deadline_ns: u64,
    late: bool,
}

/// Two lanes on one queue.
pub struct Threads<'a> {
    plan: QueuePlan,
    lanes: [SharedQueue<'a>; 2],
    turn: usize,
    held: Vec<Option<Held>>,
    free: Vec<u32>,
}

impl<'a> Threads<'a> {
    /// Makes two views of one queue, with `cells` result cells.
    pub fn new(plan: QueuePlan, lanes: [SharedQueue<'a>; 2], cells: u32) -> Self {
        Self {
            plan,
            lanes,
            turn: 0,
            held: (0..cells).map(|_| None).collect(),
            free: (0..cells).collect(),
        }
    }

    fn lane(&mut self) -> &SharedQueue<'a> {
        self.turn ^= 1;
        &self.lanes[self.turn]
    }

    /// Looks at every cell: commands that have ended leave the table.
    fn collect(&mut self, ended: &mut Vec<End>) {
        for cell in 0..self.held.len() {
            let Some(held) = &self.held[cell] else {
                continue;
            };
            let Some((outcome, _)) = self.lanes[cell % 2].poll(&held.token) else {
                continue;
            };
            ended.push(End {
                id: held.id,
                outcome,
                late: None,
            });
            self.held[cell] = None;
            self.free.push(cell as u32);
        }
    }
}

/// A lane by itself at a moment of virtual time.
struct At(u64);

impl ExecContext for At {
    fn now_ns(&self) -> u64 {
        self.0
    }

    fn pause(&self, _turn: u32) {}

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

impl IoQueue for Threads<'_> {
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
        let Some(cell) = self.free.pop() else {
            return Err(SubmitError::QueueFull);
        };
        let placed = self
            .lane()
            .place(&LoneThread, MemberCommand::new(sqe, data, cell));
        match placed {
            Ok(token) => {
                let cid = token.cid();
                self.held[cell as usize] = Some(Held {
                    id,
                    token,
                    deadline_ns,
                    late: false,
                });
                Ok(cid)
            }
            Err(error) => {
                self.free.push(cell);
                Err(error)
            }
        }
    }

    fn ring(&mut self) {
        self.lane().ring(&LoneThread);
    }

    fn poll(&mut self, ended: &mut Vec<End>) -> Result<(), ControllerFault> {
        while matches!(self.lane().drain(&LoneThread), DrainResult::Took(1..)) {}
        self.collect(ended);
        self.lanes[0].fault().map_or(Ok(()), Err)
    }

    fn expire(&mut self, now_ns: u64, late: &mut Vec<Late>, ended: &mut Vec<End>) {
        for cell in 0..self.held.len() {
            let due = |held: &mut Held| !held.late && held.deadline_ns <= now_ns;
            let Some(held) = self.held[cell].take_if(due) else {
                continue;
            };
            // A lane that waits until the deadline helps to ring and to drain before it gives up.
            let waited = self.lane().wait(&At(now_ns), held.token, held.deadline_ns);
            match waited {
                Ok((outcome, _)) => {
                    ended.push(End {
                        id: held.id,
                        outcome,
                        late: None,
                    });
                    self.free.push(cell as u32);
                }
                Err((_, token)) => {
                    late.push(Late::Id(held.id));
                    let late = true;
                    self.held[cell] = Some(Held {
                        token,
                        late,
                        ..held
                    });
                }
            }
        }
    }

    fn in_flight(&self) -> u32 {
        self.held.iter().flatten().count() as u32
    }

    fn depth(&self) -> u32 {
        self.lanes[0].state().slots().min(self.held.len() as u32)
    }

    fn refuses(&self) -> bool {
        self.lanes[0].fault().is_some()
    }

    fn close(&mut self) -> ClosedQueue {
        self.lanes[0].state().close()
    }

    fn reclaim(&mut self, proof: &Quiesced<'_>, ended: &mut Vec<End>) {
        // One call ends every command and empties the queue. After a deletion the host calls it
        // once more.
        self.lanes[0].recover(proof);
        self.collect(ended);
    }

    fn restart(&mut self, _proof: &Quiesced<'_>) {}
}
