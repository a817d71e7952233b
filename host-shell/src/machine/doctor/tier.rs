//! Which tier follows from what was found, and why not a higher one.

use super::finding::{Finding, Status};
use super::{gpu, machine};
use crate::machine::sysfs::{Function, Host};
use serde::Serialize;

/// What a controller can be used for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The controller's PCI address.
    pub controller: String,
    /// It can be driven through VFIO: now, or after `bind`.
    pub usable: bool,
    /// The highest tier to expect with a GPU; none without one.
    pub tier: Option<u8>,
    /// In words, with the reason for not expecting more.
    pub text: String,
}

pub fn of(host: &Host, function: &Function, gpus: &[Function], findings: &[Finding]) -> Verdict {
    let controller = function.address.to_string();
    let verdict = |usable, tier, text: &str| Verdict {
        controller: controller.clone(),
        usable,
        tier,
        text: text.to_owned(),
    };
    let is_missing = |one: &&Finding| one.status == Status::Missing && one.subject == controller;
    let missing = findings.iter().find(is_missing);
    if !machine::has_iommu(host) {
        return verdict(false, None, "cannot be used: the IOMMU is off");
    }
    if !machine::has_vfio(host) {
        return verdict(false, None, "cannot be used before vfio-pci is loaded");
    }
    if let Some(missing) = missing {
        let text = format!("cannot be used: {}: {}", missing.check, missing.text);
        return verdict(false, None, &text);
    }
    if !host.users(function).is_empty() {
        return verdict(false, None, "cannot be used: its disks are in use");
    }
    if gpus.is_empty() {
        return verdict(true, None, "from CPU threads; no GPU");
    }
    let Some(driver) = gpu::Driver::loaded(host) else {
        return verdict(
            true,
            None,
            "from CPU threads; the NVIDIA driver is not loaded",
        );
    };
    if !driver.registers_bars() {
        let text = "tier 0 for sure (relayed doorbells); tier 1 where the driver still registers BARs, \
                    which `nvme-gpu demo` tries";
        return verdict(true, Some(0), text);
    }
    let near = gpus
        .iter()
        .find(|gpu| gpu::common_bridge(gpu, function).is_some());
    match near {
        None => verdict(
            true,
            Some(1),
            "tier 1 (doorbells from the GPU, data in host memory); 2 and 3 need a GPU below the same PCIe switch",
        ),
        Some(_) if !driver.open => verdict(
            true,
            Some(1),
            "tier 1 (doorbells from the GPU, data in host memory); 2 and 3 need the open kernel modules",
        ),
        Some(gpu) if gpu::is_whole(gpu) == Some(false) => verdict(
            true,
            Some(2),
            "tier 2 for buffers inside BAR1; 3 needs a resizable BAR of full size",
        ),
        Some(_) => verdict(true, Some(3), "tier 3: rings and data in GPU memory"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Report, examine};
    use crate::machine::sysfs::testing::Tree;

    const GPU: &str = "0000:03:00.0";
    const SSD: &str = "0000:02:00.0";
    const SWITCH: &str = "0000:01:00.0";

    fn report(tree: &Tree) -> Report {
        examine(&tree.host())
    }

    fn ready(gpu_above: &[&str]) -> Tree {
        let tree = Tree::new();
        tree.place(SSD, &[SWITCH]);
        tree.place(GPU, gpu_above);
        tree.controller(SSD, "nvme", 7);
        tree.file("sys/bus/pci/drivers/vfio-pci/bind", "");
        tree.file("dev/vfio/vfio", "");
        tree
    }

    fn expect(tree: &Tree, usable: bool, tier: Option<u8>, text: &str) {
        let report = report(tree);
        let [verdict] = &report.tiers[..] else {
            panic!("one controller: {report:?}");
        };
        assert_eq!(
            (verdict.usable, verdict.tier),
            (usable, tier),
            "{}",
            verdict.text
        );
        assert!(verdict.text.contains(text), "{}", verdict.text);
    }

    fn version(kind: &str, number: &str) -> String {
        format!("NVRM version: NVIDIA UNIX {kind}  {number}\n")
    }

    #[test]
    fn what_keeps_a_controller_from_use_is_named() {
        let tree = Tree::new();
        tree.controller(SSD, "nvme", 7);
        expect(&tree, false, None, "vfio-pci is loaded");
        let tree = ready(&[]);
        tree.function("0000:09:00.0", &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
        expect(&tree, false, None, "group: 7 is shared");
        let tree = ready(&[]);
        tree.disk(SSD, "nvme0n1", "259:0", &[]);
        tree.file("proc/swaps", "Filename\n/dev/nvme0n1 partition\n");
        expect(&tree, false, None, "in use");
        let tree = ready(&[]);
        std::fs::remove_dir_all(tree.host().path("sys/kernel/iommu_groups")).unwrap();
        expect(&tree, false, None, "the IOMMU is off");
    }

    #[test]
    fn each_tier_has_its_conditions() {
        let tree = ready(&[SWITCH]);
        expect(&tree, true, None, "no GPU");
        let mut config = Tree::config(0x10DE, 0x2330, 0x03_02_00);
        tree.function(GPU, &config, "nvidia", 9);
        expect(&tree, true, None, "driver is not loaded");
        let open = "Open Kernel Module for x86_64";
        tree.file("proc/driver/nvidia/version", version(open, "580.159.04"));
        expect(&tree, true, Some(0), "relayed doorbells");
        tree.file("proc/driver/nvidia/version", version("x86_64", "535.1.1"));
        expect(&tree, true, Some(1), "open kernel modules");
        tree.file("proc/driver/nvidia/version", version(open, "535.1.1"));
        expect(&tree, true, Some(3), "rings and data in GPU memory");
        config.resize(4096, 0);
        config[0x100..0x104].copy_from_slice(&[0x15, 0, 1, 0]);
        config[0x104..0x108].copy_from_slice(&(0b11u32 << 12).to_le_bytes());
        config[0x108..0x10C].copy_from_slice(&(1 | 1 << 5 | 8u32 << 8).to_le_bytes());
        tree.function(GPU, &config, "nvidia", 9);
        expect(&tree, true, Some(2), "resizable BAR");
        let tree = ready(&["0000:00:09.0"]);
        tree.function(GPU, &config, "nvidia", 9);
        tree.file("proc/driver/nvidia/version", version(open, "535.1.1"));
        expect(&tree, true, Some(1), "below the same PCIe switch");
    }
}
