//! Planted bugs: each patch under tests/mutants is applied to a copy of the tree. The test that it names has to fail by
//! an assertion there, and the protocol auditor has to find what the patch says.
//!
//! A patch begins with `Bug:`, `Carried by:` (which published system has it), `Test:` and `Auditor:`: a
//! rule and the test in whose output it is named, or `no:` and why a wire cannot show it.

use chores::process::{Failure, check, root};
use chores::report::{self, Counts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Patches that are built and tested at the same time, each with its own tree and target folder.
const LANES: usize = 2;
/// Time limit of one test with its build, at the lowest priority beside other stages. A test that hangs has not failed
/// by an assertion.
const LIMIT: Duration = Duration::from_secs(3600);

/// A test as `PACKAGE/TARGET NAME`: the target is `lib` or an integration test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    package: String,
    target: String,
    name: String,
}

/// One planted bug.
struct Planted {
    path: PathBuf,
    number: String,
    bug: String,
    test: Test,
    /// The rule that the auditor has to find, and in which test.
    rule: Option<(String, Test)>,
    /// The files that it changes.
    files: Vec<PathBuf>,
}

/// The outcome for one patch.
struct Verdict {
    line: String,
    found: bool,
}

/// Runs `cargo xtask planted` with its arguments: every patch, or those whose name contains an argument.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let counts = run(words)?;
    if counts.failed == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("planted: {counts}")))
    }
}

/// Runs every patch.
pub fn stage() -> Result<Counts, Failure> {
    run(&[])
}

fn run(only: &[&str]) -> Result<Counts, Failure> {
    let all = patches()?;
    let chosen: Vec<Planted> = all
        .into_iter()
        .filter(|one| only.is_empty() || only.iter().any(|word| one.name().contains(word)))
        .collect();
    if chosen.is_empty() {
        return Err(Failure::new(
            "planted: no patch under tests/mutants has such a name",
        ));
    }
    let began = Instant::now();
    let lanes: Vec<Lane> = (0..LANES.min(chosen.len())).map(Lane::new).collect();
    prepare(&lanes, &chosen)?;
    println!("ready after {:.0} s", began.elapsed().as_secs_f64());
    let next = Mutex::new(by_program(&chosen).into_iter());
    let verdicts = Mutex::new(Vec::new());
    let troubles = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for lane in &lanes {
            let (next, verdicts, troubles) = (&next, &verdicts, &troubles);
            scope.spawn(move || {
                let work = || -> Result<(), Failure> {
                    loop {
                        let group = next.lock().expect("no panic").next();
                        let Some(group) = group else { return Ok(()) };
                        for one in group {
                            let verdict = lane.judge(one)?;
                            println!("{}", verdict.line);
                            verdicts.lock().expect("no panic").push(verdict);
                        }
                    }
                };
                if let Err(failure) = work() {
                    troubles.lock().expect("no panic").push(failure);
                }
            });
        }
    });
    if let Some(trouble) = troubles.into_inner().expect("no panic").pop() {
        return Err(trouble);
    }
    let mut verdicts = verdicts.into_inner().expect("no panic");
    verdicts.sort_by(|a, b| a.line.cmp(&b.line));
    let mut counts = Counts::default();
    println!(
        "\nplanted bugs, after {:.0} s:",
        began.elapsed().as_secs_f64()
    );
    for verdict in &verdicts {
        println!("{}", verdict.line);
        counts.add(if verdict.found {
            Counts::PASSED
        } else {
            report::keep_failures(&verdict.line);
            Counts::FAILED
        });
    }
    Ok(counts)
}

/// Groups the patches by the program of their test, the longest group first: a lane takes a group, so that one lane
/// alone compiles the program. In a group, patches of one file follow each other: the build that removes one patch
/// applies the next.
fn by_program(chosen: &[Planted]) -> Vec<Vec<&Planted>> {
    let mut groups = BTreeMap::<_, Vec<&Planted>>::new();
    for one in chosen {
        let program = (&one.test.package, &one.test.target);
        groups.entry(program).or_default().push(one);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    for group in &mut groups {
        group.sort_by(|a, b| (&a.files, &a.path).cmp(&(&b.files, &b.path)));
    }
    groups
}

/// Copies the tree into each lane. What the tests depend on is compiled once, in the first lane.
fn prepare(lanes: &[Lane], chosen: &[Planted]) -> Result<(), Failure> {
    for lane in lanes {
        copy_tree(&lane.tree)?;
    }
    let Some((first, others)) = lanes.split_first() else {
        return Ok(());
    };
    if others.iter().all(|lane| lane.target.exists()) {
        return Ok(());
    }
    let tests = chosen.iter().map(|one| &one.test);
    let packages: BTreeSet<&str> = tests.map(|test| test.package.as_str()).collect();
    for package in packages {
        let mut build = first.cargo(package);
        check(build.args(["--no-run", "--quiet", "--lib"]))?;
    }
    for lane in others {
        if !lane.target.exists() {
            let mut copy = Command::new("cp");
            check(copy.arg("-a").arg(&first.target).arg(&lane.target))?;
        }
    }
    Ok(())
}

/// Returns the patches in the order of their numbers.
fn patches() -> Result<Vec<Planted>, Failure> {
    let folder = root().join("tests/mutants");
    let entries = std::fs::read_dir(&folder)
        .map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "patch"))
        .collect();
    paths.sort();
    paths.into_iter().map(Planted::read).collect()
}

