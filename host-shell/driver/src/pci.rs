//! PCI configuration space: the identity, the BARs and the capabilities of a function.
//!
//! The bytes come from the kernel, but many of them from the device: nothing in them is trusted, and a
//! list of capabilities that runs in a circle or past the end simply ends.

/// Configuration space offsets that are written.
pub mod offset {
    /// Command register, 16 bits.
    pub const COMMAND: u64 = 0x04;
}

/// Command register: respond to memory accesses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: may start DMA.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command register: no interrupt by the INTx pin.
pub const COMMAND_NO_INTX: u16 = 1 << 10;

/// Class code of an NVM Express I/O controller.
pub const CLASS_NVME: u32 = 0x01_08_02;

const CAP_MSIX: u8 = 0x11;
const CAP_PCIE: u8 = 0x10;
const EXT_ACS: u16 = 0x0D;
const EXT_REBAR: u16 = 0x15;

/// Location of the MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixTable {
    /// Vectors, 1 to 2,048.
    pub vectors: u16,
    /// The BAR that holds the table, 0 to 5.
    pub bar: u8,
    /// Byte offset of the table in that BAR.
    pub offset: u32,
}

impl MsixTable {
    /// Returns the number of bytes of the table.
    pub fn bytes(&self) -> u64 {
        u64::from(self.vectors) * 16
    }
}

/// A link's speed and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// PCIe generation (1: 2.5 GT/s, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64).
    pub generation: u8,
    /// Lanes.
    pub lanes: u8,
}

impl PcieLink {
    /// Returns the bytes a second each way that its encoding leaves, before the headers of packets; none for a
    /// generation that is not known.
    pub fn bytes_per_second(self) -> Option<f64> {
        // Transfers a second, and the share of them that is data: 8b/10b, 128b/130b, and FLITs of 242 of 256 bytes.
        let (transfers, share) = match self.generation {
            1 => (2.5e9, 0.8),
            2 => (5e9, 0.8),
            3 => (8e9, 128.0 / 130.0),
            4 => (16e9, 128.0 / 130.0),
            5 => (32e9, 128.0 / 130.0),
            6 => (64e9, 242.0 / 256.0),
            _ => return None,
        };
        Some(transfers * share / 8.0 * f64::from(self.lanes))
    }
}

/// Role of a function on PCI Express.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRole {
    /// A device at the end of a link.
    Endpoint,
    /// A port of the root complex.
    Root,
    /// The port of a switch that leads up.
    Upstream,
    /// A port of a switch that leads down.
    Downstream,
    /// A bridge to another bus, a device inside of the root complex, or a value that has no meaning.
    Other,
}

/// ACS control: a request of one peer to another is always sent up to the root complex, although the switch could
/// forward it.
///
/// P2P Request Redirect, P2P Completion Redirect, P2P Egress Control: what Linux's P2PDMA looks at.
pub const ACS_REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 5;

/// The PCI Express capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpressCapability {
    /// Role of the function.
    pub port: PortRole,
    /// Function level reset is offered.
    pub flr: bool,
    /// Relaxed ordering is enabled (Device Control).
    pub relaxed_ordering: bool,
    /// ID-based ordering is enabled for requests or completions (Device Control 2).
    pub id_based_ordering: bool,
    /// Speed and width that the link supports; none for a function without a link.
    pub capable: Option<PcieLink>,
    /// Speed and width that the link was trained to.
    pub trained: Option<PcieLink>,
}

/// Sizes that a resizable BAR can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizableBar {
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// Present size of the BAR in bytes.
    pub current: u64,
    /// The largest size that it can have, in bytes.
    pub largest: u64,
}

/// Capabilities that were found in configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciConfig {
    /// Vendor and device.
    pub vendor: u16,
    /// See above.
    pub device: u16,
    /// Base class, subclass, programming interface.
    pub class: u32,
    /// The command register.
    pub command: u16,
    /// The MSI-X capability, if there is one that makes sense.
    pub msix: Option<MsixTable>,
    /// The PCI Express capability.
    pub express: Option<ExpressCapability>,
    /// Access Control Services: the control register; none without the capability.
    pub acs: Option<u16>,
    /// Resizable BARs.
    pub resizable: Vec<ResizableBar>,
    /// Bytes that were there to parse: 64 without privileges, 256 or 4,096 with.
    pub bytes: usize,
}

