//! What is said on standard error beside results and errors: warnings, and with --verbose what is done.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU8, Ordering};

const QUIET: u8 = 0;
const NORMAL: u8 = 1;
const VERBOSE: u8 = 2;

static LEVEL: AtomicU8 = AtomicU8::new(NORMAL);

/// What --quiet and --verbose ask for. Once, before the command runs.
pub fn set(quiet: bool, verbose: bool) {
    let level = match (quiet, verbose) {
        (true, _) => QUIET,
        (_, true) => VERBOSE,
        _ => NORMAL,
    };
    LEVEL.store(level, Ordering::Relaxed);
}

/// Whether a progress bar is drawn: at a terminal, without --quiet.
pub fn shows_progress() -> bool {
    LEVEL.load(Ordering::Relaxed) > QUIET && io::stderr().is_terminal()
}

/// Something that the user should know, although the command goes on.
pub fn warn(text: impl FnOnce() -> String) {
    line(NORMAL, text);
}

/// A step of what is being done.
pub fn step(text: impl FnOnce() -> String) {
    line(VERBOSE, text);
}

/// What was asked for beside the result, which may go into a file.
pub fn show(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

fn line(level: u8, text: impl FnOnce() -> String) {
    if LEVEL.load(Ordering::Relaxed) >= level {
        // Where standard error is closed there is no reader to miss it.
        let _ = writeln!(io::stderr(), "{}", text());
    }
}
