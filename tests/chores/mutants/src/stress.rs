//! The queues on real threads: against the simulator, and under ThreadSanitizer.

use crate::loom::weaker;
use chores::process::{Failure, cargo, check, root, shown, target_dir};
use chores::report::Counts;
use chores::{release, tools};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const PACKAGE: &str = "nvme-stress";
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Limits of a run in CI: a number of ended commands, and seconds.
const SLICE: [&str; 4] = ["--commands", "300000", "--seconds", "15"];
const SANITIZED: [&str; 5] = ["plain", "--commands", "60000", "--seconds", "15"];
/// Time in which a weakened order has to be detected.
const MUTANT: Duration = Duration::from_secs(20);

const USAGE: &str = "usage: cargo xtask stress [--commands N] [--minutes M] [--seed N] [plain]
       cargo xtask stress --tsan [--commands N] [--minutes M] [--seed N] | --mutants | --bundle [FILE]";

/// Runs `cargo xtask stress` with its words.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        ["--bundle"] => bundle(&root().join("target").join(PACKAGE)),
        ["--bundle", file] => bundle(Path::new(file)),
        ["--mutants"] => mutants(),
        ["--tsan", words @ ..] => {
            let program = sanitized("3")?;
            check(judged(&program).arg("plain").args(arguments(words)?))
        }
        words => check(Command::new(build()?).args(arguments(words)?)),
    }
}

/// Returns the arguments for the stress program, which counts in seconds.
fn arguments(words: &[&str]) -> Result<Vec<String>, Failure> {
    let mut arguments = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match *word {
            "--minutes" => {
                let minutes = words.next().and_then(|text| text.parse::<u64>().ok());
                let minutes = minutes.ok_or_else(|| Failure::new(USAGE))?;
                arguments.extend(["--seconds".to_string(), (minutes * 60).to_string()]);
            }
            "--commands" | "--seed" | "--seconds" => {
                let number = words.next().ok_or_else(|| Failure::new(USAGE))?;
                arguments.extend([word.to_string(), number.to_string()]);
            }
            "plain" => arguments.push("plain".to_string()),
            _ => return Err(Failure::new(USAGE)),
        }
    }
    Ok(arguments)
}

/// Runs the program, plain and under the sanitizer, for a short time in CI.
pub fn slices() -> Result<Counts, Failure> {
    let program = release::build(&release::ALL)?.join(PACKAGE);
    check(Command::new(program).args(SLICE))?;
    check(judged(&sanitized("1")?).args(SANITIZED))?;
    let mut counts = Counts::PASSED;
    counts.add(Counts::PASSED);
    Ok(counts)
}

fn build() -> Result<PathBuf, Failure> {
    let mut build = cargo();
    build.args(["rustc", "--release", "--package", PACKAGE, "--bin", PACKAGE]);
    // The file is copied to other machines: without symbols it has half the size.
    build.args(["--", "-C", "strip=symbols"]);
    check(&mut build)?;
    Ok(target_dir().join("release").join(PACKAGE))
}

fn bundle(file: &Path) -> Result<(), Failure> {
    let built = build()?;
    let copied = std::fs::copy(&built, file);
    copied.map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
    println!(
        "{}: needs nothing but itself; ./{PACKAGE} --help",
        file.display()
    );
    Ok(())
}

/// Returns the program, built with ThreadSanitizer. The compiler's runtime is enough: the standard library is not
/// instrumented, and the sanitizer intercepts the calls by which it starts and joins threads. A low level of
/// optimisation is enough for a run of seconds.
fn sanitized(level: &str) -> Result<PathBuf, Failure> {
    let lib = tools::sysroot(Path::new("rustc")).map(|root| root.join("lib/rustlib").join(TARGET));
    let files = lib.and_then(|lib| std::fs::read_dir(lib.join("lib")).ok());
    let is_runtime = |name: &str| name.starts_with("librustc-") && name.ends_with("_rt.tsan.a");
    let here = files.into_iter().flatten().flatten();
    if !here
        .map(|file| file.file_name())
        .any(|name| is_runtime(&name.to_string_lossy()))
    {
        return Err(Failure::missing(format!(
            "this rustc has no runtime of ThreadSanitizer for {TARGET}; use rustup's toolchain for it"
        )));
    }
    let folder = root().join("target/tsan");
    let mut build = cargo();
    build
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", level)
        .env(
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            "--cfg tsan -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer",
        )
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    build.args([
        "build",
        "--release",
        "--package",
        PACKAGE,
        "--target",
        TARGET,
    ]);
    check(build.arg("--target-dir").arg(&folder))?;
    Ok(folder.join(TARGET).join("release").join(PACKAGE))
}

/// Returns the program, to end at the first race with exit status 66.
fn judged(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("TSAN_OPTIONS", "halt_on_error=1 exitcode=66");
    command
}

/// Weakens the memory order at each place that the program reaches, one at a time: the sanitizer has to report it, or a
/// command has to end wrong.
fn mutants() -> Result<(), Failure> {
    let program = sanitized("3")?;
    let sites = root().join("target/tsan/sites.txt");
    // Absent on the first run.
    let _ = std::fs::remove_file(&sites);
    // The result of this run does not count: the list of places is under a lock that the sanitizer does not see.
    let mut run = Command::new(&program);
    run.args(SANITIZED).env("NVME_LOOM_SITES", &sites);
    check(run.env("TSAN_OPTIONS", "report_bugs=0"))?;
    let text = std::fs::read_to_string(&sites);
    let text = text.map_err(|error| Failure::new(format!("{}: {error}", sites.display())))?;
    let mut places: Vec<&str> = text.lines().collect();
    places.sort_unstable();
    let mut survivors = 0;
    for weak in places.into_iter().flat_map(weaker) {
        let seconds = MUTANT.as_secs().to_string();
        let mut run = judged(&program);
        run.args(["plain", "--commands", "10000000", "--seconds", &seconds]);
        run.env("NVME_LOOM_WEAKEN", &weak).stdin(Stdio::null());
        let run = run.stdout(Stdio::null()).stderr(Stdio::null());
        let status = run.status();
        let status = status.map_err(|error| Failure::new(format!("{}: {error}", shown(run))))?;
        match status.code() {
            Some(0) => {
                survivors += 1;
                println!("{weak}: SURVIVES");
            }
            Some(66) => println!("{weak}: a race"),
            _ => println!("{weak}: a command ends wrong"),
        }
    }
    println!("{survivors} survivors of {} seconds each", MUTANT.as_secs());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::arguments;

    #[test]
    fn minutes_become_seconds() {
        let words = arguments(&["--minutes", "3", "--commands", "5", "plain"]).unwrap();
        assert_eq!(words, ["--seconds", "180", "--commands", "5", "plain"]);
        assert!(arguments(&["--minutes"]).is_err());
        assert!(arguments(&["--minutes", "many"]).is_err());
        assert!(arguments(&["sim"]).is_err());
    }
}
