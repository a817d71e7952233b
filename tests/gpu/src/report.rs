//! The list of tests as they end, and the counts.

use std::time::Instant;

/// How a test ended.
pub enum End {
    /// With a few words on what was seen.
    Passed(String),
    Failed(String),
    /// What it needs is not on this machine.
    Skipped(String),
}

/// What the user chose.
#[derive(Clone, Debug)]
pub struct Options {
    pub json: bool,
    /// Only tests whose name holds one of these; all without.
    pub only: Vec<String>,
    pub gpu: u32,
    /// Commands of each cell of the matrix.
    pub commands: u64,
    /// Commands of the two long runs.
    pub volume: u64,
    /// Factor on every deadline.
    pub patience: u64,
    /// The CUDA C++ example, built by nvcc.
    pub image: Option<String>,
    /// Only print the names.
    pub list: bool,
}

/// Runs tests by name and prints a line for each.
pub struct Report {
    options: Options,
    began: Instant,
    lines: Vec<String>,
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl Report {
    pub fn new(options: Options) -> Self {
        Self {
            options,
            began: Instant::now(),
            lines: Vec::new(),
            passed: 0,
            failed: 0,
            skipped: 0,
        }
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Runs `test` when `name` was chosen.
    pub fn test(&mut self, name: &str, test: impl FnOnce(&Options) -> Result<String, String>) {
        self.case(name, |options| match test(options) {
            Ok(seen) => End::Passed(seen),
            Err(why) => End::Failed(why),
        });
    }

    /// As [`test`](Self::test), for tests that may be impossible here.
    pub fn case(&mut self, name: &str, test: impl FnOnce(&Options) -> End) {
        let only = &self.options.only;
        if !only.is_empty() && !only.iter().any(|part| name.contains(part.as_str())) {
            return;
        }
        if self.options.list {
            println!("{name}");
            return;
        }
        let began = Instant::now();
        let (word, detail) = match test(&self.options) {
            End::Passed(seen) => {
                self.passed += 1;
                ("ok", seen)
            }
            End::Failed(why) => {
                self.failed += 1;
                ("FAILED", why)
            }
            End::Skipped(why) => {
                self.skipped += 1;
                ("skipped", why)
            }
        };
        let seconds = began.elapsed().as_secs_f64();
        if self.options.json {
            self.lines.push(format!(
                "{{\"name\":{},\"result\":{},\"seconds\":{seconds:.3},\"detail\":{}}}",
                quoted(name),
                quoted(&word.to_lowercase()),
                quoted(&detail)
            ));
        } else {
            println!("{word:7} {name:34} {seconds:7.2} s  {detail}");
        }
    }

    /// Prints the counts; whether nothing failed.
    pub fn finish(self, gpu: &str) -> bool {
        let seconds = self.began.elapsed().as_secs_f64();
        let Self {
            passed,
            failed,
            skipped,
            ..
        } = self;
        if self.options.list {
            return true;
        }
        if self.options.json {
            println!(
                "{{\"gpu\":{},\"tests\":[\n{}\n],\"passed\":{passed},\"failed\":{failed},\"skipped\":{skipped},\"seconds\":{seconds:.1}}}",
                quoted(gpu),
                self.lines.join(",\n")
            );
        } else {
            println!("{gpu}, {seconds:.1} s");
            println!("{passed} passed, {failed} failed, {skipped} skipped");
        }
        failed == 0 && passed > 0
    }
}

/// `text` as a JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted += &format!("\\u{:04x}", c as u32),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(only: &[&str]) -> Options {
        Options {
            json: true,
            only: only.iter().map(|part| part.to_string()).collect(),
            gpu: 0,
            commands: 1,
            volume: 1,
            patience: 1,
            image: None,
            list: false,
        }
    }

    #[test]
    fn only_what_was_chosen_runs_and_a_failure_counts() {
        let mut report = Report::new(options(&["warp"]));
        report.test("matrix/warp", |_| Ok("fine".to_owned()));
        report.test("matrix/block", |_| Err("not run".to_owned()));
        assert_eq!((report.passed, report.failed), (1, 0));
        report.test("x/warp", |_| Err("bad".to_owned()));
        assert_eq!((report.passed, report.failed), (1, 1));
        assert!(!report.finish("none"));
        assert!(!Report::new(options(&[])).finish("nothing ran"));
    }

    #[test]
    fn json_strings_are_escaped() {
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }
}
