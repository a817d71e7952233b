//! Deterministic simulation: the drivers, a controller and faults in virtual time.

use chores::process::{Failure, cargo, shown};
use chores::release;
use chores::report::Counts;
use std::process::{Command, Stdio};

/// Seeds of the stage of `cargo xtask test`: enough for every fault to meet every state.
const SEEDS: &str = "20000";

/// Runs `cargo xtask simulate` with its words. Its exit code is the program's: see `--help`.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let mut command: Command = cargo();
    command.args(["run", "--quiet", "--release", "--package"]);
    command.args(["nvme-simulate", "--"]).args(words);
    match exit_code(&mut command)? {
        0 => Ok(()),
        code => std::process::exit(code),
    }
}

/// Runs new seeds. Prints the first one, and for a failing seed the command that repeats it.
pub fn stage() -> Result<Counts, Failure> {
    let mut command = Command::new(release::build(&release::ALL)?.join("simulate"));
    match exit_code(command.args(["--seeds", SEEDS]))? {
        0 => Ok(Counts::PASSED),
        3 => Err(Failure::new(
            "simulate: a fault has not met a state that it can meet, or has met one that it cannot",
        )),
        code => Err(Failure::new(format!("simulate: exit code {code}"))),
    }
}

fn exit_code(command: &mut Command) -> Result<i32, Failure> {
    command.stdin(Stdio::null());
    if !command.get_args().any(|word| word == "--json") {
        println!("$ {}", shown(command));
    }
    let status = command
        .status()
        .map_err(|error| Failure::new(format!("{}: {error}", shown(command))))?;
    // If there is no exit code, a signal has ended the process.
    Ok(status.code().unwrap_or(1))
}
