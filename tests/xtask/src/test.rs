//! `cargo xtask test`: every stage, with its time, and one line of counts at the end.
//! `cargo xtask check`: what to run before every commit.

mod programs;

use crate::{fuzz, guest, loom, model, packages, planted, ptx, python, simulate, stress, wording};
use chores::background::{EndedProcess, ProcessQueue};
use chores::process::{Failure, cargo, cargo_test, check, output, root};
use chores::report::{self, Counts};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Builds that must keep working beside the default one: packages and switches. The packages of a line share one build
/// of their dependencies.
const FEATURES: [(&[&str], &[&str]); 7] = [
    (&["nvme-core"], &["--features", "trace"]),
    (&["nvme-core", "nvme-sim"], &["--no-default-features"]),
    (
        &[
            "nvme-cuda",
            "nvme-driver",
            "nvme-bench",
            "nvme-doctor",
            "nvme-files",
            "nvme-store",
            "nvme-host",
            "nvme-gpu",
            "nvme-gpu-capi",
            "nvme-gpu-compat",
        ],
        &["--no-default-features"],
    ),
    (
        LIBRARIES,
        &[BARE, "--features=nvme-host/sim,nvme-gpu-capi/sim"],
    ),
    (
        LIBRARIES,
        &[
            BARE,
            "--features=nvme-host/vfio-user,nvme-gpu-capi/vfio-user",
        ],
    ),
    (
        LIBRARIES,
        &[BARE, "--features=nvme-host/vfio,nvme-gpu-capi/vfio"],
    ),
    (
        LIBRARIES,
        &[BARE, "--features=nvme-host/cuda,nvme-gpu-capi/cuda"],
    ),
];
/// Packages that are built with each feature alone.
const LIBRARIES: &[&str] = &["nvme-host", "nvme-gpu-capi"];
const BARE: &str = "--no-default-features";

/// Packages that are compiled without optimisation for the tests, in a quarter of the time: they wait more than they
/// compute. Core, simulator and the stand-in of CUDA move the bytes, and keep the profile's level.
const UNOPTIMISED: [&str; 28] = [
    // Packages outside of the workspace.
    "\"*\"",
    "guest-tests",
    "nvme-gpu",
    "nvme-gpu-capi",
    "nvme-gpu-compat",
    "nvme-gpu-python",
    "nvme-cuda",
    "nvme-kv",
    "nvme-kv-server",
    "nvme-lookup",
    "nvme-vfio-user",
    "nvme-driver",
    "nvme-bench",
    "nvme-doctor",
    "nvme-files",
    "nvme-store",
    "nvme-host",
    "nvme-simulate",
    "nvme-stress",
    "nvme-tests",
    "chores",
    "chores-coverage",
    "chores-fuzz",
    "chores-guest",
    "chores-mutants",
    "chores-ptx",
    "chores-results",
    "xtask",
];

/// Settings of the stages' release builds, except for the packages that Cargo.toml names: programs that contain others
/// compile in half of the time, and guests, demo and package run them for seconds.
const QUICK_RELEASE: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    // Optimisation in one piece takes two thirds of the processor time; cargo compiles two packages at a time.
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    // The sources do not change between the stages, so results for a later change would only use gigabytes of the disk.
    ("CARGO_INCREMENTAL", "0"),
];

/// Folders in which only one stage builds: with `--ci` they are removed when it has passed, so that a run needs less
/// disk.
const BUILT_FOR_ONE: [(&str, &str); 7] = [
    ("ptx", "target/ptx"),
    ("packages", "target/packages"),
    ("second-compiler", "target/second-compiler"),
    ("loom", "target/loom"),
    ("stress", "target/tsan"),
    ("planted", "target/planted"),
    ("fuzz", "fuzz/target"),
];

type Run = fn() -> Result<Counts, Failure>;

struct Stage {
    name: &'static str,
    run: Run,
    /// True for a stage that runs in another process beside the others: it downloads or compiles, and its tests have no
    /// time limits.
    beside: bool,
}

const fn stage(name: &'static str, run: Run) -> Stage {
    Stage {
        name,
        run,
        beside: false,
    }
}

const fn beside(name: &'static str, run: Run) -> Stage {
    Stage {
        name,
        run,
        beside: true,
    }
}

/// The stages that wait (for deadlines or for programs that they started) run beside the stages that compile.
const STAGES: [Stage; 18] = [
    stage("formatting", formatting),
    beside("ptx", || ptx::run(false).map(|()| Counts::PASSED)),
    stage("clippy", clippy),
    stage("tests", tests),
    stage("c-interface", c_interface),
    stage("documentation", documentation),
    stage("feature-matrix", feature_matrix),
    stage("packages", packages::pack),
    beside("second-compiler", packages::second_compiler),
    beside("loom", loom::models),
    stage("stress", stress::slices),
    stage("simulate", simulate::stage),
    beside("planted", planted::stage),
    stage("fuzz", fuzz::stage),
    stage("demo", demo),
    stage("model", model::stage),
    stage("python", python::stage),
    stage("guest", guest::stage),
];

