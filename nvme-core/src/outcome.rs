//! How a command ended: completed with a status by the controller, or aborted by a proof (`Quiesced`).

use crate::spec::Status;

/// Why a command ended without a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The controller was reset.
    ControllerReset,
    /// The queue was deleted.
    QueueDeleted,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The controller completed it with this status.
    Completed(Status),
    /// It never completed; whether it took effect is unknown.
    Aborted(AbortReason),
}
