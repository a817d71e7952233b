//! One PCI function as sysfs shows it.

use super::{PciAddress, SysfsHost};
use crate::pci::{self, PciConfig, PcieLink};
use std::fs;

/// A BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarResource {
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// First address of the BAR on the bus.
    pub start: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysfsFunction {
    /// PCI address of the function.
    pub address: PciAddress,
    /// Configuration space, as far as it may be read.
    pub config: PciConfig,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// IOMMU group of the function.
    pub group: Option<u32>,
    /// The memory BARs that have an address.
    pub resources: Vec<BarResource>,
    /// The controller's name under Linux's own driver: nvme0.
    pub controller: Option<String>,
    /// Model, if Linux's driver reports it.
    pub model: Option<String>,
    /// Serial number, likewise.
    pub serial: Option<String>,
    /// The bridges above it, the nearest first.
    pub bridges: Vec<PciAddress>,
    /// The root complex above the function, as Linux names it: pci0000:00.
    pub complex: Option<String>,
    /// The NUMA node to which the function is attached; none on machines of one node, and if the firmware does not
    /// report it.
    pub node: Option<u32>,
    /// Speed and width that its link was trained to.
    pub trained: Option<PcieLink>,
    /// Speed and width that the function supports.
    pub capable: Option<PcieLink>,
}

/// IORESOURCE_MEM of Linux.
const MEMORY: u64 = 0x200;

impl SysfsHost {
    /// Returns the PCI functions of this machine, by address.
    pub fn functions(&self) -> Vec<SysfsFunction> {
        let names = self.names("sys/bus/pci/devices");
        let addresses = names.iter().filter_map(|name| name.parse().ok());
        addresses
            .filter_map(|address| self.function(address))
            .collect()
    }

    /// Returns the NVMe controllers among them.
    pub fn controllers(&self) -> Vec<SysfsFunction> {
        let mut all = self.functions();
        all.retain(SysfsFunction::is_nvme);
        all
    }

    /// Returns the function at `address`; none when there is none, or when it does not answer.
    pub fn function(&self, address: PciAddress) -> Option<SysfsFunction> {
        SysfsFunction::read(self, address)
    }

    /// Returns the functions of IOMMU group `number`.
    pub fn group(&self, number: u32) -> Vec<SysfsFunction> {
        let names = self.names(format!("sys/kernel/iommu_groups/{number}/devices"));
        let addresses = names.iter().filter_map(|name| name.parse().ok());
        addresses
            .filter_map(|address| self.function(address))
            .collect()
    }
}

impl SysfsFunction {
    fn read(host: &SysfsHost, address: PciAddress) -> Option<Self> {
        let folder = format!("sys/bus/pci/devices/{address}");
        let config = PciConfig::parse(&fs::read(host.path(format!("{folder}/config"))).ok()?)?;
        let controller = host
            .names(format!("{folder}/nvme"))
            .into_iter()
            .find(|name| name.starts_with("nvme"));
        let told = |what: &str| {
            let name = controller.as_ref()?;
            let text = host.text(format!("{folder}/nvme/{name}/{what}"))?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let real = fs::canonicalize(host.path(&folder)).ok();
        let above = || real.iter().flat_map(|path| path.ancestors().skip(1));
        let names = || above().filter_map(|path| path.file_name()?.to_str());
        let bridges = names().filter_map(|name| name.parse().ok()).collect();
        let complex = names().find(|name| is_complex(name)).map(str::to_owned);
        // The files can be read by every user, the capability by root only.
        let link = |which: &str| {
            let speed = host.text(format!("{folder}/{which}_link_speed"))?;
            link(&speed, &host.text(format!("{folder}/{which}_link_width"))?)
        };
        let express = config.express;
        Some(Self {
            address,
            driver: host.link_name(format!("{folder}/driver")),
            group: host
                .link_name(format!("{folder}/iommu_group"))
                .and_then(|name| name.parse().ok()),
            resources: resources(&host.text(format!("{folder}/resource")).unwrap_or_default()),
            model: told("model"),
            serial: told("serial"),
            controller,
            bridges,
            complex,
            node: host
                .text(format!("{folder}/numa_node"))
                .and_then(|text| text.trim().parse().ok()),
            trained: express
                .and_then(|express| express.trained)
                .or_else(|| link("current")),
            capable: express
                .and_then(|express| express.capable)
                .or_else(|| link("max")),
            config,
        })
    }

    /// True if it is an NVM Express I/O controller.
    pub fn is_nvme(&self) -> bool {
        self.config.class == pci::CLASS_NVME
    }

    /// Returns a BAR of the function.
    pub fn resource(&self, bar: u8) -> Option<BarResource> {
        self.resources.iter().find(|r| r.bar == bar).copied()
    }
}

/// True if `name` is the name of a root complex, such as pci0000:00.
fn is_complex(name: &str) -> bool {
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let numbers = name
        .strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'));
    numbers.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

/// Parses a link from sysfs's files: "16.0 GT/s PCIe" and "4".
fn link(speed: &str, width: &str) -> Option<PcieLink> {
    let generation = match speed.split_whitespace().next()? {
        "2.5" => 1,
        "5" | "5.0" => 2,
        "8" | "8.0" => 3,
        "16" | "16.0" => 4,
        "32" | "32.0" => 5,
        "64" | "64.0" => 6,
        _ => return None,
    };
    let lanes = width.trim().parse().ok()?;
    (1..=32)
        .contains(&lanes)
        .then_some(PcieLink { generation, lanes })
}

/// Parses sysfs's `resource`: a line of start, end and flags per BAR.
fn resources(text: &str) -> Vec<BarResource> {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let line = |(bar, line): (usize, &str)| {
        let mut fields = line.split_whitespace().map(number);
        let (start, end, flags) = (fields.next()??, fields.next()??, fields.next()??);
        let bytes = end.checked_sub(start)?.checked_add(1)?;
        let used = start != 0 && flags & MEMORY != 0;
        used.then_some(BarResource {
            bar: bar as u8,
            start,
            bytes,
        })
    };
    text.lines().take(6).enumerate().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_from_files() {
        let of = |generation, lanes| Some(PcieLink { generation, lanes });
        assert_eq!(link("16.0 GT/s PCIe", "4"), of(4, 4));
        assert_eq!(link("2.5 GT/s", "16\n"), of(1, 16));
        for (speed, width) in [
            ("Unknown", "4"),
            ("", "4"),
            ("8.0 GT/s PCIe", "0"),
            ("8.0", "63"),
            ("8.0", "-1"),
        ] {
            assert_eq!(link(speed, width), None, "{speed} {width}");
        }
        assert!(is_complex("pci0000:00") && is_complex("pci10000:e1"));
        assert!(!is_complex("pci0000") && !is_complex("0000:00:01.0") && !is_complex("pci:"));
    }

    #[test]
    fn bars_without_an_address_are_left_out() {
        let text = "0x00000000febf0000 0x00000000febf3fff 0x0000000000140204\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x000000000000c000 0x000000000000c07f 0x0000000000040101\n\
                    0xfe000000 0xfdffffff 0x200\nnonsense\n";
        let bar = BarResource {
            bar: 0,
            start: 0xFEBF_0000,
            bytes: 0x4000,
        };
        assert_eq!(resources(text), [bar]);
        assert!(resources("").is_empty());
    }
}
