//! The module by checkpatch.pl of a kernel's sources, which must find nothing.

use super::{EXPORTER_SOURCES, SOURCES};
use chores::process::{self, Failure, root};
use std::path::Path;
use std::process::Command;

/// Read by checkpatch, beside what is compiled.
const BESIDE: [&str; 2] = ["Kconfig", "dev-nvme-gpu"];
/// What is not for a module that is built for several kernels, and whose interface user space includes.
const IGNORED: &str = "LINUX_VERSION_CODE,CONSTANT_COMPARISON,BIT_MACRO,ALLOC_WITH_SIZEOF";

/// Fails with what checkpatch of the kernel's `sources` says, if it says anything.
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
    process::check(&mut perl)
}
