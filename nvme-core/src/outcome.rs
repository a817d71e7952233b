//! The end of a command: completed with a status by the controller, or aborted by a proof
//! ([`Quiesced`](crate::Quiesced)).

use crate::spec::Status;

/// The reason why a command ended without a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The controller was reset.
    ControllerReset,
    /// The queue was deleted.
    QueueDeleted,
}

/// The end of a command.
///
/// An aborted write may have happened, in part or as a whole: a caller that needs to know reads the blocks
/// again after the recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// The controller completed it with this status.
    Completed(Status),
    /// The command never completed; whether it took effect is unknown.
    Aborted(AbortReason),
}

impl CommandOutcome {
    /// True if the controller completed the command with success, whatever hints the status carries.
    #[inline]
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Completed(status) if status.is_success())
    }
}
