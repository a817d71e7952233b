//! `cargo xtask release`: makes everything that is published, and tries it in clean systems. Nothing is uploaded.
//!
//! It runs by hand on Debian, as root: it takes an hour, and CI has no time for it.

mod crates;
mod debian;
pub mod files;
mod foreign;
mod linked;
mod materials;
mod programs;
mod readme;
mod roots;
mod tools;
mod trials;
mod wheels;

use chores::process::{Failure, check, output, root, target_dir};
use chores::report::Counts;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use tools::ReleaseTools;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The oldest glibc that programs, libraries and wheels run with.
pub const GLIBC: (u32, u32) = (2, 28);

/// An architecture that artefacts are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Its name in targets of Rust, and in the names of artefacts.
    pub rust: &'static str,
    /// Its name in Debian.
    pub debian: &'static str,
}

pub const ARCHITECTURES: [Architecture; 2] = [
    Architecture {
        rust: "x86_64",
        debian: "amd64",
    },
    Architecture {
        rust: "aarch64",
        debian: "arm64",
    },
];

impl Architecture {
    pub fn target(self, library: &str) -> String {
        format!("{}-unknown-linux-{library}", self.rust)
    }

    /// Returns the name that Debian gives to folders of libraries and to tools for this architecture.
    pub fn triplet(self) -> String {
        format!("{}-linux-gnu", self.rust)
    }

    pub fn is_host(self) -> bool {
        self.rust == std::env::consts::ARCH
    }
}

/// Values that the steps share.
pub struct Release {
    /// Folder of the artefacts.
    pub artefacts: PathBuf,
    /// Folder for what is in the making.
    pub work: PathBuf,
    pub tools: ReleaseTools,
    /// Architecture for which artefacts are made now.
    pub architectures: Vec<Architecture>,
    /// Time of the last commit, in seconds: the time that archives give their files.
    pub time: String,
}

type Step = fn(&Release) -> Result<Counts, Failure>;

const STEPS: [(&str, Step); 9] = [
    ("programs", programs::make),
    ("tarballs", programs::pack),
    ("wheels", wheels::make),
    ("packages", debian::make),
    ("materials", materials::make),
    ("crates", crates::publish_dry),
    ("sums", sums),
    ("trials", trials::run),
    ("aarch64", foreign::test),
];

/// `cargo xtask release [--list | [--for ARCHITECTURE] STEP...]`
pub fn command(words: &[&str]) -> Result<(), Failure> {
    if words == ["--list"] {
        STEPS.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(());
    }
    let (architectures, words) = match words {
        ["--for", wanted, rest @ ..] => {
            let of = |one: &Architecture| one.rust == *wanted;
            let found: Vec<Architecture> = ARCHITECTURES.into_iter().filter(of).collect();
            if found.is_empty() {
                return Err(Failure::new(format!(
                    "no artefacts are made for {wanted}; use x86_64 or aarch64"
                )));
            }
            (found, rest)
        }
        rest => (ARCHITECTURES.to_vec(), rest),
    };
    let names = STEPS.map(|(name, _)| name);
    if let Some(unknown) = words.iter().find(|word| !names.contains(word)) {
        return Err(Failure::new(format!(
            "no such step: {unknown}; use {}",
            names.join(", ")
        )));
    }
    let release = Release {
        artefacts: target_dir().join("release-artefacts"),
        work: target_dir().join("release-work"),
        tools: ReleaseTools::prepare()?,
        architectures,
        time: commit_time()?,
    };
    for folder in [&release.artefacts, &release.work] {
        files::make_folder(folder)?;
    }
    let mut failed = Vec::new();
    for (name, step) in STEPS {
        if !words.is_empty() && !words.contains(&name) {
            continue;
        }
        println!("== {name}");
        let start = Instant::now();
        let result = step(&release);
        let seconds = start.elapsed().as_secs();
        match result {
            Ok(counts) if counts.failed == 0 => println!("== {name}: {counts}, {seconds} s"),
            Ok(counts) => failed.push(format!("{name}: {counts}")),
            // Later steps need what this one did not make.
            Err(failure) => return Err(Failure::new(format!("{name}: {failure}"))),
        }
    }
    println!("artefacts: {}", release.artefacts.display());
    match failed.as_slice() {
        [] => Ok(()),
        some => Err(Failure::new(some.join("; "))),
    }
}

fn commit_time() -> Result<String, Failure> {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(root());
    output(&mut git).map(|text| text.trim().to_owned())
}

/// Writes SHA256SUMS of every artefact, as `sha256sum --check` reads it.
fn sums(release: &Release) -> Result<Counts, Failure> {
    let names = files::names(&release.artefacts)?;
    let artefacts = names
        .iter()
        .filter(|name| !NOT_SUMMED.contains(&name.as_str()));
    let mut sum = Command::new("sha256sum");
    sum.args(artefacts).current_dir(&release.artefacts);
    let text = output(&mut sum)?;
    files::write(&release.artefacts.join("SHA256SUMS"), &text)?;
    let mut again = Command::new("sha256sum");
    again.args(["--check", "--quiet", "SHA256SUMS"]);
    check(again.current_dir(&release.artefacts))?;
    Ok(Counts::PASSED)
}

const NOT_SUMMED: [&str; 2] = ["SHA256SUMS", trials::RECORD];

/// Packs `folder` below `within` so that the same files always give the same bytes.
pub fn tar(release: &Release, within: &Path, folder: &str, file: &Path) -> Result<(), Failure> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0"]);
    tar.args(["--numeric-owner", "--use-compress-program=gzip -9n"]);
    tar.arg(format!("--mtime=@{}", release.time)).arg("--file");
    check(tar.arg(file).arg("--directory").arg(within).arg(folder))
}

#[cfg(test)]
mod tests {
    use super::{ARCHITECTURES, command};

    #[test]
    fn an_unknown_step_is_named_before_anything_is_installed() {
        let failure = command(&["wheel"]).unwrap_err().to_string();
        assert!(failure.contains("no such step: wheel"), "{failure}");
        assert!(failure.contains("programs, tarballs, wheels"), "{failure}");
        let failure = command(&["--for", "riscv64"]).unwrap_err().to_string();
        assert!(failure.contains("use x86_64 or aarch64"), "{failure}");
    }

    #[test]
    fn targets_are_those_of_rustc() {
        let [x86, arm] = ARCHITECTURES;
        assert_eq!(x86.target("gnu"), "x86_64-unknown-linux-gnu");
        assert_eq!(arm.target("musl"), "aarch64-unknown-linux-musl");
        assert_eq!(arm.triplet(), "aarch64-linux-gnu");
    }
}
