//! What a program or library is linked with, as `readelf` says it: the glibc that it needs, and whether it is static.

use super::GLIBC;
use chores::process::{Failure, output};
use std::path::Path;
use std::process::Command;

/// Checks that `file` runs with the oldest glibc of the release.
pub fn check_floor(file: &Path) -> Result<(), Failure> {
    let text = readelf(file, "--version-info")?;
    let needed = newest(&text)
        .ok_or_else(|| Failure::new(format!("{}: it names no version of glibc", file.display())))?;
    let (major, minor) = needed;
    println!("{}: needs glibc {major}.{minor}", file.display());
    match needed <= GLIBC {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "{} needs glibc {major}.{minor}; the release promises {}.{}",
            file.display(),
            GLIBC.0,
            GLIBC.1
        ))),
    }
}

/// Checks that `file` needs neither a library nor a loader.
pub fn check_static(file: &Path) -> Result<(), Failure> {
    let needs = readelf(file, "--dynamic")?.contains("(NEEDED)");
    let loader = readelf(file, "--program-headers")?.contains("INTERP");
    match needs || loader {
        false => Ok(()),
        true => Err(Failure::new(format!("{} is not static", file.display()))),
    }
}

fn readelf(file: &Path, what: &str) -> Result<String, Failure> {
    let mut readelf = Command::new("readelf");
    output(readelf.args(["--wide", what]).arg(file).env("LC_ALL", "C"))
}

/// Returns the newest version of glibc that a table of versions names.
fn newest(text: &str) -> Option<(u32, u32)> {
    let versions = text.split("Name: GLIBC_").skip(1).filter_map(|rest| {
        let version = rest.split_whitespace().next()?;
        let mut parts = version.split('.');
        let major = parts.next()?.parse().ok()?;
        Some((major, parts.next()?.parse().ok()?))
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::newest;

    #[test]
    fn the_newest_version_is_found_by_its_numbers() {
        let text = "  000000: Version: 1  File: libc.so.6  Cnt: 3\n\
             0x0010:   Name: GLIBC_2.9  Flags: none  Version: 9\n\
             0x0020:   Name: GLIBC_2.28  Flags: none  Version: 8\n\
             0x0030:   Name: GCC_3.3  Flags: none  Version: 7\n\
             0x0040:   Name: GLIBC_2.2.5  Flags: none  Version: 6\n";
        assert_eq!(newest(text), Some((2, 28)));
        assert_eq!(newest("Name: GCC_3.0"), None);
    }
}
