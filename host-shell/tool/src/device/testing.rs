//! A made-up machine for tests: folders that look like /sys, with one controller.

use nvme_host::sysfs::SysfsHost;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub const ADDRESS: &str = "0000:01:00.0";

/// Removed at the end of the test.
pub struct Machine(PathBuf);

impl Machine {
    /// Returns a machine with one NVMe controller in IOMMU group 7, bound to `driver`.
    pub fn new(driver: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvme-gpu-machine-{}-{number}", std::process::id());
        let machine = Self(std::env::temp_dir().join(name));
        let device = format!("sys/bus/pci/devices/{ADDRESS}");
        let mut config = vec![0; 256];
        config[..4].copy_from_slice(&[0x4D, 0x14, 0x0A, 0xA8]);
        // Class: NVMe I/O controller.
        config[9..12].copy_from_slice(&[2, 8, 1]);
        machine.file(&format!("{device}/config"), &config);
        for file in [
            &format!("{device}/driver_override"),
            &format!("sys/kernel/iommu_groups/7/devices/{ADDRESS}"),
            &format!("sys/bus/pci/drivers/{driver}/unbind"),
            "sys/bus/pci/drivers_probe",
            "dev/vfio/7",
        ] {
            machine.file(file, b"");
        }
        for (name, target) in [("driver", driver), ("iommu_group", "7")] {
            let link = machine.0.join(&device).join(name);
            symlink(Path::new("elsewhere").join(target), link).unwrap();
        }
        machine
    }

    pub fn file(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub fn host(&self) -> SysfsHost {
        SysfsHost::at(&self.0)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
