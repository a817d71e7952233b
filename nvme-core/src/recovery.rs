//! Recovery: the steps after a command's deadline has passed.
//!
//! Abort first ([`AbortAttempt`]), and wait for the aborted command's own completion: an Abort that succeeded
//! is no proof that the controller stopped using the buffer. If that completion does not arrive, reset: run
//! [`BringupMachine`](crate::bringup::BringupMachine) again with a plan for each queue, reclaim every command at its
//! [`RecoveryStep::Disabled`](crate::bringup::BringupStep::Disabled), and continue.
//!
//! A single queue is ended by [`QueueDeletion`], which needs no reset.
//!
//! If the device is gone, nothing proves that memory is free: commands are expired, and their buffers stay
//! with the queue pair, which leaks them when dropped.
//!
//! NVMe Base 2.0c, 5.1 (Abort command), "Controller Level Reset".

use crate::inflight::CommandSlot;
use crate::outcome::CommandOutcome;
use crate::queue_pair::{CommandCompletion, CommandData, QueuePair};
use crate::quiesced::{ClosedQueue, ControllerId, Quiesced};
use crate::spec::{Cid, Qid, Sqe, Status, admin};

/// Interval at which a waiting machine asks to be called, in nanoseconds.
const POLL_NS: u64 = 100_000;

/// The reason why a reset is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetCause {
    /// The Abort command could not be sent: the admin queue is full.
    AdminFull,
    /// The Abort command was not answered in time, or the admin queue holds an impossible completion.
    AdminDead,
    /// Abort was refused with this status.
    Refused(Status),
    /// Abort was answered, but the command's own completion did not come in time.
    NoCompletion,
    /// The queue pair given as admin queue is not the admin queue of the queue's controller.
    OtherAdmin,
}

/// The machine's next request to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryStep {
    /// Poll the command's queue, then call again at `until_ns` or before.
    Wait {
        /// Time on the caller's clock, in nanoseconds.
        until_ns: u64,
    },
    /// The command has ended: its completion was polled.
    Ended,
    /// Only a controller reset helps.
    ResetNeeded(ResetCause),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecoveryPhase {
    Start,
    Sent { abort: Cid },
    Answered,
    Over(ResetCause),
}

/// The attempt to abort one command.
///
/// The controller limits the Abort commands outstanding ([`Info::abort_limit`]); one attempt at a
/// time is always within it.
///
/// [`Info::abort_limit`]: crate::bringup::ControllerInfo::abort_limit
#[derive(Debug)]
pub struct AbortAttempt {
    qid: Qid,
    cid: Cid,
    grace_ns: u64,
    deadline_ns: u64,
    phase: RecoveryPhase,
}

impl AbortAttempt {
    /// Prepares an attempt on command `cid` of submission queue `qid`. The answer to Abort may take
    /// `grace_ns`, and the command's own completion `grace_ns` after that.
    pub fn new(qid: Qid, cid: Cid, grace_ns: u64) -> Self {
        Self {
            qid,
            cid,
            grace_ns,
            deadline_ns: 0,
            phase: RecoveryPhase::Start,
        }
    }

    /// Does what can be done now. `in_flight` tells whether the command is still in flight after its queue
    /// was polled just now ([`QueuePair::is_in_flight`]).
    ///
    /// `other` receives each completion of the admin queue that is not the Abort's.
    pub fn step<B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        in_flight: bool,
        now_ns: u64,
        mut other: impl FnMut(CommandCompletion<B>),
    ) -> RecoveryStep {
        loop {
            match self.phase {
                RecoveryPhase::Over(cause) => return RecoveryStep::ResetNeeded(cause),
                RecoveryPhase::Start if !in_flight => return RecoveryStep::Ended,
                RecoveryPhase::Start => {
                    self.deadline_ns = now_ns.saturating_add(self.grace_ns);
                    let sqe = admin::abort(self.qid, self.cid);
                    self.phase = match admin.submit(
                        sqe,
                        CommandData::None,
                        B::default(),
                        self.deadline_ns,
                    ) {
                        Ok(abort) => {
                            admin.ring();
                            RecoveryPhase::Sent { abort }
                        }
                        Err(_) => RecoveryPhase::Over(ResetCause::AdminFull),
                    };
                }
                RecoveryPhase::Sent { abort } => match admin.poll() {
                    Ok(Some(done)) if done.cid == abort => {
                        self.deadline_ns = now_ns.saturating_add(self.grace_ns);
                        self.phase = match done.outcome {
                            CommandOutcome::Completed(status)
                                if !status.is_success() && in_flight =>
                            {
                                RecoveryPhase::Over(ResetCause::Refused(status))
                            }
                            _ => RecoveryPhase::Answered,
                        };
                    }
                    Ok(Some(done)) => other(done),
                    Ok(None) if now_ns < self.deadline_ns => {
                        return RecoveryStep::Wait {
                            until_ns: self.deadline_ns.min(now_ns.saturating_add(POLL_NS)),
                        };
                    }
                    Ok(None) | Err(_) => self.phase = RecoveryPhase::Over(ResetCause::AdminDead),
                },
                RecoveryPhase::Answered if !in_flight => return RecoveryStep::Ended,
                RecoveryPhase::Answered if now_ns < self.deadline_ns => {
                    return RecoveryStep::Wait {
                        until_ns: self.deadline_ns.min(now_ns.saturating_add(POLL_NS)),
                    };
                }
                RecoveryPhase::Answered => {
                    self.phase = RecoveryPhase::Over(ResetCause::NoCompletion)
                }
            }
        }
    }
}

