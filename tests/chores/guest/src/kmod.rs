//! `cargo xtask kmod`: builds the kernel module for the running kernel or for the guests' kernel.

mod rule;
mod style;

use crate::guest::{self, Kernel, Tree};
use chores::process::{Failure, check, output, root, target_dir};
use chores::tools::on_path;
use rule::{Outcome, Rule};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Source files of the module, in kmod/.
const SOURCES: [&str; 13] = [
    "Kbuild",
    "bar.c",
    "buffer.c",
    "domain.c",
    "event.c",
    "main.c",
    "mapping.c",
    "node.c",
    "nvme_gpu.h",
    "nvme_gpu_uapi.h",
    "pages.c",
    "peer.c",
    "reset.c",
];
const MODULE: &str = "nvme_gpu.ko";
/// The test exporter and the stand-in of gdrdrv, in tests/guest/exporter.
const EXPORTER_SOURCES: [&str; 3] = ["Kbuild", "peer_exporter.c", "gdrdrv_stand_in.c"];
/// The udev rule that says who may open the nodes.
const RULE: &str = "60-nvme-gpu.rules";
const RULES: &str = "/etc/udev/rules.d";
/// Folder with copies of the installed rule, by which an edit is detected.
const COPIES: &str = "/var/lib/nvme-gpu";
/// Folder that exists while the module is loaded.
const LOADED: &str = "/sys/module/nvme_gpu";
/// Name and version of the package in dkms.
const PACKAGE: &str = concat!("nvme-gpu/", env!("CARGO_PKG_VERSION"));
const USAGE: &str = "usage: cargo xtask kmod build [--guest] | install | remove | check SOURCES";

/// `cargo xtask kmod build [--guest] | install | remove | check SOURCES`
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        ["build"] => {
            let module = build_driver(&running()?, &target_dir().join("kmod"))?;
            println!("{}", module.display());
            Ok(())
        }
        ["build", "--guest"] => {
            let tree = Tree::prepare()?;
            for module in for_guest(&tree, &Kernel::of_debian(&tree)?)? {
                println!("{}", module.display());
            }
            Ok(())
        }
        ["install"] => install(),
        ["remove"] => remove(),
        ["check", sources] => style::check(Path::new(sources)),
        _ => Err(Failure::new(USAGE)),
    }
}

/// Returns the module, the test exporter and the stand-in of gdrdrv, for the guests' kernel.
pub fn for_guest(tree: &Tree, kernel: &Kernel) -> Result<[PathBuf; 3], Failure> {
    let modules = match kernel.modules {
        None => tree.folder().to_path_buf(),
        Some(_) => tree.folder().join("for-another"),
    };
    let driver = build_driver(&kernel.build, &modules.join("kmod"))?;
    let folder = modules.join("exporter");
    let from = root().join("tests/guest/exporter");
    copy_sources(&from, &EXPORTER_SOURCES, &folder)?;
    let exporter = build(&kernel.build, &folder, "peer_exporter.ko")?;
    let gdrdrv = folder.join("gdrdrv_stand_in.ko");
    Ok([driver, exporter, gdrdrv])
}

fn build_driver(kernel: &Path, folder: &Path) -> Result<PathBuf, Failure> {
    copy_sources(&root().join("kmod"), &SOURCES, folder)?;
    build(kernel, folder, MODULE)
}

/// Returns the folder that modules for the running kernel are built by.
fn running() -> Result<PathBuf, Failure> {
    let version = output(Command::new("uname").arg("-r"))?;
    let version = version.trim();
    let folder = Path::new("/lib/modules").join(version).join("build");
    match folder.join("Makefile").is_file() {
        true => Ok(folder),
        false => Err(Failure::missing(format!(
            "{} is not here: install the headers of the running kernel (on Debian: apt-get install linux-headers-{version})",
            folder.display()
        ))),
    }
}

/// Compiles `module` in `folder` against `kernel`. Warnings are errors; so are sparse's, if it is installed.
fn build(kernel: &Path, folder: &Path, module: &str) -> Result<PathBuf, Failure> {
    if on_path("make").is_none() || on_path("gcc").is_none() {
        return Err(Failure::missing(
            "make or gcc is not here: apt-get install build-essential",
        ));
    }
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(kernel)
        .arg(format!("M={}", folder.display()));
    make.args(["W=1", "KCFLAGS=-Werror", "CC=gcc", "modules"]);
    if on_path("sparse").is_some() {
        make.args(["C=1", "CHECK=sparse", "CF=-Wsparse-error"]);
    }
    // Its warnings about another version of the compiler are no warnings of the module.
    let text = output(&mut make)?;
    println!("{text}");
    let module = folder.join(module);
    match module.is_file() {
        true => Ok(module),
        false => Err(Failure::new(format!("make left no {}", module.display()))),
    }
}

