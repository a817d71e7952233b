//! Loom: the queues' memory operations in every interleaving, in a build of its own.

use crate::process::{Failure, cargo, cargo_test, check, output, root};
use crate::report::Counts;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a model may take with one place weakened. A place that no model needs costs it for each.
const MUTANT: Duration = Duration::from_secs(120);

/// Runs `cargo xtask loom` with its words.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        [] => run(0),
        ["--deeper", more] => match more.parse() {
            Ok(more) => run(more),
            Err(_) => Err(Failure::new("loom --deeper: give a number of preemptions")),
        },
        ["--mutants"] => mutants(),
        _ => Err(Failure::new(
            "usage: cargo xtask loom [--deeper N | --mutants]",
        )),
    }
}

/// Runs the models with `deeper` more preemptions, and fails when one of them does.
fn run(deeper: u32) -> Result<(), Failure> {
    let counts = explore(deeper)?;
    if counts.failed == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("loom: {counts}")))
    }
}

/// Runs every `loom_*` test file of `tests`.
pub fn models() -> Result<Counts, Failure> {
    explore(0)
}

fn explore(deeper: u32) -> Result<Counts, Failure> {
    let mut test = build();
    test.env("NVME_LOOM_DEEPER", deeper.to_string());
    // Each model says its property and its bound.
    test.args(["--", "--nocapture"]);
    let counts = cargo_test(&mut test)?;
    if counts == Counts::default() {
        return Err(Failure::new("loom: no model ran"));
    }
    Ok(counts)
}

/// The `cargo test` of all models.
fn build() -> Command {
    let mut test = cargo();
    // An own target folder: --cfg loom changes every crate, and would rebuild all at each switch.
    test.env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target());
    test.args(["test", "--release", "--package", "nvme-tests"]);
    for name in model_files() {
        test.args(["--test", &name]);
    }
    test
}

fn target() -> PathBuf {
    root().join("target/loom")
}

fn model_files() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("tests/tests"))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.strip_suffix(".rs")
            .filter(|stem| stem.starts_with("loom_"))
            .map(str::to_string)
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// One model: the program it is in, its name, and how long it takes.
struct Model {
    program: PathBuf,
    name: String,
    took: Duration,
}

/// Weakens the order at each place that the models meet, one at a time: some model has to fail.
fn mutants() -> Result<(), Failure> {
    check(build().arg("--no-run"))?;
    let sites = target().join("sites.txt");
    // Absent on the first run.
    let _ = std::fs::remove_file(&sites);
    let mut models = find_models()?;
    for model in &mut models {
        let began = Instant::now();
        if !passes(model, ("NVME_LOOM_SITES", &sites.to_string_lossy()), MUTANT)? {
            return Err(Failure::new(format!("{} fails as it is", model.name)));
        }
        model.took = began.elapsed();
    }
    models.sort_by_key(|model| model.took);
    let text = std::fs::read_to_string(&sites);
    let text = text.map_err(|error| Failure::new(format!("{}: {error}", sites.display())))?;
    let mut places: Vec<&str> = text.lines().collect();
    places.sort_unstable();
    places.dedup();
    let mut survivors = 0;
    for place in places {
        for weaker in weaker(place) {
            match killer(&models, &weaker)? {
                Some(name) => println!("{weaker}: {name} fails"),
                None => {
                    survivors += 1;
                    println!("{weaker}: NO MODEL FAILS");
                }
            }
        }
    }
    println!("{survivors} survivors; docs/memory-model.md says why each is there");
    Ok(())
}

/// `file:line=order` with each order below it.
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

fn killer<'m>(models: &'m [Model], weaker: &str) -> Result<Option<&'m str>, Failure> {
    for model in models {
        // Longer than the model takes by itself: a model that does not end has not passed.
        if !passes(
            model,
            ("NVME_LOOM_WEAKEN", weaker),
            model.took * 10 + MUTANT / 10,
        )? {
            return Ok(Some(&model.name));
        }
    }
    Ok(None)
}

fn find_models() -> Result<Vec<Model>, Failure> {
    let folder = target().join("release/deps");
    let mut models = Vec::new();
    for file in model_files() {
        let program = newest(&folder, &file)
            .ok_or_else(|| Failure::new(format!("{file}: built, and not found")))?;
        let list = output(Command::new(&program).arg("--list"))?;
        for name in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            models.push(Model {
                program: program.clone(),
                name: name.to_string(),
                took: Duration::ZERO,
            });
        }
    }
    Ok(models)
}

fn newest(folder: &Path, file: &str) -> Option<PathBuf> {
    let prefix = format!("{file}-");
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let programs = entries.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with(&prefix) && !name.contains('.')
    });
    programs
        .max_by_key(|entry| entry.metadata().and_then(|found| found.modified()).ok())
        .map(|entry| entry.path())
}

/// Whether the model passes with this variable set. One that takes longer than `limit` does not.
fn passes(model: &Model, (key, value): (&str, &str), limit: Duration) -> Result<bool, Failure> {
    let mut child = Command::new(&model.program)
        .args(["--exact", &model.name])
        .env(key, value)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| Failure::new(format!("{}: {error}", model.program.display())))?;
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status.success()),
            Ok(None) if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(5)),
            _ => {
                // It has run too long; whether it can still be killed does not matter.
                let _ = child.kill();
                let _ = child.wait();
                return Ok(false);
            }
        }
    }
}
