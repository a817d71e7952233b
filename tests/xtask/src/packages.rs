//! Checks the packages for crates.io: every published package can be packed with its licences and its README, and its
//! library compiles with another compiler than the active one.

use chores::process::{Failure, cargo, check, output, target_dir};
use chores::report::Counts;
use chores::tools;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The published libraries; they need no other package of the workspace.
pub const LIBRARIES: [&str; 24] = [
    "nvme-spec",
    "nvme-core",
    "nvme-ext4",
    "nvme-formats",
    "nvme-gpu-kernel",
    "nvme-units",
    "nvme-auditor",
    "nvme-vfio-user",
    "nvme-sim",
    "nvme-driver",
    "nvme-cuda",
    "nvme-doctor",
    "nvme-store",
    "nvme-files",
    "nvme-kv",
    "nvme-kv-server",
    "nvme-lookup",
    "nvme-bench",
    "nvme-host",
    "nvme-compute-kernel",
    "nvme-compute",
    "nvme-models",
    "nvme-search",
    "nvme-course",
];
const TOOL: &str = "nvme-gpu";
const EACH_HAS: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];
const SECOND: &str = "/usr/bin/rustc";

pub fn published() -> impl Iterator<Item = &'static str> {
    LIBRARIES.into_iter().chain([TOOL])
}

/// Packs them all together, so that each finds the others; nothing is compiled.
pub fn pack() -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for package in published() {
        let mut list = cargo();
        list.args(["package", "--quiet", "--list", "--allow-dirty"]);
        let files = output(list.args(["--package", package]))?;
        for wanted in EACH_HAS {
            if !files.lines().any(|file| file == wanted) {
                return Err(Failure::new(format!("package {package}: no {wanted}")));
            }
        }
        counts.add(Counts::PASSED);
    }
    let mut pack = cargo();
    pack.args(["package", "--quiet", "--no-verify", "--allow-dirty"]);
    published().for_each(|package| {
        pack.args(["--package", package]);
    });
    check(pack.arg("--target-dir").arg(target_dir().join("packages")))?;
    Ok(counts)
}

/// Checks the libraries with the distribution's compiler, or $SECOND_RUSTC.
pub fn second_compiler() -> Result<Counts, Failure> {
    let active = version(Path::new("rustc"))?;
    let rustc = std::env::var_os("SECOND_RUSTC").map_or_else(|| PathBuf::from(SECOND), Into::into);
    if !rustc.is_file() {
        let why = "a second compiler checks the libraries: set SECOND_RUSTC=";
        tools::apt(&["rustc-web"], why)?;
    }
    let second = version(&rustc)?;
    if second == active {
        return Err(Failure::missing(format!(
            "{} is the active compiler, {active}: set SECOND_RUSTC= to another",
            rustc.display()
        )));
    }
    println!("active: {active}; second: {second}");
    let mut build = cargo();
    build.env("RUSTC", &rustc).args(["check", "--quiet"]);
    for package in LIBRARIES {
        build.args(["--package", package]);
    }
    let target = target_dir().join("second-compiler");
    check(build.arg("--target-dir").arg(target))?;
    Ok(Counts::PASSED)
}

fn version(rustc: &Path) -> Result<String, Failure> {
    output(Command::new(rustc).arg("-V")).map(|text| text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::published;
    use chores::process::root;

    /// Checks that each package is published or has a manifest that forbids it.
    #[test]
    fn the_list_is_what_the_manifests_say() {
        let workspace = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let members = workspace
            .lines()
            .find_map(|line| line.strip_prefix("members = ["))
            .unwrap();
        let mut found = Vec::new();
        for member in members.split('"').skip(1).step_by(2) {
            let manifest = root().join(member).join("Cargo.toml");
            let text = std::fs::read_to_string(&manifest).unwrap();
            if !text.lines().any(|line| line == "publish = false") {
                let name = text.lines().find_map(|line| line.strip_prefix("name = "));
                found.push(name.unwrap().trim_matches('"').to_string());
            }
        }
        found.sort();
        let mut listed: Vec<&str> = published().collect();
        listed.sort_unstable();
        assert_eq!(found, listed);
    }
}
