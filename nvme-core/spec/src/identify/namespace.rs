//! Identify Namespace of the NVM command set: size, format and preferred access of a namespace.

use super::IDENTIFY_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Namespace Features (`nsfeat`).
pub mod nsfeat {
    /// Thin provisioning.
    pub const THIN: u8 = 1 << 0;
    /// NAWUN, NAWUPF and NACWU count for this namespace.
    pub const ATOMICS: u8 = 1 << 1;
    /// Reading a deallocated block can be made an error (DULBE).
    pub const DEALLOCATED_ERROR: u8 = 1 << 2;
    /// NGUID and EUI64 are never used again.
    pub const NO_ID_REUSE: u8 = 1 << 3;
    /// NPWG, NPWA, NPDG, NPDA and NOWS are defined.
    pub const OPTIMAL: u8 = 1 << 4;
}

/// Deallocate Logical Block Features (`dlfeat`).
pub mod dlfeat {
    /// Bits 2:0: value that a deallocated block reads as.
    pub const READ_BEHAVIOR: u8 = 7;
    /// READ_BEHAVIOR value: all bytes 00h.
    pub const READS_ZERO: u8 = 1;
    /// READ_BEHAVIOR value: all bytes FFh.
    pub const READS_ONES: u8 = 2;
    /// Write Zeroes may deallocate.
    pub const WRITE_ZEROES_DEALLOCATE: u8 = 1 << 3;
}

/// An LBA format: the size of blocks and of their metadata.
///
/// NVM Command Set 1.0c, "LBA Format Data Structure, NVM Command Set Specific".
///
/// The format in use is selected by FLBAS; the others are those that Format NVM can select. An entry with
/// LBADS 0 is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LbaFormat {
    /// Metadata bytes per block; 0 is none.
    pub ms: u16,
    /// LBA data size as a power of two; 0 is an unused format, 9 the least usable.
    pub lbads: u8,
    /// Relative performance in bits 1:0: 0 best, 3 degraded.
    pub rp: u8,
}
const _: () = assert!(size_of::<LbaFormat>() == 4);

impl LbaFormat {
    /// Returns the bytes of a block without metadata: 512 to 2 GiB, or `None` when LBADS is not 9 to 31.
    pub const fn block_bytes(&self) -> Option<u32> {
        if self.lbads >= 9 && self.lbads <= 31 {
            Some(1 << self.lbads)
        } else {
            None
        }
    }
}

