//! `cargo xtask fio PREFIX`: the engine for fio (host-shell/bindings/fio), over the C interface, which is installed there too.
//!
//! An engine is compiled with the headers of the fio that loads it: they come with Debian's source package, and are not
//! in this repository, since their licence is the GPL.

use chores::process::{Failure, NETWORK, check, check_retried, output, root, target_dir};
use chores::tools::{APT_LOCK, apt, on_path};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// File name of the engine in its folder below the prefix.
const ENGINE: &str = "fio-nvme_gpu.so";

/// Runs `fio PREFIX [--built FOLDER]`: installs as `install-c` does, and adds the engine.
pub fn command(words: &[&str]) -> Result<(), Failure> {
    let [prefix, ..] = words else {
        return Err(Failure::new(
            "usage: cargo xtask fio PREFIX [--built FOLDER]",
        ));
    };
    let source = source()?;
    crate::install_c::command(words)?;
    let prefix = std::path::absolute(prefix);
    let prefix = prefix.map_err(|error| Failure::new(format!("the prefix: {error}")))?;
    let lib = prefix.join("lib");
    let mut make = Command::new("make");
    make.arg("-C").arg(root().join("host-shell/bindings/fio"));
    make.arg(format!("FIO={}", source.display()));
    make.arg(format!("BUILD={}", lib.display()));
    check(make.env("PKG_CONFIG_PATH", lib.join("pkgconfig")))?;
    println!("--ioengine=external:{}", lib.join(ENGINE).display());
    Ok(())
}

/// Returns the sources of the fio that is installed, configured.
pub fn source() -> Result<PathBuf, Failure> {
    let tools = [
        ("fio", "fio"),
        ("cc", "gcc"),
        ("make", "make"),
        ("pkg-config", "pkgconf"),
    ];
    let missing = tools
        .iter()
        .filter(|(program, _)| on_path(program).is_none());
    let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if !packages.is_empty() {
        apt(&packages, "the engine for fio is built and run with them")?;
    }
    // fio-3.33
    let name = output(Command::new("fio").arg("--version"))?
        .trim()
        .to_owned();
    let folder = target_dir().join("tools/fio");
    let source = folder.join(&name);
    if source.join("config-host.h").is_file() {
        return Ok(source);
    }
    if !source.join("configure").is_file() {
        download(&folder)?;
    }
    if !source.join("configure").is_file() {
        return Err(Failure::missing(format!(
            "the source package has no {name}, which is installed"
        )));
    }
    let mut configure = Command::new("./configure");
    configure.arg("--disable-native").current_dir(&source);
    // Hundreds of lines about what this machine has.
    output(&mut configure)?;
    Ok(source)
}

/// Unpacks Debian's source package in `folder`.
fn download(folder: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", folder.display()));
    let parts = folder.join("sources");
    fs::create_dir_all(folder.join("lists/partial")).map_err(failed)?;
    fs::create_dir_all(&parts).map_err(failed)?;
    let usual = Path::new("/etc/apt/sources.list.d");
    let known = fs::read_dir(usual).into_iter().flatten().flatten();
    let known = known.map(|entry| entry.path());
    for path in known.chain([usual.with_extension("")]) {
        let (Some(name), Ok(text)) = (path.file_name(), fs::read_to_string(&path)) else {
            continue;
        };
        fs::write(parts.join(name), of_sources(&text)).map_err(failed)?;
    }
    let apt = |words: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.args([
            "-qq",
            "-o",
            APT_LOCK,
            "-o",
            "Acquire::Retries=5",
            "-o",
            "Dir::Etc::SourceList=-",
        ]);
        for (name, place) in [
            ("Etc::SourceParts", &parts),
            ("State::Lists", &folder.join("lists")),
        ] {
            apt.arg("-o")
                .arg(format!("Dir::{name}={}", place.display()));
        }
        apt.args([
            "-o",
            "Dir::Cache::pkgcache=",
            "-o",
            "Dir::Cache::srcpkgcache=",
        ]);
        apt.args(words).current_dir(folder);
        apt
    };
    let missing = |failure: Failure| Failure::missing(format!("fio's sources: {failure}"));
    check_retried(&mut apt(&["update"]), &NETWORK).map_err(missing)?;
    let fetch = ["source", "--download-only", "fio"];
    check_retried(&mut apt(&fetch), &NETWORK).map_err(missing)?;
    let archives = fs::read_dir(folder).map_err(failed)?.flatten();
    let is_source = |path: &PathBuf| {
        path.to_string_lossy().contains(".orig.tar.")
            && path.extension().is_some_and(|end| end != "asc")
    };
    let Some(archive) = archives.map(|entry| entry.path()).find(is_source) else {
        return Err(Failure::new("apt-get source fetched no sources of fio"));
    };
    check(
        Command::new("tar")
            .arg("xf")
            .arg(archive)
            .current_dir(folder),
    )
}

/// Returns a list of packages as one of sources, in both of apt's forms.
fn of_sources(text: &str) -> String {
    let line = |line: &str| match line.strip_prefix("deb ") {
        Some(rest) => format!("deb-src {rest}\n"),
        None if line.starts_with("Types:") => "Types: deb-src\n".to_owned(),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::of_sources;

    #[test]
    fn lists_of_packages_become_lists_of_sources() {
        let old = "deb [signed-by=/k] mirror:/x bookworm main\n# deb y\n";
        assert_eq!(
            of_sources(old),
            "deb-src [signed-by=/k] mirror:/x bookworm main\n# deb y\n"
        );
        let new = "Types: deb deb-src\nURIs: mirror:/x\nSuites: bookworm\n";
        assert_eq!(
            of_sources(new),
            "Types: deb-src\nURIs: mirror:/x\nSuites: bookworm\n"
        );
    }
}
