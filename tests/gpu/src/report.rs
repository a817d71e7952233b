//! The list of tests as they end, and the counts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Result of a test, or the cause of its failure.
pub type Outcome<T> = Result<T, String>;

/// The outcome of a test.
pub enum End {
    /// The test passed, with a few words on what was seen.
    Passed(String),
    Failed(String),
    /// This machine lacks what the test needs.
    Skipped(String),
}

impl From<Outcome<String>> for End {
    fn from(result: Outcome<String>) -> Self {
        match result {
            Ok(seen) => Self::Passed(seen),
            Err(why) => Self::Failed(why),
        }
    }
}

/// The user's options.
#[derive(Clone, Debug)]
pub struct Options {
    pub json: bool,
    /// Only tests whose name contains one of these run; all of them if it is empty.
    pub only: Vec<String>,
    pub gpu: u32,
    /// Commands of each cell of the matrix.
    pub commands: u64,
    /// Commands of the two long runs.
    pub volume: u64,
    /// Number of messages that each litmus case has to see.
    pub litmus: u64,
    /// Factor on every deadline.
    pub patience: u64,
    /// The CUDA C++ example, built by nvcc.
    pub image: Option<String>,
    /// Time limit of an operation in seconds.
    pub limit: u64,
    /// Tests that would begin later than this are skipped.
    pub seconds: u64,
    /// Only print the names.
    pub list: bool,
}

/// Runs tests by name and prints a line for each.
pub struct Report {
    options: Options,
    progress: Progress,
}

/// Tests that have run so far; shared with the thread that ends the program in the middle of a test.
#[derive(Clone)]
pub struct Progress(Arc<Mutex<State>>);

struct State {
    json: bool,
    began: Instant,
    /// The test that runs, and since when.
    current: (String, Instant),
    lines: Vec<String>,
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails the test that runs and ends the program: a kernel that does not end keeps the GPU and the
    /// memory that it uses.
    pub fn give_up(&self, why: &str) -> ! {
        let mut state = self.state();
        state.end(End::Failed(format!(
            "{why}; the tests after it were not run"
        )));
        state.print("the GPU is not usable any more");
        std::process::exit(1)
    }
}

impl State {
    /// Counts and prints the end of the current test.
    fn end(&mut self, end: End) {
        let (word, detail) = match end {
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
        let (name, began) = &self.current;
        let seconds = began.elapsed().as_secs_f64();
        if self.json {
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

    /// Prints the counts.
    fn print(&self, gpu: &str) {
        let seconds = self.began.elapsed().as_secs_f64();
        let Self {
            passed,
            failed,
            skipped,
            ..
        } = self;
        if self.json {
            println!(
                "{{\"gpu\":{},\"tests\":[\n{}\n],\"passed\":{passed},\"failed\":{failed},\"skipped\":{skipped},\"seconds\":{seconds:.1}}}",
                quoted(gpu),
                self.lines.join(",\n")
            );
        } else {
            println!("{gpu}, {seconds:.1} s");
            println!("{passed} passed, {failed} failed, {skipped} skipped");
        }
    }
}

impl Report {
    pub fn new(options: Options) -> Self {
        let began = Instant::now();
        let state = State {
            json: options.json,
            began,
            current: (String::new(), began),
            lines: Vec::new(),
            passed: 0,
            failed: 0,
            skipped: 0,
        };
        Self {
            options,
            progress: Progress(Arc::new(Mutex::new(state))),
        }
    }

    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Runs `test` when `name` was chosen.
    pub fn test(&mut self, name: &str, test: impl FnOnce(&Options) -> Outcome<String>) {
        self.case(name, |options| match test(options) {
            Ok(seen) => End::Passed(seen),
            Err(why) => End::Failed(why),
        });
    }

    /// Runs a test as [`test`](Self::test) does, for tests that may be impossible here.
    pub fn case(&mut self, name: &str, test: impl FnOnce(&Options) -> End) {
        let only = &self.options.only;
        if !only.is_empty() && !only.iter().any(|part| name.contains(part.as_str())) {
            return;
        }
        if self.options.list {
            println!("{name}");
            return;
        }
        self.progress.state().current = (name.to_owned(), Instant::now());
        let late = self.progress.state().began.elapsed().as_secs() >= self.options.seconds;
        let end = match late {
            true => End::Skipped("no time is left".to_owned()),
            false => test(&self.options),
        };
        let end = match (end, crate::audit::verdict()) {
            (End::Failed(why), Some(found)) => End::Failed(format!("{why}; {found}")),
            (_, Some(found)) => End::Failed(found),
            (end, None) => end,
        };
        self.progress.state().end(end);
    }

    /// Prints the counts; returns whether nothing failed.
    pub fn finish(self, gpu: &str) -> bool {
        if self.options.list {
            return true;
        }
        let state = self.progress.state();
        state.print(gpu);
        state.failed == 0 && state.passed > 0
    }
}

/// Returns `text` as a JSON string.
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
            litmus: 1,
            patience: 1,
            image: None,
            limit: 60,
            seconds: 60,
            list: false,
        }
    }

    #[test]
    fn only_what_was_chosen_runs_and_a_failure_counts() {
        let mut report = Report::new(options(&["warp"]));
        report.test("matrix/warp", |_| Ok("fine".to_owned()));
        report.test("matrix/block", |_| Err("not run".to_owned()));
        let counts = |report: &Report| {
            let state = report.progress.state();
            (state.passed, state.failed)
        };
        assert_eq!(counts(&report), (1, 0));
        report.test("x/warp", |_| Err("bad".to_owned()));
        assert_eq!(counts(&report), (1, 1));
        assert!(!report.finish("none"));
        assert!(!Report::new(options(&[])).finish("nothing ran"));
    }

    #[test]
    fn json_strings_are_escaped() {
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }
}
