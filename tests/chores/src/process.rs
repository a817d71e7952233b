//! Child processes: every command is printed before it runs, and its output is passed through.

use crate::report::Counts;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The reason why a chore failed.
#[derive(Debug)]
pub struct Failure {
    text: String,
    /// True if the chore could not be tried, because a tool is missing: `text` says how to install it.
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

/// Returns the workspace's root: two levels above this package.
pub fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .unwrap_or(&manifest)
        .to_path_buf()
}

/// Returns the folder of cargo's build results for the host.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Returns the cargo that runs this program. It repeats a download that fails.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.env("CARGO_NET_RETRY", "10");
    cargo
}

/// Returns the command as a person would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let mut text = String::new();
    for (key, value) in command.get_envs() {
        if let Some(value) = value.filter(|_| key != "CARGO_NET_RETRY") {
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

/// Pauses between the attempts of a command that needs the network.
pub const NETWORK: [Duration; 4] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];

/// Runs a command that needs the network, or a lock that another process may hold: once, and once more
/// after each pause while it fails.
pub fn check_retried(command: &mut Command, pauses: &[Duration]) -> Result<(), Failure> {
    for pause in pauses {
        match check(command) {
            Ok(()) => return Ok(()),
            Err(failure) => println!("{failure}; trying again in {} s", pause.as_secs()),
        }
        std::thread::sleep(*pause);
    }
    check(command)
}

/// Runs a command and returns its standard output; its standard error is passed through.
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

#[cfg(test)]
mod tests {
    use super::{check_retried, root};
    use std::process::Command;
    use std::time::Duration;

    /// Returns a shell command that fails until it has run `times` times, and counts its runs in a file.
    fn fails(name: &str, times: u32) -> (Command, std::path::PathBuf) {
        let file = root().join(format!("target/retried-{name}-{}", std::process::id()));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&file);
        let mut command = Command::new("sh");
        let script = r#"echo run >>"$1"; test "$(wc -l <"$1")" -gt "$2""#;
        command.args(["-c", script, "sh"]).arg(&file);
        command.arg(times.to_string());
        (command, file)
    }

    fn runs(file: &std::path::Path) -> usize {
        let text = std::fs::read_to_string(file).unwrap();
        std::fs::remove_file(file).unwrap();
        text.lines().count()
    }

    #[test]
    fn a_command_that_fails_is_tried_again_until_it_succeeds() {
        let (mut command, file) = fails("twice", 2);
        check_retried(&mut command, &[Duration::ZERO; 4]).unwrap();
        assert_eq!(runs(&file), 3);
    }

    #[test]
    fn attempts_end() {
        let (mut command, file) = fails("always", 99);
        assert!(check_retried(&mut command, &[Duration::ZERO; 4]).is_err());
        assert_eq!(runs(&file), 5);
    }
}
