//! What passed, failed and was skipped.

use std::fmt;

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

    /// The counts of libtest's closing line; zeros for any other line.
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
    /// The counts of a line that this type printed; nothing for any other line.
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
    use super::Counts;

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