impl PciConfig {
    /// Parses bytes that were read from configuration space, 64 at least.
    ///
    /// None for less, and for a function that does not answer (all ones).
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = &bytes[..bytes.len().min(4096)];
        let vendor = half(bytes, 0)?;
        if bytes.len() < 64 || vendor == u16::MAX {
            return None;
        }
        let mut config = Self {
            vendor,
            device: half(bytes, 2)?,
            class: word(bytes, 8)? >> 8,
            command: half(bytes, 4)?,
            bytes: bytes.len(),
            ..Self::default()
        };
        let has_list = half(bytes, 6)? & 1 << 4 != 0;
        if has_list {
            config.walk(bytes);
        }
        config.walk_extended(bytes);
        Some(config)
    }

    fn walk(&mut self, bytes: &[u8]) {
        let Some(first) = bytes.get(0x34) else { return };
        let mut at = usize::from(first & !3);
        // Each capability has 4 bytes at least, so a longer list is a circle.
        for _ in 0..48 {
            if at < 0x40 {
                return;
            }
            let (Some(&id), Some(&next)) = (bytes.get(at), bytes.get(at + 1)) else {
                return;
            };
            match id {
                CAP_MSIX => self.msix = self.msix.or_else(|| msix(bytes, at)),
                CAP_PCIE => self.express = self.express.or_else(|| express(bytes, at)),
                _ => {}
            }
            at = usize::from(next & !3);
        }
    }

    fn walk_extended(&mut self, bytes: &[u8]) {
        let mut at = 0x100;
        for _ in 0..960 {
            let Some(header) = word(bytes, at).filter(|word| !matches!(*word, 0 | u32::MAX)) else {
                return;
            };
            match header as u16 {
                EXT_ACS => self.acs = half(bytes, at + 6),
                EXT_REBAR if self.resizable.is_empty() => self.resizable = resizable(bytes, at),
                _ => {}
            }
            at = (header >> 20) as usize & !3;
            if at < 0x100 {
                return;
            }
        }
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn msix(bytes: &[u8], at: usize) -> Option<MsixTable> {
    let control = half(bytes, at + 2)?;
    let table = word(bytes, at + 4)?;
    let bar = (table & 7) as u8;
    (bar < 6).then_some(MsixTable {
        vectors: (control & 0x7FF) + 1,
        bar,
        offset: table & !7,
    })
}

fn express(bytes: &[u8], at: usize) -> Option<ExpressCapability> {
    let link = |value: u32| {
        let link = PcieLink {
            generation: (value & 0xF) as u8,
            lanes: (value >> 4 & 0x3F) as u8,
        };
        (link.generation > 0 && link.lanes > 0).then_some(link)
    };
    Some(ExpressCapability {
        port: match half(bytes, at + 2)? >> 4 & 0xF {
            0 | 1 => PortRole::Endpoint,
            4 => PortRole::Root,
            5 => PortRole::Upstream,
            6 => PortRole::Downstream,
            _ => PortRole::Other,
        },
        flr: word(bytes, at + 4)? & 1 << 28 != 0,
        relaxed_ordering: half(bytes, at + 8)? & 1 << 4 != 0,
        id_based_ordering: half(bytes, at + 0x28).is_some_and(|control| control & 3 << 8 != 0),
        capable: word(bytes, at + 0x0C).and_then(link),
        trained: half(bytes, at + 0x12).map(u32::from).and_then(link),
    })
}

fn resizable(bytes: &[u8], at: usize) -> Vec<ResizableBar> {
    let count = word(bytes, at + 8).map_or(0, |control| control >> 5 & 7) as usize;
    let entry = |index: usize| {
        let capability = word(bytes, at + 4 + 8 * index)?;
        let control = word(bytes, at + 8 + 8 * index)?;
        // Bit 4 of the capability stands for 1 MiB, as size 0 of the control register does; sizes
        // from 256 TiB on stand in the control register.
        let sizes = u64::from(capability >> 4) | u64::from(control >> 16) << 28;
        let largest = sizes.checked_ilog2()?;
        Some(ResizableBar {
            bar: (control & 7) as u8,
            current: 1u64.checked_shl(20 + (control >> 8 & 0x3F))?,
            largest: 1u64.checked_shl(20 + largest)?,
        })
    };
    (0..count.min(6)).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a controller as QEMU shows it: MSI-X at 40h, PCIe at 80h.
    fn space() -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[..4].copy_from_slice(&[0x36, 0x1B, 0x10, 0x00]);
        bytes[4..8].copy_from_slice(&[6, 0, 0x10, 0]);
        bytes[8..12].copy_from_slice(&[2, 0x02, 0x08, 0x01]);
        bytes[0x34] = 0x40;
        bytes[0x40..0x4C].copy_from_slice(&[0x11, 0x80, 0x40, 0x80, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
        bytes[0x80..0x84].copy_from_slice(&[0x10, 0, 2, 0]);
        bytes[0x84..0x88].copy_from_slice(&(1u32 << 28).to_le_bytes());
        bytes[0x88] = 0x10;
        bytes[0x8C..0x90].copy_from_slice(&0x44u32.to_le_bytes());
        bytes[0x92..0x94].copy_from_slice(&0x43u16.to_le_bytes());
        bytes
    }

    #[test]
    fn a_controller_is_understood() {
        let config = PciConfig::parse(&space()).unwrap();
        assert_eq!((config.vendor, config.device), (0x1B36, 0x0010));
        assert_eq!(config.class, CLASS_NVME);
        assert_eq!(config.command, COMMAND_MEMORY | COMMAND_MASTER);
        let msix = config.msix.unwrap();
        assert_eq!((msix.vectors, msix.bar, msix.offset), (65, 0, 0x2000));
        assert_eq!(msix.bytes(), 1040);
        let express = config.express.unwrap();
        assert_eq!(express.port, PortRole::Endpoint);
        assert!(express.flr && express.relaxed_ordering && !express.id_based_ordering);
        let link = |generation, lanes| Some(PcieLink { generation, lanes });
        assert_eq!(express.capable, link(4, 4));
        assert_eq!(express.trained, link(3, 4));
    }

    #[test]
    fn a_link_has_a_rate_of_its_generation_and_lanes() {
        for (generation, lanes, rate) in [
            (1, 1, 0.25e9),
            (3, 4, 3.938e9),
            (4, 4, 7.877e9),
            (5, 16, 63.015e9),
            (6, 4, 30.25e9),
        ] {
            let found = PcieLink { generation, lanes }.bytes_per_second().unwrap();
            assert!((found / rate - 1.0).abs() < 1e-3, "{generation} {found}");
        }
        for generation in [0, 7, 255] {
            let lanes = 4;
            assert_eq!(PcieLink { generation, lanes }.bytes_per_second(), None);
        }
    }

    #[test]
    fn without_privileges_the_capabilities_are_unknown() {
        let config = PciConfig::parse(&space()[..64]).unwrap();
        assert_eq!(
            (config.msix, config.express, config.bytes),
            (None, None, 64)
        );
        assert_eq!(PciConfig::parse(&space()[..63]), None);
        assert_eq!(PciConfig::parse(&[0xFF; 256]), None);
    }

    #[test]
    fn circles_and_loose_ends_end() {
        let mut bytes = space();
        bytes[0x81] = 0x40;
        assert!(PciConfig::parse(&bytes).unwrap().msix.is_some());
        bytes[0x41] = 0x40;
        assert!(PciConfig::parse(&bytes).unwrap().express.is_none());
        bytes[0x34] = 0xFC;
        assert_eq!(PciConfig::parse(&bytes).unwrap().msix, None);
        let mut bytes = space();
        bytes.resize(4096, 0);
        bytes[0x100..0x104].copy_from_slice(&[0x0B, 0, 1, 0x10]);
        assert_eq!(PciConfig::parse(&bytes).unwrap().acs, None);
    }

    #[test]
    fn extended_capabilities_are_found() {
        let mut bytes = space();
        bytes.resize(4096, 0);
        bytes[0x100..0x104].copy_from_slice(&[0x0D, 0, 1, 0x20]);
        bytes[0x106..0x108].copy_from_slice(&0x1Du16.to_le_bytes());
        bytes[0x200..0x204].copy_from_slice(&[0x15, 0, 1, 0]);
        bytes[0x204..0x208].copy_from_slice(&(0b111u32 << 12).to_le_bytes());
        bytes[0x208..0x20C].copy_from_slice(&(1 | 1 << 5 | 8u32 << 8).to_le_bytes());
        let config = PciConfig::parse(&bytes).unwrap();
        assert_eq!(config.acs, Some(0x1D));
        let bar = ResizableBar {
            bar: 1,
            current: 256 << 20,
            largest: 1 << 30,
        };
        assert_eq!(config.resizable, [bar]);
    }
}
