//! Runs the test programs of a `cargo test`, several at a time. Cargo runs one after the other, and most of them wait
//! more than they compute: for deadlines that pass, for processes that they start.

use chores::background::wait_counted;
use chores::process::{Failure, output, root, shown, target_dir};
use chores::report::{self, Counts};
use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Number of programs that run at the same time. Each has as many threads as there are processors.
const AT_ONCE: usize = 2;
/// The programs that take longest, by the name of their target: they start first, so that none of them runs alone at
/// the end. A name that is missing here costs only time.
const LONGEST: [&str; 10] = [
    "cli",
    "stand_in",
    "gpu",
    "queues",
    "oracles",
    "nvme_host",
    "xtask",
    "gpu_trace",
    "fuzz_helpers",
    "recovery_in_use",
];

/// Programs whose stand-in of a GPU has a thread for each group of a kernel, which waits without sleeping. Beside
/// another program they take five times as long as alone: each exchange with the simulated drive waits for a processor.
const SPINNING: [&str; 3] = ["stand_in", "gpu", "gpu_trace"];

/// One program and the command that starts it.
struct Program {
    name: String,
    start: Command,
}

impl Program {
    fn spins(&self) -> bool {
        SPINNING.contains(&target(&self.name))
    }
}

/// The packages of the C interface, whose programs have a stage of their own.
pub const OF_C: &str = "host-shell/bindings";

/// Builds with `test`, a `cargo test`, and runs its programs but those in the folder [`OF_C`], and the examples of the
/// documentation, each with `words`.
pub fn run(test: impl Fn() -> Command, words: &[&str]) -> Result<Counts, Failure> {
    let mut programs = built(test(), words, |folder| !is_of_c(folder))?;
    programs.sort_by_key(|program| rank(&program.name));
    let mut examples = test();
    examples.arg("--doc").arg("--").args(words);
    programs.insert(
        0,
        Program {
            name: "documentation-examples".to_string(),
            start: examples,
        },
    );
    run_all(programs, &target_dir().join("xtask/tests"))
}

/// Builds with `test`, the same `cargo test` as [`run`]'s, so that nothing is compiled twice, and runs the programs in the
/// folder [`OF_C`] with `words` and the variable `variable` of the environment.
pub fn run_c(test: Command, words: &[&str], variable: (&str, &Path)) -> Result<Counts, Failure> {
    let mut programs = built(test, words, is_of_c)?;
    for program in &mut programs {
        program.start.env(variable.0, variable.1);
    }
    run_all(programs, &target_dir().join("xtask/tests"))
}

fn is_of_c(folder: &Path) -> bool {
    folder.starts_with(root().join(OF_C))
}

/// Builds with `test` and returns the programs whose packages' folders are `wanted`.
fn built(
    mut test: Command,
    words: &[&str],
    wanted: impl Fn(&Path) -> bool,
) -> Result<Vec<Program>, Failure> {
    test.args(["--no-run", "--message-format=json-render-diagnostics"]);
    println!("$ {}", shown(&test));
    let mut programs = programs(&output(&mut test)?, words);
    programs.retain(|program| program.start.get_current_dir().is_some_and(&wanted));
    match programs.is_empty() {
        true => Err(Failure::new("tests: built, and no program is there")),
        false => Ok(programs),
    }
}

/// Returns the test programs in cargo's output, to be run in their packages' folders as cargo would.
fn programs(told: &str, words: &[&str]) -> Vec<Program> {
    let tests = told.lines().filter(|line| is_test(line));
    let program = |line| {
        let file = PathBuf::from(member(line, "executable")?);
        let folder = Path::new(member(line, "manifest_path")?).parent()?;
        let mut start = Command::new(&file);
        start.args(words).current_dir(folder);
        start.env("CARGO_MANIFEST_DIR", folder);
        Some(Program {
            name: file.file_name()?.to_str()?.to_string(),
            start,
        })
    };
    tests.filter_map(program).collect()
}

/// Returns the place in the queue of a program named `TARGET-HASH`.
fn rank(name: &str) -> usize {
    let known = LONGEST.iter().position(|known| *known == target(name));
    known.unwrap_or(LONGEST.len())
}

/// Returns the target of a program named `TARGET-HASH`.
fn target(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(target, _)| target)
}

/// Returns whether a message of cargo is about a program that libtest is in.
fn is_test(line: &str) -> bool {
    let profile = line.split_once(r#""profile":{"#);
    let profile = profile.and_then(|(_, rest)| rest.split_once('}'));
    profile.is_some_and(|(profile, _)| profile.contains(r#""test":true"#))
}

/// Returns a member of a JSON object whose value is a text without escapes.
fn member<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// Runs all programs, and prints the output of each when it ends; the output is also kept in `logs`.
fn run_all(programs: Vec<Program>, logs: &Path) -> Result<Counts, Failure> {
    std::fs::create_dir_all(logs)
        .map_err(|error| Failure::new(format!("{}: {error}", logs.display())))?;
    let (alone, others) = programs.into_iter().partition(Program::spins);
    let (alone, others) = (Mutex::new(alone), Mutex::new(others));
    let ended = Mutex::new((Counts::default(), Vec::new(), Vec::new()));
    let run_each = |todo: &Mutex<VecDeque<Program>>| {
        let next = || todo.lock().expect("no panic under this lock").pop_front();
        while let Some(program) = next() {
            let name = program.name.clone();
            let began = Instant::now();
            let done = run_one(program, logs);
            let took = began.elapsed();
            let mut ended = ended.lock().expect("no panic under this lock");
            let (counts, used, text) = done
                .unwrap_or_else(|failure| (Counts::FAILED, 0.0, format!("FAILED: {failure}\n")));
            println!(
                "\n     Ran {name} in {:.1} s, {used:.1} s of processors\n{text}",
                took.as_secs_f64()
            );
            ended.0.add(counts);
            ended.1.push((took, name.clone()));
            ended.2.push((Duration::from_secs_f64(used), name));
        }
    };
    run_each(&alone);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| run_each(&others));
        }
    });
    let (counts, times, used) = ended.into_inner().expect("no panic under this lock");
    println!("longest: {}", longest(times));
    println!("most processor time: {}", longest(used));
    Ok(counts)
}

