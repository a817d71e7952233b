//! Checks of the driver that tests of this package and tests in guests share.
//!
//! Code that needs only a device and the library belongs here, so that it runs on any `--device`. Code that starts a
//! machine is in `chores-guest`.

pub mod contract;
pub mod pattern;

use nvme_host::ControllerConfig;
use std::time::Duration;

/// The result of a test: an error is its message.
pub type Outcome = Result<(), String>;

/// Returns the time limit `time` for this machine: multiplied by `PATIENCE`, if it is set, for a kernel that was built
/// to find faults.
pub fn patient(time: Duration) -> Duration {
    let times = std::env::var("PATIENCE").ok();
    time * times.and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Returns the configuration by default, with the time limit of this machine.
pub fn config() -> ControllerConfig {
    let default = ControllerConfig::default();
    ControllerConfig {
        timeout: patient(default.timeout),
        ..default
    }
}

/// Returns the cause and the remedy.
pub fn said(error: nvme_host::Error) -> String {
    format!("{error}: {}", error.remedy())
}
