//! Clean systems of Debian in a folder: made by mmdebstrap once, unpacked anew for each trial.

use super::{Architecture, Release, files};
use chores::process::{Failure, NETWORK, check, check_retried};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Suites that artefacts are tried in.
pub const SUITES: [&str; 2] = ["stable", "testing"];
/// Longest time of one trial: programs of another architecture are emulated.
const LONGEST: &str = "2400";
/// Enters the mount namespace of a trial; its mounts end with its last process.
const ENTER: &str = "mount -t proc proc \"$1/proc\" && mount --rbind /dev \"$1/dev\" && \
    cp -L /etc/resolv.conf \"$1/etc/resolv.conf\" && exec chroot \"$1\" /bin/sh -eu \"$2\"";

/// A suite for an architecture.
#[derive(Clone, Copy, Debug)]
pub struct CleanRoot {
    pub suite: &'static str,
    pub architecture: Architecture,
}

impl CleanRoot {
    pub fn all(release: &Release) -> impl Iterator<Item = Self> {
        release.architectures.iter().flat_map(|&architecture| {
            SUITES.map(|suite| Self {
                suite,
                architecture,
            })
        })
    }

    pub fn name(self) -> String {
        format!("Debian {} {}", self.suite, self.architecture.debian)
    }

    /// Returns the archive of the system, made on its first use.
    fn archive(self, release: &Release) -> Result<PathBuf, Failure> {
        let name = format!("root-{}-{}.tar", self.suite, self.architecture.debian);
        let archive = release.work.join(name);
        if archive.is_file() {
            return Ok(archive);
        }
        if !self.architecture.is_host() {
            emulate()?;
        }
        let new = archive.with_extension("new.tar");
        let mut make = Command::new("mmdebstrap");
        make.args(["--variant=apt", "--include=ca-certificates"]);
        make.arg(format!("--architectures={}", self.architecture.debian));
        // A mirror that is a snapshot is older than its own validity date; the signature still counts.
        make.arg("--aptopt=Acquire::Check-Valid-Until \"false\"");
        make.arg("--aptopt=Acquire::Retries \"5\"");
        check_retried(make.arg(self.suite).arg(&new), &NETWORK[..1])?;
        std::fs::rename(&new, &archive)
            .map_err(|error| Failure::new(format!("{}: {error}", new.display())))?;
        Ok(archive)
    }

    /// Runs `script` in a fresh system; `given` are files that it finds in /given.
    pub fn run(self, release: &Release, script: &str, given: &[PathBuf]) -> Result<(), Failure> {
        let archive = self.archive(release)?;
        let root = release.work.join("root");
        files::empty_folder(&root)?;
        let mut unpack = Command::new("tar");
        unpack.args(["--extract", "--file"]).arg(&archive);
        check(unpack.arg("--directory").arg(&root))?;
        for file in given {
            let name = file.file_name().unwrap_or_default();
            files::copy(file, &root.join("given").join(name), 0o644)?;
        }
        files::write(&root.join("given/trial.sh"), script)?;
        let mut run = Command::new("timeout");
        run.args([
            LONGEST,
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
        ]);
        run.args(["--propagation", "private", "sh", "-c", ENTER, "sh"]);
        run.arg(&root).arg("/given/trial.sh");
        run.env_clear().envs([
            (
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            ),
            ("HOME", "/root"),
            ("LC_ALL", "C.UTF-8"),
            ("DEBIAN_FRONTEND", "noninteractive"),
        ]);
        let result = check(&mut run);
        remove(&root)?;
        result
    }
}

fn remove(root: &Path) -> Result<(), Failure> {
    // Mounts are private to the trial, so that nothing of this machine can be below the folder.
    check(
        Command::new("rm")
            .args(["-rf", "--one-file-system"])
            .arg(root),
    )
}

/// Lets this machine run programs of other architectures, by qemu-user.
pub fn emulate() -> Result<(), Failure> {
    let folder = Path::new("/proc/sys/fs/binfmt_misc");
    if !folder.join("register").exists() {
        let mut mount = Command::new("mount");
        check(mount.args(["-t", "binfmt_misc", "binfmt_misc"]).arg(folder))?;
    }
    match folder.join("qemu-aarch64").exists() {
        true => Ok(()),
        false => check(Command::new("update-binfmts").args(["--enable", "qemu-aarch64"])),
    }
}
