//! State that a queue's handle shares with recovery: the pair, and the completions that the handle has not
//! returned yet.

use super::statistics::QueueStatistics;
use crate::dma::{DmaBuffer, Lease, OwnedPair};
use nvme_core::spec::Cid;
use nvme_core::{AbortReason, CommandOutcome, ControllerFault};
use std::collections::VecDeque;

/// The end of a command, with the buffer that it was lent.
#[derive(Debug)]
pub struct QueueCompletion {
    /// The command.
    pub cid: Cid,
    /// The buffer, if it had one.
    pub buffer: Option<DmaBuffer>,
    /// The controller's answer, or why there is none.
    pub outcome: CommandOutcome,
    /// Command-specific dword 0.
    pub dw0: u32,
    /// True if the command's deadline had passed when its end was seen.
    pub late: bool,
    deadline_ns: u64,
}

impl QueueCompletion {
    /// True if the controller completed the command with success, in time.
    #[inline]
    pub fn is_success(&self) -> bool {
        !self.late && self.outcome.is_success()
    }

    /// Marks a command as late once its deadline has passed; returns true if it was not marked before.
    #[inline]
    fn check_deadline(&mut self, now_ns: u64) -> bool {
        let newly = !self.late && self.deadline_ns <= now_ns;
        self.late |= newly;
        newly
    }

    /// True if the command may be sent again: a reset that another command caused aborted it.
    pub fn may_retry(&self) -> bool {
        !self.late && self.outcome == CommandOutcome::Aborted(AbortReason::ControllerReset)
    }
}

impl From<nvme_core::CommandCompletion<Lease>> for QueueCompletion {
    #[inline]
    fn from(completion: nvme_core::CommandCompletion<Lease>) -> Self {
        let nvme_core::CommandCompletion {
            cid,
            buffer,
            outcome,
            dw0,
            late,
            deadline_ns,
            ..
        } = completion;
        Self {
            cid,
            buffer,
            outcome,
            dw0,
            late,
            deadline_ns,
        }
    }
}

/// The most commands that a queue has in flight.
const MOST_EXPIRED: usize = 4096;

/// The last commands whose deadlines passed, with the results of their recovery.
#[derive(Debug, Default)]
pub(crate) struct ExpiredCommands(VecDeque<(Cid, String)>);

impl ExpiredCommands {
    /// Adds a command; of too many, the oldest one is forgotten.
    pub fn add(&mut self, cid: Cid, account: String) {
        if self.0.len() == MOST_EXPIRED {
            self.0.pop_front();
        }
        self.0.push_back((cid, account));
    }

    /// Returns the result of the last recovery of `cid`.
    pub fn account_of(&self, cid: Cid) -> Option<String> {
        let last = self.0.iter().rev().find(|(known, _)| *known == cid);
        last.map(|(_, account)| account.clone())
    }
}

/// State that a queue's handle shares with recovery.
pub struct QueueInner {
    /// The rings, and the commands in flight on them.
    pub pair: OwnedPair,
    /// Completions that recovery polled or reclaimed.
    pub backlog: VecDeque<QueueCompletion>,
    /// Commands that expired, with the results of their recovery.
    pub(crate) expired: ExpiredCommands,
    /// Cause of a controller reset that failed: the controller may not have created the queue again.
    pub(crate) failed_reset: Option<String>,
    /// Counters of the queue.
    pub statistics: QueueStatistics,
    /// Present while a GPU drives the queue in the pair's stead.
    #[cfg(feature = "cuda")]
    pub lent: Option<Box<dyn GpuDrivenQueue>>,
}

/// Effects of a controller reset on a queue that a GPU drives.
#[cfg(feature = "cuda")]
pub trait GpuDrivenQueue: Send {
    /// Waits until the kernels of a caller have returned the queue; returns true if they have. Changes nothing else.
    fn is_returned(&mut self) -> bool;
    /// Keeps kernels out whose facts an admin command is about to make invalid, and waits until none of them uses the
    /// queue; returns true if none does. Commands may still be in flight, so nothing of theirs becomes free.
    fn keep_out(&mut self) -> bool;
    /// Stops the GPU's use of the queue before the reset; once this returns, the GPU touches it no
    /// longer.
    fn stop(&mut self);
    /// Ends the commands that the GPU had in flight: the controller can do nothing to them any more.
    fn end(&mut self, proof: &nvme_core::Quiesced<'_>);
    /// Ends the pause after the reset; `works` is true if the queue exists again.
    fn resume(&mut self, works: bool);
}

impl QueueInner {
    /// Reaps the posted completions into the backlog. `clock` is read after the completions, so that one that arrived
    /// after its deadline never counts as in time.
    pub fn drain(
        &mut self,
        clock: impl FnOnce() -> u64,
    ) -> std::result::Result<(), ControllerFault> {
        let before = self.backlog.len();
        let drained = loop {
            match self.pair.queue().poll() {
                Ok(Some(completion)) => self.backlog.push_back(completion.into()),
                Ok(None) => break Ok(()),
                Err(fault) => break Err(fault),
            }
        };
        let now_ns = clock();
        for done in self.backlog.range_mut(before..) {
            self.statistics.expired += u64::from(done.check_deadline(now_ns));
        }
        drained
    }

    /// Moves at most `most` commands that ended into `ended`, counted. Those that `clock`, read afterwards,
    /// finds past their deadline are late.
    #[inline]
    pub fn take(
        &mut self,
        most: usize,
        ended: &mut Vec<QueueCompletion>,
        clock: impl FnOnce() -> u64,
    ) -> (u64, std::result::Result<(), ControllerFault>) {
        let known = self.backlog.len().min(most);
        ended.extend(self.backlog.drain(..known));
        let mut taken = Ok(());
        while ended.len() < most {
            match self.pair.queue().poll() {
                Ok(Some(completion)) => ended.push(completion.into()),
                Ok(None) => break,
                Err(fault) => {
                    taken = Err(fault);
                    break;
                }
            }
        }
        let now_ns = clock();
        for (index, done) in ended.iter_mut().enumerate() {
            if index >= known {
                self.statistics.expired += u64::from(done.check_deadline(now_ns));
            }
            self.statistics.completed += 1;
            match done.outcome {
                CommandOutcome::Completed(status) if status.is_success() => {}
                CommandOutcome::Completed(_) => self.statistics.errors += 1,
                CommandOutcome::Aborted(_) => self.statistics.aborted += 1,
            }
        }
        (now_ns, taken)
    }

    /// Publishes the commands that were submitted since the last call.
    #[inline]
    pub fn ring(&mut self) {
        self.statistics.rings += 1;
        self.pair.queue().ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_commands_that_expired_are_known() {
        let mut expired = ExpiredCommands::default();
        for number in 0..3 * MOST_EXPIRED {
            expired.add(Cid(number as u16 & 0x1FFF), number.to_string());
        }
        assert_eq!(expired.0.len(), MOST_EXPIRED);
        let account = |cid| expired.account_of(Cid(cid));
        assert_eq!(account(0xFFF).as_deref(), Some("12287"));
        assert_eq!(account(0x1000), None);
    }
}