impl Planted {
    fn read(path: PathBuf) -> Result<Self, Failure> {
        let bad = |why: &str| Failure::new(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(&path).map_err(|error| bad(&error.to_string()))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::trim)
                .ok_or_else(|| bad(&format!("a patch begins with a line {name}")))
        };
        let test = |words: &str| {
            Test::read(words).ok_or_else(|| bad("write a test as PACKAGE/TARGET NAME"))
        };
        field("Carried by:")?;
        let auditor = field("Auditor:")?;
        let rule = match auditor.strip_prefix("no:") {
            Some(_) => None,
            None => {
                let (rule, words) = auditor
                    .split_once(' ')
                    .ok_or_else(|| bad("write Auditor: RULE TEST, or Auditor: no: and why"))?;
                Some((rule.to_string(), test(words)?))
            }
        };
        let files: BTreeSet<PathBuf> = text
            .lines()
            .filter_map(|line| line.strip_prefix("+++ b/"))
            .map(PathBuf::from)
            .collect();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self {
            number: name.split('-').next().unwrap_or_default().to_string(),
            bug: field("Bug:")?.to_string(),
            test: test(field("Test:")?)?,
            rule,
            files: files.into_iter().collect(),
            path: path.clone(),
        })
    }

    fn name(&self) -> String {
        let name = self.path.file_stem().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn verdict(&self, found: bool, what: &str) -> Verdict {
        let word = if found { "found" } else { "NOT FOUND" };
        Verdict {
            line: format!("{} {word:9} {}: {what}", self.number, self.bug),
            found,
        }
    }
}

impl Test {
    fn read(words: &str) -> Option<Self> {
        let (place, name) = words.trim().split_once(' ')?;
        let (package, target) = place.split_once('/')?;
        Some(Self {
            package: package.to_string(),
            target: target.to_string(),
            name: name.trim().to_string(),
        })
    }
}

/// Copies the files that git tracks, or would track, if they differ, so that unchanged files are not built again.
pub fn copy_tree(tree: &Path) -> Result<(), Failure> {
    let mut list = Command::new("git");
    list.args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let names = chores::process::output(&mut list)?;
    let wanted: BTreeSet<&str> = names.split('\0').filter(|name| !name.is_empty()).collect();
    for name in &wanted {
        copy_file(tree, Path::new(name))?;
    }
    remove_others(tree, tree, &wanted)
}

/// Removes the files below `folder` of an earlier copy that the tree no longer has: cargo would find two tests of a name.
fn remove_others(tree: &Path, folder: &Path, wanted: &BTreeSet<&str>) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", folder.display()));
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.strip_prefix(tree).unwrap_or(&path).to_string_lossy();
        if name == "target" {
            continue;
        } else if path.is_dir() {
            remove_others(tree, &path, wanted)?;
        } else if !wanted.contains(&*name) {
            std::fs::remove_file(&path).map_err(failed)?;
        }
    }
    Ok(())
}

/// Makes one file of the copy equal to the file in the tree.
fn copy_file(tree: &Path, name: &Path) -> Result<(), Failure> {
    let (from, to) = (root().join(name), tree.join(name));
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", to.display()));
    let Ok(bytes) = std::fs::read(&from) else {
        // Deleted, and still known to git.
        return Ok(());
    };
    if std::fs::read(&to).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::write(&to, bytes).map_err(failed)
}

/// A copy of the tree in which one patch at a time is applied.
struct Lane {
    tree: PathBuf,
    target: PathBuf,
}

impl Lane {
    fn new(number: usize) -> Self {
        let folder = root().join("target/planted");
        Self {
            tree: folder.join(format!("tree-{number}")),
            target: folder.join(format!("build-{number}")),
        }
    }

    fn judge(&self, one: &Planted) -> Result<Verdict, Failure> {
        let mut apply = Command::new("git");
        // The copy lies inside the repository, but git must not treat it as a part of it.
        apply
            .env("GIT_CEILING_DIRECTORIES", root().join("target/planted"))
            .current_dir(&self.tree)
            .arg("apply")
            .arg(&one.path)
            .stdin(Stdio::null());
        let applied = apply.output();
        let applied = applied.map_err(|error| Failure::new(format!("git apply: {error}")))?;
        let verdict = if applied.status.success() {
            self.judge_applied(one)
        } else {
            let why = String::from_utf8_lossy(&applied.stderr);
            let why = why.lines().next().unwrap_or_default();
            Ok(one.verdict(
                false,
                &format!("the patch no longer applies, refresh it: {why}"),
            ))
        };
        for file in &one.files {
            copy_file(&self.tree, file)?;
        }
        verdict
    }

