//! The guests' kernel: Debian's, or one that was built from its sources.

use super::apt::{failed, files, make_folder};
use super::boots::Boot;
use super::headers::KernelHeaders;
use super::tree::Tree;
use chores::process::{Failure, check, output};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Factor for time limits on a kernel that was built to find faults.
const PATIENCE: u64 = 8;

/// The kernel that a guest boots, with the files that modules are built with.
pub struct Kernel {
    pub image: PathBuf,
    /// Folder for `make -C`.
    pub build: PathBuf,
    /// Folder with the kernel's modules by version, if the base of the initramfs lacks them.
    pub modules: Option<PathBuf>,
}

impl Kernel {
    /// Returns the kernel of the tree.
    pub fn of_debian(tree: &Tree) -> Result<Self, Failure> {
        Ok(Self {
            image: tree.unpacked_kernel()?,
            build: KernelHeaders::prepare(tree)?.build(),
            modules: None,
        })
    }

    /// Returns the kernel that `make bzImage modules` has left in the folder `sources`.
    pub fn built(sources: &Path, tree: &Tree) -> Result<Self, Failure> {
        let build = fs::canonicalize(sources).map_err(|error| failed(sources, &error))?;
        let image = build.join("arch/x86/boot/bzImage");
        if !image.is_file() {
            return Err(Failure::new(format!(
                "{} is not here: run `make bzImage modules` in {}",
                image.display(),
                build.display()
            )));
        }
        let make = || {
            let mut make = Command::new("make");
            make.arg("-s").arg("-C").arg(&build);
            make
        };
        let version = output(make().arg("kernelrelease"))?.trim().to_owned();
        let root = tree.folder().join("modules-of-another");
        if root.exists() {
            fs::remove_dir_all(&root).map_err(|error| failed(&root, &error))?;
        }
        make_folder(&root)?;
        let place = format!("INSTALL_MOD_PATH={}", root.display());
        // The guest's own depmod makes the index.
        check(
            make()
                .args(["modules_install", "INSTALL_MOD_STRIP=1", "DEPMOD=true"])
                // A kernel that needs a module to check the signature of a module would wait for itself.
                .arg("CONFIG_MODULE_SIG_ALL=")
                .arg(place),
        )?;
        let modules = root.join("lib/modules");
        for link in ["build", "source"] {
            // A link to the sources, which Linux before 6.10 makes twice.
            let _ = fs::remove_file(modules.join(&version).join(link));
        }
        tree.index_modules(&root, &version)?;
        if files(&modules)?.len() != 1 {
            return Err(Failure::new(format!(
                "not one version in {}",
                modules.display()
            )));
        }
        Ok(Self {
            image,
            build,
            modules: Some(modules),
        })
    }

    /// Returns the factor for time limits, compared with Debian's kernel.
    pub fn patience(&self) -> u64 {
        match self.modules {
            None => 1,
            Some(_) => PATIENCE,
        }
    }

    /// Returns the boot with the time limits of this kernel.
    pub fn adapted(&self, boot: &Boot) -> Boot {
        Boot {
            deadline_s: boot.deadline_s * self.patience(),
            ..*boot
        }
    }
}
