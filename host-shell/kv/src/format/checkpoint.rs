//! A checkpoint: the whole index at one moment, which the log of the same half continues.

use super::page::{PageRecord, RecordWire};
use super::{InstanceId, StructureBlock, block_of, ends_in_zeros, sealed};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"NVMEKVCP";
/// Bytes of an entry.
pub(crate) const CHECKPOINT_ENTRY_BYTES: usize = size_of::<RecordWire>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct CheckpointWire {
    magic: [u8; 8],
    instance: InstanceId,
    sequence: U64,
    log_sequence: U64,
    log_previous: U64,
    entries_checksum: U64,
    epoch: U32,
    count: U32,
}

/// The block before the entries of a checkpoint. Entries are those of pages in the order of their last use, the
/// oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointHeader {
    /// Name of the store.
    pub instance: InstanceId,
    /// Number of the checkpoint: of two valid ones the larger counts.
    pub sequence: u64,
    /// Number of the log block that comes next.
    pub log_sequence: u64,
    /// Checksum of the log block before it.
    pub log_previous: u64,
    /// CRC-64/NVME of the entries.
    pub entries_checksum: u64,
    /// Number of the opening that wrote it.
    pub epoch: u32,
    /// Entries.
    pub count: u32,
}

impl CheckpointHeader {
    /// Returns the block.
    pub fn to_block(&self) -> StructureBlock {
        let wire = CheckpointWire {
            magic: MAGIC,
            instance: self.instance,
            sequence: U64::new(self.sequence),
            log_sequence: U64::new(self.log_sequence),
            log_previous: U64::new(self.log_previous),
            entries_checksum: U64::new(self.entries_checksum),
            epoch: U32::new(self.epoch),
            count: U32::new(self.count),
        };
        block_of(wire.as_bytes())
    }

    /// Reads a header; `None` for a block that is none.
    pub fn parse(block: &StructureBlock) -> Option<Self> {
        sealed(block)?;
        let (wire, _) = CheckpointWire::ref_from_prefix(block).ok()?;
        if wire.magic != MAGIC || !ends_in_zeros(block, size_of::<CheckpointWire>()) {
            return None;
        }
        Some(Self {
            instance: wire.instance,
            sequence: wire.sequence.get(),
            log_sequence: wire.log_sequence.get(),
            log_previous: wire.log_previous.get(),
            entries_checksum: wire.entries_checksum.get(),
            epoch: wire.epoch.get(),
            count: wire.count.get(),
        })
    }
}

/// Appends an entry.
pub(crate) fn write_entry(record: &PageRecord, to: &mut Vec<u8>) {
    to.extend_from_slice(RecordWire::of(record).as_bytes());
}

/// Reads an entry of [`CHECKPOINT_ENTRY_BYTES`] bytes.
pub(crate) fn read_entry(bytes: &[u8; CHECKPOINT_ENTRY_BYTES]) -> PageRecord {
    let wire: &RecordWire = zerocopy::transmute_ref!(bytes);
    wire.record()
}
