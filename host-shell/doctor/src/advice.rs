//! What moves the bytes of a store, the next better way, and the one thing that stands between: the same words for the
//! tool, Rust, C and Python.

use crate::doctor::judge;
use crate::nvidia::{self, NvidiaDriver};
use crate::topology::{FeatureVerdict, MachineTopology, SharedMemoryGpus, meaning};
use nvme_driver::sysfs::{LayeredDisk, PciAddress, SysfsHost};
use serde::Serialize;
use std::fmt;

/// Facts about an open device of a store.
#[derive(Clone, Copy, Debug)]
pub struct AdviceFacts<'a> {
    /// Name of the device, as the user wrote it.
    pub device: &'a str,
    /// Mover of the data, in words.
    pub path: &'a str,
    /// Reason why no faster path is used, in words.
    pub why: &'a str,
    /// The tier of the GPU that submits commands.
    pub tier: Option<u32>,
    /// True if the store was opened with a GPU.
    pub has_gpu: bool,
    /// Major and minor number of the block device that a file lies on; `None` for a controller that this process drives.
    pub disk: Option<(u32, u32)>,
}

/// Advice about a device of a store. `Display` is three lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathAdvice {
    /// Name of the device, as the user wrote it.
    pub device: String,
    /// What moves the bytes now.
    pub now: String,
    /// The next better way; `None` if there is none.
    pub better: Option<String>,
    /// What stands between; `None` if there is no better way.
    pub between: Option<String>,
}

impl fmt::Display for PathAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or =
            |text: &Option<String>, none: &str| text.clone().unwrap_or_else(|| none.to_owned());
        writeln!(f, "{}", self.device)?;
        writeln!(f, "  now: {}", self.now)?;
        writeln!(f, "  better: {}", or(&self.better, "nothing is"))?;
        write!(f, "  between: {}", or(&self.between, "-"))
    }
}

/// Returns what moves the bytes now and what would be better. Reads files of the system, and changes nothing.
pub fn advise(host: &SysfsHost, facts: &AdviceFacts<'_>) -> PathAdvice {
    let now = match facts.tier.and_then(|tier| u8::try_from(tier).ok()) {
        Some(tier) => format!("{}; tier {tier}: {}", facts.path, meaning(tier)),
        None => facts.path.to_owned(),
    };
    let next = match (facts.disk, facts.tier) {
        (Some(disk), _) => Some(above_file(host, disk)),
        (None, Some(tier)) => above_tier(host, facts, tier),
        (None, None) => Some(above_cpu(host, facts)),
    };
    let (better, between) = next.unzip();
    PathAdvice {
        device: facts.device.to_owned(),
        now,
        better,
        between,
    }
}

/// Returns the way above a file or block device of the system, and what stands between.
fn above_file(host: &SysfsHost, disk: (u32, u32)) -> (String, String) {
    let better = "commands of this process, or of a GPU, to the drive itself".to_owned();
    let below = host.block_layers(disk);
    let between = match (below.layers.as_slice(), below.disks.as_slice()) {
        ([], [one]) => match one.controller {
            Some(controller) => above_disk(host, controller),
            None => format!("it lies on {}, which is no NVMe drive: copy it to one", one.name),
        },
        ([], _) => {
            "the file does not lie on a partition or namespace of an NVMe drive of this machine: copy it to one"
                .to_owned()
        }
        (layers, disks) => under_layers(layers, disks),
    };
    (better, between)
}

/// Returns what keeps a controller of PCIe, whose disk a file lies on, from this process.
fn above_disk(host: &SysfsHost, controller: PciAddress) -> String {
    let topology = MachineTopology::with(host, &SharedMemoryGpus::here());
    let (is_usable, _, text) = judge(host, &controller.to_string(), &topology);
    match is_usable {
        true => format!(
            "the drive {controller} belongs to Linux: `nvme-gpu bind {controller}`, then open vfio:{controller}"
        ),
        false => format!("the drive {controller} {text}"),
    }
}

