//! `cargo xtask test`: every stage in turn, with its time, and one line of counts at the end.

use crate::process::{Failure, cargo, cargo_test, check, output, target_dir};
use crate::report::Counts;
use crate::{fuzz, guest, loom, planted, ptx, simulate, stress};
use std::process::Command;
use std::time::Instant;

/// Builds that must keep working beside the default one: package and switches.
const FEATURES: [(&str, &[&str]); 4] = [
    ("nvme-core", &["--no-default-features"]),
    ("nvme-core", &["--features", "trace"]),
    ("nvme-sim", &["--no-default-features"]),
    ("host-shell", &["--no-default-features"]),
];

type Stage = fn() -> Result<Counts, Failure>;

const STAGES: [(&str, Stage); 13] = [
    ("formatting", formatting),
    ("clippy", clippy),
    ("tests", tests),
    ("documentation", documentation),
    ("feature matrix", feature_matrix),
    ("loom", loom::models),
    ("stress", stress::slices),
    ("ptx", || ptx::run(false).map(|()| Counts::PASSED)),
    ("simulate", simulate::stage),
    ("planted bugs", planted::stage),
    ("fuzz", fuzz::stage),
    ("demo", demo),
    ("guest", guest::stage),
];

/// Runs every stage, whatever became of the ones before it. With `ci`, a skip is a failure.
pub fn run(ci: bool) -> Result<(), Failure> {
    let start = Instant::now();
    let mut total = Counts::default();
    let mut lines = Vec::new();
    for (name, stage) in STAGES {
        println!("\n==== {name}");
        let began = Instant::now();
        let (counts, word) = match stage() {
            Ok(counts) if counts.failed > 0 => (counts, "FAILED"),
            Ok(counts) => (counts, "ok"),
            Err(failure) if failure.missing_tool && !ci => {
                println!("SKIPPED: {failure}");
                (Counts::SKIPPED, "skipped")
            }
            Err(failure) => {
                println!("FAILED: {failure}");
                (Counts::FAILED, "FAILED")
            }
        };
        total.add(counts);
        lines.push(format!(
            "{name:15} {word:8} {:6.1} s  {counts}",
            began.elapsed().as_secs_f64()
        ));
    }
    println!("\n==== summary\n{}", lines.join("\n"));
    println!(
        "{:15} {:8} {:6.1} s",
        "all",
        "",
        start.elapsed().as_secs_f64()
    );
    let bad = total.failed > 0 || (ci && total.skipped > 0);
    if ci && total.skipped > 0 {
        println!("with --ci nothing may be skipped");
    }
    println!("{total}");
    if bad {
        Err(Failure::new("not everything passed"))
    } else {
        Ok(())
    }
}

/// The development profile with some optimisation: the simulator moves a lot of bytes in the tests.
fn optimised(mut command: Command) -> Command {
    command
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    command
}

fn formatting() -> Result<Counts, Failure> {
    check(cargo().args(["fmt", "--all", "--check"]))?;
    check(cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))?;
    Ok(Counts::PASSED)
}

fn clippy() -> Result<Counts, Failure> {
    let mut clippy = optimised(cargo());
    check(clippy.args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Counts::PASSED)
}

fn tests() -> Result<Counts, Failure> {
    let mut test = optimised(cargo());
    test.args(["test", "--workspace", "--no-fail-fast"]);
    match crate::tools::libnvme() {
        // Every ignored test says which tool it needs, and it is here now.
        Ok(()) => test.args(["--", "--include-ignored"]),
        Err(failure) if failure.missing_tool => {
            println!("SKIPPED: {failure}");
            &mut test
        }
        Err(failure) => return Err(failure),
    };
    cargo_test(&mut test)
}

fn documentation() -> Result<Counts, Failure> {
    let mut doc = optimised(cargo());
    check(
        doc.env("RUSTDOCFLAGS", "-D warnings")
            .args(["doc", "--workspace", "--no-deps"]),
    )?;
    Ok(Counts::PASSED)
}

fn feature_matrix() -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for (package, switches) in FEATURES {
        let mut build = optimised(cargo());
        build
            .env("RUSTFLAGS", "-D warnings")
            .env("CARGO_TARGET_DIR", target_dir().join("features"));
        check(build.args(["check", "--package", package]).args(switches))?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

/// The first command of the README, and what it must answer: every byte verified.
fn demo() -> Result<Counts, Failure> {
    let mut demo = cargo();
    demo.args(["run", "--quiet", "--release", "--", "demo", "--json"]);
    println!("$ cargo run --release -- demo --json");
    let json = output(&mut demo)?;
    println!("{}", json.trim());
    let compact: String = json.chars().filter(|c| !c.is_whitespace()).collect();
    if !(compact.starts_with('{') && compact.ends_with('}')) {
        return Err(Failure::new(
            "demo --json printed something else than one JSON object",
        ));
    }
    if !compact.contains("\"verified\":true") {
        return Err(Failure::new("the demo did not say \"verified\": true"));
    }
    Ok(Counts::PASSED)
}
