//! Recovery: what to do about a command whose deadline has passed.
//!
//! Abort first, and wait for the aborted command's own completion: an Abort that succeeded is no
//! proof that the controller has let go of the buffer. If that does not come, reset: run
//! [`Bringup`](crate::bringup::Bringup) again with a plan for each queue, reclaim every command at
//! its [`Step::Disabled`](crate::bringup::Step::Disabled) and go on.
//!
//! A single queue is ended by [`QueueDeletion`], which needs no reset.
//!
//! When the device is gone nothing proves that memory is free: commands are expired, and what they
//! hold stays with the queue pair, which leaks it when dropped.
//!
//! NVMe Base 2.0c, 5.1 (Abort command), "Controller Level Reset".

use crate::inflight::Slot;
use crate::outcome::Outcome;
use crate::queue_pair::{Completion, Data, QueuePair};
use crate::quiesced::{ClosedQueue, ControllerId, Quiesced};
use crate::spec::{Cid, Qid, Sqe, Status, admin};

/// How often a waiting machine wants to look again.
const POLL_NS: u64 = 100_000;

/// Why a reset is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetCause {
    /// The Abort command could not be sent: the admin queue is full.
    AdminFull,
    /// The Abort command was not answered in time, or the admin queue holds a completion that cannot be.
    AdminDead,
    /// Abort was refused with this status.
    Refused(Status),
    /// Abort was answered, but the command's own completion did not come in time.
    NoCompletion,
    /// The queue pair given as admin queue is not the admin queue of the queue's controller.
    OtherAdmin,
}

/// What the machine wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Poll the command's queue, then call again at `until_ns` or before.
    Wait {
        /// On the caller's clock.
        until_ns: u64,
    },
    /// The command has ended: its completion was polled.
    Ended,
    /// Only a controller reset helps.
    ResetNeeded(ResetCause),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
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
/// [`Info::abort_limit`]: crate::bringup::Info::abort_limit
#[derive(Debug)]
pub struct AbortAttempt {
    qid: Qid,
    cid: Cid,
    grace_ns: u64,
    deadline_ns: u64,
    phase: Phase,
}

impl AbortAttempt {
    /// An attempt on command `cid` of submission queue `qid`. Abort's answer, and then the command's
    /// completion, each have `grace_ns` to come.
    pub fn new(qid: Qid, cid: Cid, grace_ns: u64) -> Self {
        Self {
            qid,
            cid,
            grace_ns,
            deadline_ns: 0,
            phase: Phase::Start,
        }
    }

    /// Does what can be done now. `in_flight` is whether the command still is, after its queue was
    /// polled just now ([`QueuePair::is_in_flight`]).
    ///
    /// `other` is handed each completion of the admin queue that is not the Abort's.
    pub fn step<B: Default, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        in_flight: bool,
        now_ns: u64,
        mut other: impl FnMut(Completion<B>),
    ) -> Step {
        loop {
            match self.phase {
                Phase::Over(cause) => return Step::ResetNeeded(cause),
                Phase::Start if !in_flight => return Step::Ended,
                Phase::Start => {
                    self.deadline_ns = now_ns.saturating_add(self.grace_ns);
                    let sqe = admin::abort(self.qid, self.cid);
                    self.phase = match admin.submit(sqe, Data::None, B::default(), self.deadline_ns)
                    {
                        Ok(abort) => {
                            admin.ring();
                            Phase::Sent { abort }
                        }
                        Err(_) => Phase::Over(ResetCause::AdminFull),
                    };
                }
                Phase::Sent { abort } => match admin.poll() {
                    Ok(Some(done)) if done.cid == abort => {
                        self.deadline_ns = now_ns.saturating_add(self.grace_ns);
                        self.phase = match done.outcome {
                            Outcome::Completed(status) if !status.is_success() && in_flight => {
                                Phase::Over(ResetCause::Refused(status))
                            }
                            _ => Phase::Answered,
                        };
                    }
                    Ok(Some(done)) => other(done),
                    Ok(None) if now_ns < self.deadline_ns => {
                        return Step::Wait {
                            until_ns: self.deadline_ns.min(now_ns.saturating_add(POLL_NS)),
                        };
                    }
                    Ok(None) | Err(_) => self.phase = Phase::Over(ResetCause::AdminDead),
                },
                Phase::Answered if !in_flight => return Step::Ended,
                Phase::Answered if now_ns < self.deadline_ns => {
                    return Step::Wait {
                        until_ns: self.deadline_ns.min(now_ns.saturating_add(POLL_NS)),
                    };
                }
                Phase::Answered => self.phase = Phase::Over(ResetCause::NoCompletion),
            }
        }
    }
}

/// What the deletion of a queue wants next.
#[derive(Debug)]
pub enum DeletionStep {
    /// Call again at `until_ns` or before.
    Wait {
        /// On the caller's clock.
        until_ns: u64,
    },
    /// The submission queue is gone: its commands' memory is free. Poll what was completed, reclaim
    /// the rest, then step on to delete the completion queue.
    Emptied(Quiesced<'static>),
    /// Both queues are gone.
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

/// The deletion of one I/O queue pair: submission queue first.
///
/// NVMe Base 2.0c, "Delete I/O Submission Queue command".
#[derive(Debug)]
pub struct QueueDeletion {
    qid: Qid,
    controller: ControllerId,
    /// Until the proof is given.
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

    /// Does what can be done now; `other` is handed each admin completion that is not its own. `admin` is
    /// the admin queue of the controller that the queue is bound to.
    pub fn step<B: Default, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
        mut other: impl FnMut(Completion<B>),
    ) -> DeletionStep {
        if admin.qid() != Qid::ADMIN || admin.controller() != self.controller {
            // Its answers say nothing of the queue.
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
                        Outcome::Completed(status) if !status.is_success() => {
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

    fn send<B: Default, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &mut self,
        admin: &mut QueuePair<'_, B, S>,
        sqe: Sqe,
        last: bool,
        now_ns: u64,
    ) {
        self.deadline_ns = now_ns.saturating_add(self.timeout_ns);
        self.phase = match admin.submit(sqe, Data::None, B::default(), self.deadline_ns) {
            Ok(cid) => {
                admin.ring();
                DeletionPhase::Sent { cid, last }
            }
            Err(_) => DeletionPhase::Over(ResetCause::AdminFull),
        };
    }
}
