//! A part of a store: all of it, or a partition.

use super::gpt::Partitions;
use crate::error::{Error, Result};
use crate::store::Store;
use nvme_ext4::{Source, SourceError};
use std::sync::Arc;

/// Sizes of blocks that a file can be the image of.
const BLOCKS: [u32; 2] = [512, 4096];

/// A range of a store.
#[derive(Clone, Debug)]
pub struct Part {
    store: Arc<Store>,
    offset: u64,
    bytes: u64,
}

impl Part {
    /// All of `store`.
    pub fn whole(store: &Arc<Store>) -> Self {
        Self {
            store: Arc::clone(store),
            offset: 0,
            bytes: store.len(),
        }
    }

    /// The partition `number`, and what is wrong with the table at the begin of the drive, if that at its end was used.
    ///
    /// # Errors
    /// [`Error::Device`] for a drive without a table that can be used; [`Error::Usage`] for a partition that it does not
    /// have.
    pub fn partition(store: &Arc<Store>, number: u32) -> Result<(Self, Option<String>)> {
        let found = partitions(store)?;
        let Some(partition) = found.get(number) else {
            let names = found.entries.iter().map(|one| {
                let size = nvme_units::bytes(one.bytes);
                format!("{} ({size}, '{}')", one.number, one.name)
            });
            let names: Vec<String> = names.collect();
            return Err(Error::usage(
                format!("there is no partition {number}"),
                format!("there are: {}", names.join(", ")),
            ));
        };
        let part = Self {
            store: Arc::clone(store),
            offset: partition.offset,
            bytes: partition.bytes,
        };
        Ok((part, found.damage))
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Its first byte in the store.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

fn partitions(store: &Arc<Store>) -> Result<Partitions> {
    let whole = Part::whole(store);
    let own = [store.block_bytes()];
    let blocks = match own[0] {
        ..512 => &BLOCKS[..],
        _ => &own,
    };
    let mut last = String::new();
    for block in blocks {
        match Partitions::read(&whole, *block) {
            Ok(found) => return Ok(found),
            Err(fault) => last = fault,
        }
    }
    let cause = format!("no partition table: {last}");
    let remedy = "leave part= out if the file system has the whole device";
    Err(Error::device(cause, remedy))
}

impl Source for Part {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> std::result::Result<(), SourceError> {
        let read = self.store.read_at(self.offset + offset, data);
        read.map_err(SourceError::from)
    }
}