/// Parts of stages that are built or downloaded beside the earlier stages: the stage, and the words of its command.
const PREPARED: [(&str, [&str; 2]); 2] = [
    ("guest", ["guest", "--prepare"]),
    ("fuzz", ["fuzz", "--build"]),
];

/// `cargo xtask test [--ci] [--list | STAGE...]`
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let (switches, names): (Vec<&str>, Vec<&str>) =
        words.iter().partition(|word| word.starts_with("--"));
    if switches == ["--list"] && names.is_empty() {
        STAGES.iter().for_each(|stage| println!("{}", stage.name));
        return Ok(());
    }
    let ci = match switches.as_slice() {
        [] => false,
        ["--ci"] => true,
        _ => {
            return Err(Failure::new(
                "usage: cargo xtask test [--ci] [--list | STAGE...]",
            ));
        }
    };
    let stages = chosen(&names)?;
    // The settings are made once, for every process that the stages start: cargo would build again for two processes
    // with different settings.
    if std::env::var_os(QUICK_RELEASE[0].0).is_none() {
        return again(words);
    }
    run(ci, &stages)
}

/// Runs this command in a process that has [`QUICK_RELEASE`] set.
fn again(words: &[&str]) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("xtask test: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("test").args(words).envs(QUICK_RELEASE);
    match command.status().map_err(failed)?.code() {
        Some(0) => Ok(()),
        // The process has printed the reason.
        code => std::process::exit(code.unwrap_or(1)),
    }
}

/// Returns the named stages in the order of the list; without names, all.
fn chosen(names: &[&str]) -> Result<Vec<&'static Stage>, Failure> {
    if let Some(unknown) = names
        .iter()
        .find(|name| !STAGES.iter().any(|stage| stage.name == **name))
    {
        let known = STAGES.map(|stage| stage.name).join(", ");
        return Err(Failure::new(format!(
            "no such stage: {unknown}; there are: {known}"
        )));
    }
    let wanted = |stage: &&Stage| names.is_empty() || names.contains(&stage.name);
    Ok(STAGES.iter().filter(wanted).collect())
}

/// Runs the stages, whatever became of the ones before it. With `ci`, a skip is a failure.
fn run(ci: bool, stages: &[&Stage]) -> Result<(), Failure> {
    let start = Instant::now();
    let mut summary = Summary::default();
    let (queue, prepared) = start_beside(ci, stages)?;
    // A single stage has no other stage to run beside.
    let is_beside = |stage: &Stage| stage.beside && stages.len() > 1;
    // Stages that did not run beside others run here at the end.
    let (later, now): (Vec<&Stage>, Vec<&Stage>) =
        stages.iter().partition(|stage| is_beside(stage));
    let here = |stage: &Stage, summary: &mut Summary| -> Result<(), Failure> {
        println!("\n==== {}", stage.name);
        let began = Instant::now();
        let mut used = 0.0;
        if prepared.contains(&stage.name) {
            // What fails here is tried again by the stage itself.
            let done = queue.wait(&preparation(stage.name))?;
            println!("{}", done.text);
            used += done.used;
        }
        used -= queue.others_seconds();
        let mut result = (stage.run)();
        used += queue.others_seconds();
        if ci && result.as_ref().is_ok_and(|counts| counts.failed == 0) {
            let removed = remove_built(stage.name);
            result = result.and_then(|counts| removed.map(|()| counts));
        }
        summary.add(stage.name, result, began.elapsed().as_secs_f64(), used, ci);
        Ok(())
    };
    for stage in now {
        here(stage, &mut summary)?;
    }
    let (left, begun): (Vec<&Stage>, Vec<&Stage>) =
        later.into_iter().partition(|stage| queue.take(stage.name));
    for stage in left {
        here(stage, &mut summary)?;
    }
    for stage in begun {
        let done = queue.wait(stage.name)?;
        println!("\n==== {} (beside the others)\n{}", stage.name, done.text);
        let result = counts_of(stage.name, &done);
        if !done.success {
            report::keep_failures(&done.text);
        }
        summary.add(stage.name, result, done.seconds, done.used, ci);
    }
    summary.end(start.elapsed().as_secs_f64(), ci)
}

