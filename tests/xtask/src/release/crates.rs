//! The crates, as crates.io would take them: packed, compiled from the packed sources, and with what their pages show.

use super::{Release, files};
use crate::packages;
use chores::process::{Failure, cargo, check, output, root, target_dir};
use chores::report::Counts;
use std::path::PathBuf;

/// Keys of a manifest that crates.io shows.
const SHOWN: [&str; 5] = ["description", "license", "readme", "keywords", "categories"];

/// Publishes all crates in the order of their dependencies, without the upload.
pub fn publish_dry(_: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    let mut publish = cargo();
    publish.args(["publish", "--dry-run", "--locked"]);
    for package in packages::published() {
        let missing = lacks(&files::read(&manifest(package)?)?);
        if !missing.is_empty() {
            let missing = missing.join(", ");
            return Err(Failure::new(format!(
                "the page of {package} would have no {missing}"
            )));
        }
        publish.args(["--package", package]);
        counts.add(Counts::PASSED);
    }
    publish.env("CARGO_PROFILE_DEV_DEBUG", "0");
    check(
        publish
            .arg("--target-dir")
            .arg(target_dir().join("release-crates")),
    )?;
    Ok(counts)
}

fn manifest(package: &str) -> Result<PathBuf, Failure> {
    let mut locate = cargo();
    locate.args(["pkgid", "--package", package]);
    let id = output(locate.current_dir(root()))?;
    let folder = id
        .trim()
        .strip_prefix("path+file://")
        .and_then(|rest| rest.split('#').next());
    folder
        .map(|folder| PathBuf::from(folder).join("Cargo.toml"))
        .ok_or_else(|| Failure::new(format!("cargo pkgid says {id:?} of {package}")))
}

fn lacks(manifest: &str) -> Vec<&'static str> {
    let has = |key: &&str| {
        let starts = |line: &str| {
            let rest = line.strip_prefix(*key).map(str::trim_start);
            rest.is_some_and(|rest| rest.starts_with('=') || rest.starts_with(".workspace"))
        };
        manifest.lines().any(starts)
    };
    SHOWN.into_iter().filter(|key| !has(key)).collect()
}

#[cfg(test)]
mod tests {
    use super::lacks;

    #[test]
    fn what_a_page_would_lack_is_named() {
        let text = "description = \"a\"\nlicense.workspace = true\nreadme = \"b\"\nkeywords = []\n";
        assert_eq!(lacks(text), ["categories"]);
        assert_eq!(lacks("descriptions = 1"), super::SHOWN);
    }
}
