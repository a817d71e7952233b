//! Checks the module with the tools of a kernel's sources: checkpatch.pl, which must find nothing, and the harness of
//! kselftest.

use super::{EXPORTER_SOURCES, SOURCES};
use crate::guest;
use chores::process::{self, Failure, root, target_dir};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Files that checkpatch reads besides the sources.
const BESIDE: [&str; 3] = ["Kconfig", "dev-nvme-gpu", "selftests/nvme_gpu_test.c"];
/// Checks that do not fit this module: it is built for several kernels, user space includes its interface, and a
/// program reads registers.
const IGNORED: &str = "LINUX_VERSION_CODE,CONSTANT_COMPARISON,BIT_MACRO,ALLOC_WITH_SIZEOF,VOLATILE";
/// The program of kmod/selftests.
const SELFTEST: &str = "nvme_gpu_test";

/// Fails with the findings of checkpatch from the kernel's `sources`, if it has any, and builds the selftest with the
/// kernel's harness.
pub fn check(sources: &Path) -> Result<(), Failure> {
    let script = sources.join("scripts/checkpatch.pl");
    if !script.is_file() {
        return Err(Failure::missing(format!(
            "{} is not here: name the folder of a kernel's sources (on Debian: apt-get install linux-source-6.12)",
            script.display()
        )));
    }
    let mut perl = Command::new("perl");
    perl.arg(&script)
        .args([
            "--no-tree",
            "--strict",
            "--terse",
            "--show-types",
            "--no-summary",
        ])
        .args(["--ignore", IGNORED, "--file"]);
    for (folder, names) in [
        ("kmod", &SOURCES[..]),
        ("kmod", &BESIDE),
        ("tests/guest/exporter", &EXPORTER_SOURCES),
    ] {
        let folder = root().join(folder);
        perl.args(names.iter().map(|name| folder.join(name)));
    }
    process::check(&mut perl)?;
    let folder = target_dir().join("kmod");
    fs::create_dir_all(&folder).map_err(|error| guest::failed(&folder, &error))?;
    let program = folder.join(SELFTEST);
    process::check(&mut selftest(sources, &program))?;
    println!("{}", program.display());
    Ok(())
}

/// Returns the command by which `make -C tools/testing/selftests` would build the test. It is static, for a guest
/// without libraries.
fn selftest(sources: &Path, program: &Path) -> Command {
    let source = root().join("kmod/selftests").join(format!("{SELFTEST}.c"));
    let mut gcc = Command::new("gcc");
    gcc.args(["-Wall", "-Werror", "-O2", "-static", "-I"])
        .arg(root().join("kmod"))
        .arg("-I")
        .arg(sources.join("tools/testing/selftests/timers"))
        .arg("-o")
        .arg(program)
        .arg(source);
    gcc
}
