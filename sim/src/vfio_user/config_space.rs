//! PCI configuration space: header, power management, MSI-X and PCI Express capabilities.
//!
//! A write changes the bits that are writable in a real device, whatever its width and alignment.
//! Effects outside the space, such as a reset, are returned to the caller.
//!
//! PCI Express Base 5.0, "Configuration Space"; NVMe over PCIe Transport 1.0, "PCI Express
//! Registers".

use super::wire::SIMULATOR;
use std::boxed::Box;
use std::vec;

/// Size of configuration space in bytes; the extended part is empty.
pub(crate) const BYTES: usize = 4096;
const VENDOR: u16 = SIMULATOR[0];
const DEVICE: u16 = SIMULATOR[1];

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const PM: usize = 0x40;
const MSIX: usize = 0x50;
const EXPRESS: usize = 0x60;

const INTERRUPT_DISABLE: u16 = 1 << 10;
const INTERRUPT_STATUS: u8 = 1 << 3;
/// Device Control: Initiate Function Level Reset.
const INITIATE_FLR: u16 = 1 << 15;

/// Sizes and positions that configuration space reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BarLayout {
    /// Bytes of BAR 0, a power of two.
    pub bar0: u64,
    /// Bytes of BAR 4, a power of two.
    pub bar4: u64,
    /// Entries of the MSI-X table, at the start of BAR 4.
    pub vectors: u16,
    /// Offset of the pending bits in BAR 4.
    pub pba: u32,
}

/// Effects of a write outside configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WriteEffects {
    /// True if the function is to be reset.
    pub reset: bool,
}

/// The bytes of configuration space, with a mask of the bits that a driver may change.
pub(crate) struct ConfigSpace {
    bytes: Box<[u8]>,
    writable: Box<[u8]>,
    layout: BarLayout,
}

impl ConfigSpace {
    pub fn new(layout: BarLayout) -> Self {
        let mut space = Self {
            bytes: vec![0; BYTES].into_boxed_slice(),
            writable: vec![0; BYTES].into_boxed_slice(),
            layout,
        };
        space.header();
        space.capabilities();
        space
    }

    fn header(&mut self) {
        let BarLayout { bar0, bar4, .. } = self.layout;
        self.put16(0x00, VENDOR, 0);
        self.put16(0x02, DEVICE, 0);
        // Memory space, bus master, SERR and parity responses, interrupt disable.
        self.put16(COMMAND, 0, 0x0546);
        self.put16(STATUS, 1 << 4, 0); // A capability list.
        self.bytes[0x08] = 1;
        self.bytes[0x09..0x0C].copy_from_slice(&[0x02, 0x08, 0x01]); // NVM Express.
        self.writable[0x0C] = 0xFF; // Cache line size, without effect.
        for (index, size) in [(0, bar0), (4, bar4)] {
            // The BAR is 64 bits wide. Address bits below its size read as 0 whatever is written: a
            // driver writes all ones and learns the size from the bits that stay.
            self.put32(BARS + index * 4, 0x4, !(size as u32 - 1));
            self.put32(BARS + index * 4 + 4, 0, u32::MAX);
        }
        self.put16(0x2C, VENDOR, 0);
        self.put16(0x2E, DEVICE, 0);
        self.bytes[0x34] = PM as u8;
        self.writable[0x3C] = 0xFF; // Interrupt line.
        self.bytes[0x3D] = 1; // INTA.
    }

    fn capabilities(&mut self) {
        let BarLayout { vectors, pba, .. } = self.layout;
        // Power management, version 3: D0 and D3hot, and nothing is lost between them.
        self.put16(PM, 0x01 | (MSIX as u16) << 8, 0);
        self.put16(PM + 2, 3, 0);
        self.put16(PM + 4, 1 << 3, 0x0003);
        // MSI-X: table and pending bits in BAR 4; enable and function mask are writable.
        self.put16(MSIX, 0x11 | (EXPRESS as u16) << 8, 0);
        self.put16(MSIX + 2, vectors - 1, 0xC000);
        self.put32(MSIX + 4, 4, 0);
        self.put32(MSIX + 8, pba | 4, 0);
        // PCI Express, version 2, an endpoint.
        self.put16(EXPRESS, 0x10, 0);
        self.put16(EXPRESS + 2, 2, 0);
        // Payloads of 256 bytes, role-based errors, function level reset.
        self.put32(EXPRESS + 4, 1 | 1 << 15 | 1 << 28, 0);
        // Error reporting, relaxed order, payload and read sizes, no snoop.
        self.put16(EXPRESS + 8, 0x2810, 0x78FF);
        // 32 GT/s, 4 lanes, in capability and status.
        self.put32(EXPRESS + 0x0C, 5 | 4 << 4, 0);
        self.put16(EXPRESS + 0x10, 0, 0x00C8);
        self.put16(EXPRESS + 0x12, 5 | 4 << 4, 0);
        // Completion time-out ranges and disable.
        self.put32(EXPRESS + 0x24, 0x1F, 0);
        self.put16(EXPRESS + 0x28, 0, 0x001F);
        self.put32(EXPRESS + 0x2C, 0x3E, 0); // Speeds 2.5 to 32 GT/s.
        self.put16(EXPRESS + 0x30, 5, 0x000F);
    }

