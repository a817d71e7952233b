//! The structures on the drive, as docs/kv-format.md describes them. All numbers are little-endian.
//!
//! Each structure is one block of [`UNIT`] bytes whose last eight bytes are the CRC-64/NVME of those before. What is
//! read is not trusted: a structure is returned only if its checksum, its store and every number in it are right.

mod checkpoint;
mod log;
mod page;
mod superblock;

pub use checkpoint::CheckpointHeader;
pub use log::{LogBlock, LogRecord, RECORDS_OF_BLOCK, RecordKind};
pub use page::{PageHeader, PageRecord};
pub use superblock::SuperBlock;

pub(crate) use checkpoint::{CHECKPOINT_ENTRY_BYTES, read_entry, write_entry};
pub(crate) use superblock::SuperBlockFault;

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a block of the format, a multiple of the drive's.
pub const UNIT: u64 = 4096;
/// The block of a structure.
pub type StructureBlock = [u8; UNIT as usize];
/// Version of the format.
pub const VERSION: u32 = 1;
/// Bytes of a block before its checksum.
pub(crate) const SUMMED: usize = UNIT as usize - 8;

/// The random name that formatting gives a store, and that all its structures have. Structures of the store that was
/// here before have another one.
pub type InstanceId = [u8; 16];

/// Returns the CRC-64/NVME of several parts.
pub(crate) fn crc_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    parts.into_iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// Returns the checksum of a payload: XXH3 of 64 bits, as the kernel `nvme_hash_chunks` computes it on a GPU.
pub fn payload_checksum(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}

/// Writes the checksum of a block into its last eight bytes, and returns it.
pub fn seal(block: &mut StructureBlock) -> u64 {
    let sum = crc_of([&block[..SUMMED]]);
    block[SUMMED..].copy_from_slice(&sum.to_le_bytes());
    sum
}

/// Returns the checksum in a block, if it is that of its content.
pub(crate) fn sealed(block: &StructureBlock) -> Option<u64> {
    let (content, stored) = block.split_last_chunk::<8>()?;
    let sum = crc_of([content]);
    (sum == u64::from_le_bytes(*stored)).then_some(sum)
}

/// Returns a block that begins with `structure`, with zeros up to its checksum.
fn block_of(structure: &[u8]) -> StructureBlock {
    let mut block = [0; UNIT as usize];
    block[..structure.len()].copy_from_slice(structure);
    seal(&mut block);
    block
}

/// True if the bytes from `from` on up to the checksum are zero, as in every block of this version.
fn ends_in_zeros(block: &StructureBlock, from: usize) -> bool {
    block[from..SUMMED].iter().all(|byte| *byte == 0)
}
