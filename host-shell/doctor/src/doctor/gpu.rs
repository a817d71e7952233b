//! Findings about NVIDIA GPUs: the driver, the memory that it can map, and whether a controller can access GPU
//! memory. Findings follow from files and driver calls alone; nothing is launched, and each finding has its remedy.

use super::finding::{DoctorFinding, FindingSeverity, MACHINE, SubjectFindings};
use crate::nvidia::{GpuProduct, NvidiaDriver, RawAddresses, is_whole};
use crate::topology::{MachineTopology, PathRelation, PeerPath, TurningPoint};
use nvme_driver::sysfs::{SysfsFunction, SysfsHost};

pub fn examine(
    host: &SysfsHost,
    gpus: &[SysfsFunction],
    topology: &MachineTopology,
) -> Vec<DoctorFinding> {
    let mut notes = SubjectFindings::about(MACHINE);
    driver(host, gpus, &mut notes);
    let mut all = notes.all;
    for gpu in gpus {
        let mut notes = SubjectFindings::about(gpu.address);
        resizable_bar(gpu, &mut notes);
        product(host, gpu, &mut notes);
        let address = gpu.address.to_string();
        let paths = topology.paths.iter().filter(|path| path.gpu == address);
        paths.for_each(|path| peers(path, &mut notes));
        all.append(&mut notes.all);
    }
    all
}

fn driver(host: &SysfsHost, gpus: &[SysfsFunction], notes: &mut SubjectFindings) {
    if gpus.is_empty() {
        return notes.add(
            "GPU",
            FindingSeverity::Note,
            "no NVIDIA GPU on PCIe",
            "nothing has to be done: commands come from CPU threads",
        );
    }
    let Some(driver) = NvidiaDriver::loaded(host) else {
        return notes.add(
            "NVIDIA driver",
            FindingSeverity::Missing,
            "not loaded",
            "install the driver (580 or later, open kernel modules), `modprobe nvidia`",
        );
    };
    let kind = if driver.open {
        "open kernel modules"
    } else {
        "proprietary modules"
    };
    notes.ok("NVIDIA driver", format!("{}, {kind}", driver.version));
    if driver.registers_bars() {
        notes.ok(
            "BAR in the GPU",
            "this driver registers mapped BARs (cudaHostRegister, IOMEMORY)",
        );
    } else {
        let kernel = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
        notes.add(
            "BAR in the GPU",
            FindingSeverity::Warning,
            format!(
                "drivers from 550.54 on may refuse to register a mapped BAR (cudaHostRegister of PFN maps) on \
                 kernels that dropped follow_pfn and follow_pte (open-gpu-kernel-modules, issue 732); this is \
                 kernel {kernel}"
            ),
            "`nvme-gpu demo` tries it and falls back to tier 0",
        );
    }
    addresses(&driver, notes);
    if !host.exists("sys/kernel/dmabuf") && !host.exists("dev/dma_heap") {
        notes.add(
            "dma-buf",
            FindingSeverity::Unknown,
            "nothing is seen of dma-buf in this kernel",
            "see whether the kernel has CONFIG_DMA_SHARED_BUFFER",
        );
    } else if driver.open {
        notes.ok("dma-buf", "the driver exports GPU memory");
    } else {
        notes.add(
            "dma-buf",
            FindingSeverity::Warning,
            "the proprietary modules do not export GPU memory",
            "install the open kernel modules (Turing and later)",
        );
    }
}

/// Examines whether the driver is one that is known to export addresses that no IOMMU maps.
fn addresses(driver: &NvidiaDriver, notes: &mut SubjectFindings) {
    const CHECK: &str = "exported addresses";
    const ISSUE: &str = "open-gpu-kernel-modules, issue 1324";
    match driver.raw_addresses() {
        RawAddresses::NotOpen => {}
        RawAddresses::Earlier => notes.ok(
            CHECK,
            format!("nothing is known against {} ({ISSUE} is about 595.84)", driver.version),
        ),
        RawAddresses::Reported => notes.add(
            CHECK,
            FindingSeverity::Warning,
            format!("595.84 is reported to export addresses of BAR1 that the IOMMU does not map ({ISSUE})"),
            "kmod:BDF maps them itself or refuses them; use another driver where it refuses",
        ),
        RawAddresses::Later => notes.add(
            CHECK,
            FindingSeverity::Note,
            format!("{ISSUE} is about 595.84; whether {} is mended is not known", driver.version),
            "nothing has to be done: kmod:BDF looks at each address, and maps or refuses it",
        ),
    }
}

