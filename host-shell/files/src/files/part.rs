//! A part of a store: all of it, or a partition.

use super::gpt::{GptPartition, PartitionTable};
use nvme_driver::error::{Error, Result};
use nvme_ext4::{SourceError, VolumeSource};
use nvme_store::Store;
use std::sync::Arc;

/// Sizes of blocks that a file can be the image of.
const BLOCKS: [u32; 2] = [512, 4096];

/// A range of a store.
#[derive(Clone, Debug)]
pub struct StoreRange {
    store: Arc<Store>,
    offset: u64,
    bytes: u64,
}

impl StoreRange {
    /// Returns all of `store`.
    pub fn whole(store: &Arc<Store>) -> Self {
        Self {
            store: Arc::clone(store),
            offset: 0,
            bytes: store.len(),
        }
    }

    /// Opens the partition `number`; also returns the fault of the table at the start of the drive, if the
    /// backup at its end was used.
    ///
    /// # Errors
    /// [`Error::Device`] for a drive without a usable table; [`Error::Usage`] for a partition that it does not
    /// have.
    pub fn partition(store: &Arc<Store>, number: u32) -> Result<(Self, Option<String>)> {
        let found = partitions(store)?;
        let Some(partition) = found.get(number) else {
            return Err(Error::usage(
                format!("there is no partition {number}"),
                format!("there are: {}", list(&found)),
            ));
        };
        let part = Self {
            store: Arc::clone(store),
            offset: partition.offset,
            bytes: partition.bytes,
        };
        Ok((part, found.damage))
    }

    /// Returns the store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns its first byte in the store.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Formats partitions with their sizes and names, for people.
pub fn list(found: &PartitionTable) -> String {
    let text = |one: &GptPartition| {
        let size = nvme_units::bytes(one.bytes);
        let name = one.name.escape_debug();
        format!("{} ({size}, '{name}')", one.number)
    };
    match found.entries.is_empty() {
        true => "no partitions".to_owned(),
        false => nvme_driver::words::listed(found.entries.iter().map(text)),
    }
}

/// Searches for a partition table of any block size, and returns both.
pub fn partitions_of(part: &StoreRange) -> Option<(u32, PartitionTable)> {
    let found = BLOCKS
        .iter()
        .map(|block| (*block, PartitionTable::read(part, *block)));
    found
        .filter_map(|(block, found)| Some((block, found.ok()?)))
        .next()
}

fn partitions(store: &Arc<Store>) -> Result<PartitionTable> {
    let whole = StoreRange::whole(store);
    let own = store.block_bytes();
    let found = match own {
        ..512 => partitions_of(&whole)
            .map(|(_, found)| found)
            .ok_or_else(|| {
                PartitionTable::read(&whole, BLOCKS[0])
                    .err()
                    .unwrap_or_default()
            }),
        own => PartitionTable::read(&whole, own),
    };
    found.map_err(|fault| match partitions_of(&whole) {
        // The table counts in blocks of another size, so by the drive's blocks its numbers would denote other
        // bytes.
        Some((block, found)) => Error::device(
            format!(
                "the partition table is one of blocks of {block} bytes, on a drive with blocks of {own}: {}",
                list(&found)
            ),
            format!(
                "format the drive with blocks of {block} bytes before the image is written to it, or make the table anew"
            ),
        ),
        None => Error::device(
            format!("no partition table: {fault}"),
            "leave part= out if the file system has the whole device",
        ),
    })
}

impl VolumeSource for StoreRange {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> std::result::Result<(), SourceError> {
        let read = self.store.read_at(self.offset + offset, data);
        read.map_err(SourceError::from)
    }
}
