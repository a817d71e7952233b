//! Made-up machines for tests: folders that look like /sys, /proc and /dev.

use super::SysfsHost;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A root folder, removed at the end of the test.
pub struct Tree(PathBuf);

impl Tree {
    /// Makes an empty machine.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvme-gpu-sysfs-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Returns the fixture as a machine that this program examines.
    pub fn host(&self) -> SysfsHost {
        SysfsHost::at(&self.0)
    }

    /// Writes a file and the folders that it is in.
    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Returns what a file has.
    pub fn text(&self, path: &str) -> String {
        fs::read_to_string(self.0.join(path)).unwrap()
    }

    /// Makes a symbolic link, as in sysfs: only the last part of its target counts.
    pub fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    /// Returns the configuration space of a function: vendor, device and class.
    pub fn config(vendor: u16, device: u16, class: u32) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[..2].copy_from_slice(&vendor.to_le_bytes());
        bytes[2..4].copy_from_slice(&device.to_le_bytes());
        bytes[8..12].copy_from_slice(&(class << 8).to_le_bytes());
        bytes
    }

    /// Adds a function in no IOMMU group, bound to `driver` (or none when it is empty).
    pub fn without_group(&self, bdf: &str, config: &[u8], driver: &str) {
        if !self.host().exists("proc/self/mountinfo") {
            self.file("proc/self/mountinfo", "");
        }
        let folder = format!("sys/bus/pci/devices/{bdf}");
        self.file(&format!("{folder}/config"), config);
        self.file(&format!("{folder}/driver_override"), "(null)\n");
        if !driver.is_empty() {
            self.file(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
            self.file(&format!("sys/bus/pci/drivers/{driver}/bind"), "");
            let target = format!("../../drivers/{driver}");
            self.link(&format!("{folder}/driver"), &target);
        }
    }

    /// Adds a function in IOMMU group `group`, bound to `driver` (or none when it is empty).
    pub fn function(&self, bdf: &str, config: &[u8], driver: &str, group: u32) {
        self.without_group(bdf, config, driver);
        let folder = format!("sys/bus/pci/devices/{bdf}");
        let target = format!("../../../../kernel/iommu_groups/{group}");
        self.link(&format!("{folder}/iommu_group"), &target);
        self.file(
            &format!("sys/kernel/iommu_groups/{group}/devices/{bdf}"),
            "",
        );
    }

    /// Adds a function below `bridges` (the nearest last); its other files are added afterwards.
    pub fn place(&self, bdf: &str, bridges: &[&str]) {
        self.place_at(bdf, &[&["pci0000:00"], bridges].concat());
    }

    /// Adds a function as [`place`](Self::place) does, below a root complex and bridges.
    pub fn place_at(&self, bdf: &str, above: &[&str]) {
        let below = [above, &[bdf]].concat().join("/");
        fs::create_dir_all(self.0.join(format!("sys/devices/{below}"))).unwrap();
        let target = format!("../../../devices/{below}");
        self.link(&format!("sys/bus/pci/devices/{bdf}"), &target);
    }

    /// Adds an NVMe controller; with Linux's driver it is nvme0.
    pub fn controller(&self, bdf: &str, driver: &str, group: u32) {
        let config = Self::config(0x144D, 0xA80A, crate::pci::CLASS_NVME);
        self.function(bdf, &config, driver, group);
        let folder = format!("sys/bus/pci/devices/{bdf}");
        let bar0 = "0x00000000febf0000 0x00000000febf3fff 0x0000000000140204\n";
        self.file(&format!("{folder}/resource"), bar0);
        if driver == "nvme" {
            self.file(&format!("{folder}/nvme/nvme0/model"), "Fast SSD 1TB   \n");
            self.file(&format!("{folder}/nvme/nvme0/serial"), "S1234\n");
        }
    }

    /// Adds a process with links to its open files. Nodes are named without a leading slash.
    pub fn process(&self, id: u32, name: &str, open: &[&str]) {
        let folder = format!("proc/{id}");
        self.file(&format!("{folder}/comm"), format!("{name}\n"));
        self.file(
            &format!("{folder}/stat"),
            format!("{id} ({name}) S 1 {id} {id} 0 -1 4194304 0 0 0 0\n"),
        );
        self.file(&format!("{folder}/mountinfo"), "");
        fs::create_dir_all(self.0.join(&folder).join("fd")).unwrap();
        for (number, path) in open.iter().enumerate() {
            let target = match path.contains(':') && !path.contains('/') {
                true => PathBuf::from(path),
                false => self.0.join(path),
            };
            symlink(target, self.0.join(format!("{folder}/fd/{}", number + 3))).unwrap();
        }
    }

    /// Returns the absolute path of `path`.
    pub fn name(&self, path: &str) -> String {
        self.0.join(path).to_str().unwrap().to_owned()
    }

    /// Adds a block device at `place` below the root, with links from its number and its name, made of the devices at
    /// `below`.
    pub fn block(&self, place: &str, number: &str, below: &[&str]) {
        self.file(&format!("{place}/dev"), format!("{number}\n"));
        let name = |place: &str| place.rsplit('/').next().unwrap_or(place).to_owned();
        let from_devices = place.trim_start_matches("sys/");
        self.link(
            &format!("sys/class/block/{}", name(place)),
            &format!("../../{from_devices}"),
        );
        self.link(
            &format!("sys/dev/block/{number}"),
            &format!("../../{from_devices}"),
        );
        for one in below {
            let link = format!("{place}/slaves/{}", name(one));
            self.link(&link, &self.name(one));
        }
    }

    /// Adds a disk of the controller nvme0 with its partitions.
    pub fn disk(&self, bdf: &str, name: &str, number: &str, parts: &[(&str, &str)]) {
        self.file(
            &format!("sys/bus/pci/devices/{bdf}/nvme/nvme0/{name}/dev"),
            number,
        );
        self.file(&format!("sys/class/block/{name}/dev"), number);
        self.file(&format!("dev/{name}"), "");
        for (part, number) in parts {
            self.file(&format!("dev/{part}"), "");
            self.file(&format!("sys/class/block/{name}/{part}/partition"), "1\n");
            self.file(&format!("sys/class/block/{part}/dev"), number);
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