    fn put16(&mut self, at: usize, value: u16, writable: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self.writable[at..at + 2].copy_from_slice(&writable.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32, writable: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.writable[at..at + 4].copy_from_slice(&writable.to_le_bytes());
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Reads the bytes from `at` on, inside the space. `pin` is the level of the interrupt pin.
    pub fn read(&mut self, at: usize, into: &mut [u8], pin: bool) {
        self.bytes[STATUS] &= !INTERRUPT_STATUS;
        self.bytes[STATUS] |= if pin { INTERRUPT_STATUS } else { 0 };
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
    }

    /// Writes the bytes from `at` on, inside the space.
    pub fn write(&mut self, at: usize, from: &[u8]) -> WriteEffects {
        for (i, value) in from.iter().enumerate() {
            let (byte, mask) = (&mut self.bytes[at + i], self.writable[at + i]);
            *byte = *byte & !mask | value & mask;
        }
        // Initiate Function Level Reset is one bit of the upper byte of Device Control, and always
        // reads as 0.
        let flr = (EXPRESS + 9).checked_sub(at).and_then(|i| from.get(i));
        let reset = flr.is_some_and(|byte| u16::from(*byte) << 8 & INITIATE_FLR != 0);
        WriteEffects { reset }
    }

    /// True if the command register enables the interrupt pin.
    pub fn pin_enabled(&self) -> bool {
        self.word(COMMAND) & INTERRUPT_DISABLE == 0
    }

    /// Restores the state after a function reset.
    pub fn reset(&mut self) {
        *self = Self::new(self.layout);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace::new(BarLayout {
            bar0: 16 << 10,
            bar4: 8 << 10,
            vectors: 65,
            pba: 4096,
        })
    }

    fn read32(space: &mut ConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(at, &mut bytes, false);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn bars_answer_a_sizing_write_with_their_size_and_keep_an_address() {
        let mut space = space();
        space.write(BARS, &[0xFF; 24]);
        let bars: [u32; 6] = std::array::from_fn(|i| read32(&mut space, BARS + i * 4));
        assert_eq!(bars, [0xFFFF_C004, u32::MAX, 0, 0, 0xFFFF_E004, u32::MAX]);
        space.write(BARS, &0xFEBF_0123u32.to_le_bytes());
        assert_eq!(read32(&mut space, BARS), 0xFEBF_0004);
        space.reset();
        assert_eq!(read32(&mut space, BARS), 4);
    }

    #[test]
    fn the_capability_list_ends_and_holds_what_linux_looks_for() {
        let mut space = space();
        let mut found = vec![];
        let mut at = read32(&mut space, 0x34) as usize & 0xFF;
        while at != 0 {
            assert!(found.len() < 10 && at >= 0x40 && at.is_multiple_of(4));
            let word = read32(&mut space, at);
            found.push(word & 0xFF);
            at = (word >> 8 & 0xFF) as usize;
        }
        assert_eq!(found, [0x01, 0x11, 0x10]);
        assert_eq!(read32(&mut space, MSIX) >> 16, 64);
        assert_eq!(read32(&mut space, MSIX + 8), 4096 | 4);
        assert_eq!(read32(&mut space, 0x08), 0x0108_0201);
        assert_eq!(read32(&mut space, 0x100), 0, "no extended capability");
    }

    #[test]
    fn read_only_bits_stay_and_narrow_writes_work() {
        let mut space = space();
        let before: vec::Vec<u8> = space.bytes.to_vec();
        space.write(0, &[0; BYTES]);
        assert_eq!(read32(&mut space, 0) as u16, VENDOR);
        assert_eq!(space.bytes[0x34], before[0x34]);
        space.write(MSIX + 3, &[0x80]);
        assert_eq!(space.word(MSIX + 2), 0x8040);
        assert!(space.pin_enabled());
        space.write(COMMAND + 1, &[0x04]);
        assert!(!space.pin_enabled());
        let mut status = [0; 2];
        space.read(STATUS, &mut status, true);
        assert_eq!(status, [1 << 4 | 1 << 3, 0]);
    }

    #[test]
    fn a_function_level_reset_is_asked_for_in_any_width() {
        let mut space = space();
        let control = EXPRESS + 8;
        assert!(!space.write(control, &[0xFF]).reset);
        assert!(space.write(control, &0xA810u16.to_le_bytes()).reset);
        assert!(space.write(control + 1, &[0x80]).reset);
        assert!(space.write(control - 4, &[0xFF; 8]).reset);
        assert!(!space.write(control + 2, &[0xFF; 4]).reset);
        assert_eq!(space.word(control) & INITIATE_FLR, 0);
    }
}
