//! The tests on a GPU: one file that holds everything that the machine with the GPU needs.

use crate::ptx::nvcc;
use chores::process::{Failure, cargo, check, root, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "nvme-gpu-tests";
const PROGRAM: &str = "gpu-test";
/// Largest size of a bundle.
const MOST_BYTES: u64 = 64 << 20;
/// The C library of the oldest system that should run it: Ubuntu 22.04 has 2.35.
const NEWEST_GLIBC: (u32, u32) = (2, 34);

/// `cargo xtask gpu-test --bundle [FILE]`, or `cargo xtask gpu-test ARGUMENTS` to run it here.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    match words {
        ["--bundle"] => bundle(&root().join("target").join(PROGRAM)),
        ["--bundle", file] => bundle(Path::new(file)),
        arguments => check(Command::new(build(None)?).args(arguments)),
    }
}

/// Returns the CUDA C++ example for each architecture, in one folder.
fn images() -> Result<PathBuf, Failure> {
    let folder = target_dir().join("gpu-test-images");
    for arch in ["sm_80", "sm_90", "sm_100"] {
        let of_one = folder.join(arch);
        nvcc::example(&of_one, arch)?;
        let (from, to) = (
            of_one.join("histogram.cubin"),
            folder.join(format!("histogram.{arch}.cubin")),
        );
        std::fs::copy(&from, to)
            .map_err(|error| Failure::new(format!("{}: {error}", from.display())))?;
    }
    Ok(folder)
}

/// Builds the program; it contains the files of `images`.
fn build(images: Option<&Path>) -> Result<PathBuf, Failure> {
    let mut build = cargo();
    if let Some(images) = images {
        build.env("NVME_GPU_IMAGES", images);
    }
    build.args(["rustc", "--release", "--package", PACKAGE, "--bin", PROGRAM]);
    // Without symbols the file has half the size.
    build.args(["--", "-C", "strip=symbols"]);
    check(&mut build)?;
    Ok(target_dir().join("release").join(PROGRAM))
}

fn bundle(file: &Path) -> Result<(), Failure> {
    let built = build(Some(&images()?))?;
    let named = |error: std::io::Error| Failure::new(format!("{}: {error}", file.display()));
    std::fs::copy(&built, file).map_err(named)?;
    let bytes = std::fs::read(file).map_err(named)?;
    let len = bytes.len() as u64;
    if len >= MOST_BYTES {
        return Err(Failure::new(format!(
            "{}: {len} bytes, the limit is {MOST_BYTES}",
            file.display()
        )));
    }
    let glibc = newest_glibc(&bytes);
    if glibc > NEWEST_GLIBC {
        return Err(Failure::new(format!(
            "{}: wants glibc {}.{}, the limit is {}.{}",
            file.display(),
            glibc.0,
            glibc.1,
            NEWEST_GLIBC.0,
            NEWEST_GLIBC.1
        )));
    }
    println!(
        "{}: {:.1} MiB, needs glibc {}.{}; run it on a machine with an NVIDIA driver: ./{PROGRAM} --json",
        file.display(),
        len as f64 / f64::from(1 << 20),
        glibc.0,
        glibc.1
    );
    Ok(())
}

/// Returns the newest version of the C library whose symbols a program asks for.
fn newest_glibc(program: &[u8]) -> (u32, u32) {
    let name = b"GLIBC_";
    let versions = program.windows(name.len() + 5).filter_map(|window| {
        let version = window.strip_prefix(name)?;
        let end = version
            .iter()
            .position(|b| !b.is_ascii_digit() && *b != b'.');
        let text = std::str::from_utf8(&version[..end.unwrap_or(version.len())]).ok()?;
        let (major, minor) = text.split_once('.')?;
        let minor = minor.split('.').next()?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    versions.max().unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use super::newest_glibc;

    #[test]
    fn the_newest_version_counts() {
        let program = b"..GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0......";
        assert_eq!(newest_glibc(program), (2, 34));
        assert_eq!(newest_glibc(b"a static program without any"), (0, 0));
    }
}
