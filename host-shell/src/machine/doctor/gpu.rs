//! NVIDIA GPUs: driver, what it can map, and whether a controller can reach their memory.

use super::finding::{Finding, MACHINE, Notes, Status};
use crate::machine::sysfs::{Function, Host};

const NVIDIA: u16 = 0x10DE;
/// The first driver that no longer registers every mapped BAR.
const REGRESSION: (u32, u32) = (550, 54);

/// The GPUs of this machine.
pub fn find(host: &Host) -> Vec<Function> {
    let mut all = host.functions();
    all.retain(|one| one.config.vendor == NVIDIA && one.config.class >> 16 == 0x03);
    all
}

/// The NVIDIA driver that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// 580.159.04
    pub version: String,
    /// The open kernel modules.
    pub open: bool,
}

impl Driver {
    pub fn loaded(host: &Host) -> Option<Self> {
        let text = host.text("proc/driver/nvidia/version")?;
        let line = text
            .lines()
            .find(|line| line.starts_with("NVRM version:"))?;
        let is_version = |word: &&str| {
            let starts = word.starts_with(|c: char| c.is_ascii_digit());
            starts && word.contains('.')
        };
        Some(Self {
            version: line.split_whitespace().find(is_version)?.to_owned(),
            open: line.contains("Open Kernel Module"),
        })
    }

    /// Whether it registers a mapped BAR with a GPU for sure: those before 550.54 do.
    pub fn registers_bars(&self) -> bool {
        let mut numbers = self
            .version
            .split('.')
            .map(|part| part.parse().unwrap_or(0));
        let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        number < REGRESSION
    }
}

/// The bridge that both are below, if the way between them need not pass the root complex.
pub fn common_bridge(one: &Function, other: &Function) -> Option<crate::machine::sysfs::Address> {
    let mut bridges = one.bridges.iter();
    bridges
        .find(|bridge| other.bridges.contains(bridge))
        .copied()
}

/// Whether all of a GPU's memory can be seen by its peers: BAR1 has its largest size.
pub fn is_whole(gpu: &Function) -> Option<bool> {
    let bar = gpu.config.resizable.iter().find(|bar| bar.bar == 1)?;
    Some(bar.current == bar.largest)
}

pub fn examine(host: &Host, gpus: &[Function], controllers: &[Function]) -> Vec<Finding> {
    let mut notes = Notes::about(MACHINE);
    driver(host, gpus, &mut notes);
    let mut all = notes.all;
    for gpu in gpus {
        let mut notes = Notes::about(gpu.address);
        resizable_bar(gpu, &mut notes);
        for controller in controllers {
            peers(gpu, controller, &mut notes);
        }
        all.append(&mut notes.all);
    }
    all
}

fn driver(host: &Host, gpus: &[Function], notes: &mut Notes) {
    if gpus.is_empty() {
        return notes.add(
            "GPU",
            Status::Note,
            "no NVIDIA GPU on PCIe",
            "nothing has to be done: commands come from CPU threads",
        );
    }
    let Some(driver) = Driver::loaded(host) else {
        return notes.add(
            "NVIDIA driver",
            Status::Missing,
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
            Status::Warning,
            format!(
                "drivers from 550.54 on may refuse to register a mapped BAR (cudaHostRegister of PFN maps) on \
                 kernels that dropped follow_pfn and follow_pte; this is kernel {kernel}"
            ),
            "`nvme-gpu demo` tries it and falls back to tier 0",
        );
    }
    if !host.exists("sys/kernel/dmabuf") && !host.exists("dev/dma_heap") {
        notes.add(
            "dma-buf",
            Status::Unknown,
            "nothing is seen of dma-buf in this kernel",
            "see whether the kernel has CONFIG_DMA_SHARED_BUFFER",
        );
    } else if driver.open {
        notes.ok("dma-buf", "the driver exports GPU memory");
    } else {
        notes.add(
            "dma-buf",
            Status::Warning,
            "the proprietary modules do not export GPU memory",
            "install the open kernel modules (Turing and later)",
        );
    }
}

fn resizable_bar(gpu: &Function, notes: &mut Notes) {
    let Some(bar) = gpu.config.resizable.iter().find(|bar| bar.bar == 1) else {
        let text = match gpu.resource(1) {
            Some(bar) => format!("BAR1 has {} MiB and cannot be resized", bar.bytes >> 20),
            None => "BAR1 has no address".to_owned(),
        };
        let remedy = "peers reach that much of its memory; as root more may be known";
        return notes.add("resizable BAR", Status::Unknown, text, remedy);
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
            Status::Warning,
            format!(
                "BAR1 has {} of {} MiB: peers reach only a part of the GPU's memory",
                mib(bar.current),
                mib(bar.largest)
            ),
            "switch on Resizable BAR and Above 4G Decoding in the firmware",
        );
    }
}

fn peers(gpu: &Function, controller: &Function, notes: &mut Notes) {
    let other = controller.address;
    match common_bridge(gpu, controller) {
        Some(bridge) => notes.ok(
            "peer-to-peer",
            format!("{other} is below the same bridge {bridge}: reads and writes go straight"),
        ),
        None => notes.add(
            "peer-to-peer",
            Status::Warning,
            format!(
                "the way to {other} leads through the root complex: writes mostly arrive, reads may be \
                 slow or refused"
            ),
            format!(
                "put both below one PCIe switch; what works is shown by \
                 `nvme-gpu p2p --device vfio:{other} --peer /sys/bus/pci/devices/{}/resource1`",
                gpu.address
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::*;
    use crate::machine::sysfs::testing::Tree;

    const GPU: &str = "0000:03:00.0";
    const SSD: &str = "0000:02:00.0";

    fn found(tree: &Tree, subject: &str, check: &str) -> String {
        examine(&tree.host()).find(subject, check)
    }

    fn gpu() -> Vec<u8> {
        Tree::config(NVIDIA, 0x2330, 0x03_02_00)
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
        let (root, down, other) = ("0000:00:01.0", "0000:01:00.0", "0000:00:02.0");
        for (gpu_above, straight) in [(vec![root, down], true), (vec![other], false)] {
            let tree = Tree::new();
            tree.place(SSD, &[root]);
            tree.place(GPU, &gpu_above);
            tree.controller(SSD, "nvme", 7);
            tree.function(GPU, &gpu(), "nvidia", 9);
            let text = found(&tree, GPU, "peer-to-peer");
            assert_eq!(
                text.starts_with("Ok: 0000:02:00.0 is below the same bridge"),
                straight
            );
            assert_eq!(
                text.contains("nvme-gpu p2p --device vfio:0000:02:00.0"),
                !straight
            );
        }
    }
}
