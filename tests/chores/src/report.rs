//! Counts of what passed, failed and was skipped.

use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Lines about failed tests of this process.
static FAILED: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Lines that are kept after the one that names a panic: its message and the first frames.
const LINES_OF_PANIC: usize = 6;
/// Lines that are kept of one output.
const MOST_LINES: usize = 40;

/// Keeps the lines about failed tests in the output of a test program or of pytest, for [`failed_lines`].
pub fn keep_failures(output: &str) {
    let mut failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
    failed.extend(failures_of(output));
}

/// Returns the lines that [`keep_failures`] has kept since the start of the process, to be printed last, where readers
/// find them.
pub fn failed_lines() -> Vec<String> {
    let failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
    failed.clone()
}

/// Returns the lines of an output that name failed tests of libtest, pytest and planted bugs, and their causes.
fn failures_of(output: &str) -> Vec<String> {
    let (mut kept, mut of_panic) = (Vec::new(), 0);
    for line in output.lines() {
        let starts = |words: &[&str]| words.iter().any(|word| line.starts_with(word));
        if line.contains(" panicked at ") {
            of_panic = LINES_OF_PANIC;
        }
        let is_named = line.starts_with("test ") && line.ends_with("FAILED");
        let is_told = starts(&["FAILED", "ERROR ", "E  "]) || line.contains(" NOT FOUND ");
        if is_named || is_told || of_panic > 0 {
            kept.push(line.to_string());
        }
        of_panic = of_panic.saturating_sub(1);
    }
    kept.truncate(MOST_LINES);
    kept
}

/// Tests and stages, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Counts {
    pub const PASSED: Self = Self {
        passed: 1,
        failed: 0,
        skipped: 0,
    };
    pub const FAILED: Self = Self {
        passed: 0,
        failed: 1,
        skipped: 0,
    };
    pub const SKIPPED: Self = Self {
        passed: 0,
        failed: 0,
        skipped: 1,
    };

    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Returns the counts of libtest's closing line; zeros for any other line.
    pub fn of_result_line(line: &str) -> Self {
        let Some(rest) = line.trim_start().strip_prefix("test result: ") else {
            return Self::default();
        };
        let number = |word: &str| {
            let part = rest
                .split(['.', ';'])
                .find(|part| part.trim().ends_with(word));
            part.and_then(|part| part.trim().split(' ').next()?.parse().ok())
                .unwrap_or(0)
        };
        Self {
            passed: number(" passed"),
            failed: number(" failed"),
            skipped: number(" ignored"),
        }
    }
}

impl Counts {
    /// Returns the counts of a line that this type printed; `None` for any other line.
    pub fn of_total_line(line: &str) -> Option<Self> {
        let mut numbers = [0; 3];
        let mut parts = line.trim().split(", ");
        for (number, word) in numbers.iter_mut().zip([" passed", " failed", " skipped"]) {
            *number = parts.next()?.strip_suffix(word)?.parse().ok()?;
        }
        let [passed, failed, skipped] = numbers;
        parts.next().is_none().then_some(Self {
            passed,
            failed,
            skipped,
        })
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, MOST_LINES, failures_of};

    #[test]
    fn what_failed_is_kept_with_its_cause() {
        let output = "test a::passes ... ok\ntest a::fails ... FAILED\n\nthread 'a::fails' panicked at src/a.rs:1:2:\nleft\nright\n\n\n\nover";
        let wanted =
            "test a::fails ... FAILED,thread 'a::fails' panicked at src/a.rs:1:2:,left,right,,,";
        assert_eq!(failures_of(output).join(","), wanted);
        let pytest = "tests/test_a.py ..F\nE   assert 1 == 2\nFAILED tests/test_a.py::test_b - assert 1 == 2";
        assert_eq!(failures_of(pytest).len(), 2);
        assert_eq!(failures_of("67 NOT FOUND a bug: ok").len(), 1);
        assert!(failures_of("3 passed, 0 failed").is_empty());
        assert_eq!(failures_of(&"E  \n".repeat(1000)).len(), MOST_LINES);
    }

    #[test]
    fn reads_the_closing_line_of_libtest() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.02s";
        assert_eq!(
            Counts::of_result_line(line),
            Counts {
                passed: 12,
                failed: 3,
                skipped: 1
            }
        );
    }

    #[test]
    fn reads_the_line_that_it_prints() {
        let counts = Counts {
            passed: 4,
            failed: 0,
            skipped: 2,
        };
        assert_eq!(Counts::of_total_line(&counts.to_string()), Some(counts));
        for line in ["4 passed, 0 failed", "a passed, 0 failed, 0 skipped", "ok"] {
            assert_eq!(Counts::of_total_line(line), None, "{line}");
        }
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in ["running 3 tests", "test ring::wraps ... ok", "3 passed", ""] {
            assert_eq!(Counts::of_result_line(line), Counts::default(), "{line}");
        }
    }
}
