//! The machine: IOMMU, VFIO, limits.

use super::finding::{DoctorFinding, FindingSeverity, MACHINE, SubjectFindings};
use nvme_driver::sysfs::SysfsHost;

/// Bytes of locked memory that a benchmark with many queues needs.
const ENOUGH: u64 = 64 << 20;
/// Capability to lock memory without a limit.
const CAP_IPC_LOCK: u32 = 14;

pub fn no_controller() -> DoctorFinding {
    let mut notes = SubjectFindings::about(MACHINE);
    notes.add(
        "controllers",
        FindingSeverity::Missing,
        "there is no NVMe controller on PCIe",
        "try the simulator: `nvme-gpu demo`",
    );
    notes.all.remove(0)
}

pub fn examine(host: &SysfsHost) -> Vec<DoctorFinding> {
    let mut notes = SubjectFindings::about(MACHINE);
    iommu(host, &mut notes);
    remapping(host, &mut notes);
    vfio(host, &mut notes);
    memlock(host, &mut notes);
    huge_pages(host, &mut notes);
    notes.all
}

fn iommu(host: &SysfsHost, notes: &mut SubjectFindings) {
    let groups = host.iommu_groups();
    if groups > 0 {
        return notes.ok("iommu", format!("on, {groups} groups"));
    }
    let line = host.text("proc/cmdline").unwrap_or_default();
    let off = line
        .split_whitespace()
        .find(|word| matches!(*word, "intel_iommu=off" | "amd_iommu=off" | "iommu=off"));
    if let Some(word) = off {
        return notes.add(
            "iommu",
            FindingSeverity::Missing,
            format!("switched off by {word} on the kernel's command line"),
            "take that word out and start again",
        );
    }
    let processor = host.text("proc/cpuinfo").unwrap_or_default();
    let remedy = if processor.contains("GenuineIntel") {
        "switch VT-d on in the firmware and start the kernel with intel_iommu=on"
    } else if processor.contains("AuthenticAMD") {
        "switch the IOMMU (AMD-Vi) on in the firmware; the kernel then uses it"
    } else {
        "switch the IOMMU on in the firmware and on the kernel's command line"
    };
    notes.add(
        "iommu",
        FindingSeverity::Missing,
        "off: there are no IOMMU groups",
        remedy,
    );
}

