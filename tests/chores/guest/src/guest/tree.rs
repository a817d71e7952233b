//! The files of the guest: QEMU and tools from Debian sid, the kernel from bookworm-backports, and the base archive of
//! the initramfs. They are made once and kept under `target/guest`.

use super::apt::{Suite, failed, files, make_folder, read, write};
use super::cpio::Archive;
use super::image;
use chores::process::{Failure, check, output, target_dir};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// QEMU with its vfio-user client (10.1 or newer), the programs that run in the guest, and what unpacks the kernel.
const SID: [&str; 10] = [
    "qemu-system-x86",
    "nvme-cli",
    "fio",
    "e2fsprogs",
    "dmsetup",
    "lvm2",
    "mdadm",
    "btrfs-progs",
    "busybox-static",
    "zstd",
];
/// Copied into the guest, with the libraries that they load.
const PROGRAMS: [&str; 10] = [
    "usr/sbin/nvme",
    "usr/bin/fio",
    "usr/sbin/mke2fs",
    "usr/sbin/e2fsck",
    "usr/sbin/dmsetup",
    "usr/sbin/lvm",
    "usr/sbin/mdadm",
    "usr/bin/btrfs",
    "usr/sbin/mkfs.btrfs",
    "usr/bin/busybox",
];
/// Libraries that this workspace's programs load.
const LIBRARIES: [&str; 3] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1"];
/// Kernel modules in the guest; the modules that they need are added.
const MODULES: [&str; 10] = [
    "nvme",
    "vfio_pci",
    "vfio_iommu_type1",
    "ext4",
    "crc32c_generic",
    "dm_mod",
    "loop",
    "nvmet",
    "raid1",
    "btrfs",
];
/// Part of the stamp: raise it when the list of copied files changes.
const RECIPE: u32 = 5;

/// The unpacked packages and the base archive.
pub struct Tree {
    folder: PathBuf,
}

impl Tree {
    /// Finds the tree, or downloads and makes it.
    pub fn prepare() -> Result<Self, Failure> {
        let tree = Self {
            folder: target_dir().join("guest"),
        };
        let wanted = format!("{RECIPE} {SID:?} {PROGRAMS:?} {MODULES:?}");
        let stamp = tree.folder.join("stamp");
        if fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
            return Ok(tree);
        }
        let began = Instant::now();
        for part in ["sid", "kernel", "modules", "apt"] {
            let old = tree.folder.join(part);
            if old.exists() {
                fs::remove_dir_all(&old).map_err(|error| failed(&old, &error))?;
            }
        }
        make_folder(&tree.folder)?;
        let sid = Suite::open("sid", &tree.folder.join("apt/sid"))?;
        sid.unpack(&SID, &tree.sid())?;
        println!("sid: {:.1} s", began.elapsed().as_secs_f64());
        tree.unpack_kernel()?;
        tree.unpack_image()?;
        tree.write_base()?;
        // Half a gigabyte that nothing reads any more.
        for part in ["apt", "kernel/lib", "modules"] {
            let used = tree.folder.join(part);
            fs::remove_dir_all(&used).map_err(|error| failed(&used, &error))?;
        }
        write(&stamp, wanted.as_bytes())?;
        println!(
            "the guest's tree is ready after {:.1} s",
            began.elapsed().as_secs_f64()
        );
        Ok(tree)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the base of the initramfs: programs, libraries, modules.
    pub fn base(&self) -> PathBuf {
        self.folder.join("base.cpio")
    }