    fn judge_applied(&self, one: &Planted) -> Result<Verdict, Failure> {
        let output = self.run(&one.test)?;
        let failed = format!("test {} ... FAILED", one.test.name);
        let how = assertion(&output);
        let Some(how) = how.filter(|_| output.lines().any(|line| line.ends_with(&failed[5..])))
        else {
            return Ok(one.verdict(false, &why_not(&output)));
        };
        let Some((rule, test)) = &one.rule else {
            if let Some(finding) = output.lines().find(|line| line.contains("driver: queue ")) {
                let what = format!(
                    "the patch says that no wire shows it, but {}",
                    finding.trim()
                );
                return Ok(one.verdict(false, &what));
            }
            return Ok(one.verdict(
                true,
                &format!("{}: {how}; nothing on the wire", one.test.name),
            ));
        };
        let output = if *test == one.test {
            output
        } else {
            self.run(test)?
        };
        let named = format!(": {rule}, ");
        let finding = output.lines().find(|line| line.contains(&named));
        match finding {
            Some(_) => Ok(one.verdict(true, &format!("{}: {how}; auditor: {rule}", one.test.name))),
            None => {
                let others = output
                    .lines()
                    .filter(|line| line.contains("driver: ") || line.contains("controller: "));
                let others: Vec<&str> = others.take(3).collect();
                let what = format!(
                    "the auditor does not find {rule} in {}: {} {}",
                    test.name,
                    others.join(" | "),
                    why_not(&output)
                );
                Ok(one.verdict(false, &what))
            }
        }
    }

    /// `cargo test` of a package in this lane.
    fn cargo(&self, package: &str) -> Command {
        let mut cargo = Command::new("timeout");
        cargo.arg(LIMIT.as_secs().to_string());
        cargo.arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["test", "--package", package]);
        // Cargo.toml names it to be fast; here it would be compiled for longer than it runs.
        cargo.args([
            "--config",
            "profile.dev.package.nvme-gpu-kernel.opt-level=0",
        ]);
        match package {
            "nvme-tests" => {
                cargo.arg("--no-default-features");
            }
            // Tests of kernels run their source on the host.
            "nvme-gpu-kernel" | "nvme-compute-kernel" => {
                cargo.args(["--features", "lanes"]);
            }
            _ => {}
        }
        cargo
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            // Each bug is compiled once and run once.
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
            .env("CARGO_PROFILE_DEV_DEBUG", "none")
            .env("CARGO_INCREMENTAL", "1")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null());
        cargo
    }

    /// Builds and runs one test; returns everything that was printed.
    fn run(&self, test: &Test) -> Result<String, Failure> {
        let mut cargo = self.cargo(&test.package);
        match test.target.as_str() {
            "lib" => cargo.arg("--lib"),
            name => cargo.args(["--test", name]),
        };
        cargo.args(["--", "--exact", &test.name]);
        let output = cargo.output();
        let output =
            output.map_err(|error| Failure::new(format!("timeout cargo test: {error}")))?;
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let over = output.status.code() == Some(124);
        Ok(if over {
            format!("{text}\nit took longer than {} s\n", LIMIT.as_secs())
        } else {
            text.into_owned()
        })
    }
}

/// Returns the first line of the panic that ended a test.
fn assertion(output: &str) -> Option<String> {
    let mut lines = output
        .lines()
        .skip_while(|line| !line.contains("panicked at"));
    let place = lines
        .next()?
        .split("panicked at ")
        .nth(1)?
        .trim_end_matches(':');
    let what = lines.next().unwrap_or_default();
    let what: String = what.chars().take(60).collect();
    Some(format!("{what} ({place})"))
}

/// Returns the reason why a test did not fail as it should.
fn why_not(output: &str) -> String {
    let told = [
        "error[",
        "error: could not compile",
        "it took longer",
        "0 passed; 0 failed",
        "test result: ok",
    ];
    let line = told
        .iter()
        .find_map(|word| output.lines().find(|line| line.contains(word)));
    line.unwrap_or("it ended without a result").to_string()
}

#[cfg(test)]
mod tests {
    use super::{by_program, patches};

    #[test]
    fn each_patch_is_judged_once_and_a_program_by_one_lane() {
        let all = patches().unwrap();
        let groups = by_program(&all);
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), all.len());
        let mut programs: Vec<_> = groups
            .iter()
            .map(|group| {
                let test = &group[0].test;
                let is_of = |one: &&super::Planted| {
                    (&one.test.package, &one.test.target) == (&test.package, &test.target)
                };
                assert!(group.iter().all(is_of));
                (test.package.clone(), test.target.clone())
            })
            .collect();
        programs.sort();
        programs.dedup();
        assert_eq!(programs.len(), groups.len());
    }
}
