//! SGL descriptors.
//!
//! NVMe Base 2.0c, 4.1.2 (Scatter Gather List).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// SGL descriptor types (identifier bits 7:4).
pub mod kind {
    /// Data lies at the address.
    pub const DATA_BLOCK: u8 = 0x0;
    /// Data read from the controller is discarded.
    pub const BIT_BUCKET: u8 = 0x1;
    /// More descriptors lie at the address; the last of them is a segment again.
    pub const SEGMENT: u8 = 0x2;
    /// More descriptors lie at the address; no further segment follows.
    pub const LAST_SEGMENT: u8 = 0x3;
}

/// One SGL descriptor of the address sub type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SglDescriptor {
    /// Where data or descriptors lie. Reserved in a bit bucket.
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
    /// A descriptor of type `kind` with sub type address.
    #[inline]
    pub const fn new(kind: u8, address: u64, length: u32) -> Self {
        Self {
            address,
            length,
            reserved: [0; 3],
            identifier: kind << 4,
        }
    }

    /// The descriptor type: one of [`kind`], or an unknown one.
    #[inline]
    pub const fn kind(&self) -> u8 {
        self.identifier >> 4
    }

    /// The sub type: 0 is an address, 1 an offset.
    #[inline]
    pub const fn sub_type(&self) -> u8 {
        self.identifier & 0xF
    }

    /// The descriptor as two words.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [
            self.address,
            self.length as u64 | (self.identifier as u64) << 56,
        ]
    }

    /// The descriptor read back from two words.
    #[inline]
    pub const fn from_words(words: [u64; 2]) -> Self {
        zerocopy::transmute!(words)
    }
}