/// Runs one program to its end; returns its counts, its seconds of processor time and its output. A program that fails without a failed test counts as
/// one failure.
fn run_one(mut program: Program, logs: &Path) -> Result<(Counts, f64, String), Failure> {
    let log = logs.join(format!("{}.log", program.name));
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", log.display()));
    let out = File::create(&log).map_err(failed)?;
    let err = out.try_clone().map_err(failed)?;
    let start = program.start.stdin(Stdio::null()).stdout(out).stderr(err);
    let ended = start.spawn().and_then(|mut child| wait_counted(&mut child));
    let (status, used) =
        ended.map_err(|error| Failure::new(format!("{}: {error}", shown(start))))?;
    let text = std::fs::read(&log).map_err(failed)?;
    let mut text = String::from_utf8_lossy(&text).into_owned();
    let mut counts = Counts::default();
    text.lines()
        .for_each(|line| counts.add(Counts::of_result_line(line)));
    if !status.success() {
        text += &format!("{}: {status}\n", program.name);
        report::keep_failures(&text);
        if counts.failed == 0 {
            counts.failed = 1;
        }
    }
    Ok((counts, used, text))
}

/// Returns the ten that took longest, in one line.
fn longest(mut times: Vec<(Duration, String)>) -> String {
    times.sort_by(|a, b| b.cmp(a));
    let shown = times.iter().take(10);
    let shown = shown.map(|(took, name)| format!("{name} {:.1} s", took.as_secs_f64()));
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, Program, longest, programs, rank, run_all};
    use chores::process::target_dir;
    use chores::report::Counts;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn test_programs_are_those_with_libtest() {
        let told = r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"test":true},"profile":{"opt_level":"0","test":true},"executable":"/t/a-1","fresh":true}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"test":true},"profile":{"opt_level":"0","test":false},"executable":"/t/tool","fresh":true}
{"reason":"compiler-artifact","manifest_path":"/w/b/Cargo.toml","profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}"#;
        let found = programs(told, &["--include-ignored"]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "a-1");
        let start = &found[0].start;
        assert_eq!(start.get_program(), "/t/a-1");
        assert_eq!(start.get_current_dir(), Some("/w/a".as_ref()));
        assert!(start.get_args().eq(["--include-ignored"]));
    }

    fn shell(name: &str, script: &str) -> Program {
        let mut start = Command::new("sh");
        start.args(["-c", script]);
        Program {
            name: name.to_string(),
            start,
        }
    }

    #[test]
    fn counts_add_up_and_a_program_that_crashes_has_failed() {
        let result = |words| format!("echo 'test result: {words}'");
        let mut missing = shell("missing", "");
        missing.start = Command::new("/no/such/program");
        let all = vec![
            shell("passes", &result("ok. 2 passed; 0 failed; 1 ignored")),
            shell(
                "fails",
                &(result("FAILED. 1 passed; 3 failed; 0 ignored") + "; exit 101"),
            ),
            shell("crashes", "kill -SEGV $$"),
            missing,
        ];
        let logs = target_dir().join(format!("xtask/programs-{}", std::process::id()));
        let counts = run_all(all, &logs).unwrap();
        std::fs::remove_dir_all(&logs).unwrap();
        let expected = Counts {
            passed: 3,
            failed: 3 + 1 + 1,
            skipped: 1,
        };
        assert_eq!(counts, expected);
    }

    #[test]
    fn programs_that_spin_run_alone() {
        let logs = target_dir().join(format!("xtask/alone-{}", std::process::id()));
        std::fs::create_dir_all(&logs).unwrap();
        let others = logs.join("others");
        let touch = format!("touch {}", others.display());
        let alone = format!("sleep 0.1; ! test -e {}", others.display());
        let all = vec![
            shell("cli-1", &touch),
            shell("gpu-2", &alone),
            shell("stand_in-3", &alone),
        ];
        let counts = run_all(all, &logs).unwrap();
        assert!(others.exists());
        std::fs::remove_dir_all(&logs).unwrap();
        assert_eq!(counts, Counts::default());
    }

    #[test]
    fn a_program_is_ranked_by_its_whole_name() {
        assert_eq!(rank("gpu-0123456789abcdef"), 2);
        assert_eq!(rank("gpu_test-0123456789abcdef"), LONGEST.len());
    }

    #[test]
    fn the_longest_are_named_first() {
        let times = [1, 3, 2].map(|s| (Duration::from_secs(s), format!("p{s}")));
        assert_eq!(longest(times.into()), "p3 3.0 s, p2 2.0 s, p1 1.0 s");
    }
}
