//! Trials of the artefacts in clean systems. Each prints a row for docs/install.md, and is recorded beside the artefacts.

use super::programs::archive;
use super::roots::CleanRoot;
use super::{ARCHITECTURES, Architecture, Release, debian, files, readme, wheels};
use chores::process::{Failure, check, output, root};
use chores::report::Counts;
use std::path::PathBuf;
use std::process::Command;

/// File with a row for each trial: date, place, artefact, outcome.
pub const RECORD: &str = "trials.tsv";
/// Versions of Python that the wheel is tried in, 3.N; a version that is not on this machine is skipped.
const PYTHONS: std::ops::RangeInclusive<u32> = 10..=14;
/// Most seconds from `pip install` to the first row.
const MOST_SECONDS: &str = "60";

/// What is tried in each clean system: a name, the script, and the files that it needs.
struct Trial {
    artefact: &'static str,
    script: String,
    given: Vec<PathBuf>,
}

/// Tries everything; NVME_GPU_TRIALS=WORD takes those whose row has the word.
pub fn run(release: &Release) -> Result<Counts, Failure> {
    let chosen = std::env::var("NVME_GPU_TRIALS").unwrap_or_default();
    let mut counts = Counts::default();
    for clean in CleanRoot::all(release) {
        for trial in of_system(release, clean.architecture)? {
            let row = format!("{}\t{}", clean.name(), trial.artefact);
            if row.contains(&chosen) {
                let result = clean.run(release, &trial.script, &trial.given);
                counts.add(record(release, &row, result.map(|()| String::new()))?);
            }
        }
    }
    let host = release.architectures.iter().any(|one| one.is_host());
    for minor in PYTHONS.filter(|_| host) {
        let row = format!("CPython 3.{minor} {}\twheel", std::env::consts::ARCH);
        if row.contains(&chosen) {
            let result = in_python(release, minor);
            counts.add(record(release, &row, result)?);
        }
    }
    Ok(counts)
}

/// Records a trial; a result is what it has measured, or nothing.
fn record(
    release: &Release,
    row: &str,
    result: Result<String, Failure>,
) -> Result<Counts, Failure> {
    let (outcome, counts) = match result {
        Ok(measured) if measured.is_empty() => ("passed".to_owned(), Counts::PASSED),
        Ok(measured) => (format!("passed: {measured}"), Counts::PASSED),
        Err(failure) if failure.missing_tool => (format!("skipped: {failure}"), Counts::default()),
        Err(failure) => (format!("failed: {failure}"), Counts::FAILED),
    };
    let today = output(Command::new("date").args(["--utc", "+%F"]))?;
    let line = format!("{}\t{row}\t{outcome}\n", today.trim());
    print!("{line}");
    let path = release.artefacts.join(RECORD);
    let before = files::read(&path).unwrap_or_default();
    // A later trial of the same replaces the earlier one.
    let same = |known: &&str| !known.contains(&format!("\t{row}\t"));
    let mut text: String = before
        .lines()
        .filter(same)
        .map(|known| format!("{known}\n"))
        .collect();
    text += &line;
    files::write(&path, &text)?;
    Ok(counts)
}

fn of_system(release: &Release, architecture: Architecture) -> Result<Vec<Trial>, Failure> {
    let artefact = |name: String| release.artefacts.join(name);
    let package = |name: &str| artefact(debian::file_name(name, architecture.debian));
    let smoke = readme::first_command()?;
    let archived = |library: &str| Trial {
        artefact: if library == "musl" {
            "archive, musl"
        } else {
            "archive, glibc"
        },
        script: include_str!("trials/archive.sh").replace("@SMOKE@", &smoke),
        given: vec![artefact(format!(
            "{}.tar.gz",
            archive(architecture, library)
        ))],
    };
    let mut trials = vec![
        Trial {
            artefact: "nvme-gpu.deb",
            script: include_str!("trials/tool.sh").replace("@SMOKE@", &smoke),
            given: vec![package("nvme-gpu")],
        },
        archived("gnu"),
        archived("musl"),
        Trial {
            artefact: "libnvme-gpu-dev.deb",
            script: include_str!("trials/library.sh").replace("@BLOCK@", &readme::block("c")?),
            given: ["libnvme-gpu1", "libnvme-gpu-compat0", "libnvme-gpu-dev"]
                .map(package)
                .to_vec(),
        },
        Trial {
            artefact: "wheel",
            script: include_str!("trials/wheel.sh").replace("@BLOCK@", &readme::block("python")?),
            given: vec![artefact(wheels::name(architecture))],
        },
    ];
    if architecture == ARCHITECTURES[0] {
        let rule = root().join("kmod/60-nvme-gpu.rules");
        trials.push(Trial {
            artefact: "nvme-gpu-dkms.deb",
            script: include_str!("trials/module.sh").to_owned(),
            given: vec![artefact(debian::file_name("nvme-gpu-dkms", "all")), rule],
        });
    }
    Ok(trials)
}

/// Installs the wheel with what it depends on into a new environment of Python 3.`minor`, and runs README's example.
/// Returns the time to the first row, in words.
fn in_python(release: &Release, minor: u32) -> Result<String, Failure> {
    let host = ARCHITECTURES.into_iter().find(|one| one.is_host());
    let host = host.ok_or_else(|| Failure::missing("no wheel is for this machine"))?;
    let python = python(minor)?;
    let folder = release.work.join(format!("python-3.{minor}"));
    let script = release.work.join("first_row.sh");
    files::write(&script, include_str!("trials/first_row.sh"))?;
    let mut install = Command::new("sh");
    install.arg(script).arg(python);
    install.arg(release.artefacts.join(wheels::name(host)));
    let said = output(install.arg(&folder).arg(MOST_SECONDS))?;
    println!("{said}");
    let example = release.work.join("readme.py");
    files::write(&example, &readme::block("python")?)?;
    let mut run = Command::new(folder.join("bin/python"));
    check(run.arg(example).current_dir(&release.work))?;
    Ok(said.trim().to_owned())
}

/// Returns a Python 3.`minor`: on the path, or one of pyenv's.
fn python(minor: u32) -> Result<PathBuf, Failure> {
    let name = format!("python3.{minor}");
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .unwrap_or_default();
    let versions = home.join(".pyenv/versions");
    let prefix = format!("3.{minor}.");
    let of_pyenv = files::names(&versions).unwrap_or_default().into_iter();
    let of_pyenv = of_pyenv.filter(|version| version.starts_with(&prefix));
    let mut found: Vec<PathBuf> = of_pyenv
        .map(|version| versions.join(version).join("bin").join(&name))
        .collect();
    found.extend(chores::tools::on_path(&name));
    let answers = |python: &PathBuf| {
        let asked = Command::new(python).arg("--version").output();
        asked.is_ok_and(|done| done.status.success())
    };
    found
        .into_iter()
        .find(answers)
        .ok_or_else(|| Failure::missing(format!("{name} is not on this machine")))
}
