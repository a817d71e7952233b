//! The release programs that several stages run, built by one command: what they have in common is compiled
//! once, which separate commands, with separate unions of features, would not do.

use crate::process::{Failure, cargo, check, target_dir};
use std::path::PathBuf;
use std::process::Command;

/// Package and program.
pub type Program = (&'static str, &'static str);

pub const TOOL: Program = ("nvme-gpu", "nvme-gpu");
pub const IN_GUEST: Program = ("guest-tests", "guest-tests");
pub const STRESS: Program = ("nvme-stress", "nvme-stress");
pub const SIMULATE: Program = ("nvme-simulate", "simulate");
/// What the stages of `cargo xtask test` run.
pub const ALL: [Program; 4] = [TOOL, IN_GUEST, STRESS, SIMULATE];

/// As users build it, but for what is not of the workspace: nothing there takes time here. Without names and
/// lines. What shares the folder of release builds has to be built alike, or it is compiled twice.
///
/// Level 0, since `"*"` stands for compilers' plugins, too, which cargo compiles at level 0 otherwise.
pub fn lighter(build: &mut Command) -> &mut Command {
    for (package, level) in [("\"*\"", 0), ("xxhash-rust", 3)] {
        let level = format!("profile.release.package.{package}.opt-level={level}");
        build.args(["--config", &level]);
    }
    build.env("CARGO_PROFILE_RELEASE_DEBUG", "0")
}

/// Builds `programs` and returns the folder that they are in.
pub fn build(programs: &[Program]) -> Result<PathBuf, Failure> {
    let mut build = cargo();
    lighter(build.args(["build", "--quiet", "--release"]));
    for (package, program) in programs {
        build.args(["--package", package, "--bin", program]);
    }
    check(&mut build)?;
    Ok(target_dir().join("release"))
}