/// Copies the files that have changed, so that nothing else is compiled again.
fn copy_sources(from: &Path, names: &[&str], folder: &Path) -> Result<(), Failure> {
    let failed =
        |path: &Path, error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
    fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    for name in names {
        let (from, to) = (from.join(name), folder.join(name));
        let bytes = fs::read(&from).map_err(|error| failed(&from, error))?;
        if fs::read(&to).ok().as_ref() != Some(&bytes) {
            fs::write(&to, bytes).map_err(|error| failed(&to, error))?;
        }
    }
    Ok(())
}

/// Adds the module to dkms, which builds it again for each new kernel, and installs the udev rule of its nodes.
fn install() -> Result<(), Failure> {
    if on_path("dkms").is_none() {
        return Err(Failure::missing("dkms is not here: apt-get install dkms"));
    }
    let sources = sources();
    let from = root().join("kmod");
    copy_sources(&from, &SOURCES, &sources)?;
    copy_sources(&from, &["dkms.conf"], &sources)?;
    let path = from.join(RULE);
    let text = fs::read(&path).map_err(|error| guest::failed(&path, &error))?;
    say(&rule().install(&text)?);
    reload_rules()?;
    if is_known()? {
        // dkms would install an old build again, whatever the sources say.
        check(Command::new("dkms").args(["remove", PACKAGE, "--all"]))?;
    }
    check(Command::new("dkms").args(["install", "--force", PACKAGE]))?;
    if Path::new(LOADED).exists() {
        println!("the module that is loaded stays until `modprobe -r nvme_gpu`");
    }
    check(Command::new("modprobe").arg("nvme_gpu"))
}

/// Removes the module from the running kernel and from dkms, with the rule and the sources. Parts that are missing are
/// skipped.
fn remove() -> Result<(), Failure> {
    if Path::new(LOADED).exists() {
        check(Command::new("modprobe").args(["-r", "nvme_gpu"]))?;
    }
    if is_known()? {
        check(Command::new("dkms").args(["remove", PACKAGE, "--all"]))?;
    }
    let failed =
        |path: &Path, error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
    let sources = sources();
    if sources.exists() {
        fs::remove_dir_all(&sources).map_err(|error| failed(&sources, error))?;
    }
    say(&rule().remove()?);
    reload_rules()
}

fn rule() -> Rule {
    Rule::new(RULE, Path::new(RULES), Path::new(COPIES))
}

fn say(outcome: &Outcome) {
    if let Some(text) = outcome.in_words(&rule()) {
        println!("{text}");
    }
}

/// Returns the folder where dkms finds the sources.
fn sources() -> PathBuf {
    PathBuf::from("/usr/src").join(PACKAGE.replace('/', "-"))
}

/// Returns whether dkms has the module.
fn is_known() -> Result<bool, Failure> {
    match on_path("dkms") {
        Some(dkms) => Ok(!output(Command::new(dkms).args(["status", PACKAGE]))?
            .trim()
            .is_empty()),
        None => Ok(false),
    }
}

/// Makes udev read its rules again. If udev does not run, as in a container, it reads them when it starts.
fn reload_rules() -> Result<(), Failure> {
    match on_path("udevadm") {
        Some(udevadm) if Path::new("/run/udev/control").exists() => {
            check(Command::new(udevadm).args(["control", "--reload"]))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{PACKAGE, SOURCES};
    use chores::process::root;
    use std::process::Command;

    #[test]
    fn every_source_is_known_and_dkms_has_our_version() {
        let folder = root().join("kmod");
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if name.ends_with(".c") || name.ends_with(".h") || name == "Kbuild" {
                assert!(SOURCES.contains(&name.as_str()), "{name}");
            }
        }
        let version = PACKAGE.rsplit('/').next().unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(read("dkms.conf").contains(&format!("PACKAGE_VERSION=\"{version}\"")));
        assert!(read("main.c").contains(&format!("MODULE_VERSION(\"{version}\")")));
    }

    /// The test matches kernels by the expression in dkms's configuration, as dkms does.
    #[test]
    fn dkms_builds_for_no_kernel_that_the_module_does_not_know() {
        let file = root().join("kmod/dkms.conf");
        let text = std::fs::read_to_string(file).unwrap();
        let key = "BUILD_EXCLUSIVE_KERNEL=\"";
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        let expression = value.trim_end_matches('"');
        let takes = |version: &str| {
            let script = "[[ $1 =~ $2 ]]";
            let mut shell = Command::new("bash");
            shell.args(["-c", script, "bash", version, expression]);
            shell.status().unwrap().success()
        };
        for version in [
            "6.12.95+deb12-amd64",
            "6.13-rc1",
            "6.20.0",
            "7.0.0-1-amd64",
            "7.3.4",
            "10.1.2",
        ] {
            assert!(takes(version), "{version}");
        }
        for version in [
            "6.1.0-56-amd64",
            "6.2.0-26-generic",
            "6.11.9",
            "5.15.0",
            "4.19.0",
            "6.1",
        ] {
            assert!(!takes(version), "{version}");
        }
    }
}
