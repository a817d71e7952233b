//! Status of a row: one number in all interfaces of the library.
//!
//! 0 is success, above 0 is the controller's status (SCT << 8 | SC), below 0 is a [`RowStatus`] of this library.

use nvme_core::spec::Status;
use nvme_driver::error::Error;

/// The status of a row that was moved.
pub const OK: i32 = 0;

/// Reason why a row was not moved, for failures without a status of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStatus {
    /// The id is negative, or not below the number of rows.
    OutOfRange,
    /// A command that the row needed was not answered in time.
    TimedOut,
    /// The device, or the member of a stripe that holds the row, is gone.
    Gone,
    /// A file or the system failed; the report has the errno.
    Io,
    /// The operation ended before a command for the row was sent.
    NotRun,
}

impl RowStatus {
    /// All codes of this library, from -1 down.
    pub const ALL: [Self; 5] = [
        Self::OutOfRange,
        Self::TimedOut,
        Self::Gone,
        Self::Io,
        Self::NotRun,
    ];

    /// Returns the number in status buffers.
    pub const fn code(self) -> i32 {
        match self {
            Self::OutOfRange => -1,
            Self::TimedOut => -2,
            Self::Gone => -3,
            Self::Io => -4,
            Self::NotRun => -5,
        }
    }

    /// Returns the status with this number.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.code() == code)
    }

    /// Returns the reason in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfRange => "Id Out of Range",
            Self::TimedOut => "Timed Out",
            Self::Gone => "Device Gone",
            Self::Io => "File or System Error",
            Self::NotRun => "Not Run",
        }
    }

    /// Returns the remedy: one clause without a full stop.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::OutOfRange => "use ids from 0 to the number of rows - 1",
            Self::TimedOut => "raise the timeout if the device is slow, then read the row again",
            Self::Gone => {
                "check that the device, or its server, is there and runs, then open it again"
            }
            Self::Io => "look at the errno in the report, and check the file and its disk",
            Self::NotRun => "the report says what ended the operation; run it again",
        }
    }
}

/// Returns the number that stands for `error` in a row's status.
pub fn of_error(error: &Error) -> i32 {
    match error {
        // A row that failed never has the code of success, whatever error the caller made.
        Error::Command { status, .. } if !status.is_success() => i32::from(status.code()),
        Error::Timeout { .. } => RowStatus::TimedOut.code(),
        Error::Gone { .. } | Error::Changed { .. } => RowStatus::Gone.code(),
        Error::Interrupted => RowStatus::NotRun.code(),
        _ => RowStatus::Io.code(),
    }
}

/// Returns the error that a status other than 0 stands for; `what` names the operation, as "reading page 3".
pub fn error_of(code: i32, what: &str) -> Error {
    if let Ok(code) = u16::try_from(code) {
        return Error::Command {
            what: what.to_owned(),
            status: Status(code),
        };
    }
    let (name, remedy) = describe(code);
    let cause = format!("{what} ended with: {name}");
    match RowStatus::from_code(code) {
        Some(RowStatus::Gone) => Error::Gone { cause },
        Some(RowStatus::OutOfRange) => Error::usage(cause, remedy),
        _ => Error::device(cause, remedy),
    }
}

/// Returns the name and remedy of any status of a row.
///
/// ```
/// use nvme_store::status;
///
/// assert_eq!(status::describe(0).0, "Success");
/// assert_eq!(status::describe(0x281).0, "Unrecovered Read Error");
/// let (name, remedy) = status::describe(-1);
/// assert_eq!(name, "Id Out of Range");
/// assert!(remedy.contains("number of rows"));
/// ```
pub fn describe(code: i32) -> (&'static str, &'static str) {
    if code == OK {
        return ("Success", "nothing to do");
    }
    if let Some(own) = RowStatus::from_code(code) {
        return (own.name(), own.remedy());
    }
    match u16::try_from(code) {
        Ok(code) => {
            let status = Status(code);
            let name = status.name().unwrap_or("NVMe status without a name");
            (name, nvme_driver::remedy::of_status(status))
        }
        Err(_) => ("Unknown", "this number is no status of a row"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn every_code_has_a_number_a_name_and_a_remedy() {
        let codes: Vec<i32> = RowStatus::ALL.iter().map(|one| one.code()).collect();
        assert_eq!(codes, [-1, -2, -3, -4, -5]);
        for one in RowStatus::ALL {
            assert_eq!(RowStatus::from_code(one.code()), Some(one));
            assert_eq!(describe(one.code()), (one.name(), one.remedy()));
            assert!(!one.remedy().ends_with('.'));
        }
        assert_eq!(RowStatus::from_code(-6), None);
        assert_eq!(describe(-6).0, "Unknown");
        assert_eq!(describe(0x7FF).0, "NVMe status without a name");
    }

    /// A page store drops a page for an error of its place alone, which is that of a command.
    #[test]
    fn only_a_status_of_the_controller_is_an_error_of_a_command() {
        for code in [0x281, 0x282, 1] {
            let error = error_of(code, "reading page 3");
            assert!(matches!(error, Error::Command { .. }));
            assert_eq!(of_error(&error), code);
        }
        for one in RowStatus::ALL {
            let error = error_of(one.code(), "reading page 3");
            assert!(!matches!(error, Error::Command { .. } | Error::File { .. }));
            assert!(error.to_string().contains(one.name()));
        }
    }

    #[test]
    fn errors_have_the_number_of_their_kind() {
        let command = Error::Command {
            what: "Read".to_owned(),
            status: Status::UNRECOVERED_READ_ERROR.with_dnr(),
        };
        assert_eq!(of_error(&command), 0x281);
        let success = Error::Command {
            what: "Read".to_owned(),
            status: Status::SUCCESS.with_more(),
        };
        assert_eq!(of_error(&success), -4);
        let gone = Error::Gone {
            cause: "it left".to_owned(),
        };
        assert_eq!(of_error(&gone), -3);
        assert_eq!(of_error(&Error::Interrupted), -5);
        let file = Error::file("read", "x")(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(of_error(&file), -4);
        assert_eq!(of_error(&Error::device("a", "b")), -4);
    }
}
