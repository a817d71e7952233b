//! Tools that are not Rust packages of the workspace: found, or installed, or named.

use crate::process::{Failure, cargo, check, output, target_dir};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// ptxas, cuobjdump: the assembler that reads what the NVPTX back end wrote.
const NVCC_PACKAGE: &str = "nvidia-cuda-nvcc==13.5.37";
const CARGO_FUZZ: &str = "0.13.2";

/// Looks a program up on PATH.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Whether this process may install packages.
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").stderr(Stdio::null()).output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}

/// Installs Debian packages as root; otherwise says the line that does.
pub fn apt(packages: &[&str], why: &str) -> Result<(), Failure> {
    let line = format!(
        "apt-get install -y --no-install-recommends {}",
        packages.join(" ")
    );
    if !is_root() || on_path("apt-get").is_none() {
        return Err(Failure::missing(format!("{why}; as root run: {line}")));
    }
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        apt
    };
    let installed = check(apt().args(["update", "-qq"])).and_then(|()| {
        check(
            apt()
                .args(["install", "-y", "-qq", "--no-install-recommends"])
                .args(packages),
        )
    });
    installed.map_err(|failure| Failure::missing(format!("{why}; {failure}; tried: {line}")))
}

/// `ptxas`: $PTXAS, PATH, the CUDA toolkit's usual place, or the pip package under the target folder.
pub fn ptxas() -> Result<PathBuf, Failure> {
    let folder = target_dir().join("tools/python");
    let packaged = || {
        let nvidia = std::fs::read_dir(folder.join("nvidia")).ok()?;
        nvidia
            .flatten()
            .map(|entry| entry.path().join("bin/ptxas"))
            .find(|file| file.is_file())
    };
    let here = std::env::var_os("PTXAS")
        .map(PathBuf::from)
        .or_else(packaged)
        .or_else(|| on_path("ptxas"))
        .or_else(|| Some(PathBuf::from("/usr/local/cuda/bin/ptxas")).filter(|file| file.is_file()));
    if let Some(ptxas) = here {
        return Ok(ptxas);
    }
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]);
    pip.arg("--target").arg(&folder).arg(NVCC_PACKAGE);
    let line = crate::process::shown(&pip);
    let why = "ptxas (NVIDIA's PTX assembler) is not here";
    if !is_root() {
        return Err(Failure::missing(format!(
            "{why}; run: {line}  (or set PTXAS=)"
        )));
    }
    if !has_pip() {
        apt(&["python3-pip"], why)?;
    }
    check(&mut pip).map_err(|failure| Failure::missing(format!("{why}; {failure}")))?;
    packaged().ok_or_else(|| Failure::missing(format!("{why}, nor in {NVCC_PACKAGE}")))
}

fn has_pip() -> bool {
    let pip = Command::new("python3")
        .args(["-m", "pip", "--version"])
        .output();
    pip.is_ok_and(|pip| pip.status.success())
}

/// The headers of libnvme, against which the wire types are compared.
pub fn libnvme() -> Result<(), Failure> {
    if Path::new("/usr/include/libnvme.h").is_file() {
        return Ok(());
    }
    apt(
        &["libnvme-dev", "gcc", "libc6-dev"],
        "the headers of libnvme are not here",
    )
}

/// Makes `cargo fuzz` available.
pub fn cargo_fuzz() -> Result<(), Failure> {
    let there = cargo()
        .args(["fuzz", "--version"])
        .stderr(Stdio::null())
        .output();
    if there.is_ok_and(|there| there.status.success()) {
        return Ok(());
    }
    let line = format!("cargo install --locked cargo-fuzz --version {CARGO_FUZZ}");
    let why = "cargo-fuzz is not here";
    if !is_root() {
        return Err(Failure::missing(format!("{why}; run: {line}")));
    }
    let mut install = cargo();
    install.args(["install", "--locked", "cargo-fuzz", "--version", CARGO_FUZZ]);
    check(&mut install).map_err(|failure| Failure::missing(format!("{why}; {failure}")))
}

/// The compiler's sysroot.
pub fn sysroot(rustc: &Path) -> Option<PathBuf> {
    let text = output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
    Some(PathBuf::from(text.trim()))
}
