//! This workspace's programs in the guest: the release programs without their debugging information, because the
//! initramfs is loaded at every boot. Their libraries are in its base.

use super::apt::make_folder;
use chores::process::{Failure, output, target_dir};
use chores::release::{self, AUDITOR, IN_GUEST, OF_NODE, Program, STAND_IN_FILE, TOOL};
use chores::tools::on_path;
use std::path::PathBuf;
use std::process::Command;

/// Package and program name of each program in the guest.
pub const PROGRAMS: [Program; 3] = [TOOL, IN_GUEST, OF_NODE];

/// Builds the programs, and the auditor that judges traces here, and returns the folder that they are in.
pub fn build() -> Result<PathBuf, Failure> {
    if on_path("strip").is_none() {
        return Err(Failure::missing(
            "strip is not here: apt-get install binutils",
        ));
    }
    let built = release::build(&[TOOL, IN_GUEST, OF_NODE, AUDITOR])?;
    let folder = target_dir().join("guest/programs");
    make_folder(&folder)?;
    let programs = PROGRAMS.map(|(_, program)| program);
    for program in programs.into_iter().chain([STAND_IN_FILE]) {
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o");
        output(strip.arg(folder.join(program)).arg(built.join(program)))?;
    }
    Ok(folder)
}