/// The next request of a queue deletion to its caller.
#[derive(Debug)]
pub enum DeletionStep {
    /// Call again at `until_ns` or before.
    Wait {
        /// Time on the caller's clock, in nanoseconds.
        until_ns: u64,
    },
    /// The submission queue is deleted: its commands' memory is free. Poll the completions that were posted,
    /// reclaim the remaining commands, then step again to delete the completion queue.
    Emptied(Quiesced<'static>),
    /// Both queues are deleted.
    Done,
    /// The deletion failed: only a controller reset helps.
    ResetNeeded(ResetCause),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeletionPhase {
    Submission,
    Completion,
    Sent { cid: Cid, last: bool },
    Done,
    Over(ResetCause),
}

/// The deletion of one I/O queue pair: submission queue first, since a completion queue may only be deleted
/// after all submission queues that use it.
///
/// NVMe Base 2.0c, "Delete I/O Submission Queue command".
#[derive(Debug)]
pub struct QueueDeletion {
    qid: Qid,
    controller: ControllerId,
    /// Present until the proof was returned.
    closed: Option<ClosedQueue>,
    timeout_ns: u64,
    deadline_ns: u64,
    phase: DeletionPhase,
}

impl QueueDeletion {
    /// Deletes the pair that was closed; each of the two commands has `timeout_ns`.
    pub fn new(closed: ClosedQueue, timeout_ns: u64) -> Self {
        Self {
            qid: closed.qid,
            controller: closed.binding.controller,
            closed: Some(closed),
            timeout_ns,
            deadline_ns: 0,
            phase: DeletionPhase::Submission,
        }
    }

    /// Does what can be done now; `other` receives each admin completion that is not its own. `admin` is the
    /// admin queue of the controller that the queue is bound to.
    pub fn step<B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
        mut other: impl FnMut(CommandCompletion<B>),
    ) -> DeletionStep {
        if admin.qid() != Qid::ADMIN || admin.controller() != self.controller {
            // Answers of another controller's admin queue prove nothing about this queue, so the deletion
            // ends here.
            self.phase = DeletionPhase::Over(ResetCause::OtherAdmin);
        }
        loop {
            match self.phase {
                DeletionPhase::Submission => {
                    self.send(admin, admin::delete_io_sq(self.qid), false, now_ns);
                }
                DeletionPhase::Completion => {
                    self.send(admin, admin::delete_io_cq(self.qid), true, now_ns);
                }
                DeletionPhase::Sent { cid, last } => match admin.poll() {
                    Ok(Some(done)) if done.cid == cid => match done.outcome {
                        CommandOutcome::Completed(status) if !status.is_success() => {
                            self.phase = DeletionPhase::Over(ResetCause::Refused(status));
                        }
                        _ if last => self.phase = DeletionPhase::Done,
                        _ => {
                            self.phase = DeletionPhase::Completion;
                            if let Some(closed) = self.closed.take() {
                                return DeletionStep::Emptied(Quiesced::queue(closed));
                            }
                        }
                    },
                    Ok(Some(done)) => other(done),
                    Ok(None) if now_ns < self.deadline_ns => {
                        let until_ns = self.deadline_ns.min(now_ns.saturating_add(POLL_NS));
                        return DeletionStep::Wait { until_ns };
                    }
                    Ok(None) | Err(_) => self.phase = DeletionPhase::Over(ResetCause::AdminDead),
                },
                DeletionPhase::Done => return DeletionStep::Done,
                DeletionPhase::Over(cause) => return DeletionStep::ResetNeeded(cause),
            }
        }
    }

    fn send<B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        sqe: Sqe,
        last: bool,
        now_ns: u64,
    ) {
        self.deadline_ns = now_ns.saturating_add(self.timeout_ns);
        self.phase = match admin.submit(sqe, CommandData::None, B::default(), self.deadline_ns) {
            Ok(cid) => {
                admin.ring();
                DeletionPhase::Sent { cid, last }
            }
            Err(_) => DeletionPhase::Over(ResetCause::AdminFull),
        };
    }
}
