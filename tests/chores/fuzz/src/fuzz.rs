//! Fuzzing: each target runs for a limited time from its seed corpus, as many targets at a time as there are
//! processors.

mod bundle;
mod reach;

use chores::process::{Failure, cargo, check, root};
use chores::report::Counts;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time for each target in CI; its corpus takes less than a second of it. Users choose longer times.
const SLICE: Duration = Duration::from_secs(6);
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Text that a binary contains only if it was built with AddressSanitizer.
const SANITIZED: &[u8] = b"__asan_report_load8";

/// `cargo xtask fuzz [--minutes M | --coverage | --bundle [DIR]] [TARGET...]`
pub fn command(args: &[&str]) -> Result<(), Failure> {
    let mut minutes = 1.0;
    let (mut reach, mut bundle, mut only_build) = (false, None, false);
    let mut only = Vec::new();
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        match arg {
            "--minutes" => {
                let value = args.next().and_then(|text| text.parse::<f64>().ok());
                minutes = value.filter(|value| *value > 0.0).ok_or_else(|| {
                    Failure::new(
                        "--minutes takes a number above 0, as in: cargo xtask fuzz --minutes 5",
                    )
                })?;
            }
            "--coverage" => reach = true,
            "--build" => only_build = true,
            "--bundle" => {
                let usual = root().join("target/fuzz-bundle");
                bundle = Some(args.next().map_or(usual, PathBuf::from));
            }
            _ => only.push(arg),
        }
    }
    let all = targets()?;
    if let Some(unknown) = only
        .iter()
        .find(|only| !all.iter().any(|name| name == *only))
    {
        return Err(Failure::new(format!(
            "no such fuzz target: {unknown}; there are: {}",
            all.join(", ")
        )));
    }
    let chosen: Vec<String> = all
        .into_iter()
        .filter(|name| only.is_empty() || only.contains(&name.as_str()))
        .collect();
    if reach {
        return reach::report(&chosen);
    }
    let built = build()?;
    if only_build {
        return Ok(());
    }
    if let Some(folder) = bundle {
        return bundle::make(&built, &chosen, &folder);
    }
    let counts = run(&built, &chosen, Duration::from_secs_f64(minutes * 60.0))?;
    match counts.failed {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} targets failed"))),
    }
}

/// Runs every target for a short time.
pub fn stage() -> Result<Counts, Failure> {
    run(&build()?, &targets()?, SLICE)
}

/// Returns the targets that fuzz/Cargo.toml declares.
fn targets() -> Result<Vec<String>, Failure> {
    let manifest = root().join("fuzz/Cargo.toml");
    let text = std::fs::read_to_string(&manifest)
        .map_err(|error| Failure::new(format!("{}: {error}", manifest.display())))?;
    let bins = text.split("[[bin]]").skip(1);
    let names = bins.filter_map(|bin| bin.lines().find_map(|line| line.strip_prefix("name = ")));
    Ok(names
        .map(|name| name.trim().trim_matches('"').to_string())
        .collect())
}

/// Compiler flags as cargo-fuzz sets them for a release build: sanitizer coverage for libFuzzer, comparisons traced,
/// AddressSanitizer, assertions on, one codegen unit (more of them keep small functions from being inlined).
const INSTRUMENTED: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-sanitizer-coverage-stack-depth \
     -Cllvm-args=-simplifycfg-branch-fold-threshold=0 --cfg fuzzing -Zsanitizer=address \
     -Cdebug-assertions -Ccodegen-units=1";

/// Builds all targets; the folder of the binaries.
fn build() -> Result<PathBuf, Failure> {
    let began = Instant::now();
    // `cargo fuzz build` would be one more tool to install, and these switches are all that is needed of it.
    let mut build = cargo();
    build.args(["build", "--release", "--manifest-path", "fuzz/Cargo.toml"]);
    build.args(["--target", TRIPLE, "--bins"]);
    build
        .arg("--target-dir")
        .arg(root().join("fuzz/target"))
        .current_dir(root())
        // Sanitizers are unstable switches: the active compiler takes them with RUSTC_BOOTSTRAP=1.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", INSTRUMENTED)
        // Names and lines of a crash; with --target, build scripts and macros are not instrumented.
        .env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
    check(&mut build)?;
    println!("built in {:.1} s", began.elapsed().as_secs_f64());
    Ok(root().join("fuzz/target").join(TRIPLE).join("release"))
}

