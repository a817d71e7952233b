//! `cargo xtask install-c PREFIX`: headers, shared and static library, pkg-config file and CMake package.

use chores::process::{Failure, cargo, check, root, target_dir};
use std::fs;
use std::path::{Path, PathBuf};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Libraries, each with the number of its interface. The numbers are the same as in build.rs of host-shell/bindings/c
/// and of compat.
const LIBRARIES: [(&str, u32); 2] = [("nvme_gpu", 1), ("nvme_gpu_compat", 0)];

/// `install-c PREFIX [--built FOLDER]`: from FOLDER, or built here for release.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let (prefix, built) = match words {
        [prefix] => (Path::new(prefix), None),
        [prefix, "--built", folder] => (Path::new(prefix), Some(PathBuf::from(folder))),
        _ => {
            let usage = "usage: cargo xtask install-c PREFIX [--built FOLDER]";
            return Err(Failure::new(usage));
        }
    };
    let prefix = std::path::absolute(prefix);
    let prefix = prefix.map_err(|error| Failure::new(format!("the prefix: {error}")))?;
    let built = match built {
        Some(folder) => folder,
        None => {
            let mut build = cargo();
            build.args(["build", "--release", "--package", "nvme-gpu-capi"]);
            check(build.args(["--package", "nvme-gpu-compat"]))?;
            target_dir().join("release")
        }
    };
    install(&CInstallation {
        prefix: &prefix,
        stage: Path::new("/"),
        libraries: "lib",
        built: &built,
    })?;
    println!("installed under {}", prefix.display());
    Ok(())
}

/// A place for the C interface.
pub struct CInstallation<'a> {
    /// The prefix that the installed files name.
    pub prefix: &'a Path,
    /// Folder that stands for `/` while a package is made.
    pub stage: &'a Path,
    /// Folder of the libraries below the prefix: `lib`, or Debian's `lib/TRIPLET`.
    pub libraries: &'a str,
    /// Folder in which cargo built the libraries.
    pub built: &'a Path,
}

/// Installs headers, libraries, the pkg-config file and the CMake package.
pub fn install(place: &CInstallation<'_>) -> Result<(), Failure> {
    let capi = root().join("host-shell/bindings/c");
    let kernel = root().join("nvme-gpu-kernel");
    let built = place.built;
    let below = place.prefix.strip_prefix("/").unwrap_or(place.prefix);
    let prefix = &place.stage.join(below);
    let (include, lib) = (prefix.join("include"), prefix.join(place.libraries));
    let (pkgconfig, cmake) = (lib.join("pkgconfig"), lib.join("cmake/nvme_gpu"));
    let share = prefix.join("share/nvme_gpu");
    for folder in [&include, &pkgconfig, &cmake, &share] {
        fs::create_dir_all(folder).map_err(|error| failed("create", folder, &error))?;
    }
    for header in ["nvme_gpu.h", "nvme_gpu.hpp"] {
        copy(&capi.join("include").join(header), &include.join(header))?;
    }
    let compat = "include/nvme_gpu_compat.h";
    copy(&capi.join("../compat").join(compat), &prefix.join(compat))?;
    let device = "include/nvme_gpu_device.cuh";
    copy(&kernel.join(device), &prefix.join(device))?;
    copy(
        &kernel.join("ptx/nvme_gpu_device.ptx"),
        &share.join("nvme_gpu_device.ptx"),
    )?;
    for (name, interface) in LIBRARIES {
        let crate_name = if name == "nvme_gpu" {
            "nvme_gpu_capi"
        } else {
            name
        };
        let full = format!("lib{name}.so.{VERSION}");
        copy(&built.join(format!("lib{crate_name}.so")), &lib.join(&full))?;
        // A program that was linked with an earlier interface must not find this one under its name.
        for earlier in 0..interface {
            let _ = fs::remove_file(lib.join(format!("lib{name}.so.{earlier}")));
        }
        for link in [format!("lib{name}.so.{interface}"), format!("lib{name}.so")] {
            let link = lib.join(link);
            if link.is_symlink() {
                fs::remove_file(&link).map_err(|error| failed("replace", &link, &error))?;
            }
            std::os::unix::fs::symlink(&full, &link)
                .map_err(|error| failed("create", &link, &error))?;
        }
    }
    copy(
        &built.join("libnvme_gpu_capi.a"),
        &lib.join("libnvme_gpu.a"),
    )?;
    fill(
        &capi.join("nvme_gpu.pc.in"),
        &pkgconfig.join("nvme_gpu.pc"),
        place,
    )?;
    copy(
        &capi.join("nvme_gpu-config.cmake"),
        &cmake.join("nvme_gpu-config.cmake"),
    )?;
    let version = "nvme_gpu-config-version.cmake";
    fill(
        &capi.join(format!("{version}.in")),
        &cmake.join(version),
        place,
    )
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    // A library in use keeps its old file.
    if to.exists() {
        fs::remove_file(to).map_err(|error| failed("replace", to, &error))?;
    }
    let copied = fs::copy(from, to);
    copied
        .map(drop)
        .map_err(|error| failed("copy", from, &error))
}

/// Copies with the marks filled in.
fn fill(from: &Path, to: &Path, place: &CInstallation<'_>) -> Result<(), Failure> {
    let text = fs::read_to_string(from).map_err(|error| failed("read", from, &error))?;
    let prefix = place.prefix.display().to_string();
    let text = text
        .replace("@PREFIX@", &prefix)
        .replace("@LIBRARIES@", place.libraries)
        .replace("@VERSION@", VERSION);
    fs::write(to, text).map_err(|error| failed("write", to, &error))
}

fn failed(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {action} {}: {error}", path.display()))
}
