//! The headers of the guests' kernel, to build modules by.

use super::apt::{Suite, failed, files, make_folder, read, write};
use super::tree::Tree;
use chores::process::Failure;
use std::fs;
use std::path::PathBuf;

/// The unpacked packages.
pub struct KernelHeaders {
    build: PathBuf,
}

impl KernelHeaders {
    /// Finds the headers of the tree's kernel, or downloads them.
    pub fn prepare(tree: &Tree) -> Result<Self, Failure> {
        let version = tree.kernel_version()?;
        let folder = tree.folder().join("headers");
        let headers = Self {
            build: folder.join(format!("usr/src/linux-headers-{version}")),
        };
        let stamp = folder.join("stamp");
        if fs::read_to_string(&stamp).is_ok_and(|text| text == version) {
            return Ok(headers);
        }
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
        }
        make_folder(&folder)?;
        let suite = Suite::open("bookworm-backports", &folder.join("apt"))?;
        let (abi, _) = version.rsplit_once('-').unwrap_or((version.as_str(), ""));
        for package in [
            format!("linux-headers-{version}"),
            format!("linux-headers-{abi}-common"),
            format!("linux-kbuild-{abi}"),
        ] {
            suite.unpack_one(&package, &folder)?;
        }
        headers.relocate(&folder)?;
        let apt = folder.join("apt");
        fs::remove_dir_all(&apt).map_err(|error| failed(&apt, &error))?;
        write(&stamp, version.as_bytes())?;
        Ok(headers)
    }

    /// Returns the folder for `make -C`.
    pub fn build(&self) -> PathBuf {
        self.build.clone()
    }

    /// Corrects the paths in the packages: they name each other by where they are installed, which
    /// is elsewhere.
    fn relocate(&self, folder: &std::path::Path) -> Result<(), Failure> {
        let makefile = self.build.join("Makefile");
        let text = String::from_utf8_lossy(&read(&makefile)?).into_owned();
        let here = folder.join("usr/src").display().to_string();
        write(&makefile, text.replace("/usr/src", &here).as_bytes())?;
        // If `vmlinux` exists, the build makes type information with a tool that is not in the
        // packages.
        let vmlinux = self.build.join("vmlinux");
        if vmlinux.exists() {
            fs::remove_file(&vmlinux).map_err(|error| failed(&vmlinux, &error))?;
        }
        match files(&self.build.join("scripts")) {
            Ok(scripts) if !scripts.is_empty() => Ok(()),
            _ => Err(Failure::new(
                "the headers' scripts are not where their link points to",
            )),
        }
    }
}
