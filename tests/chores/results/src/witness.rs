//! `cargo xtask witness-check FILE...`: whether witness files can be believed, and their rows for docs/hardware.md.

use chores::process::{Failure, cargo, check};

/// Has the tool check each file.
pub fn command(files: &[&str]) -> Result<(), Failure> {
    if files.is_empty() {
        return Err(Failure::new("usage: cargo xtask witness-check FILE..."));
    }
    for file in files {
        let mut tool = cargo();
        tool.args(["run", "--quiet", "--release", "--package", "nvme-gpu", "--"]);
        check(tool.args(["witness", "--check", file]))?;
    }
    Ok(())
}
