//! Outages of a run that continues after them: counts of lost commands and resets, and the wait for a device that
//! left and may come back under the same name.

use crate::error::{Error, Result};
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::identify::PrintableText;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Pause between two tries to open a device again.
const PAUSE: Duration = Duration::from_millis(50);
/// Limit of the causes that are kept as text; further outages are only counted.
const MOST_CAUSES: usize = 16;

/// Faults from which a run recovered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutageCounts {
    /// Commands that ended by Abort, or by their completion after the deadline.
    pub aborted: u64,
    /// Controller resets.
    pub resets: u64,
    /// Number of times that the device left and was opened again.
    pub reopened: u64,
    /// Number of commands without an answer: their deadline passed, a reset aborted them, or the device left with them.
    pub lost: u64,
    /// Lost commands that were sent again. The other lost commands were not repeated, because the run had ended.
    pub retried: u64,
    /// The first causes, each once.
    pub causes: Vec<String>,
}

impl OutageCounts {
    /// Records the cause of a loss.
    pub fn note(&mut self, cause: impl Into<String>) {
        let cause = cause.into();
        if self.causes.len() < MOST_CAUSES && !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
    }

    /// Adds the counts of another part of the run.
    pub fn add(&mut self, other: Self) {
        self.aborted += other.aborted;
        self.resets += other.resets;
        self.reopened += other.reopened;
        self.lost += other.lost;
        self.retried += other.retried;
        for cause in other.causes {
            self.note(cause);
        }
    }

    /// Returns the number of recoveries: aborts, resets, and devices that were opened again.
    pub fn recoveries(&self) -> u64 {
        self.aborted + self.resets + self.reopened
    }

    /// Returns the counts as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "recoveries": self.recoveries(), "aborted": self.aborted, "resets": self.resets,
            "reopened": self.reopened, "lost": self.lost, "retried": self.retried,
            "causes": self.causes,
        })
    }

    /// Returns the counts in a line or a few, or nothing when there was no outage.
    pub fn to_text(&self) -> String {
        if self.recoveries() == 0 {
            return String::new();
        }
        let mut text = format!(
            "recovered {} times: {} commands aborted, {} controller resets, {} times opened again; {} commands were \
             lost, {} of them sent again\n",
            self.recoveries(),
            self.aborted,
            self.resets,
            self.reopened,
            self.lost,
            self.retried
        );
        for cause in &self.causes {
            text.push_str(&format!("  {cause}\n"));
        }
        text
    }
}

/// Returns an error if a device that left came back as another one; `before` and `now` are its namespace and its serial
/// number.
pub fn came_back_as(
    before: (NamespaceInfo, [u8; 20]),
    now: (NamespaceInfo, [u8; 20]),
) -> Option<Error> {
    let nsid = now.0.nsid;
    let cause = match before.0.change(&now.0) {
        _ if before.1 != now.1 => format!(
            "another controller came back: its serial number is {}, not {}",
            PrintableText(&now.1),
            PrintableText(&before.1)
        ),
        Some(change) => format!("the device came back, and namespace {nsid} {change}"),
        // The addresses of a run are spread over the whole namespace, so that another size ends the run.
        None if before.0.blocks != now.0.blocks => format!(
            "the device came back, and namespace {nsid} has another size ({} -> {} blocks)",
            before.0.blocks, now.0.blocks
        ),
        None => return None,
    };
    Some(Error::Changed { cause })
}

/// Opens a device that left, again and again until it answers, for as long as `patience`; `cause` is the error with
/// which it left, and `is_stopped` ends the wait.
///
/// # Errors
/// [`Error::Gone`] with both causes when the time is over, [`Error::Interrupted`], and what is wrong with
/// the arguments of `open`.
pub fn reopen<T>(
    patience: Duration,
    cause: &Error,
    is_stopped: impl Fn() -> bool,
    mut open: impl FnMut() -> Result<T>,
) -> Result<T> {
    let begin = Instant::now();
    loop {
        if is_stopped() {
            return Err(Error::Interrupted);
        }
        let error = match open() {
            Ok(opened) => return Ok(opened),
            Err(error @ (Error::Usage { .. } | Error::Changed { .. } | Error::Interrupted)) => {
                return Err(error);
            }
            Err(error) => error,
        };
        if begin.elapsed() >= patience {
            return Err(Error::Gone {
                cause: format!(
                    "{cause}; it did not come back within {:.1} s: {error}",
                    patience.as_secs_f64()
                ),
            });
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone() -> Error {
        Error::Gone {
            cause: "it left".to_owned(),
        }
    }

    #[test]
    fn a_device_is_opened_until_it_answers_or_the_time_is_over() {
        let mut tries = 0;
        let open = || {
            tries += 1;
            if tries < 3 { Err(gone()) } else { Ok(tries) }
        };
        let hour = Duration::from_secs(3600);
        assert_eq!(reopen(hour, &gone(), || false, open).unwrap(), 3);
        let never = || -> Result<()> { Err(Error::device("no answer", "none")) };
        let error = reopen(Duration::ZERO, &gone(), || false, never).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("it left") && text.contains("no answer"),
            "{text}"
        );
        assert_eq!(error.exit_code(), crate::exit::TIMEOUT);
        let stopped = reopen(hour, &gone(), || true, never).unwrap_err();
        assert_eq!(stopped.exit_code(), crate::exit::INTERRUPTED);
        let usage = || -> Result<()> { Err(Error::usage("no such option", "none")) };
        let error = reopen(hour, &gone(), || false, usage).unwrap_err();
        assert_eq!(error.exit_code(), crate::exit::USAGE);
    }

    #[test]
    fn outages_add_up_and_causes_are_told_once() {
        let mut sum = OutageCounts::default();
        assert_eq!(sum.to_text(), "");
        for _ in 0..2 {
            let mut one = OutageCounts {
                resets: 1,
                lost: 5,
                retried: 4,
                ..OutageCounts::default()
            };
            one.note("CSTS.CFS");
            sum.add(one);
        }
        assert_eq!((sum.recoveries(), sum.lost, sum.retried), (2, 10, 8));
        assert_eq!(sum.causes, ["CSTS.CFS"]);
        assert_eq!(sum.to_json()["recoveries"], 2);
        assert!(sum.to_text().lines().any(|line| line == "  CSTS.CFS"));
    }
}
