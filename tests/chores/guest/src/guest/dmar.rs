//! A table of the firmware, DMAR, that replaces QEMU's. It says for which functions the IOMMU translates, and for which
//! of them the firmware reserves memory (RMRR). Linux reads it from its initramfs (CONFIG_ACPI_TABLE_UPGRADE).
//!
//! "Intel Virtualization Technology for Directed I/O", chapter 8.

/// Path at which Linux looks for the table.
pub const PLACE: &str = "kernel/firmware/acpi/dmar.aml";

/// Devices on bus 0, function 0 of each.
#[derive(Clone, Copy)]
pub struct Dmar {
    /// Device numbers of the functions that the IOMMU translates for; it translates for no other.
    pub translated: &'static [u8],
    /// The one with memory reserved for the firmware.
    pub own_memory: u8,
}

/// Registers of QEMU's IOMMU.
const REGISTERS: u64 = 0xFED9_0000;
/// A page that QEMU's firmware keeps to itself.
const OWN_MEMORY: u64 = 0xFEFF_C000;
const PAGE: u64 = 4096;
const HEADER: usize = 36;
/// Revision of the table: higher than that of QEMU's table, or Linux keeps QEMU's.
const REVISION: u32 = 2;
/// Types of structures.
const UNIT: u16 = 0;
const RESERVED_REGION: u16 = 1;

impl Dmar {
    pub fn table(&self) -> Vec<u8> {
        let mut table = Vec::from(*b"DMAR\0\0\0\0");
        // Revision of the structure, checksum.
        table.extend([1, 0]);
        table.extend(b"BOCHS BXPC    ");
        table.extend(REVISION.to_le_bytes());
        table.extend(b"TEST");
        table.extend(1u32.to_le_bytes());
        assert_eq!(table.len(), HEADER, "a header of ACPI");
        // Addresses of 39 bits; interrupt remapping.
        table.extend([38, 1]);
        table.extend([0; 10]);
        table.extend(unit(REGISTERS, self.translated));
        table.extend(reserved_region(OWN_MEMORY, self.own_memory));
        let bytes = table.len() as u32;
        table[4..8].copy_from_slice(&bytes.to_le_bytes());
        let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = sum.wrapping_neg();
        table
    }
}

/// Encodes one function as a device scope, with its path from bus 0.
fn scope(device: u8) -> [u8; 8] {
    const ENDPOINT: u8 = 1;
    [ENDPOINT, 8, 0, 0, 0, 0, device, 0]
}

fn structure(kind: u16, content: &[u8]) -> Vec<u8> {
    let bytes = 4 + content.len() as u16;
    let mut structure = Vec::from(kind.to_le_bytes());
    structure.extend(bytes.to_le_bytes());
    structure.extend(content);
    structure
}

fn unit(registers: u64, devices: &[u8]) -> Vec<u8> {
    // Flags: not for each function; size, segment.
    let mut content = vec![0, 0, 0, 0];
    content.extend(registers.to_le_bytes());
    content.extend(devices.iter().flat_map(|device| scope(*device)));
    structure(UNIT, &content)
}

fn reserved_region(first: u64, device: u8) -> Vec<u8> {
    let mut content = vec![0, 0, 0, 0];
    content.extend(first.to_le_bytes());
    content.extend((first + PAGE - 1).to_le_bytes());
    content.extend(scope(device));
    structure(RESERVED_REGION, &content)
}

#[cfg(test)]
mod tests {
    use super::Dmar;

    #[test]
    fn the_table_has_its_length_and_sums_to_zero() {
        let dmar = Dmar {
            translated: &[0x10, 0x12],
            own_memory: 0x12,
        };
        let table = dmar.table();
        let bytes = u32::from_le_bytes([table[4], table[5], table[6], table[7]]);
        assert_eq!(bytes as usize, table.len());
        assert_eq!(table.len(), 48 + (16 + 2 * 8) + (24 + 8));
        let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(sum, 0);
        // Structures follow each other to the end.
        let mut at = 48;
        while at < table.len() {
            at += usize::from(u16::from_le_bytes([table[at + 2], table[at + 3]]));
        }
        assert_eq!(at, table.len());
    }
}