/// Runs targets for `time` each; a crash is a failure, and its input is left in fuzz/artifacts.
fn run(built: &Path, targets: &[String], time: Duration) -> Result<Counts, Failure> {
    for name in targets {
        let binary = built.join(name);
        let bytes = std::fs::read(&binary).map_err(failed(&binary))?;
        if !bytes.windows(SANITIZED.len()).any(|part| part == SANITIZED) {
            let binary = binary.display();
            return Err(Failure::new(format!("{binary} has no AddressSanitizer")));
        }
    }
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{} targets with AddressSanitizer, {workers} at a time",
        targets.len()
    );
    let todo = Mutex::new(targets.iter());
    let counts = Mutex::new(Counts::default());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(name) = todo.lock().expect("no panic under this lock").next() else {
                        return;
                    };
                    let began = Instant::now();
                    let result = fuzz(built, name, time);
                    let seconds = began.elapsed().as_secs_f64();
                    let (word, count) = match &result {
                        Ok(told) => (told.clone(), Counts::PASSED),
                        Err(failure) => (format!("FAILED: {failure}"), Counts::FAILED),
                    };
                    println!("{name:20} {seconds:6.1} s  {word}");
                    counts.lock().expect("no panic under this lock").add(count);
                }
            });
        }
    });
    Ok(counts.into_inner().expect("no panic under this lock"))
}

/// Fuzzes one target; returns a sentence about what it did.
fn fuzz(built: &Path, target: &str, time: Duration) -> Result<String, Failure> {
    // The inputs that the fuzzer finds and keeps go under target/: the seeds in the repository do not change.
    let found = root().join("target/fuzz-corpus").join(target);
    let artifacts = root().join("fuzz/artifacts").join(target);
    let log = root()
        .join("target/fuzz-corpus")
        .join(format!("{target}.log"));
    for folder in [&found, &artifacts] {
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
    }
    let out = std::fs::File::create(&log).map_err(failed(&log))?;
    let err = out.try_clone().map_err(failed(&log))?;
    let mut run = Command::new(built.join(target));
    run.arg(&found).arg(root().join("fuzz/corpus").join(target));
    run.arg(format!("-max_total_time={}", time.as_secs().max(1)));
    run.arg(format!("-artifact_prefix={}/", artifacts.display()));
    let dictionary = dictionary(target);
    if dictionary.is_file() {
        run.arg(format!("-dict={}", dictionary.display()));
    }
    run.args(["-timeout=10", "-max_len=4096", "-print_final_stats=1"]);
    run.stdin(Stdio::null()).stdout(out).stderr(err);
    let status = run.status().map_err(failed(&built.join(target)))?;
    let text = std::fs::read(&log).map_err(failed(&log))?;
    let text = String::from_utf8_lossy(&text);
    if status.success() {
        return Ok(summary(&text));
    }
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(40)..].join("\n");
    Err(Failure::new(format!(
        "{status}; its input is in {}; the end of {}:\n{tail}",
        artifacts.display(),
        log.display()
    )))
}

/// Runs and edges, from what libFuzzer prints at its end.
fn summary(log: &str) -> String {
    let number = |line: &str, key: &str| {
        let rest = line.split_once(key)?.1.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_digit());
        Some(rest[..end.unwrap_or(rest.len())].to_string())
    };
    let last = |key| log.lines().rev().find_map(|line| number(line, key));
    let told = |key| last(key).unwrap_or_else(|| "?".to_string());
    format!(
        "{} runs, {} edges, {} features",
        told("stat::number_of_executed_units:"),
        told(" cov:"),
        told(" ft:")
    )
}

fn dictionary(target: &str) -> PathBuf {
    root()
        .join("fuzz/dictionaries")
        .join(format!("{target}.dict"))
}

/// Returns an error of the operating system, with the path.
fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::new(format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn reads_the_end_of_a_log() {
        let log = "#2\tINITED cov: 5 ft: 6 corp: 1/1b\n#9\tDONE   cov: 31 ft: 77 corp: 9/1Kb\n\
                   stat::number_of_executed_units: 900\nstat::average_exec_per_sec:     30\n";
        assert_eq!(summary(log), "900 runs, 31 edges, 77 features");
        assert_eq!(summary(""), "? runs, ? edges, ? features");
    }
}
