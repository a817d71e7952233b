//! A block of the log: records of pages that were committed or freed, in the order in which that happened.

use super::page::{PageRecord, RecordWire};
use super::{InstanceId, StructureBlock, UNIT, block_of, ends_in_zeros, sealed};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"NVMEKVLG";
const RECORD_BYTES: usize = size_of::<LogRecordWire>();
/// The most records of a block.
pub const RECORDS_OF_BLOCK: usize = (UNIT as usize - 8 - size_of::<LogWire>()) / RECORD_BYTES;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct LogWire {
    magic: [u8; 8],
    instance: InstanceId,
    sequence: U64,
    previous: U64,
    epoch: U32,
    opens: U32,
    count: U32,
    reserved: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct LogRecordWire {
    kind: U32,
    reserved: U32,
    page: RecordWire,
}

/// The change that a record makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// The page is found from now on: its data are durable.
    Commit,
    /// The page is not found any more, and its slot may be used for another one.
    Free,
}

/// One change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// The change.
    pub kind: RecordKind,
    /// The page.
    pub page: PageRecord,
}

/// A block of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogBlock {
    /// Name of the store.
    pub instance: InstanceId,
    /// Number of the block, one more than that of the block before, also across checkpoints.
    pub sequence: u64,
    /// Checksum of the block before: an old block is not taken for the successor of a new one.
    pub previous: u64,
    /// Number of the opening that wrote it.
    pub epoch: u32,
    /// True for the first block of an opening, which alone may change the epoch.
    pub opens: bool,
    /// The changes, in their order.
    pub records: Vec<LogRecord>,
}

impl LogBlock {
    /// Returns the block; records beyond [`RECORDS_OF_BLOCK`] are left out.
    pub fn to_block(&self) -> StructureBlock {
        let records = &self.records[..self.records.len().min(RECORDS_OF_BLOCK)];
        let head = LogWire {
            magic: MAGIC,
            instance: self.instance,
            sequence: U64::new(self.sequence),
            previous: U64::new(self.previous),
            epoch: U32::new(self.epoch),
            opens: U32::new(u32::from(self.opens)),
            count: U32::new(records.len() as u32),
            reserved: U32::ZERO,
        };
        let mut bytes = head.as_bytes().to_vec();
        for record in records {
            let kind = match record.kind {
                RecordKind::Commit => 1,
                RecordKind::Free => 2,
            };
            let wire = LogRecordWire {
                kind: U32::new(kind),
                reserved: U32::ZERO,
                page: RecordWire::of(&record.page),
            };
            bytes.extend_from_slice(wire.as_bytes());
        }
        block_of(&bytes)
    }

    /// Reads a block with its checksum; `None` for one that is no block of a log, or has a record that is none.
    pub fn parse(block: &StructureBlock) -> Option<(Self, u64)> {
        let sum = sealed(block)?;
        let (head, rest) = LogWire::ref_from_prefix(block).ok()?;
        let count = head.count.get() as usize;
        let opens = match head.opens.get() {
            0 => false,
            1 => true,
            _ => return None,
        };
        if head.magic != MAGIC || head.reserved.get() != 0 || count > RECORDS_OF_BLOCK {
            return None;
        }
        let (records, _) = <[LogRecordWire]>::ref_from_prefix_with_elems(rest, count).ok()?;
        let records = records.iter().map(read_record);
        let records = records.collect::<Option<Vec<_>>>()?;
        if !ends_in_zeros(block, size_of::<LogWire>() + count * RECORD_BYTES) {
            return None;
        }
        let read = Self {
            instance: head.instance,
            sequence: head.sequence.get(),
            previous: head.previous.get(),
            epoch: head.epoch.get(),
            opens,
            records,
        };
        Some((read, sum))
    }
}

fn read_record(wire: &LogRecordWire) -> Option<LogRecord> {
    let kind = match wire.kind.get() {
        1 => RecordKind::Commit,
        2 => RecordKind::Free,
        _ => return None,
    };
    let page = wire.page.record();
    (wire.reserved.get() == 0).then_some(LogRecord { kind, page })
}
