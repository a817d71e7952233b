//! Checks of the driver that tests of this package and tests in guests share.

pub mod contract;
pub mod pattern;

/// What a test says when it fails.
pub type Outcome = Result<(), String>;

/// The cause and the remedy.
pub fn said(error: nvme_host::Error) -> String {
    format!("{error}: {}", error.remedy())
}