/// Removes files that only this stage reads.
fn remove_built(stage: &str) -> Result<(), Failure> {
    let of_stage = BUILT_FOR_ONE.iter().filter(|(name, _)| *name == stage);
    for folder in of_stage.map(|(_, folder)| root().join(folder)) {
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let what = format!("{}: {error}", folder.display());
                return Err(Failure::new(what));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Starts the processes that run beside the stages. Returns them, and the names of the stages that are prepared there.
fn start_beside(ci: bool, stages: &[&Stage]) -> Result<(ProcessQueue, Vec<&'static str>), Failure> {
    let (mut jobs, mut prepared) = (Vec::new(), Vec::new());
    if stages.len() > 1 {
        for (name, words) in PREPARED {
            if stages.iter().any(|stage| stage.name == name) {
                jobs.push((preparation(name), words.to_vec()));
                prepared.push(name);
            }
        }
        for stage in stages.iter().filter(|stage| stage.beside) {
            let mut words = vec!["test", stage.name];
            words.extend(ci.then_some("--ci"));
            jobs.push((stage.name.to_string(), words));
        }
    }
    Ok((ProcessQueue::start(jobs)?, prepared))
}

/// Returns the name of what prepares a stage.
fn preparation(stage: &str) -> String {
    format!("prepare-{stage}")
}

/// Returns the counts that a stage in another process has printed.
fn counts_of(name: &str, done: &EndedProcess) -> Result<Counts, Failure> {
    let counts = done.text.lines().rev().find_map(Counts::of_total_line);
    let failed = Failure::new(format!("{name}: ended without a line of counts"));
    let mut counts = counts.ok_or(failed)?;
    if !done.success && counts.failed == 0 && counts.skipped == 0 {
        counts.failed = 1;
    }
    Ok(counts)
}

/// The outcome of each stage.
#[derive(Default)]
struct Summary {
    total: Counts,
    lines: Vec<String>,
    cpu: f64,
}

impl Summary {
    fn add(
        &mut self,
        name: &str,
        result: Result<Counts, Failure>,
        seconds: f64,
        cpu: f64,
        ci: bool,
    ) {
        let (counts, word) = match result {
            Ok(counts) if counts.failed > 0 => (counts, "FAILED"),
            Ok(counts) if counts.passed == 0 && counts.skipped > 0 => (counts, "skipped"),
            Ok(counts) => (counts, "ok"),
            Err(failure) if failure.missing_tool && !ci => {
                println!("SKIPPED: {failure}");
                (Counts::SKIPPED, "skipped")
            }
            Err(failure) => {
                let line = format!("FAILED: {failure}");
                println!("{line}");
                report::keep_failures(&line);
                (Counts::FAILED, "FAILED")
            }
        };
        self.total.add(counts);
        self.cpu += cpu;
        self.lines.push(format!(
            "{name:15} {word:8} {seconds:6.1} s {cpu:7.1} s of processors  {counts}"
        ));
    }

    fn end(&self, seconds: f64, ci: bool) -> Result<(), Failure> {
        let failed = report::failed_lines();
        if !failed.is_empty() {
            println!("\n==== what failed\n{}", failed.join("\n"));
        }
        println!("\n==== summary\n{}", self.lines.join("\n"));
        println!(
            "{:15} {:8} {seconds:6.1} s {:7.1} s of processors",
            "all", "", self.cpu
        );
        if ci && self.total.skipped > 0 {
            println!("with --ci nothing may be skipped");
        }
        println!("{}", self.total);
        if self.total.failed > 0 || (ci && self.total.skipped > 0) {
            Err(Failure::new("not everything passed"))
        } else {
            Ok(())
        }
    }
}

/// `cargo xtask check`: formatting, clippy of the workspace, unit tests of core, simulator and host library. It needs
/// no root and installs nothing.
pub fn quick() -> Result<(), Failure> {
    let stages = [
        stage("formatting", formatting),
        stage("clippy", clippy),
        stage("unit-tests", unit_tests),
    ];
    run(false, &stages.each_ref())
}

fn unit_tests() -> Result<Counts, Failure> {
    let mut test = cargo();
    test.args(["test", "--quiet", "--no-fail-fast", "--lib"]);
    with_settings(&mut test);
    for package in [
        "nvme-spec",
        "nvme-core",
        "nvme-sim",
        "nvme-driver",
        "nvme-host",
    ] {
        test.args(["--package", package]);
    }
    cargo_test(&mut test)
}

fn formatting() -> Result<Counts, Failure> {
    check(cargo().args(["fmt", "--all", "--check"]))?;
    check(cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))?;
    wording::check()?;
    Ok(Counts::PASSED)
}

fn clippy() -> Result<Counts, Failure> {
    let mut clippy = cargo();
    clippy.args(["clippy", "--workspace", "--all-targets"]);
    check(with_settings(&mut clippy).args(["--", "-D", "warnings"]))?;
    Ok(Counts::PASSED)
}

/// Sets what tests are compiled like. Checks have the same settings: what runs at build time is compiled once for both.
fn with_settings(command: &mut Command) -> &mut Command {
    // A failed test names its line without it.
    command.env("CARGO_PROFILE_DEV_DEBUG", "0");
    // As in release builds.
    command.env("CARGO_PROFILE_DEV_CODEGEN_UNITS", "1");
    for package in UNOPTIMISED {
        // Without optimisation many pieces are as cheap.
        for setting in ["opt-level=0", "codegen-units=256"] {
            let setting = format!("profile.dev.package.{package}.{setting}");
            command.args(["--config", &setting]);
        }
    }
    command
}

fn test_command() -> Command {
    let mut test = cargo();
    test.args(["test", "--no-fail-fast", "--workspace"]);
    with_settings(&mut test);
    test
}

fn tests() -> Result<Counts, Failure> {
    let has_ext4 = match chores::tools::for_ext4() {
        Ok(()) => true,
        Err(failure) if failure.missing_tool => {
            println!("SKIPPED: {failure}");
            false
        }
        Err(failure) => return Err(failure),
    };
    let test = || {
        let mut test = test_command();
        if !has_ext4 {
            test.args(["--exclude", "nvme-ext4"]);
        }
        test
    };
    match chores::tools::libnvme() {
        // Every ignored test names the tool that it needs, and the tool is here now.
        Ok(()) => programs::run(test, &["--include-ignored"]),
        Err(failure) if failure.missing_tool => {
            println!("SKIPPED: {failure}");
            programs::run(test, &[])
        }
        Err(failure) => Err(failure),
    }
}

/// Programs in C and C++ over the C interface: plain, with sanitizers, under valgrind, as installed; fio.
fn c_interface() -> Result<Counts, Failure> {
    let source = chores::tools::for_c().and_then(|()| crate::fio::source());
    match source {
        Ok(source) => programs::run_c(
            test_command(),
            &["--include-ignored"],
            ("FIO_SOURCE", &source),
        ),
        Err(failure) if failure.missing_tool => {
            println!("SKIPPED: {failure}");
            programs::run_c(test_command(), &[], ("FIO_SOURCE", Path::new("")))
        }
        Err(failure) => Err(failure),
    }
}

fn documentation() -> Result<Counts, Failure> {
    let mut doc = cargo();
    doc.args(["doc", "--workspace", "--no-deps"]);
    check(with_settings(&mut doc).env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Counts::PASSED)
}

fn feature_matrix() -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for (packages, switches) in FEATURES {
        // This is clippy rather than check, because it uses again what the stage before it compiled of other crates.
        let mut build = cargo();
        with_settings(build.arg("clippy")).args(switches);
        for package in packages {
            build.args(["--package", package]);
            counts.add(Counts::PASSED);
        }
        check(build.args(["--", "-D", "warnings"]))?;
    }
    Ok(counts)
}

