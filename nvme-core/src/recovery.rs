//! Recovery: what to do about a command whose deadline has passed.
//!
//! Abort first, and wait for the aborted command's own completion: an Abort that succeeded is no
//! proof that the controller has let go of the buffer. If that does not come, reset: run
//! [`Bringup`](crate::bringup::Bringup) again with a plan for each queue, reclaim every command at
//! its [`Step::Disabled`](crate::bringup::Step::Disabled) and go on.
//!
//! NVMe Base 2.0c, 5.1 (Abort command), "Controller Level Reset".

use crate::inflight::Slot;
use crate::queue_pair::{Data, Outcome, QueuePair};
use crate::spec::{Cid, Qid, Status, admin};

/// How often a waiting machine wants to look again.
const POLL_NS: u64 = 100_000;

/// Why a reset is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetCause {
    /// The Abort command could not be sent: the admin queue is full.
    AdminFull,
    /// The Abort command was not answered in time, or the admin queue holds nonsense.
    AdminDead,
    /// Abort was refused with this status.
    Refused(Status),
    /// Abort was answered, but the command's own completion did not come in time.
    NoCompletion,
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
        Self { qid, cid, grace_ns, deadline_ns: 0, phase: Phase::Start }
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
        mut other: impl FnMut(crate::Completion<B>),
    ) -> Step {
        loop {
            match self.phase {
                Phase::Over(cause) => return Step::ResetNeeded(cause),
                Phase::Start if !in_flight => return Step::Ended,
                Phase::Start => {
                    self.deadline_ns = now_ns + self.grace_ns;
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
                        self.deadline_ns = now_ns + self.grace_ns;
                        self.phase = match done.outcome {
                            Outcome::Done(status) if !status.is_success() && in_flight => {
                                Phase::Over(ResetCause::Refused(status))
                            }
                            _ => Phase::Answered,
                        };
                    }
                    Ok(Some(done)) => other(done),
                    Ok(None) if now_ns < self.deadline_ns => {
                        return Step::Wait { until_ns: self.deadline_ns.min(now_ns + POLL_NS) };
                    }
                    Ok(None) | Err(_) => self.phase = Phase::Over(ResetCause::AdminDead),
                },
                Phase::Answered if !in_flight => return Step::Ended,
                Phase::Answered if now_ns < self.deadline_ns => {
                    return Step::Wait { until_ns: self.deadline_ns.min(now_ns + POLL_NS) };
                }
                Phase::Answered => self.phase = Phase::Over(ResetCause::NoCompletion),
            }
        }
    }
}
