//! Child processes: every command is printed before it runs, and its output goes through.

use crate::report::Counts;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Why a chore did not get to its end.
#[derive(Debug)]
pub struct Failure {
    text: String,
    /// The thing could not be tried, because a tool is missing: `text` says how to install it.
    pub missing_tool: bool,
}

impl Failure {
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            missing_tool: false,
        }
    }

    pub fn missing(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            missing_tool: true,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The workspace's root: two levels above this package.
pub fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .unwrap_or(&manifest)
        .to_path_buf()
}

/// Where cargo puts what it builds for the host.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let mut text = String::new();
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            text += &format!("{}={:?} ", key.to_string_lossy(), value.to_string_lossy());
        }
    }
    text + &words
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs a command to its end; anything but exit status 0 is a failure.
pub fn check(command: &mut Command) -> Result<(), Failure> {
    println!("$ {}", shown(command));
    let status = command.stdin(Stdio::null()).status();
    let status = status.map_err(|error| Failure::new(format!("{}: {error}", shown(command))))?;
    if status.success() {
        Ok(())
    } else {
        Err(Failure::new(format!("{}: {status}", shown(command))))
    }
}

/// Runs a command and returns what it printed on standard output; its standard error goes through.
pub fn output(command: &mut Command) -> Result<String, Failure> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let output = output.map_err(|error| Failure::new(format!("{}: {error}", shown(command))))?;
    if !output.status.success() {
        return Err(Failure::new(format!(
            "{}: {}",
            shown(command),
            output.status
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a `cargo test`, passing its output on and adding up its `test result:` lines.
///
/// A run that fails without a failed test (it did not compile, or it crashed) counts as one failure.
pub fn cargo_test(command: &mut Command) -> Result<Counts, Failure> {
    println!("$ {}", shown(command));
    let failed_to_run = |error| Failure::new(format!("cargo test: {error}"));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed_to_run)?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(failed_to_run)?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            counts.add(Counts::of_result_line(&line));
        }
    }
    let status = child.wait().map_err(failed_to_run)?;
    if !status.success() && counts.failed == 0 {
        counts.failed = 1;
    }
    Ok(counts)
}