/// Returns what stands between the drives and a file on a device that Linux makes of them.
fn under_layers(layers: &[String], disks: &[LayeredDisk]) -> String {
    let drives = disks.iter().map(|disk| match disk.controller {
        Some(controller) => format!("{controller} ({})", disk.name),
        None => format!("{}, which is no NVMe drive", disk.name),
    });
    let drives: Vec<String> = drives.collect();
    let layers = layers.join(" on ");
    let nvme = disks
        .iter()
        .filter(|disk| disk.controller.is_some())
        .count();
    let remedy = match nvme {
        0 => "copy the data to an NVMe drive",
        1 => "copy the data to a drive without them, and open that",
        _ => "copy the data to one drive, or in stripes to several (`stripe:`), and open those",
    };
    match drives.as_slice() {
        [] => format!("{layers}, whose bytes only Linux finds: {remedy}"),
        drives => format!(
            "{layers}, whose bytes only Linux finds, on {}: {remedy}",
            drives.join(" and ")
        ),
    }
}

/// Returns the way above CPU threads that drive a controller, and what stands between.
fn above_cpu(host: &SysfsHost, facts: &AdviceFacts<'_>) -> (String, String) {
    let better = format!("tier 0 or above: {}", meaning(0));
    let between = if facts.has_gpu {
        facts.why.to_owned()
    } else if NvidiaDriver::loaded(host).is_some() {
        "no GPU was asked for: open the store with one".to_owned()
    } else if nvidia::find(host).is_empty() {
        "this machine has no GPU".to_owned()
    } else {
        "the NVIDIA driver is not loaded".to_owned()
    };
    (better, between)
}

/// Returns the tier above `tier`, and what stands between; `None` above the highest.
fn above_tier(host: &SysfsHost, facts: &AdviceFacts<'_>, tier: u32) -> Option<(String, String)> {
    let next = u8::try_from(tier + 1).ok().filter(|next| *next <= 3)?;
    let better = format!("tier {next}: {}", meaning(next));
    if next == 3 {
        let between =
            "it is used only where it is asked for, and no drive has run it yet (docs/tier3.md)";
        return Some((better, between.to_owned()));
    }
    // What was tried when the store was opened is known better than what files of the system say.
    let mut between = facts.why.to_owned();
    if let Some(verdict) = verdict(host, facts.device, next) {
        between = format!("{between}; {verdict}");
    }
    Some((better, between))
}