/// Examines which tiers the model of GPU allows according to NVIDIA, and to reports about patched drivers.
fn product(host: &SysfsHost, gpu: &SysfsFunction, notes: &mut SubjectFindings) {
    if GpuProduct::of(host, gpu) != GpuProduct::GeForce {
        return;
    }
    notes.add(
        "GeForce",
        FindingSeverity::Note,
        "tiers 0 and 1 with stock software: NVIDIA offers GPUDirect RDMA for Tesla and Quadro GPUs only",
        "nothing has to be done for these; of tier 2 with patched software nothing has been run: reports are in \
         docs/topology.md",
    );
}

fn resizable_bar(gpu: &SysfsFunction, notes: &mut SubjectFindings) {
    let Some(bar) = gpu.config.resizable.iter().find(|bar| bar.bar == 1) else {
        let text = match gpu.resource(1) {
            Some(bar) => format!("BAR1 has {} MiB and cannot be resized", bar.bytes >> 20),
            None => "BAR1 has no address".to_owned(),
        };
        let remedy = "peers reach that much of its memory; as root more may be known";
        return notes.add("resizable BAR", FindingSeverity::Unknown, text, remedy);
    };
    let mib = |bytes: u64| bytes >> 20;
    if is_whole(gpu) == Some(true) {
        notes.ok(
            "resizable BAR",
            format!("BAR1 has {} MiB, its largest size", mib(bar.current)),
        );
    } else {
        notes.add(
            "resizable BAR",
            FindingSeverity::Warning,
            format!(
                "BAR1 has {} of {} MiB: peers reach only a part of the GPU's memory",
                mib(bar.current),
                mib(bar.largest)
            ),
            "switch on Resizable BAR and Above 4G Decoding in the firmware",
        );
    }
}

