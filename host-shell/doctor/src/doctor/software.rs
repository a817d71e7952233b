//! Findings about software for peer-to-peer transfers: the kernel's configuration, this project's module,
//! gdrcopy's driver.

use super::finding::{DoctorFinding, FindingSeverity, MACHINE, SubjectFindings};
use crate::kernel::{self, OptionState};
use nvme_driver::sysfs::SysfsHost;

pub fn examine(host: &SysfsHost) -> Vec<DoctorFinding> {
    let mut notes = SubjectFindings::about(MACHINE);
    module(host, &mut notes);
    p2pdma(host, &mut notes);
    iommufd(host, &mut notes);
    gdrdrv(host, &mut notes);
    notes.all
}

/// Examines the module nvme_gpu: loaded, installed or neither.
fn module(host: &SysfsHost, notes: &mut SubjectFindings) {
    const CHECK: &str = "module nvme_gpu";
    if host.exists("sys/module/nvme_gpu") {
        let version = host.text("sys/module/nvme_gpu/version");
        let version = version.unwrap_or_else(|| "of no version".to_owned());
        let is_unsafe = host.text("sys/module/nvme_gpu/parameters/unsafe");
        if is_unsafe.is_some_and(|text| text.trim() == "Y") {
            return notes.add(
                CHECK,
                FindingSeverity::Warning,
                format!("loaded, {version}, with unsafe=1: a controller that it lends reaches all memory"),
                "load it without that parameter where the IOMMU can be on",
            );
        }
        return notes.ok(CHECK, format!("loaded, {version}"));
    }
    let release = kernel::release(host);
    let list = host.text(format!("lib/modules/{release}/modules.dep"));
    let is_installed = list.is_some_and(|list| list.contains("/nvme_gpu.ko"));
    match is_installed {
        true => notes.add(
            CHECK,
            FindingSeverity::Note,
            format!("installed for kernel {release}, not loaded"),
            "for kmod:BDF: `modprobe nvme_gpu`",
        ),
        false => notes.add(
            CHECK,
            FindingSeverity::Note,
            format!("not installed for kernel {release}"),
            "for kmod:BDF, with which a drive reaches GPU memory: `cargo xtask kmod install`; vfio:BDF needs none",
        ),
    }
}

fn p2pdma(host: &SysfsHost, notes: &mut SubjectFindings) {
    match kernel::has(host, "CONFIG_PCI_P2PDMA") {
        OptionState::In => notes.ok("P2PDMA", "the kernel has CONFIG_PCI_P2PDMA"),
        OptionState::Out => notes.add(
            "P2PDMA",
            FindingSeverity::Note,
            "the kernel was built without CONFIG_PCI_P2PDMA: drivers that map peers' memory by it refuse",
            "for tier 2 use a kernel that was built with it",
        ),
        OptionState::Unknown => notes.add(
            "P2PDMA",
            FindingSeverity::Unknown,
            "neither /proc/config.gz nor /boot has the kernel's configuration",
            "look for CONFIG_PCI_P2PDMA where your distribution keeps it",
        ),
    }
}

fn iommufd(host: &SysfsHost, notes: &mut SubjectFindings) {
    if host.exists("dev/iommu") {
        return notes.ok(
            "IOMMUFD",
            "/dev/iommu is there: vfio:BDF?iommu=iommufd uses it, vfio:BDF uses type 1",
        );
    }
    let text = match kernel::has(host, "CONFIG_IOMMUFD") {
        OptionState::In => "built, but /dev/iommu is not there",
        _ => "/dev/iommu is not there",
    };
    notes.add(
        "IOMMUFD",
        FindingSeverity::Note,
        text,
        "nothing has to be done: vfio:BDF uses type 1",
    );
}

fn gdrdrv(host: &SysfsHost, notes: &mut SubjectFindings) {
    match host.exists("dev/gdrdrv") {
        true => notes.ok("gdrdrv", "/dev/gdrdrv is there: vfio:BDF reaches GPU memory by it (tier 2)"),
        false => notes.add(
            "gdrdrv",
            FindingSeverity::Note,
            "gdrcopy's driver is not loaded",
            "for tier 2 by vfio:BDF load gdrcopy's module; kmod:BDF needs none: GPU memory is exported as dma-bufs",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use nvme_driver::sysfs::testing::Tree;

    fn found(tree: &Tree, check: &str) -> String {
        examine(&tree.host()).find("machine", check)
    }

    #[test]
    fn the_module_is_loaded_installed_or_neither() {
        let tree = Tree::new();
        tree.file("proc/sys/kernel/osrelease", "6.12.9\n");
        let text = found(&tree, "module nvme_gpu");
        assert!(
            text.starts_with("Note: not installed for kernel 6.12.9: "),
            "{text}"
        );
        tree.file(
            "lib/modules/6.12.9/modules.dep",
            "updates/dkms/nvme_gpu.ko.xz:\n",
        );
        assert!(found(&tree, "module nvme_gpu").contains("`modprobe nvme_gpu`"));
        tree.file("sys/module/nvme_gpu/version", "0.1.0\n");
        assert_eq!(found(&tree, "module nvme_gpu"), "Ok: loaded, 0.1.0: -");
        tree.file("sys/module/nvme_gpu/parameters/unsafe", "Y\n");
        assert!(
            found(&tree, "module nvme_gpu").starts_with("Warning: loaded, 0.1.0, with unsafe=1")
        );
    }

    #[test]
    fn what_the_kernel_was_built_with_is_told() {
        let tree = Tree::new();
        assert!(found(&tree, "P2PDMA").starts_with("Unknown"));
        assert!(found(&tree, "IOMMUFD").starts_with("Note: /dev/iommu is not"));
        assert!(found(&tree, "gdrdrv").starts_with("Note"));
        tree.file("proc/sys/kernel/osrelease", "6.12.9\n");
        tree.file("boot/config-6.12.9", "CONFIG_IOMMUFD=m\n");
        assert!(found(&tree, "P2PDMA").starts_with("Note: the kernel was built without"));
        assert!(found(&tree, "IOMMUFD").starts_with("Note: built, but"));
        tree.file("boot/config-6.12.9", "CONFIG_PCI_P2PDMA=y\n");
        tree.file("dev/iommu", "");
        tree.file("dev/gdrdrv", "");
        for check in ["P2PDMA", "IOMMUFD", "gdrdrv"] {
            assert!(found(&tree, check).starts_with("Ok"), "{check}");
        }
    }
}
