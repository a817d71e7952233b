//! Line coverage: which lines of each library the tests reach, held to the floors of tests/coverage.txt.

use crate::python;
use chores::process::{Failure, cargo, check, output, root, shown, target_dir};
use chores::tools;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// File that names what is measured, the least share of its lines that must run, and the files that do not count.
const FLOORS: &str = "tests/coverage.txt";
/// Tests whose coverage counts: core and simulator, both together, the simulation, and the host's side; seeds
/// of the fuzz targets do not count.
const TESTS: [&[&str]; 4] = [
    &[
        "--package",
        "nvme-core",
        "--package",
        "nvme-spec",
        "--package",
        "nvme-sim",
        "--features",
        "nvme-core/trace",
    ],
    &[
        "--package",
        "nvme-tests",
        "--package",
        "nvme-simulate",
        "--no-default-features",
    ],
    &[
        "--package",
        "nvme-cuda",
        "--package",
        "nvme-driver",
        "--package",
        "nvme-bench",
        "--package",
        "nvme-doctor",
        "--package",
        "nvme-files",
        "--package",
        "nvme-kv",
        "--package",
        "nvme-kv-server",
        "--package",
        "nvme-store",
        "--package",
        "nvme-host",
        "--package",
        "nvme-gpu",
        "--package",
        "nvme-units",
        "--package",
        "nvme-vfio-user",
        "--package",
        "nvme-ext4",
        "--package",
        "nvme-compute",
        "--package",
        "nvme-models",
        "--package",
        "nvme-search",
        "--package",
        "nvme-course",
        "--package",
        "nvme-compute-kernel",
        // Runs the host's side of CUDA over the stand-in.
        "--package",
        "nvme-gpu-tests",
    ],
    // The programs in C and C++ of these tests load the shared libraries that are built beside them.
    &["--package", "nvme-gpu-capi", "--package", "nvme-gpu-compat"],
];
/// Packages whose libraries the tests of Python load.
const OF_PYTHON: [&str; 3] = ["nvme-gpu-python", "nvme-fake-cuda", "nvme-fake-cufile"];

/// `cargo xtask coverage`
pub fn command() -> Result<(), Failure> {
    let path = root().join(FLOORS);
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    let floors = Floors::read(&text)?;
    let llvm = llvm()?;
    let built = target_dir().join("coverage");
    let raw = built.join("raw");
    if raw.exists() {
        std::fs::remove_dir_all(&raw)
            .map_err(|error| Failure::new(format!("{}: {error}", raw.display())))?;
    }
    let (mut programs, mut low) = (Vec::new(), Vec::new());
    for tests in TESTS {
        let test = |last: &[&str]| {
            let mut test = instrumented(&built);
            test.arg("test")
                .args(tests)
                .args(["--lib", "--tests"])
                .args(last);
            test.env("LLVM_PROFILE_FILE", raw.join("%p-%m.profraw"));
            test
        };
        let told = output(&mut test(&["--no-run", "--message-format=json"]))?;
        programs.extend(executables(&told).chain(libraries(&told)));
        // What a failing test reached is measured too.
        if let Err(failure) = check(&mut test(&["--quiet", "--no-fail-fast"])) {
            low.push(failure.to_string());
        }
    }
    let mut build = instrumented(&built);
    build.arg("build");
    OF_PYTHON.iter().for_each(|package| {
        build.args(["--package", package]);
    });
    check(&mut build)?;
    let debug = built.join("debug");
    match python::measured(&debug, &raw.join("%p-%m.profraw")) {
        Ok(counts) if counts.failed == 0 => (),
        Ok(counts) => low.push(format!("the tests of Python: {counts}")),
        Err(failure) => low.push(failure.to_string()),
    }
    programs.push(debug.join("lib_native.so"));
    let profiles = std::fs::read_dir(&raw)
        .map_err(|error| Failure::new(format!("{}: {error}", raw.display())))?;
    let profiles: Vec<PathBuf> = profiles.flatten().map(|entry| entry.path()).collect();
    let lines = Lines::of(&llvm.lcov(&profiles, &programs)?);
    for (folder, least) in &floors.least {
        let (mut total, mut reached) = (0, 0);
        println!("\n{folder}: lines that no test reaches");
        for (file, found) in lines.under(folder) {
            let missed = found.missed();
            let excepted = floors.excepted(file);
            if !excepted {
                total += found.total();
                reached += found.total() - missed.len();
            }
            if !missed.is_empty() {
                println!(
                    "  {file}: {} of {}{}: {}",
                    missed.len(),
                    found.total(),
                    if excepted { ", excepted" } else { "" },
                    ranges(&missed)
                );
            }
        }
        let share = 100.0 * reached as f64 / total.max(1) as f64;
        println!("{folder}: {reached} of {total} lines, {share:.2} %");
        if share < *least {
            low.push(format!(
                "{folder}: {share:.2} % of the lines, below {least} %"
            ));
        }
    }
    match low.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(low.join("; "))),
    }
}

