//! `cargo xtask loom --mutants`: each order weakened, each statement left out or moved; some model has to fail.
//!
//! Mutants for which no model fails are in `tests/mutants/loom-survivors.txt`, each with its reason. Another survivor
//! is a failure; so is a listed mutant that a model has found, or that does not exist any more. A model that does not
//! end within its limit has found the mutant, too; the report names the mutants that were found in no other way.

use super::statements::{self, FILES, Mutant};
use super::{Model, models_of, test_command, weaker};
use crate::planted::copy_tree;
use chores::process::{Failure, root, shown};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time that a model may take with a mutant, in addition to ten times its time without one.
const LIMIT: Duration = Duration::from_secs(30);
/// Number of models that are tried for a mutant with which one of them does not end.
const HANGS: usize = 2;
const SURVIVORS: &str = "tests/mutants/loom-survivors.txt";
/// Number of attempts to leave out mutants that do not compile.
const BUILDS: usize = 6;

/// One attempt: the variable that selects the mutant, and the mutant's name.
struct Try {
    variable: (&'static str, String),
    key: String,
    /// The models that come by.
    models: Vec<usize>,
}

/// The outcome of an attempt.
enum End {
    /// A model fails: its name, and its message.
    Found(String, String),
    /// A model does not end.
    Hangs(String),
    Survives,
}

/// Which mutants are tried.
#[derive(Debug, PartialEq, Eq)]
struct Choice<'a> {
    /// Number of the first mutant of this run (1 is the first of all); every `of`th one follows.
    part: usize,
    of: usize,
    /// The mutants whose name has one of these in it; all mutants if the list is empty.
    words: &'a [&'a str],
}

impl<'a> Choice<'a> {
    /// Parses `[--part K/N] [NAME...]`.
    fn parse(words: &'a [&'a str]) -> Result<Self, Failure> {
        let (text, words) = match words {
            ["--part", text, words @ ..] => (*text, words),
            ["--part"] => ("", words),
            _ => ("1/1", words),
        };
        let part = text.split_once('/');
        let part = part.and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
        match part {
            Some((part, of)) if (1..=of).contains(&part) => Ok(Self { part, of, words }),
            _ => Err(Failure::new("loom --mutants --part: give K/N, as in 1/4")),
        }
    }

    fn has(&self, number: usize, key: &str) -> bool {
        let named = self.words.is_empty() || self.words.iter().any(|word| key.contains(word));
        named && number % self.of == self.part - 1
    }
}

/// Tries the mutants that `words` choose.
pub fn run(words: &[&str]) -> Result<(), Failure> {
    let choice = Choice::parse(words)?;
    let began = Instant::now();
    let tree = root().join("target/loom-mutants");
    copy_tree(&tree)?;
    let (mutants, mut models) = built(&tree)?;
    let mut reached: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let sites = tree.join("target-sites.txt");
    models.sort_by(|a, b| a.name.cmp(&b.name));
    for (number, model) in models.iter_mut().enumerate() {
        // Absent on the first run.
        let _ = std::fs::remove_file(&sites);
        let began = Instant::now();
        let file = sites.to_string_lossy().into_owned();
        match judged(model, ("NVME_LOOM_SITES", &file), LIMIT * 10)? {
            End::Survives => {}
            _ => return Err(Failure::new(format!("{} fails as it is", model.name))),
        }
        model.took = began.elapsed();
        for place in std::fs::read_to_string(&sites).unwrap_or_default().lines() {
            reached.entry(place.to_string()).or_default().push(number);
        }
    }
    let all = tries(&tree, &mutants, &reached);
    let keys: BTreeSet<String> = all.iter().map(|one| one.key.clone()).collect();
    let tries = all.into_iter().enumerate();
    let tries: Vec<Try> = tries
        .filter(|(number, one)| choice.has(*number, &one.key))
        .map(|(_, one)| one)
        .collect();
    println!(
        "{} of {} mutants, {} models, after {} s",
        tries.len(),
        keys.len(),
        models.len(),
        began.elapsed().as_secs()
    );
    let ends = judge_all(&tries, &models)?;
    println!("after {} s", began.elapsed().as_secs());
    report(&tries, &ends, &keys)
}

/// Builds the tree's models with every mutant in them; mutants that do not compile are left out.
fn built(tree: &Path) -> Result<(Vec<Mutant>, Vec<Model>), Failure> {
    let mut without = BTreeSet::new();
    for _ in 0..BUILDS {
        let mut mutants = Vec::new();
        let mut next = 1;
        for file in FILES {
            let path = root().join(file);
            let source = std::fs::read_to_string(&path)
                .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
            let (text, found) = statements::mutate(file, &source, &mut next, &without);
            let to = tree.join(file);
            // What is the same is not built again.
            if std::fs::read_to_string(&to).ok().as_deref() != Some(&text) {
                std::fs::write(&to, text)
                    .map_err(|error| Failure::new(format!("{}: {error}", to.display())))?;
            }
            mutants.extend(found);
        }
        let mut build = test_command();
        build.current_dir(tree).arg("--no-run");
        println!("$ {}", shown(&build));
        let output = build.stdin(Stdio::null()).output();
        let output = output.map_err(|error| Failure::new(format!("cargo: {error}")))?;
        let told = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return Ok((mutants, models_of(tree, &told)?));
        }
        let refused = refused(tree, &told);
        let before = without.len();
        without.extend(
            mutants
                .into_iter()
                .filter(|mutant| refused.contains(&mutant.number))
                .map(|mutant| mutant.key),
        );
        if without.len() == before {
            return Err(Failure::new(format!("the mutants do not compile:\n{told}")));
        }
        println!("{} mutants do not compile", without.len());
    }
    Err(Failure::new("the mutants do not compile"))
}

