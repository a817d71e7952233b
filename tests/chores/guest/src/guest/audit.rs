//! The protocol auditor over the trace of QEMU's controller.

use super::apt::write;
use chores::process::{Failure, check, output, target_dir};
use chores::release::AUDITOR;
use std::path::{Path, PathBuf};
use std::process::Command;

fn auditor() -> Command {
    Command::new(target_dir().join("release").join(AUDITOR.1))
}

/// Returns a file in `folder` with the events that the auditor reads, for QEMU's `-trace events=FILE`.
pub fn events(folder: &Path) -> Result<PathBuf, Failure> {
    let path = folder.join("events");
    write(&path, output(auditor().arg("events"))?.as_bytes())?;
    Ok(path)
}

/// Fails if the log of a controller with these namespaces shows that a rule was broken.
pub fn judge(log: &Path, namespaces: &[u32]) -> Result<(), Failure> {
    let mut audit = auditor();
    audit.arg("qemu").arg(log);
    audit.args(namespaces.iter().map(u32::to_string));
    check(&mut audit)
}