/// Content of tests/coverage.txt.
#[derive(Debug, Default)]
struct Floors {
    /// Folders, each with the least share of its lines that must run, in percent.
    least: Vec<(String, f64)>,
    /// Files and folders whose lines do not count.
    except: Vec<String>,
}

impl Floors {
    /// Lines `FOLDER PERCENT` and `except PATH: REASON`; what follows # is a comment.
    fn read(text: &str) -> Result<Self, Failure> {
        let mut floors = Self::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            let bad = |why: &str| Failure::new(format!("{FLOORS}:{}: {why}", index + 1));
            let path = |path: &str| match root().join(path).exists() {
                true => Ok(path.to_string()),
                false => Err(bad(&format!("there is no {path}"))),
            };
            if line.is_empty() {
                continue;
            }
            if let Some(rest) = line.strip_prefix("except ") {
                let (name, reason) = rest.split_once(':').unwrap_or((rest, ""));
                if reason.trim().is_empty() {
                    return Err(bad("write: except PATH: REASON"));
                }
                floors.except.push(path(name)?);
                continue;
            }
            let (folder, least) = line.split_once(' ').unwrap_or((line, ""));
            let least = least.trim().parse::<f64>().ok();
            let least = least.filter(|least| (0.0..=100.0).contains(least));
            let least = least.ok_or_else(|| bad("write: FOLDER PERCENT"))?;
            floors.least.push((path(folder)?, least));
        }
        Ok(floors)
    }

    fn excepted(&self, file: &str) -> bool {
        let file = Path::new(file);
        self.except.iter().any(|path| file.starts_with(path))
    }
}

/// Returns a cargo whose programs count which lines run.
pub fn instrumented(built: &Path) -> Command {
    let mut command = cargo();
    command
        .env("RUSTFLAGS", "-Cinstrument-coverage")
        .env("CARGO_TARGET_DIR", built)
        // Build scripts and macros are instrumented, too. Without this line they would write their profiles where
        // cargo was started.
        .env("LLVM_PROFILE_FILE", built.join("of-the-build/%m.profraw"))
        // What is built runs once.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_INCREMENTAL", "0");
    command
}

/// Returns the paths of the programs that cargo's output with `--message-format=json` names.
fn executables(told: &str) -> impl Iterator<Item = PathBuf> {
    let parts = told.split("\"executable\":\"").skip(1);
    parts.filter_map(|part| part.split('"').next().map(PathBuf::from))
}

/// Returns the paths of the shared libraries of the C interface that cargo's output names.
fn libraries(told: &str) -> impl Iterator<Item = PathBuf> {
    let files = told.split('"').filter(|text| {
        let name = text.rsplit('/').next().unwrap_or_default();
        name.starts_with("libnvme_gpu_") && name.ends_with(".so")
    });
    files.map(PathBuf::from)
}

/// LLVM's tools, of the version with which rustc instruments.
pub struct Llvm {
    pub cov: PathBuf,
    pub profdata: PathBuf,
}

/// Finds the tools of LLVM, or installs them.
pub fn llvm() -> Result<Llvm, Failure> {
    let told = output(Command::new("rustc").arg("-vV"))?;
    let version = told
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: "));
    let major = version.and_then(|version| version.split('.').next());
    let major = major.ok_or_else(|| Failure::new("rustc -vV names no LLVM version"))?;
    let cov = tools::llvm("llvm-cov", major)?;
    Ok(Llvm {
        profdata: cov.with_file_name("llvm-profdata"),
        cov,
    })
}

