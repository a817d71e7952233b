//! Messages on standard error besides results and errors: warnings and, with --verbose, the steps of the work.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU8, Ordering};

const QUIET: u8 = 0;
const NORMAL: u8 = 1;
const VERBOSE: u8 = 2;

static LEVEL: AtomicU8 = AtomicU8::new(NORMAL);

/// Sets the verbosity from --quiet and --verbose; called once, before the command runs.
pub fn set(quiet: bool, verbose: bool) {
    let level = match (quiet, verbose) {
        (true, _) => QUIET,
        (_, true) => VERBOSE,
        _ => NORMAL,
    };
    LEVEL.store(level, Ordering::Relaxed);
}

/// True if a progress bar is drawn: on a terminal, without --quiet.
pub fn shows_progress() -> bool {
    LEVEL.load(Ordering::Relaxed) > QUIET && io::stderr().is_terminal()
}

/// Warns the user; the command continues.
pub fn warn(text: impl FnOnce() -> String) {
    line(NORMAL, text);
}

/// Reports a step of the work, with --verbose.
pub fn step(text: impl FnOnce() -> String) {
    line(VERBOSE, text);
}

/// Prints requested information besides the result, which may go into a file.
pub fn show(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

fn line(level: u8, text: impl FnOnce() -> String) {
    if LEVEL.load(Ordering::Relaxed) >= level {
        // If standard error is closed, nobody would read the text, so that the error is ignored.
        let _ = writeln!(io::stderr(), "{}", text());
    }
}
