//! What moves the bytes of a store, the next better way, and the one thing that stands between: the same words for the
//! tool, Rust, C and Python.

use crate::doctor::judge;
use crate::nvidia::{self, NvidiaDriver};
use crate::topology::{FeatureVerdict, MachineTopology, SharedMemoryGpus, meaning};
use nvme_driver::sysfs::{PciAddress, SysfsHost};
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
    let between = match controller_of(host, disk) {
        None => "the file does not lie on a partition or namespace of an NVMe drive of this machine: copy it to one"
            .to_owned(),
        Some(controller) => {
            let (is_usable, _, text) = judge(host, &controller, &MachineTopology::with(host, &SharedMemoryGpus::here()));
            match is_usable {
                true => format!(
                    "the drive {controller} belongs to Linux: `nvme-gpu bind {controller}`, then open vfio:{controller}"
                ),
                false => format!("the drive {controller} {text}"),
            }
        }
    };
    (better, between)
}

/// Returns the PCI address of the NVMe controller that a block device is a namespace or partition of.
fn controller_of(host: &SysfsHost, (major, minor): (u32, u32)) -> Option<String> {
    let link = host.path(format!("sys/dev/block/{major}:{minor}"));
    let place = std::fs::canonicalize(link).ok()?;
    let names = place.iter().filter_map(|name| name.to_str());
    let address = names
        .rev()
        .find_map(|name| name.parse::<PciAddress>().ok())?;
    let function = host.function(address)?;
    function.is_nvme().then(|| address.to_string())
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