impl Llvm {
    /// Returns the counts of raw profiles of `programs`, in the lcov format.
    ///
    /// Exports the programs one by one. If llvm-cov gets several, it takes the first record of a function, and a
    /// program that never calls an inlined function has a record of it without counts.
    pub fn lcov(&self, raw: &[PathBuf], programs: &[PathBuf]) -> Result<String, Failure> {
        let merged = target_dir().join("coverage/merged.profdata");
        check(
            Command::new(&self.profdata)
                // One test limits the size of files, which cuts the profile of its program short.
                .args(["merge", "-sparse", "-failure-mode=all", "-o"])
                .arg(&merged)
                .args(raw),
        )?;
        let mut profile = std::ffi::OsString::from("-instr-profile=");
        profile.push(&merged);
        let mut lcov = String::new();
        for program in programs {
            let mut export = Command::new(&self.cov);
            export.args(["export", "-format=lcov"]).arg(&profile);
            lcov += &exported(export.arg(program))?;
        }
        Ok(lcov)
    }
}

/// Returns the output of `llvm-cov export`; empty for a program that has no code in this build, such as the models for
/// loom.
fn exported(export: &mut Command) -> Result<String, Failure> {
    let told = export.output();
    let told = told.map_err(|error| Failure::new(format!("{}: {error}", shown(export))))?;
    let errors = String::from_utf8_lossy(&told.stderr);
    if !told.status.success() && !errors.contains("no coverage data found") {
        return Err(Failure::new(format!(
            "{}: {}",
            shown(export),
            errors.trim()
        )));
    }
    Ok(String::from_utf8_lossy(&told.stdout).into_owned())
}

/// Number of runs of each line of a file, without its test modules.
#[derive(Default)]
pub struct File(BTreeMap<u32, u64>);

impl File {
    pub fn total(&self) -> usize {
        self.0.len()
    }

    /// Lines that never ran.
    pub fn missed(&self) -> Vec<u32> {
        let never = self.0.iter().filter(|(_, count)| **count == 0);
        never.map(|(line, _)| *line).collect()
    }
}

/// The files of the repository, by path.
pub struct Lines(BTreeMap<String, File>);

impl Lines {
    /// Reads the lcov format.
    pub fn of(lcov: &str) -> Self {
        let mut files = BTreeMap::<String, File>::new();
        let (mut name, mut end) = (None, u32::MAX);
        for line in lcov.lines() {
            if let Some(path) = line.strip_prefix("SF:") {
                let path = Path::new(path).strip_prefix(root()).ok();
                name = path.map(|path| path.display().to_string());
                end = name.as_ref().map_or(0, |name| tests_begin(name));
            } else if let (Some(name), Some(data)) = (&name, line.strip_prefix("DA:")) {
                let mut numbers = data.split(',');
                let mut number = || numbers.next()?.parse::<u64>().ok();
                if let (Some(line), Some(count)) = (number(), number())
                    && (line as u32) < end
                {
                    let file = files.entry(name.clone()).or_default();
                    let sum = file.0.entry(line as u32).or_default();
                    *sum = sum.saturating_add(count);
                }
            }
        }
        Self(files)
    }

    pub fn of_file(&self, name: &str) -> Option<&File> {
        self.0.get(name)
    }

    /// Returns the files under a folder.
    fn under(&self, folder: &str) -> impl Iterator<Item = (&String, &File)> {
        let inside = move |name: &String| Path::new(name).starts_with(folder);
        self.0.iter().filter(move |(name, _)| inside(name))
    }
}

/// Returns the line where a file's tests begin. Tests are not measured.
fn tests_begin(name: &str) -> u32 {
    let text = |file: &Path| std::fs::read_to_string(root().join(file)).unwrap_or_default();
    let path = Path::new(name);
    let folder = path.parent().unwrap_or(path);
    let above = [
        folder.with_extension("rs"),
        folder.join("mod.rs"),
        folder.join("lib.rs"),
    ];
    let module = path.file_stem().unwrap_or_default().to_string_lossy();
    let tests = name.contains("/tests/");
    match tests || above.iter().any(|file| tests_in(&text(file), &module)) {
        true => 0,
        false => first_test_line(&text(path)),
    }
}

