//! The tier that follows from the findings, and the reason why no higher one does.

use crate::nvidia::NvidiaDriver;
use crate::topology::{FeatureVerdict, MachineTopology, PeerPath, ReasonedVerdict, meaning};
use nvme_driver::sysfs::{SysfsFunction, SysfsHost};
use serde::Serialize;

/// Possible use of a controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ControllerVerdict {
    /// The controller's PCI address.
    pub controller: String,
    /// True if the controller can be driven through VFIO or the module nvme_gpu: now, or after
    /// `bind`.
    pub usable: bool,
    /// The highest tier to expect for sure with a GPU; none without one.
    pub tier: Option<u8>,
    /// The verdict in words, with the reason for not expecting more.
    pub text: String,
}

pub fn of(
    host: &SysfsHost,
    function: &SysfsFunction,
    topology: &MachineTopology,
) -> ControllerVerdict {
    let controller = function.address.to_string();
    let (usable, tier, text) = judge(host, &controller, topology);
    ControllerVerdict {
        controller,
        usable,
        tier,
        text,
    }
}

/// Returns whether a controller can be driven, the highest tier that is sure, and both in words.
pub fn judge(
    host: &SysfsHost,
    controller: &str,
    topology: &MachineTopology,
) -> (bool, Option<u8>, String) {
    let mut controllers = topology.controllers.iter();
    let Some(found) = controllers.find(|one| one.controller == controller) else {
        return (false, None, "is not there any more".to_owned());
    };
    let (vfio, kmod) = (&found.ways.vfio, &found.ways.kmod);
    if vfio.allowed == FeatureVerdict::No && kmod.allowed == FeatureVerdict::No {
        let more = match kmod.why == vfio.why {
            true => String::new(),
            false => format!("; kmod: {}", kmod.why),
        };
        return (
            false,
            None,
            format!("cannot be used: vfio: {}{more}", vfio.why),
        );
    }
    let paths: Vec<&PeerPath> = topology
        .paths
        .iter()
        .filter(|path| path.controller == controller)
        .collect();
    if paths.is_empty() {
        return (true, None, "from CPU threads; no GPU".to_owned());
    }
    if NvidiaDriver::loaded(host).is_none() {
        let text = "from CPU threads; the NVIDIA driver is not loaded";
        return (true, None, text.to_owned());
    }
    let (tier, text) = highest(&paths);
    (true, tier, text)
}

/// Returns the highest tier of the best path, and why the next one is not for sure.
fn highest(paths: &[&PeerPath]) -> (Option<u8>, String) {
    let best = |path: &PeerPath| {
        let sure = path
            .tiers
            .iter()
            .filter(|tier| better(&tier.vfio, &tier.kmod).allowed == FeatureVerdict::Yes);
        sure.map(|tier| tier.tier).max()
    };
    let Some(path) = paths.iter().max_by_key(|path| best(path)) else {
        return (None, String::new());
    };
    let tier = best(path);
    let next = tier.map_or(0, |tier| usize::from(tier) + 1);
    let why = path.tiers.get(next).map(|tier| {
        let answer = better(&tier.vfio, &tier.kmod);
        let word = match answer.allowed {
            FeatureVerdict::Unknown => "not for sure",
            _ => "not",
        };
        format!("tier {} {word}: {}", tier.tier, answer.why)
    });
    let is = tier.map(|tier| format!("tier {tier} ({})", meaning(tier)));
    let parts: Vec<String> = is.into_iter().chain(why).collect();
    (tier, parts.join("; "))
}

/// Returns the better of the two verdicts; the module's if they are equal.
fn better<'a>(vfio: &'a ReasonedVerdict, kmod: &'a ReasonedVerdict) -> &'a ReasonedVerdict {
    let rank = |answer: &ReasonedVerdict| match answer.allowed {
        FeatureVerdict::Yes => 2,
        FeatureVerdict::Unknown => 1,
        FeatureVerdict::No => 0,
    };
    match rank(vfio) > rank(kmod) {
        true => vfio,
        false => kmod,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DoctorReport, examine};
    use nvme_driver::sysfs::testing::Tree;

    const GPU: &str = "0000:03:00.0";
    const SSD: &str = "0000:02:00.0";
    const SWITCH: &str = "0000:01:00.0";

    fn report(tree: &Tree) -> DoctorReport {
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
        expect(&tree, false, None, "vfio-pci is not loaded");
        expect(
            &tree,
            false,
            None,
            "kmod: the module nvme_gpu is not loaded",
        );
        let tree = ready(&[]);
        tree.function("0000:09:00.0", &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
        expect(&tree, false, None, "its group is shared with 0000:09:00.0");
        // With the module, the controller could access the memory of the other function, too.
        tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
        expect(&tree, false, None, "whose memory would be within its reach");
        let tree = ready(&[]);
        tree.disk(SSD, "nvme0n1", "259:0", &[]);
        tree.file("proc/swaps", "Filename\n/dev/nvme0n1 partition\n");
        expect(&tree, false, None, "in use");
        let tree = Tree::new();
        tree.without_group(SSD, &Tree::config(1, 2, 0x01_08_02), "");
        expect(&tree, false, None, "the IOMMU is off");
    }

    #[test]
    fn each_tier_has_its_conditions() {
        let tree = ready(&[SWITCH]);
        expect(&tree, true, None, "no GPU");
        let config = Tree::config(0x10DE, 0x2330, 0x03_02_00);
        tree.function(GPU, &config, "nvidia", 9);
        expect(&tree, true, None, "driver is not loaded");
        let open = "Open Kernel Module for x86_64";
        tree.file("proc/driver/nvidia/version", version(open, "580.159.04"));
        expect(
            &tree,
            true,
            Some(0),
            "tier 1 not for sure: driver 580.159.04 may refuse",
        );
        tree.file("proc/driver/nvidia/version", version("x86_64", "535.1.1"));
        expect(
            &tree,
            true,
            Some(1),
            "tier 2 not: the module nvme_gpu is not loaded",
        );
        tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
        expect(&tree, true, Some(1), "tier 2 not: the proprietary modules");
        tree.file("proc/driver/nvidia/version", version(open, "535.1.1"));
        expect(
            &tree,
            true,
            Some(1),
            "tier 2 not for sure: the driver does not name",
        );
        let name = |model: &str| {
            let file = format!("proc/driver/nvidia/gpus/{GPU}/information");
            tree.file(&file, format!("Model: {model}\n"));
        };
        name("NVIDIA GeForce RTX 3090");
        expect(&tree, true, Some(1), "tier 2 not: a GeForce");
        name("NVIDIA H200");
        expect(
            &tree,
            true,
            Some(1),
            "tier 2 not for sure: transfers between peers pass",
        );
    }
}