/// Examines interrupt remapping: bit 3 of Intel's extended capability register.
fn remapping(host: &SysfsHost, notes: &mut SubjectFindings) {
    let units = host.names("sys/class/iommu");
    let capability = |unit: &String| {
        let text = host.text(format!("sys/class/iommu/{unit}/intel-iommu/ecap"))?;
        u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let mut known = units.iter().filter_map(capability).peekable();
    if known.peek().is_none() {
        return;
    }
    if known.all(|bits| bits & 1 << 3 != 0) {
        notes.ok("interrupt remapping", "offered by every IOMMU");
    } else {
        notes.add(
            "interrupt remapping",
            FindingSeverity::Warning,
            "not offered: VFIO refuses the group",
            "switch it on in the firmware; only where you trust every device: \
             `modprobe vfio_iommu_type1 allow_unsafe_interrupts=1`",
        );
    }
}

fn vfio(host: &SysfsHost, notes: &mut SubjectFindings) {
    if !host.exists("sys/bus/pci/drivers/vfio-pci") {
        return notes.add(
            "vfio",
            FindingSeverity::Missing,
            "the driver vfio-pci is not loaded",
            "`modprobe vfio-pci`; at every start: a line vfio-pci in /etc/modules-load.d/vfio.conf",
        );
    }
    if !host.exists("dev/vfio/vfio") {
        return notes.add(
            "vfio",
            FindingSeverity::Missing,
            "vfio-pci is there, but /dev/vfio/vfio is not",
            "`modprobe vfio`; in a container: pass /dev/vfio through",
        );
    }
    if !host.exists("sys/module/vfio_iommu_type1") {
        return notes.add(
            "vfio",
            FindingSeverity::Warning,
            "vfio-pci is loaded, vfio_iommu_type1 is not seen",
            "`modprobe vfio_iommu_type1`, unless it is built into the kernel",
        );
    }
    notes.ok("vfio", "vfio-pci and the type 1 IOMMU are loaded");
}

fn memlock(host: &SysfsHost, notes: &mut SubjectFindings) {
    let status = host.text("proc/self/status").unwrap_or_default();
    let capabilities = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    if capabilities.is_some_and(|bits| bits & 1 << CAP_IPC_LOCK != 0) {
        return notes.ok("locked memory", "no limit for this user (CAP_IPC_LOCK)");
    }
    let limits = host.text("proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    match soft.map(str::parse::<u64>) {
        None => notes.add(
            "locked memory",
            FindingSeverity::Unknown,
            "the limit cannot be read",
            "look at `ulimit -l`",
        ),
        Some(Err(_)) => notes.ok("locked memory", "unlimited"),
        Some(Ok(bytes)) if bytes >= ENOUGH => {
            notes.ok("locked memory", format!("up to {} MiB", bytes >> 20));
        }
        Some(Ok(bytes)) => notes.add(
            "locked memory",
            FindingSeverity::Warning,
            format!(
                "limited to {} KiB: memory for DMA counts, and large queues and buffers will not fit",
                bytes >> 10
            ),
            "a line `USER - memlock unlimited` in /etc/security/limits.d, then log in again; \
             LimitMEMLOCK=infinity in a systemd unit",
        ),
    }
}

fn huge_pages(host: &SysfsHost, notes: &mut SubjectFindings) {
    let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let free = host.text(format!("{folder}/free_hugepages"));
    match free.map(|text| text.parse::<u64>()) {
        Some(Ok(0)) => notes.add(
            "huge pages",
            FindingSeverity::Note,
            "none free: buffers are mapped in pages of 4 KiB",
            "`echo 256 > /proc/sys/vm/nr_hugepages` sets 512 MiB aside",
        ),
        Some(Ok(free)) => notes.ok("huge pages", format!("{free} of 2 MiB are free")),
        _ => notes.add(
            "huge pages",
            FindingSeverity::Unknown,
            "this kernel tells nothing of huge pages of 2 MiB",
            "nothing has to be done: buffers are mapped in pages of 4 KiB",
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
    fn the_iommu_is_on_or_the_remedy_names_the_processor() {
        let tree = Tree::new();
        assert!(found(&tree, "iommu").starts_with("Missing: off"));
        for (vendor, remedy) in [
            ("GenuineIntel", "intel_iommu=on"),
            ("AuthenticAMD", "AMD-Vi"),
        ] {
            tree.file("proc/cpuinfo", format!("vendor_id : {vendor}\n"));
            assert!(found(&tree, "iommu").contains(remedy));
        }
        tree.file("proc/cmdline", "quiet intel_iommu=off\n");
        assert!(found(&tree, "iommu").contains("switched off by intel_iommu=off"));
        tree.controller("0000:01:00.0", "nvme", 7);
        assert_eq!(found(&tree, "iommu"), "Ok: on, 1 groups: -");
    }

    #[test]
    fn interrupt_remapping_is_told_where_it_is_known() {
        let tree = Tree::new();
        assert!(found(&tree, "interrupt remapping").starts_with("no finding"));
        tree.file("sys/class/iommu/dmar0/intel-iommu/ecap", "f00f5a\n");
        assert!(found(&tree, "interrupt remapping").starts_with("Ok"));
        tree.file("sys/class/iommu/dmar1/intel-iommu/ecap", "f00f52\n");
        assert!(found(&tree, "interrupt remapping").contains("allow_unsafe_interrupts"));
    }

    #[test]
    fn what_is_missing_of_vfio_is_named() {
        let tree = Tree::new();
        assert!(found(&tree, "vfio").contains("modprobe vfio-pci"));
        tree.file("sys/bus/pci/drivers/vfio-pci/bind", "");
        assert!(found(&tree, "vfio").contains("/dev/vfio/vfio is not"));
        tree.file("dev/vfio/vfio", "");
        assert!(found(&tree, "vfio").starts_with("Warning"));
        tree.file("sys/module/vfio_iommu_type1/refcnt", "0\n");
        assert!(found(&tree, "vfio").starts_with("Ok"));
    }

    #[test]
    fn the_limit_of_locked_memory_is_judged() {
        let tree = Tree::new();
        assert!(found(&tree, "locked memory").starts_with("Unknown"));
        let limit = |text: &str| format!("Max locked memory         {text}   {text}  bytes\n");
        tree.file("proc/self/limits", limit("8388608"));
        let small = found(&tree, "locked memory");
        assert!(small.starts_with("Warning: limited to 8192 KiB") && small.contains("limits.d"));
        tree.file("proc/self/limits", limit("1073741824"));
        assert_eq!(found(&tree, "locked memory"), "Ok: up to 1024 MiB: -");
        tree.file("proc/self/limits", limit("unlimited"));
        assert_eq!(found(&tree, "locked memory"), "Ok: unlimited: -");
        tree.file("proc/self/limits", limit("65536"));
        tree.file("proc/self/status", "Name: x\nCapEff:\t000001ffffffffff\n");
        assert!(found(&tree, "locked memory").starts_with("Ok: no limit"));
    }

    #[test]
    fn huge_pages_are_counted() {
        let tree = Tree::new();
        assert!(found(&tree, "huge pages").starts_with("Unknown"));
        let file = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
        tree.file(file, "0\n");
        assert!(found(&tree, "huge pages").starts_with("Note: none free"));
        tree.file(file, "12\n");
        assert_eq!(found(&tree, "huge pages"), "Ok: 12 of 2 MiB are free: -");
    }

    #[test]
    fn a_machine_without_a_controller_says_so() {
        let tree = Tree::new();
        assert!(found(&tree, "controllers").contains("nvme-gpu demo"));
        tree.controller("0000:01:00.0", "nvme", 7);
        assert!(found(&tree, "controllers").starts_with("no finding"));
    }
}
