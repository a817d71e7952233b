//! Fuzzing: every target for a while, from its seed corpus.

use crate::process::{Failure, cargo, check, root};
use crate::tools;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// `cargo xtask fuzz [--minutes M] [TARGET]`
pub fn command(args: &[&str]) -> Result<(), Failure> {
    let mut minutes = 1.0;
    let mut only = None;
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        if arg == "--minutes" {
            let value = args.next().and_then(|text| text.parse::<f64>().ok());
            minutes = value.filter(|value| *value > 0.0).ok_or_else(|| {
                Failure::new(
                    "--minutes takes a number above 0, as in: cargo xtask fuzz --minutes 5",
                )
            })?;
        } else {
            only = Some(arg);
        }
    }
    let all = targets()?;
    let chosen: Vec<&String> = all
        .iter()
        .filter(|name| only.is_none_or(|only| only == *name))
        .collect();
    if chosen.is_empty() {
        return Err(Failure::new(format!(
            "no such fuzz target; there are: {}",
            all.join(", ")
        )));
    }
    tools::cargo_fuzz()?;
    for name in chosen {
        fuzz(name, Duration::from_secs_f64(minutes * 60.0))?;
    }
    Ok(())
}

/// The targets that fuzz/Cargo.toml declares.
pub fn targets() -> Result<Vec<String>, Failure> {
    let manifest = root().join("fuzz/Cargo.toml");
    let text = std::fs::read_to_string(&manifest)
        .map_err(|error| Failure::new(format!("{}: {error}", manifest.display())))?;
    let bins = text.split("[[bin]]").skip(1);
    let names = bins.filter_map(|bin| bin.lines().find_map(|line| line.strip_prefix("name = ")));
    Ok(names
        .map(|name| name.trim().trim_matches('"').to_string())
        .collect())
}

/// Fuzzes one target for `time`; a crash is a failure, and its input is left in fuzz/artifacts.
pub fn fuzz(target: &str, time: Duration) -> Result<(), Failure> {
    // What the fuzzer finds worth keeping goes under target/: the seeds in the repository stay as they are.
    let found = root().join("target/fuzz-corpus").join(target);
    let seeds = root().join("fuzz/corpus").join(target);
    std::fs::create_dir_all(&found)
        .map_err(|error| Failure::new(format!("{}: {error}", found.display())))?;
    let mut run = cargo_fuzz_command(&root());
    run.args(["fuzz", "run", target]).arg(&found);
    if seeds.is_dir() {
        run.arg(&seeds);
    }
    run.arg("--")
        .arg(format!("-max_total_time={}", time.as_secs().max(1)));
    run.args([
        "-timeout=10",
        "-max_len=4096",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    check(&mut run)
}

/// Sanitizers are unstable switches: the active compiler takes them with RUSTC_BOOTSTRAP=1.
fn cargo_fuzz_command(root: &Path) -> Command {
    let mut command = cargo();
    command
        .current_dir(root)
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("CARGO_TARGET_DIR");
    command
}
