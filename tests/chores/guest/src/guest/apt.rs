//! Debian packages for the guest, unpacked under the target folder: nothing is installed on this machine.
//!
//! Each suite has its own package database, which is empty at first, so that apt resolves every dependency. Signatures
//! are checked against the machine's Debian keyring.

use chores::process::{Failure, NETWORK, check_retried, output};
use chores::tools::{APT_LOCK, on_path};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One suite of the archive that this machine's apt uses.
pub struct Suite {
    folder: PathBuf,
}

impl Suite {
    /// Reads the package lists of `name` into `folder`.
    pub fn open(name: &str, folder: &Path) -> Result<Self, Failure> {
        for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
            if on_path(tool).is_none() {
                return Err(Failure::missing(format!(
                    "the guest tests take QEMU and a kernel from Debian, and {tool} is not here: run them on Debian"
                )));
            }
        }
        if !Path::new(KEYRING).is_file() {
            return Err(Failure::missing(format!(
                "{KEYRING} is not here: apt-get install debian-archive-keyring"
            )));
        }
        for part in ["lists/partial", "archives/partial"] {
            make_folder(&folder.join(part))?;
        }
        let sources = folder.join("sources.list");
        let line = format!("deb [signed-by={KEYRING}] {} {name} main\n", archive()?);
        write(&sources, line.as_bytes())?;
        write(&folder.join("status"), b"")?;
        let place = folder.display();
        // A mirror that is a snapshot is older than its own validity date; the signature still counts.
        let settings = format!(
            "Dir::State \"{place}\";\n\
             Dir::State::status \"{place}/status\";\n\
             Dir::Cache \"{place}\";\n\
             Dir::Etc::SourceList \"{place}/sources.list\";\n\
             Dir::Etc::SourceParts \"/dev/null\";\n\
             Dir::Etc::Preferences \"/dev/null\";\n\
             Dir::Etc::PreferencesParts \"/dev/null\";\n\
             Acquire::Check-Valid-Until \"false\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::Retries \"3\";\n\
             Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             APT::Install-Recommends \"false\";\n\
             APT::Sandbox::User \"root\";\n"
        );
        write(&folder.join("apt.conf"), settings.as_bytes())?;
        let suite = Self {
            folder: folder.to_path_buf(),
        };
        check_retried(suite.apt("apt-get").args(["update", "-qq"]), &NETWORK)?;
        Ok(suite)
    }

    /// Downloads `packages` and all they depend on, and unpacks every one into `root`.
    pub fn unpack(&self, packages: &[&str], root: &Path) -> Result<(), Failure> {
        let mut install = self.apt("apt-get");
        install.args(["install", "-y", "-qq", "--download-only"]);
        check_retried(install.args(packages), &NETWORK)?;
        let archives = self.folder.join("archives");
        for file in files(&archives)? {
            if file.extension().is_some_and(|end| end == "deb") {
                unpack(&file, root)?;
            }
        }
        Ok(())
    }

    /// Downloads one package without its dependencies and unpacks it into `root`.
    pub fn unpack_one(&self, package: &str, root: &Path) -> Result<(), Failure> {
        let mut download = self.apt("apt-get");
        let archives = self.folder.join("archives");
        download.current_dir(&archives);
        check_retried(download.args(["download", "-qq", package]), &NETWORK)?;
        for file in files(&archives)? {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(&format!("{package}_")) {
                return unpack(&file, root);
            }
        }
        Err(Failure::new(format!("apt-get download {package}: no file")))
    }

    /// Returns the names of the packages that the package depends on.
    pub fn depends(&self, package: &str) -> Result<Vec<String>, Failure> {
        let text = output(self.apt("apt-cache").args(["depends", package]))?;
        let names = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_string).collect())
    }

    fn apt(&self, program: &str) -> Command {
        let mut apt = Command::new(program);
        apt.env("DEBIAN_FRONTEND", "noninteractive")
            .env("APT_CONFIG", self.folder.join("apt.conf"))
            .args(["-o", APT_LOCK]);
        apt
    }
}

/// Returns the address of the Debian archive in this machine's own apt sources.
fn archive() -> Result<String, Failure> {
    let format = "$(ORIGIN)|$(LABEL)|$(REPO_URI)";
    let mut list = Command::new("apt-get");
    list.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let text = output(&mut list)?;
    let found = text
        .lines()
        .find_map(|line| line.strip_prefix("Debian|Debian|"));
    found.map(str::to_string).ok_or_else(|| {
        Failure::missing(
            "this machine's apt knows no Debian archive (origin and label Debian): \
             add one to /etc/apt/sources.list and run apt-get update",
        )
    })
}

fn unpack(package: &Path, root: &Path) -> Result<(), Failure> {
    make_folder(root)?;
    // These commands are not printed: there are more than a hundred.
    output(Command::new("dpkg-deb").arg("-x").arg(package).arg(root)).map(drop)
}

/// Returns the entries of a folder, sorted.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(|error| failed(folder, &error))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

pub fn make_folder(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).map_err(|error| failed(path, &error))
}

pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).map_err(|error| failed(path, &error))
}

pub fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| failed(path, &error))
}

pub fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {error}", path.display()))
}
