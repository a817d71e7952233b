//! Loom: the queues' memory operations in every interleaving, in a separate build.

mod mutants;
mod statements;

use chores::process::{Failure, cargo, cargo_test, output, root};
use chores::report::Counts;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Runs `cargo xtask loom` with its words.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        [] => run(0),
        ["--deeper", more] => match more.parse() {
            Ok(more) => run(more),
            Err(_) => Err(Failure::new("loom --deeper: give a number of preemptions")),
        },
        ["--mutants", words @ ..] => mutants::run(words),
        _ => Err(Failure::new(
            "usage: cargo xtask loom [--deeper N | --mutants [--part K/N] [NAME...]]",
        )),
    }
}

/// Runs the models with `deeper` more preemptions; fails if a model fails.
fn run(deeper: u32) -> Result<(), Failure> {
    let counts = explore(deeper)?;
    if counts.failed == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("loom: {counts}")))
    }
}

/// Runs every model under `tests/tests/loom`.
pub fn models() -> Result<Counts, Failure> {
    explore(0)
}

fn explore(deeper: u32) -> Result<Counts, Failure> {
    let mut test = test_command();
    test.env("NVME_LOOM_DEEPER", deeper.to_string());
    if deeper == 0 {
        // The models run for seconds: most of the time is the compiler's.
        test.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        test.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    }
    // Each model says its property and its bound.
    test.args(["--", "--nocapture"]);
    let counts = cargo_test(&mut test)?;
    if counts == Counts::default() {
        return Err(Failure::new("loom: no model ran"));
    }
    Ok(counts)
}

/// Returns the `cargo test` of all models.
fn test_command() -> Command {
    let mut test = cargo();
    // An own target folder: --cfg loom changes every crate, and would rebuild all at each switch.
    test.env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target());
    test.args(["test", "--release", "--package", "nvme-tests"]);
    test.args(["--test", "loom_models"]);
    test
}

fn target() -> PathBuf {
    root().join("target/loom")
}

/// One model: its program, its name, and the time that it takes.
struct Model {
    program: PathBuf,
    name: String,
    took: Duration,
}

/// Returns `file:line=order` for each order that is weaker than the one in `place`.
pub fn weaker(place: &str) -> Vec<String> {
    let Some((site, order)) = place.split_once('=') else {
        return Vec::new();
    };
    let orders: &[&str] = match order {
        "AcqRel" => &["Acquire", "Release"],
        _ => &["Relaxed"],
    };
    orders
        .iter()
        .map(|order| format!("{site}={order}"))
        .collect()
}

/// Returns the models in the programs that cargo's output says it has built in `tree`.
fn models_of(tree: &Path, told: &str) -> Result<Vec<Model>, Failure> {
    let mut models = Vec::new();
    let programs = told
        .lines()
        .filter(|line| line.contains("Executable tests/loom/"));
    for program in programs.filter_map(|line| line.split(['(', ')']).nth(1)) {
        let program = tree.join(program);
        let list = output(Command::new(&program).arg("--list"))?;
        for name in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            models.push(Model {
                program: program.clone(),
                name: name.to_string(),
                took: Duration::ZERO,
            });
        }
    }
    if models.is_empty() {
        return Err(Failure::new("loom: built, and no model is there"));
    }
    Ok(models)
}