/// Returns what `doctor` says against a tier of a controller on PCIe, over the GPU for which it is best.
fn verdict(host: &SysfsHost, device: &str, tier: u8) -> Option<String> {
    let (way, address) = device
        .split_once(':')
        .filter(|(way, _)| ["vfio", "kmod"].contains(way))?;
    let address = address.split('?').next()?;
    let topology = MachineTopology::with(host, &SharedMemoryGpus::here());
    let paths = topology
        .paths
        .iter()
        .filter(|path| path.controller == address);
    let verdicts = paths.flat_map(|path| path.tiers.iter().filter(|one| one.tier == tier));
    let best = verdicts
        .map(|one| if way == "vfio" { &one.vfio } else { &one.kmod })
        .min_by_key(|verdict| verdict.allowed)?;
    (best.allowed != FeatureVerdict::Yes).then(|| best.why.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_driver::sysfs::testing::Tree;

    const SSD: &str = "0000:02:00.0";
    const GPU: &str = "0000:03:00.0";

    fn facts<'a>(device: &'a str, tier: Option<u32>) -> AdviceFacts<'a> {
        AdviceFacts {
            device,
            path: "8 queues",
            why: "a host thread passes doorbells on (refused)",
            tier,
            has_gpu: tier.is_some(),
            disk: None,
        }
    }

    fn between(tree: &Tree, facts: &AdviceFacts<'_>) -> String {
        advise(&tree.host(), facts).between.unwrap_or_default()
    }

    fn drive() -> Tree {
        let tree = Tree::new();
        tree.controller(SSD, "nvme", 7);
        tree.file("sys/bus/pci/drivers/vfio-pci/bind", "");
        tree.file("dev/vfio/vfio", "");
        tree
    }

    #[test]
    fn above_a_file_is_its_drive_and_what_keeps_it_is_named() {
        let tree = drive();
        let file = AdviceFacts {
            disk: Some((259, 1)),
            ..facts("file:/data/table", None)
        };
        assert!(between(&tree, &file).contains("does not lie on"));
        let place = format!("sys/devices/pci0000:00/{SSD}/nvme/nvme0/nvme0n1/nvme0n1p1");
        tree.file(&format!("{place}/dev"), "259:1\n");
        tree.link("sys/dev/block/259:1", &format!("../../../{place}"));
        let text = between(&tree, &file);
        assert!(text.contains(&format!("`nvme-gpu bind {SSD}`")), "{text}");
        tree.disk(SSD, "nvme0n1", "259:0", &[]);
        tree.file("proc/swaps", "Filename\n/dev/nvme0n1 partition\n");
        let text = between(&tree, &file);
        assert!(
            text.contains("cannot be used") && text.contains("in use"),
            "{text}"
        );
    }

    #[test]
    fn below_raid_and_lvm_are_their_drives() {
        let tree = drive();
        let disk = format!("sys/devices/pci0000:00/{SSD}/nvme/nvme0/nvme0n1");
        tree.block(&disk, "259:0", &[]);
        let sda = "sys/devices/pci0000:00/0000:00:1f.2/ata1/host0/block/sda";
        tree.block(sda, "8:0", &[]);
        let array = "sys/devices/virtual/block/md0";
        tree.block(array, "9:0", &[&disk, sda]);
        tree.file(&format!("{array}/md/level"), "raid1\n");
        let volume = "sys/devices/virtual/block/dm-3";
        tree.block(volume, "253:3", &[array]);
        tree.file(&format!("{volume}/dm/name"), "vg-data\n");
        tree.file(&format!("{volume}/dm/uuid"), "LVM-x\n");
        let on = |disk: (u32, u32)| {
            let file = AdviceFacts {
                disk: Some(disk),
                ..facts("/dev/mapper/vg-data", None)
            };
            between(&tree, &file)
        };
        assert_eq!(
            on((253, 3)),
            "the logical volume vg-data (LVM) on the RAID array md0 (raid1), whose bytes only Linux finds, on \
             0000:02:00.0 (nvme0n1) and sda, which is no NVMe drive: copy the data to a drive without them, and open that"
        );
        assert!(on((9, 0)).starts_with("the RAID array md0 (raid1), whose bytes"));
        assert!(on((259, 0)).contains(&format!("`nvme-gpu bind {SSD}`")));
        assert_eq!(
            on((8, 0)),
            "it lies on sda, which is no NVMe drive: copy it to one"
        );
        assert!(on((8, 1)).contains("does not lie on"));
    }

    #[test]
    fn above_cpu_threads_is_a_gpu() {
        let tree = drive();
        let drive = facts("vfio:0000:02:00.0", None);
        assert_eq!(between(&tree, &drive), "this machine has no GPU");
        let config = Tree::config(0x10DE, 0x2330, 0x03_02_00);
        tree.function(GPU, &config, "nvidia", 9);
        assert_eq!(between(&tree, &drive), "the NVIDIA driver is not loaded");
        let version = "NVRM version: NVIDIA UNIX x86_64  535.1.1\n";
        tree.file("proc/driver/nvidia/version", version);
        assert!(between(&tree, &drive).starts_with("no GPU was asked for"));
        let refused = AdviceFacts {
            has_gpu: true,
            ..drive
        };
        assert_eq!(between(&tree, &refused), refused.why);
    }

    #[test]
    fn above_a_tier_is_the_next_with_what_doctor_says() {
        let tree = drive();
        tree.function(GPU, &Tree::config(0x10DE, 0x2330, 0x03_02_00), "nvidia", 9);
        let version = "NVRM version: NVIDIA UNIX x86_64  535.1.1\n";
        tree.file("proc/driver/nvidia/version", version);
        let advice = advise(&tree.host(), &facts("kmod:0000:02:00.0", Some(1)));
        assert!(
            advice.now.contains("tier 1: the GPU rings doorbells"),
            "{advice}"
        );
        assert!(advice.better.as_deref().unwrap().starts_with("tier 2"));
        let text = advice.between.as_deref().unwrap();
        assert!(
            text.starts_with("a host thread passes") && text.contains("module nvme_gpu"),
            "{text}"
        );
        let simulated = advise(&tree.host(), &facts("sim:mem", Some(1)));
        assert_eq!(simulated.between.as_deref(), Some(facts("", None).why));
        let last = advise(&tree.host(), &facts("sim:mem", Some(2)));
        assert!(last.between.unwrap().contains("asked for"));
        let none = advise(&tree.host(), &facts("sim:mem", Some(3)));
        assert_eq!((&none.better, &none.between), (&None, &None));
        assert!(
            none.to_string()
                .ends_with("better: nothing is\n  between: -")
        );
    }
}