/// Returns the mutants in the lines that the compiler's errors name.
fn refused(tree: &Path, told: &str) -> BTreeSet<u32> {
    let places = told
        .lines()
        .filter_map(|line| line.trim().strip_prefix("--> "));
    let mut found = BTreeSet::new();
    for place in places {
        let mut parts = place.split(':');
        let (Some(file), Some(line)) = (parts.next(), parts.next()) else {
            continue;
        };
        let source = std::fs::read_to_string(tree.join(file)).unwrap_or_default();
        let line: usize = line.parse().unwrap_or(0);
        let line = source.lines().nth(line.saturating_sub(1)).unwrap_or("");
        found.extend(statements::numbers_in(line));
    }
    // A line that loses a statement to a mutant may be reported here although only the end of the line is wrong.
    found
}

/// Returns an attempt for every order that a model reaches, and for every statement.
fn tries(tree: &Path, mutants: &[Mutant], reached: &BTreeMap<String, Vec<usize>>) -> Vec<Try> {
    let mut tries = Vec::new();
    for (place, models) in reached.iter().filter(|(place, _)| place.contains('=')) {
        for weak in weaker(place) {
            let key = order_key(tree, &weak);
            tries.push(Try {
                variable: ("NVME_LOOM_WEAKEN", weak),
                key,
                models: models.clone(),
            });
        }
    }
    for mutant in mutants {
        let models = reached.get(&format!("statement {}", mutant.number));
        tries.push(Try {
            variable: ("NVME_LOOM_STATEMENT", mutant.number.to_string()),
            key: mutant.key.clone(),
            models: models.cloned().unwrap_or_default(),
        });
    }
    tries
}

/// Returns `file function: statement as Order`, without the line's number.
fn order_key(tree: &Path, weak: &str) -> String {
    let (place, order) = weak.split_once('=').unwrap_or((weak, ""));
    let (file, line) = place.split_once(':').unwrap_or((place, "1"));
    let line = line.parse::<usize>().unwrap_or(1).saturating_sub(1);
    let folders = ["nvme-core/src", "nvme-gpu-kernel/src", "tests"];
    let source = folders
        .iter()
        .find_map(|folder| found(&tree.join(folder), file));
    let source = source.and_then(|path| std::fs::read_to_string(path).ok());
    let source = source.unwrap_or_default();
    let lines: Vec<&str> = source.lines().collect();
    let text = unwrapped(lines.get(line).copied().unwrap_or(""));
    let function = lines.iter().enumerate().take(line + 1).rev();
    let function = function.filter_map(|(at, line)| {
        let (_, rest) = line
            .trim_start()
            .split_once("fn ")
            .filter(|_| !line.contains("//"))?;
        Some((at, rest.split(['(', '<']).next()?))
    });
    let (from, function) = function.into_iter().next().unwrap_or((0, ""));
    // Equal statements of a function get a number from the second one on, as the keys of statements do.
    let same = lines[from..lines.len().min(line)].iter();
    let number = match same.filter(|line| unwrapped(line) == text).count() {
        0 => String::new(),
        before => format!(" ({})", before + 1),
    };
    format!("{file} {function}: `{text}` as {order}{number}")
}

/// Returns a line without the code that wraps mutants of statements.
fn unwrapped(line: &str) -> &str {
    let text = line.trim();
    match text.split_once("]) { ") {
        Some((_, inner)) if text.starts_with("if !crate") => inner.trim_end_matches(" }"),
        _ => text,
    }
}

fn found(folder: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(path) = found(&path, name) {
                return Some(path);
            }
        } else if path.file_name().is_some_and(|file| file == name) {
            return Some(path);
        }
    }
    None
}

/// Runs each of `tries` with its models, as many at once as there are processors.
fn judge_all(tries: &[Try], models: &[Model]) -> Result<Vec<End>, Failure> {
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let next = Mutex::new(tries.iter().enumerate());
    let ends = Mutex::new(Vec::new());
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let one = next.lock().expect("no panic").next();
                    let Some((number, one)) = one else { return };
                    match judge(one, models) {
                        Ok(end) => {
                            match &end {
                                End::Found(model, says) => println!("{}: {model}: {says}", one.key),
                                End::Hangs(model) => println!("{}: {model} DOES NOT END", one.key),
                                End::Survives => println!("{}: NO MODEL FAILS", one.key),
                            }
                            ends.lock().expect("no panic").push((number, end));
                        }
                        Err(failure) => *failed.lock().expect("no panic") = Some(failure),
                    }
                }
            });
        }
    });
    if let Some(failure) = failed.into_inner().expect("no panic") {
        return Err(failure);
    }
    let mut ends = ends.into_inner().expect("no panic");
    ends.sort_by_key(|(number, _)| *number);
    Ok(ends.into_iter().map(|(_, end)| end).collect())
}

