//! Names the commit that a release is built from, for `nvme-gpu --version`.
//!
//! Taken from NVME_GPU_COMMIT where that is set (a build outside git), else from git. A development build names
//! none: otherwise it would be recompiled after each commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=NVME_GPU_COMMIT");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let given = std::env::var("NVME_GPU_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    let source = match (given, std::env::var("PROFILE").as_deref()) {
        (Some(commit), _) => format!("commit {commit}"),
        (None, Ok("release")) => {
            for file in watched(here) {
                println!("cargo::rerun-if-changed={file}");
            }
            commit(here).map_or("commit unknown".to_owned(), |commit| {
                format!("commit {commit}")
            })
        }
        (None, _) => "development build".to_owned(),
    };
    println!("cargo::rustc-env=NVME_GPU_SOURCE={source}");
}

/// Returns the first 12 digits of the commit that the folder `of` is checked out from, if git tracks it.
pub fn commit(of: &Path) -> Option<String> {
    // A source archive unpacked inside another project's repository is not of that repository's commit.
    git(of, &["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(of, &["rev-parse", "--short=12", "HEAD"])?;
    commit
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then_some(commit)
}

/// Returns the files of git that change with each commit.
pub fn watched(of: &Path) -> Vec<String> {
    let file = |name| {
        let path = git(of, &["rev-parse", "--git-path", name])?;
        let path = of.join(path);
        path.exists().then(|| path.display().to_string())
    };
    ["HEAD", "logs/HEAD"].into_iter().filter_map(file).collect()
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(arguments)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
