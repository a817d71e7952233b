//! A page: the record that commits it, and the header before its payload.

use super::{InstanceId, StructureBlock, block_of, ends_in_zeros, sealed};
use crate::key::PageKey;
pub use crate::record::PageRecord;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"NVMEKVPG";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RecordWire {
    key: [u8; PageKey::BYTES],
    generation: U64,
    checksum: U64,
    slot: U32,
    length: U32,
}

impl RecordWire {
    pub fn of(record: &PageRecord) -> Self {
        Self {
            key: record.key.0,
            generation: U64::new(record.generation),
            checksum: U64::new(record.checksum),
            slot: U32::new(record.slot),
            length: U32::new(record.length),
        }
    }

    pub fn record(&self) -> PageRecord {
        PageRecord {
            key: PageKey(self.key),
            generation: self.generation.get(),
            checksum: self.checksum.get(),
            slot: self.slot.get(),
            length: self.length.get(),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct HeaderWire {
    magic: [u8; 8],
    instance: InstanceId,
    record: RecordWire,
}

/// The block before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// Name of the store.
    pub instance: InstanceId,
    /// The page.
    pub record: PageRecord,
}

impl PageHeader {
    /// Returns the block.
    pub fn to_block(&self) -> StructureBlock {
        let wire = HeaderWire {
            magic: MAGIC,
            instance: self.instance,
            record: RecordWire::of(&self.record),
        };
        block_of(wire.as_bytes())
    }

    /// Reads a header; `None` for a block that is none.
    pub fn parse(block: &StructureBlock) -> Option<Self> {
        sealed(block)?;
        let (wire, _) = HeaderWire::ref_from_prefix(block).ok()?;
        let is_header = wire.magic == MAGIC && ends_in_zeros(block, size_of::<HeaderWire>());
        is_header.then(|| Self {
            instance: wire.instance,
            record: wire.record.record(),
        })
    }
}
