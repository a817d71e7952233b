//! The release programs that several stages run. Two commands build them, so that code that the programs of one command
//! share is compiled once. The first command has the features of `cargo run --release -- demo`, so that README's first
//! command compiles nothing again; the second has the kernels' source for the host, which changes the features of the
//! core.

use crate::process::{Failure, cargo, check, target_dir};
use std::path::PathBuf;

/// Package and program.
pub type Program = (&'static str, &'static str);

pub const TOOL: Program = ("nvme-gpu", "nvme-gpu");
pub const IN_GUEST: Program = ("guest-tests", "guest-tests");
pub const OF_NODE: Program = ("guest-tests", "node-tests");
pub const STRESS: Program = ("nvme-stress", "nvme-stress");
pub const AUDITOR: Program = ("nvme-auditor", "nvme-auditor");
pub const SIMULATE: Program = ("nvme-simulate", "simulate");
/// The stand-in for CUDA's driver, a library.
pub const STAND_IN: &str = "nvme-fake-cuda";
pub const STAND_IN_FILE: &str = "libnvme_fake_cuda.so";
/// Programs that the stages of `cargo xtask test` run.
pub const ALL: [Program; 6] = [TOOL, IN_GUEST, OF_NODE, STRESS, AUDITOR, SIMULATE];

/// Builds `programs` and the stand-in of CUDA, and returns the folder that they are in.
pub fn build(programs: &[Program]) -> Result<PathBuf, Failure> {
    let (with_kernels, plain): (Vec<Program>, Vec<Program>) =
        programs.iter().partition(|program| **program == SIMULATE);
    let build = |programs: &[Program]| {
        let mut build = cargo();
        build.args(["build", "--quiet", "--release"]);
        for (package, program) in programs {
            build.args(["--package", package, "--bin", program]);
        }
        build
    };
    check(&mut build(&plain))?;
    check(build(&with_kernels).args(["--package", STAND_IN, "--lib"]))?;
    Ok(target_dir().join("release"))
}