/// Identify Namespace (CNS 00h).
///
/// NVM Command Set 1.0c, 4.1.5.1 (Identify Namespace Data Structure, NVM Command Set).
///
/// The structure of an inactive namespace identifier is all zero: a size of 0 blocks is how a driver without
/// a list of namespaces recognises it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Namespace size in blocks. 0 when the NSID is inactive.
    pub nsze: u64,
    /// Namespace capacity in blocks.
    pub ncap: u64,
    /// Namespace utilization in blocks.
    pub nuse: u64,
    /// Namespace features: [`nsfeat`].
    pub nsfeat: u8,
    /// Number of LBA formats, 0's based.
    pub nlbaf: u8,
    /// Formatted LBA size: format in bits 3:0, upper bits in 6:5, extended metadata in bit 4.
    pub flbas: u8,
    /// Metadata capabilities.
    pub mc: u8,
    /// End-to-end data protection capabilities.
    pub dpc: u8,
    /// End-to-end data protection type settings: type in bits 2:0, 0 is none.
    pub dps: u8,
    /// Multi-path and sharing capabilities.
    pub nmic: u8,
    /// Reservation capabilities.
    pub rescap: u8,
    /// Format progress indicator: bit 7 supported, bits 6:0 percent left.
    pub fpi: u8,
    /// Deallocate features: [`dlfeat`].
    pub dlfeat: u8,
    /// Atomic write unit normal, in blocks, 0's based.
    pub nawun: u16,
    /// Atomic write unit power fail, in blocks, 0's based.
    pub nawupf: u16,
    /// Atomic compare and write unit, in blocks, 0's based.
    pub nacwu: u16,
    /// Atomic boundary size normal, in blocks, 0's based.
    pub nabsn: u16,
    /// Atomic boundary offset, in blocks.
    pub nabo: u16,
    /// Atomic boundary size power fail, in blocks, 0's based.
    pub nabspf: u16,
    /// Optimal I/O boundary in blocks, not 0's based; 0 is not reported.
    pub noiob: u16,
    /// NVM capacity in bytes.
    pub nvmcap: [u8; 16],
    /// Preferred write granularity, in blocks, 0's based.
    pub npwg: u16,
    /// Preferred write alignment, in blocks, 0's based.
    pub npwa: u16,
    /// Preferred deallocate granularity, in blocks, 0's based.
    pub npdg: u16,
    /// Preferred deallocate alignment, in blocks, 0's based.
    pub npda: u16,
    /// Optimal write size, in blocks, 0's based.
    pub nows: u16,
    /// Maximum single source range length of Copy, in blocks.
    pub mssrl: u16,
    /// Maximum copy length, in blocks.
    pub mcl: u32,
    /// Maximum source range count of Copy, 0's based.
    pub msrc: u8,
    /// Reserved.
    pub reserved81: u8,
    /// Number of unique attribute LBA formats: they follow the `nlbaf + 1` common ones.
    pub nulbaf: u8,
    /// Reserved.
    pub reserved83: [u8; 9],
    /// ANA group identifier.
    pub anagrpid: u32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// Namespace attributes: bit 0 write protected.
    pub nsattr: u8,
    /// NVM set identifier.
    pub nvmsetid: u16,
    /// Endurance group identifier.
    pub endgid: u16,
    /// Namespace globally unique identifier, most significant byte first; 0 is none.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier, most significant byte first; 0 is none.
    pub eui64: [u8; 8],
    /// LBA formats; the first [`lba_formats`](Self::lba_formats) of them are valid.
    pub lbaf: [LbaFormat; 64],
    /// Vendor specific.
    pub vs: [u8; 3712],
}
const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_BYTES);

offsets!(IdentifyNamespace: nsze @ 0, ncap @ 8, nuse @ 16, nsfeat @ 24, nlbaf @ 25, flbas @ 26,
    mc @ 27, dpc @ 28, dps @ 29, nmic @ 30, rescap @ 31, fpi @ 32, dlfeat @ 33, nawun @ 34,
    nawupf @ 36, nacwu @ 38, nabsn @ 40, nabo @ 42, nabspf @ 44, noiob @ 46, nvmcap @ 48, npwg @ 64,
    npwa @ 66, npdg @ 68, npda @ 70, nows @ 72, mssrl @ 74, mcl @ 76, msrc @ 80,
    nulbaf @ 82, anagrpid @ 92, nsattr @ 99, nvmsetid @ 100, endgid @ 102, nguid @ 104, eui64 @ 120, lbaf @ 128, vs @ 384);

impl IdentifyNamespace {
    /// FLBAS bit 4: metadata is at the end of each block in the data buffer instead of in a separate buffer.
    pub const EXTENDED_METADATA: u8 = 1 << 4;

    /// Returns the number of valid entries of `lbaf`, 1 to 64; a larger sum from the controller is cut to the
    /// table.
    pub const fn lba_formats(&self) -> usize {
        let formats = self.nlbaf as usize + self.nulbaf as usize + 1;
        if formats < self.lbaf.len() {
            formats
        } else {
            self.lbaf.len()
        }
    }

    /// Returns the index of the current format, 0 to 63. FLBAS bits 6:5 are used only with more than 16
    /// formats.
    pub const fn lba_format_index(&self) -> usize {
        let upper = if self.lba_formats() > 16 {
            (self.flbas >> 5) & 3
        } else {
            0
        };
        (upper << 4 | self.flbas & 0xF) as usize
    }

    /// Returns the namespace's current format. It may be one that the controller does not describe (all
    /// zero).
    pub const fn lba_format(&self) -> LbaFormat {
        self.lbaf[self.lba_format_index()]
    }

    /// Returns the bytes of a block without metadata, or `None` when LBADS is not 9 to 31.
    pub const fn block_bytes(&self) -> Option<u32> {
        self.lba_format().block_bytes()
    }
}
