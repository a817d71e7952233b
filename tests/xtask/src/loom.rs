//! Loom: every interleaving of the rings' memory operations, in a build of its own.

use crate::process::{Failure, cargo, cargo_test, root};
use crate::report::Counts;

/// Runs the models and fails when one of them does.
pub fn run() -> Result<(), Failure> {
    let counts = models()?;
    if counts.failed == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("loom: {counts}")))
    }
}

/// Runs every `loom_*` test file of `tests` and `nvme-core`.
pub fn models() -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for (package, folder) in [
        ("nvme-tests", "tests/tests"),
        ("nvme-core", "nvme-core/tests"),
    ] {
        let names = model_files(folder);
        if names.is_empty() {
            continue;
        }
        let mut test = cargo();
        // An own target folder: --cfg loom changes every crate, and would rebuild all at each switch.
        test.env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", root().join("target/loom"));
        test.args(["test", "--release", "--package", package]);
        for name in &names {
            test.args(["--test", name]);
        }
        counts.add(cargo_test(&mut test)?);
    }
    if counts == Counts::default() {
        return Err(Failure::new("loom: no model ran"));
    }
    Ok(counts)
}

fn model_files(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(folder))
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