fn peers(path: &PeerPath, notes: &mut SubjectFindings) {
    let PeerPath {
        gpu,
        controller,
        why,
        ..
    } = path;
    let shown = format!(
        "what works is shown by `nvme-gpu p2p --device vfio:{controller} --peer /sys/bus/pci/devices/{gpu}/resource1`"
    );
    match (path.relation, path.route) {
        (_, TurningPoint::Switch) => notes.ok("peer-to-peer", format!("{controller}: {why}")),
        (PathRelation::SameSwitch, _) => notes.add(
            "peer-to-peer",
            FindingSeverity::Note,
            format!("{controller} is below the same switch, though transfers may leave it: {why}"),
            shown,
        ),
        _ => notes.add(
            "peer-to-peer",
            FindingSeverity::Warning,
            format!(
                "the way to {controller} leads through the root complex: writes mostly arrive, reads may be \
                 slow or refused"
            ),
            format!("put both below one PCIe switch; {shown}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use nvme_driver::sysfs::testing::Tree;

    const GPU: &str = "0000:03:00.0";
    const SSD: &str = "0000:02:00.0";

    fn found(tree: &Tree, subject: &str, check: &str) -> String {
        examine(&tree.host()).find(subject, check)
    }

    fn gpu() -> Vec<u8> {
        Tree::config(0x10DE, 0x2330, 0x03_02_00)
    }

    fn version(kind: &str, number: &str) -> String {
        format!("NVRM version: NVIDIA UNIX {kind}  {number}  Release Build\nGCC version: 12\n")
    }

    const OPEN: &str = "Open Kernel Module for x86_64";

    #[test]
    fn the_driver_is_missing_or_named() {
        let tree = Tree::new();
        assert!(found(&tree, "machine", "GPU").starts_with("Note: no NVIDIA GPU"));
        tree.function(GPU, &gpu(), "", 9);
        assert!(found(&tree, "machine", "NVIDIA driver").starts_with("Missing"));
        tree.file("proc/driver/nvidia/version", version(OPEN, "580.159.04"));
        let text = found(&tree, "machine", "NVIDIA driver");
        assert_eq!(text, "Ok: 580.159.04, open kernel modules: -");
        tree.file("proc/driver/nvidia/version", "nonsense");
        assert!(found(&tree, "machine", "NVIDIA driver").starts_with("Missing"));
    }

    #[test]
    fn the_regression_of_registered_bars_is_told_with_the_kernel() {
        let tree = Tree::new();
        tree.function(GPU, &gpu(), "nvidia", 9);
        tree.file("proc/sys/kernel/osrelease", "6.12.9\n");
        for (number, fine) in [
            ("535.288.01", true),
            ("550.40.07", true),
            ("550.54.14", false),
            ("580.1", false),
        ] {
            tree.file("proc/driver/nvidia/version", version(OPEN, number));
            let text = found(&tree, "machine", "BAR in the GPU");
            assert_eq!(text.starts_with("Ok"), fine, "{number}: {text}");
            assert_eq!(text.contains("kernel 6.12.9"), !fine);
        }
    }

    #[test]
    fn known_faults_of_the_driver_are_compared_with_its_version() {
        let tree = Tree::new();
        tree.function(GPU, &gpu(), "nvidia", 9);
        for (kind, number, said) in [
            (
                OPEN,
                "580.159.04",
                "Ok: nothing is known against 580.159.04",
            ),
            (OPEN, "595.84", "Warning: 595.84 is reported"),
            (OPEN, "610.1", "Note: open-gpu-kernel-modules, issue 1324"),
            ("x86_64 Kernel Module", "595.84", "no finding"),
        ] {
            tree.file("proc/driver/nvidia/version", version(kind, number));
            let text = found(&tree, "machine", "exported addresses");
            assert!(text.starts_with(said), "{text}");
        }
    }

    #[test]
    fn a_geforce_is_told_what_it_allows() {
        let tree = Tree::new();
        tree.function(GPU, &gpu(), "nvidia", 9);
        let file = format!("proc/driver/nvidia/gpus/{GPU}/information");
        tree.file(&file, "Model: \t NVIDIA GeForce RTX 3090\n");
        let text = found(&tree, GPU, "GeForce");
        assert!(
            text.starts_with("Note: tiers 0 and 1 with stock software"),
            "{text}"
        );
        tree.file(&file, "Model: \t NVIDIA RTX A4000\n");
        assert!(found(&tree, GPU, "GeForce").starts_with("no finding"));
    }

    #[test]
    fn dma_buf_needs_the_kernel_and_the_open_modules() {
        let tree = Tree::new();
        tree.function(GPU, &gpu(), "nvidia", 9);
        tree.file("proc/driver/nvidia/version", version(OPEN, "580.1"));
        assert!(found(&tree, "machine", "dma-buf").starts_with("Unknown"));
        tree.file("sys/kernel/dmabuf/buffers/x", "");
        assert!(found(&tree, "machine", "dma-buf").starts_with("Ok"));
        tree.file(
            "proc/driver/nvidia/version",
            version("x86_64 Kernel Module", "580.1"),
        );
        assert!(found(&tree, "machine", "dma-buf").starts_with("Warning: the proprietary"));
    }

    #[test]
    fn a_small_bar1_is_a_warning() {
        let tree = Tree::new();
        tree.function(GPU, &gpu(), "nvidia", 9);
        assert!(found(&tree, GPU, "resizable BAR").starts_with("Unknown: BAR1 has no address"));
        let mut config = gpu();
        config.resize(4096, 0);
        config[0x100..0x104].copy_from_slice(&[0x15, 0, 1, 0]);
        config[0x104..0x108].copy_from_slice(&(0b11u32 << 12).to_le_bytes());
        config[0x108..0x10C].copy_from_slice(&(1 | 1 << 5 | 8u32 << 8).to_le_bytes());
        tree.function(GPU, &config, "nvidia", 9);
        let text = found(&tree, GPU, "resizable BAR");
        assert!(
            text.starts_with("Warning: BAR1 has 256 of 512 MiB"),
            "{text}"
        );
        config[0x109] = 9;
        tree.function(GPU, &config, "nvidia", 9);
        assert!(found(&tree, GPU, "resizable BAR").starts_with("Ok: BAR1 has 512 MiB"));
    }

    #[test]
    fn peers_below_one_switch_reach_each_other() {
        let (root, up) = ("0000:00:01.0", "0000:01:00.0");
        let of = |gpu_above: &[&str], group: Option<u32>| {
            let tree = Tree::new();
            for (bdf, above, class) in [
                (root, &[][..], 0x06_04_00),
                (up, &[root], 0x06_04_00),
                (SSD, &[root, up], 0x01_08_02),
                (GPU, gpu_above, 0x03_02_00),
            ] {
                tree.place(bdf, above);
                let vendor = if bdf == GPU { 0x10DE } else { 1 };
                let mut config = Tree::config(vendor, 2, class);
                config.resize(4096, 0);
                match group {
                    Some(group) => tree.function(bdf, &config, "", group),
                    None => tree.without_group(bdf, &config, ""),
                }
            }
            found(&tree, GPU, "peer-to-peer")
        };
        let text = of(&[root, up], None);
        assert!(
            text.starts_with("Ok: 0000:02:00.0: switch 0000:01:00.0 passes"),
            "{text}"
        );
        let text = of(&[root, up], Some(9));
        assert!(
            text.starts_with("Note: 0000:02:00.0 is below the same switch"),
            "{text}"
        );
        let text = of(&[], None);
        assert!(
            text.contains("nvme-gpu p2p --device vfio:0000:02:00.0"),
            "{text}"
        );
        assert!(text.starts_with("Warning"), "{text}");
    }
}