fn judge(one: &Try, models: &[Model]) -> Result<End, Failure> {
    let mut mine: Vec<&Model> = one.models.iter().map(|number| &models[*number]).collect();
    mine.sort_by_key(|model| model.took);
    let (key, value) = &one.variable;
    let mut hangs = Vec::new();
    for model in mine {
        match judged(model, (key, value), model.took * 10 + LIMIT)? {
            End::Survives => {}
            End::Hangs(model) => hangs.push(model),
            found => return Ok(found),
        }
        if hangs.len() >= HANGS {
            break;
        }
    }
    // A failed assertion says more than a time limit, so a time limit is returned only if no model fails by one.
    Ok(hangs.pop().map_or(End::Survives, End::Hangs))
}

/// Returns how a model ends with this variable set.
fn judged(model: &Model, (key, value): (&str, &str), limit: Duration) -> Result<End, Failure> {
    let mut command = Command::new("timeout");
    // The model is killed if it does not end after the limit's signal.
    command.args(["--kill-after", "5"]);
    command.arg(limit.as_secs().max(1).to_string());
    command.arg(&model.program).args(["--exact", &model.name]);
    command
        .env(key, value)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null());
    let output = command.output();
    let output = output.map_err(|error| Failure::new(format!("{}: {error}", shown(&command))))?;
    if output.status.success() {
        return Ok(End::Survives);
    }
    // 137: killed, which `timeout` passes on.
    if matches!(output.status.code(), Some(124 | 137)) {
        return Ok(End::Hangs(model.name.clone()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let says = text
        .lines()
        .skip_while(|line| !line.contains("panicked at"))
        .nth(1);
    let says: String = says.unwrap_or("it fails").chars().take(90).collect();
    Ok(End::Found(model.name.clone(), says))
}

/// Compares the ends with the list of survivors. `keys` are the keys of every mutant, tried or not.
fn report(tries: &[Try], ends: &[End], keys: &BTreeSet<String>) -> Result<(), Failure> {
    let path = root().join(SURVIVORS);
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    let listed = listed(&text)?;
    let mut faults = Vec::new();
    let (mut survivors, mut hangs) = (0, 0);
    for (one, end) in tries.iter().zip(ends) {
        let known = listed.contains_key(&one.key);
        match end {
            End::Survives if known => survivors += 1,
            End::Survives => faults.push(format!("no model fails: {}", one.key)),
            End::Hangs(model) | End::Found(model, _) if known => {
                faults.push(format!("listed, but {model} fails: {}", one.key));
            }
            End::Hangs(model) => {
                hangs += 1;
                println!("found by the time limit of {model}: {}", one.key);
            }
            End::Found(..) => {}
        }
    }
    let gone = listed.keys().filter(|key| !keys.contains(key.as_str()));
    faults.extend(gone.map(|key| format!("listed, but no mutant: {key}")));
    println!(
        "{} mutants: {survivors} survive, each with its reason in {SURVIVORS}; {hangs} found by a time limit alone",
        tries.len()
    );
    if faults.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "loom --mutants:\n{}",
        faults.join("\n")
    )))
}

/// Returns the mutants of a list, each under the heading that is its reason.
fn listed(text: &str) -> Result<BTreeMap<String, String>, Failure> {
    let mut found = BTreeMap::new();
    let mut reason = "";
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        match line.strip_prefix("    ") {
            None => reason = line,
            Some(_) if reason.is_empty() => {
                return Err(Failure::new(format!(
                    "{SURVIVORS}: a reason comes first: {line}"
                )));
            }
            Some(key) => _ = found.insert(key.to_string(), reason.to_string()),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_make_the_whole() {
        let parts = ["1/3", "2/3", "3/3"].map(|part| ["--part", part]);
        let chosen =
            |words: &[&str], number| Choice::parse(words).unwrap().has(number, "sq.rs push");
        for number in 0..10 {
            let count = parts.iter().filter(|part| chosen(*part, number)).count();
            assert_eq!(count, 1);
            assert!(chosen(&[], number) && chosen(&["push"], number) && !chosen(&["ring"], number));
        }
        for wrong in ["0/3", "4/3", "1", "a/b", "1/0"] {
            assert!(Choice::parse(&["--part", wrong]).is_err(), "{wrong}");
        }
        assert!(Choice::parse(&["--part"]).is_err());
    }

    #[test]
    fn a_survivor_has_a_reason() {
        let text =
            "# comment\n\nIt commutes.\n    a.rs f: `x;` left out\n    a.rs f: `y;` left out\n";
        let found = listed(text).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found["a.rs f: `y;` left out"], "It commutes.");
        assert!(listed("    a.rs f: `x;` left out\n").is_err());
        let committed = std::fs::read_to_string(root().join(SURVIVORS)).unwrap();
        assert!(listed(&committed).is_ok());
    }
}