/// Runs the first command of the README and checks its answer: every byte was verified.
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

#[cfg(test)]
mod tests {
    use super::{Summary, chosen, command};
    use chores::process::Failure;
    use chores::report::Counts;

    #[test]
    fn stages_are_chosen_by_name_and_run_in_the_order_of_the_list() {
        let names = |words: &[&str]| -> Vec<&str> {
            let stages = chosen(words).unwrap();
            stages.iter().map(|stage| stage.name).collect()
        };
        assert_eq!(names(&["demo", "clippy"]), ["clippy", "demo"]);
        assert_eq!(names(&[]).len(), super::STAGES.len());
    }

    #[test]
    fn an_unknown_stage_is_named_with_those_that_exist() {
        let failure = command(&["formating"]).unwrap_err().to_string();
        assert!(failure.contains("no such stage: formating"), "{failure}");
        assert!(failure.contains("formatting, ptx, clippy"), "{failure}");
        assert!(command(&["--everything"]).is_err());
    }

    #[test]
    fn folders_are_those_of_stages() {
        let known = |name: &str| super::STAGES.iter().any(|stage| stage.name == name);
        for (stage, folder) in super::BUILT_FOR_ONE {
            assert!(known(stage), "{folder}");
        }
        super::remove_built("formatting").unwrap();
    }

    #[test]
    fn a_missing_tool_fails_ci_and_nothing_else() {
        let ended = |ci| {
            let mut summary = Summary::default();
            summary.add("a", Ok(Counts::PASSED), 0.0, 0.0, ci);
            summary.add("b", Err(Failure::missing("no tool")), 0.0, 0.0, ci);
            summary.end(0.0, ci).is_ok()
        };
        assert!(ended(false));
        assert!(!ended(true));
    }
}
