//! SGL descriptors.
//!
//! NVMe Base 2.0c, 4.1.2 (Scatter Gather List).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// SGL descriptor types (identifier bits 7:4).
pub mod kind {
    /// Data Block: the address is that of data.
    pub const DATA_BLOCK: u8 = 0x0;
    /// Bit Bucket: data read from the controller is discarded.
    pub const BIT_BUCKET: u8 = 0x1;
    /// Segment: the address is that of more descriptors, the last of them a (Last) Segment descriptor.
    pub const SEGMENT: u8 = 0x2;
    /// Last Segment: the address is that of more descriptors, none of them a segment descriptor.
    pub const LAST_SEGMENT: u8 = 0x3;
}

/// One SGL descriptor of the address sub type.
///
/// A transfer of one contiguous range has one Data Block descriptor in the command itself; any other has a
/// (Last) Segment descriptor there that points to a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address of the data or the descriptors. Reserved in a bit bucket.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Type in bits 7:4, sub type in bits 3:0 (0 is an address).
    pub identifier: u8,
}
const _: () = assert!(size_of::<SglDescriptor>() == DESCRIPTOR_BYTES);

impl SglDescriptor {
    /// Makes a descriptor of type `kind` with sub type address.
    #[inline]
    pub const fn new(kind: u8, address: u64, length: u32) -> Self {
        Self {
            address,
            length,
            reserved: [0; 3],
            identifier: kind << 4,
        }
    }

    /// Returns the descriptor type: one of [`kind`], or an unknown one.
    #[inline]
    pub const fn kind(&self) -> u8 {
        self.identifier >> 4
    }

    /// Returns the sub type: 0 is an address, 1 an offset.
    #[inline]
    pub const fn sub_type(&self) -> u8 {
        self.identifier & 0xF
    }

    /// Returns the descriptor as two words.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [
            self.address,
            self.length as u64 | (self.identifier as u64) << 56,
        ]
    }

    /// Makes a descriptor of two words.
    #[inline]
    pub const fn from_words(words: [u64; 2]) -> Self {
        zerocopy::transmute!(words)
    }
}
