//! What of ours runs in the guest, linked statically: the guest has no libraries for it.

use crate::process::{Failure, cargo, check, target_dir};
use std::path::PathBuf;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Package and program.
pub const PROGRAMS: [(&str, &str); 2] = [("nvme-gpu", "nvme-gpu"), ("guest-tests", "guest-tests")];

/// Builds the programs and returns the folder that they are in.
pub fn build() -> Result<PathBuf, Failure> {
    let target = target_dir().join("guest/build");
    let mut build = cargo();
    build
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env("CARGO_TARGET_DIR", &target)
        // The initramfs is loaded at every boot: no debugging information, and none is made.
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env("CARGO_PROFILE_RELEASE_STRIP", "debuginfo")
        .args(["build", "--quiet", "--release", "--target", TARGET]);
    for (package, program) in PROGRAMS {
        build.args(["--package", package, "--bin", program]);
    }
    check(&mut build)?;
    Ok(target.join(TARGET).join("release"))
}