/// Returns whether a line is a condition that is true in tests alone.
fn is_test(line: &str) -> bool {
    line.starts_with("#[cfg(") && line.contains("test")
}

/// Returns whether a file declares `module`, which has its own file, for tests alone.
fn tests_in(text: &str, module: &str) -> bool {
    let declared = format!("mod {module};");
    let lines: Vec<&str> = text.lines().collect();
    let mut pairs = lines.windows(2);
    pairs.any(|pair| is_test(pair[0]) && pair[1] == declared)
}

fn first_test_line(text: &str) -> u32 {
    let lines: Vec<&str> = text.lines().collect();
    let module = lines
        .windows(2)
        .position(|pair| is_test(pair[0]) && pair[1].starts_with("mod "));
    module.map_or(u32::MAX, |index| index as u32 + 1)
}

/// Writes line numbers as ranges, such as `3-5, 9`.
pub fn ranges(lines: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &line in lines {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == line => *last = line,
            _ => parts.push((line, line)),
        }
    }
    let shown = parts.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    match parts.is_empty() {
        true => "none".to_string(),
        false => shown.collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_the_same_line_add_up() {
        let file = root().join("tests/chores/src/report.rs");
        let lcov = format!(
            "SF:{0}\nDA:5,0\nDA:6,2\nend_of_record\nSF:{0}\nDA:5,1\nDA:7,0\nSF:/elsewhere\nDA:1,0\n",
            file.display()
        );
        let lines = Lines::of(&lcov);
        assert_eq!(lines.0.len(), 1);
        let found = lines.of_file("tests/chores/src/report.rs").unwrap();
        assert_eq!((found.total(), found.missed()), (3, vec![7]));
    }

    #[test]
    fn lines_of_tests_do_not_count() {
        let text = "fn a() {}\n#[cfg(test)]\nuse x;\n#[cfg(all(test, not(loom)))]\nmod tests {\n";
        assert_eq!(first_test_line(text), 4);
        assert_eq!(first_test_line("fn a() {}\n"), u32::MAX);
        assert!(tests_in("mod a;\n#[cfg(test)]\nmod held;\n", "held"));
        assert!(!tests_in("#[cfg(test)]\nmod held;\nmod a;\n", "a"));
        assert_eq!(tests_begin("sim/src/memory/host/peer_reads.rs"), 0);
        assert_eq!(tests_begin("sim/src/command/nvm/tests/media.rs"), 0);
        assert_eq!(tests_begin("sim/src/testing.rs"), 0);
        assert!(tests_begin("sim/src/memory/host.rs") > 100);
    }

    #[test]
    fn floors_are_read_and_mistakes_in_them_named() {
        let text = "# floors\nsim/src 95.5 # all\n\nexcept sim/src/memory: another's\n";
        let floors = Floors::read(text).unwrap();
        assert_eq!(floors.least, [("sim/src".to_string(), 95.5)]);
        assert!(floors.excepted("sim/src/memory/host.rs"));
        assert!(!floors.excepted("sim/src/memory.rs"));
        for wrong in [
            "sim/src",
            "sim/src ninety",
            "sim/src 101",
            "no/such 5",
            "except sim/src/bus/queue.rs",
            "except no/such.rs: gone",
        ] {
            let failure = Floors::read(wrong).unwrap_err().to_string();
            assert!(failure.contains("coverage.txt:1"), "{failure}");
        }
    }

    #[test]
    fn the_committed_floors_can_be_read() {
        let text = std::fs::read_to_string(root().join(FLOORS)).unwrap();
        let floors = Floors::read(&text).unwrap();
        assert!(
            floors
                .least
                .iter()
                .any(|(folder, _)| folder == "host-shell/driver/src")
        );
    }

    #[test]
    fn programs_are_found_in_what_cargo_tells() {
        let told = r#"{"executable":null}\n{"a":1,"executable":"/t/a-1"}\n{"executable":"/t/b"}"#;
        let found: Vec<PathBuf> = executables(told).collect();
        assert_eq!(found, [PathBuf::from("/t/a-1"), PathBuf::from("/t/b")]);
    }

    #[test]
    fn ranges_are_short() {
        assert_eq!(ranges(&[1, 3, 4, 5, 9]), "1, 3-5, 9");
        assert_eq!(ranges(&[]), "none");
    }
}
