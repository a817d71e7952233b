//! Results of an admin command, from which its completion is made.

use nvme_spec::Status;

/// Result of an admin command without an error.
pub(crate) enum CommandReply {
    /// Completed, with this dword 0.
    Done(u32),
    /// Completes when an event occurs.
    Held,
}

/// A status other than success, with dword 0 of the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandError {
    pub status: Status,
    pub dw0: u32,
}

impl From<Status> for CommandError {
    /// Sets Do Not Retry: an admin command is rejected because of its fields, so that repeating
    /// it cannot help.
    fn from(status: Status) -> Self {
        Self {
            status: status.with_dnr(),
            dw0: 0,
        }
    }
}