    /// Returns the kernel image.
    pub fn kernel(&self) -> Result<PathBuf, Failure> {
        let boot = files(&self.folder.join("kernel/boot"))?;
        let image = boot.into_iter().find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("vmlinuz-")
        });
        image.ok_or_else(|| Failure::new("the kernel package holds no vmlinuz"))
    }

    /// Returns the kernel of that image, unpacked, or the image itself if it is not packed as Debian packs it.
    pub fn unpacked_kernel(&self) -> Result<PathBuf, Failure> {
        let unpacked = self.folder.join("kernel/vmlinux");
        match unpacked.is_file() {
            true => Ok(unpacked),
            false => self.kernel(),
        }
    }

    /// Returns the version of the kernel, as its packages are named by it.
    pub fn kernel_version(&self) -> Result<String, Failure> {
        let image = self.kernel()?;
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        Ok(name.trim_start_matches("vmlinuz-").to_string())
    }

    /// Returns a program of sid, run by sid's own loader and libraries on this machine.
    pub fn program(&self, path: &str) -> Command {
        let mut loader = self.loader();
        loader.arg(self.sid().join(path));
        loader
    }

    /// Returns a command that runs QEMU with the path of its firmware.
    pub fn qemu(&self) -> Command {
        let mut qemu = self.program("usr/bin/qemu-system-x86_64");
        for data in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            qemu.arg("-L").arg(self.sid().join(data));
        }
        qemu
    }

    fn loader(&self) -> Command {
        let sid = self.sid();
        let libraries = ["usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"];
        let path = libraries.map(|folder| sid.join(folder).display().to_string());
        let mut loader = Command::new(sid.join("usr/lib64/ld-linux-x86-64.so.2"));
        loader.arg("--library-path").arg(path.join(":"));
        loader
    }

    fn sid(&self) -> PathBuf {
        self.folder.join("sid")
    }

    fn unpack_kernel(&self) -> Result<(), Failure> {
        let suite = Suite::open("bookworm-backports", &self.folder.join("apt/backports"))?;
        let names = suite.depends("linux-image-amd64")?;
        let image = names
            .iter()
            .find(|name| name.starts_with("linux-image-"))
            .ok_or_else(|| Failure::new("linux-image-amd64 depends on no kernel"))?;
        println!("kernel: {image}");
        suite.unpack_one(image, &self.folder.join("kernel"))
    }

    /// Unpacks the kernel of the image: QEMU starts it directly (PVH). Unpacking it in the guest would take 2 s of each
    /// boot.
    fn unpack_image(&self) -> Result<(), Failure> {
        let image = read(&self.kernel()?)?;
        let Some(payload) = image::packed_kernel(&image) else {
            return Ok(());
        };
        let packed = self.folder.join("kernel/vmlinux.zst");
        write(&packed, payload)?;
        let mut zstd = self.program("usr/bin/zstd");
        zstd.args(["-d", "-q", "--rm"]);
        check(zstd.arg(&packed))
    }

    fn write_base(&self) -> Result<(), Failure> {
        let mut base = Archive::default();
        for link in ["lib", "lib64", "sbin"] {
            base.link(link, &format!("usr/{link}"));
        }
        let mut libraries = BTreeMap::new();
        for program in PROGRAMS {
            base.file(program, &self.sid().join(program))?;
            if program != "usr/bin/busybox" {
                self.libraries(program, &mut libraries)?;
            }
        }
        for name in LIBRARIES {
            let place = format!("usr/lib/x86_64-linux-gnu/{name}");
            let source = self.sid().join(&place);
            libraries.insert(place, source);
        }
        for (name, source) in libraries {
            base.file(&name, &source)?;
        }
        let modules = self.modules()?;
        base.tree("usr/lib/modules", &modules.join("lib/modules"))?;
        write(&self.base(), &base.finish())
    }

    /// Returns the libraries that the loader would load for `program`: name in the guest -> file.
    fn libraries(
        &self,
        program: &str,
        found: &mut BTreeMap<String, PathBuf>,
    ) -> Result<(), Failure> {
        let mut loader = self.loader();
        loader.arg("--list").arg(self.sid().join(program));
        let text = output(&mut loader)?;
        for line in text.lines() {
            let target = line.split("=> ").last().unwrap_or(line);
            let path = Path::new(target.split_whitespace().next().unwrap_or_default());
            // The loader prints its own path on this machine, so it is added by name.
            if path.is_absolute() && path.starts_with(&self.folder) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let place = format!("usr/lib/x86_64-linux-gnu/{name}");
                found.insert(place, path.to_path_buf());
            }
        }
        let name = "usr/lib64/ld-linux-x86-64.so.2";
        found.insert(name.to_string(), self.sid().join(name));
        Ok(())
    }

    /// Returns a module tree with the wanted modules and what they need, and its index.
    fn modules(&self) -> Result<PathBuf, Failure> {
        let all = self.folder.join("kernel/lib/modules");
        let versions = files(&all)?;
        let source = versions
            .first()
            .ok_or_else(|| Failure::new("the kernel package holds no modules"))?;
        let version = source
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let mut by_name = BTreeMap::new();
        index(&source.join("kernel"), &mut by_name)?;
        let root = self.folder.join("modules");
        let target = root.join("lib/modules").join(&version);
        make_folder(&target)?;
        let mut queue: Vec<String> = MODULES.iter().map(|name| name.to_string()).collect();
        while let Some(name) = queue.pop() {
            let unpacked = target.join(format!("{name}.ko"));
            if unpacked.exists() {
                continue;
            }
            let packed = by_name
                .get(&name)
                .ok_or_else(|| Failure::new(format!("the kernel has no module {name}")))?;
            let bytes = self.decompress(packed)?;
            queue.extend(depends(&bytes));
            write(&unpacked, &bytes)?;
        }
        self.index_modules(&root, &version)?;
        Ok(root)
    }

    /// Makes the index of the modules of kernel `version` under `root`.
    pub fn index_modules(&self, root: &Path, version: &str) -> Result<(), Failure> {
        let mut depmod = Command::new(self.sid().join("usr/bin/busybox"));
        check(depmod.arg("depmod").arg("-b").arg(root).arg(version))
    }

    fn decompress(&self, module: &Path) -> Result<Vec<u8>, Failure> {
        if module.extension().is_some_and(|end| end == "ko") {
            return read(module);
        }
        let mut unxz = Command::new(self.sid().join("usr/bin/busybox"));
        let done = unxz.arg("unxz").arg("-c").arg(module).output();
        let done = done.map_err(|error| failed(module, &error))?;
        if done.status.success() {
            Ok(done.stdout)
        } else {
            Err(Failure::new(format!(
                "{}: not an xz file",
                module.display()
            )))
        }
    }
}

/// Adds every module under `folder` to `found`: name with underscores -> file.
fn index(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<(), Failure> {
    for path in files(folder)? {
        if path.is_dir() {
            index(&path, found)?;
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some((stem, _)) = name.split_once(".ko") {
            found.insert(stem.replace('-', "_"), path.clone());
        }
    }
    Ok(())
}

/// Returns the `depends=` entry of a module's information section.
fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else {
        return Vec::new();
    };
    let rest = &module[at + key.len()..];
    let value = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value);
    names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::depends;

    #[test]
    fn reads_what_a_module_depends_on() {
        assert_eq!(
            depends(b"xx\0license=GPL\0depends=nvme-core,t10-pi\0name=nvme\0"),
            ["nvme_core", "t10_pi"]
        );
        assert!(depends(b"\0depends=\0name=crc16\0").is_empty());
        assert!(depends(b"no information").is_empty());
    }
}
