//! How a command ends before its completion is posted.

use nvme_core::spec::Status;

/// What becomes of a command that was not refused.
pub(crate) enum Reply {
    /// Completed, with this dword 0.
    Done(u32),
    /// Completes when there is an event.
    Held,
}

/// A status other than success, and dword 0 beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub status: Status,
    pub dw0: u32,
}

impl From<Status> for Refusal {
    /// Admin refusals say something about the command, so repeating it will not help.
    fn from(status: Status) -> Self {
        Self {
            status: status.with_dnr(),
            dw0: 0,
        }
    }
}
