//! Bugs of a driver or a controller, planted to prove that the oracles find them.

use crate::account::Accounts;
use crate::queue::End;
use nvme_core::CommandOutcome;
use nvme_core::spec::Status;

/// A planted bug, at a point where a driver meets the host or the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// No bug.
    #[default]
    None,
    /// Command 50 ends twice.
    EndsTwice,
    /// The end of command 50 is lost.
    EndIsLost,
    /// An error status is reported as success.
    ErrorIsSuccess,
    /// One bit of the data that command 50 and later ones read is wrong.
    FlippedBit,
    /// Data are written beside the buffer of command 50.
    Overrun,
    /// The buffer of an expired command is taken back at once.
    EarlyRelease,
    /// Deadlines are not looked at.
    NoDeadlines,
    /// Flush does nothing.
    NoFlush,
    /// The queues are not emptied for a new start.
    NoRestart,
}

const TARGET: u32 = 50;

impl Sabotage {
    pub(crate) fn ignores_deadlines(self) -> bool {
        self == Self::NoDeadlines
    }

    pub(crate) fn of_ends(self, ended: &mut Vec<End>, accounts: &mut Accounts<'_>) {
        match self {
            Self::EndsTwice => {
                if let Some(end) = ended.iter().find(|end| end.id == TARGET).copied() {
                    ended.push(end);
                }
            }
            Self::EndIsLost => ended.retain(|end| end.id != TARGET),
            Self::ErrorIsSuccess => {
                for end in ended {
                    if matches!(end.outcome, CommandOutcome::Completed(_)) {
                        end.outcome = CommandOutcome::Completed(Status::SUCCESS);
                    }
                }
            }
            Self::FlippedBit | Self::Overrun => {
                for end in ended.iter().filter(|end| end.id >= TARGET) {
                    let Some((index, start, len)) =
                        accounts.record(end.id).and_then(|record| record.buffer)
                    else {
                        continue;
                    };
                    let words = accounts.pool.words(index);
                    let at = if self == Self::Overrun {
                        start + len
                    } else {
                        start + 3
                    };
                    words.set(at, words.get(at) ^ 1);
                }
            }
            _ => {}
        }
    }
}
