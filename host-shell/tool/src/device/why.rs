//! `why`: what moves the bytes of a device, and what stands between it and a better way.

use crate::common::{OutputForm, output, visible};
use clap::Args;
use nvme_host::advice::{AdviceFacts, PathAdvice, advise};
use nvme_host::sysfs::SysfsHost;
use nvme_host::{Error, Result, Store, StoreOptions};
use rustix::fs::{major, minor};
use serde_json::json;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// Say what moves the bytes of a device now, the next better way, and the one thing that stands between
///
/// Opens the device for reading only, as a program would: a drive that another program drives is refused. Of a block
/// device that Linux uses it says that, and what lies below.
#[derive(Args)]
pub struct WhyCommand {
    /// Device or file: sim:, vfio:, kmod:, vfio-user:, file:, stripe:, or a path
    device: String,
    /// Open it with GPU N (0 without a number)
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0")]
    gpu: Option<u32>,
    #[command(flatten)]
    form: OutputForm,
}

impl WhyCommand {
    pub fn run(self) -> Result<()> {
        let options = StoreOptions {
            read_only: true,
            #[cfg(feature = "cuda")]
            gpu: self.gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..Default::default()
            }),
            ..StoreOptions::default()
        };
        let members = match Store::open(&self.device, &options) {
            Ok(store) => store.explain(),
            Err(error) => match of_block_device(&SysfsHost::here(), &self.device, &error) {
                Some(advice) => vec![advice],
                None => return Err(error),
            },
        };
        if self.form.json {
            return output::json(&json!({ "members": members }));
        }
        let lines: Vec<String> = members.iter().map(ToString::to_string).collect();
        output::print(&visible::lines(&lines.join("\n")))
    }
}

/// Returns the advice about a block device that could not be opened; `None` for everything else.
fn of_block_device(host: &SysfsHost, device: &str, error: &Error) -> Option<PathAdvice> {
    let path = device.strip_prefix("file:").unwrap_or(device);
    let found = std::fs::metadata(path).ok()?;
    let number = (major(found.rdev()), minor(found.rdev()));
    let is_block_device = found.file_type().is_block_device();
    is_block_device.then(|| of_disk(host, device, number, error))
}

fn of_disk(host: &SysfsHost, device: &str, disk: (u32, u32), error: &Error) -> PathAdvice {
    let facts = AdviceFacts {
        device,
        path: &format!("nothing of this program: {error}"),
        why: "",
        tier: None,
        has_gpu: false,
        disk: Some(disk),
    };
    advise(host, &facts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_block_device_in_use_has_its_layers_and_drives_named() {
        let root = std::env::temp_dir().join(format!("nvme-gpu-why-{}", std::process::id()));
        let devices = root.join("sys/devices/virtual/block");
        for (name, file, text) in [("md0", "md/level", "raid1\n"), ("sda", "size", "8\n")] {
            let path = devices.join(name).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        for folder in [
            devices.join("md0/slaves"),
            root.join("sys/dev/block"),
            root.join("sys/class/block"),
        ] {
            fs::create_dir_all(folder).unwrap();
        }
        symlink(devices.join("sda"), devices.join("md0/slaves/sda")).unwrap();
        symlink(devices.join("md0"), root.join("sys/dev/block/9:0")).unwrap();
        symlink(devices.join("md0"), root.join("sys/class/block/md0")).unwrap();
        let error = Error::usage("/dev/md0 is in use: md0 is mounted at /data", "unmount it");
        let host = SysfsHost::at(&root);
        let advice = of_disk(&host, "/dev/md0", (9, 0), &error);
        let other = of_block_device(&host, "/dev/null", &error);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            advice.now,
            "nothing of this program: /dev/md0 is in use: md0 is mounted at /data"
        );
        let between = advice.between.unwrap();
        assert!(
            between.starts_with("the RAID array md0 (raid1), whose bytes")
                && between.contains("sda"),
            "{between}"
        );
        assert_eq!(other, None);
    }
}
