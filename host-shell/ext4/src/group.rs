//! Group descriptors, which locate the inodes of a group.
//!
//! Linux, Documentation/filesystems/ext4, "Block Group Descriptors" and "Meta Block Groups".

use crate::bytes::{u16_at, u32_at, wide};
use crate::crc::{crc16, crc32c};
use crate::error::{Ext4Error, Result};
use crate::superblock::{GroupChecksum, VolumeSuperblock};

const CHECKSUM: usize = 0x1E;

/// Returns the byte of the device at which the descriptor of `group`, one of the file system's, begins.
pub fn place(superblock: &VolumeSuperblock, group: u64) -> Result<u64> {
    let block_bytes = u64::from(superblock.info.block_bytes);
    let descriptor = u64::from(superblock.descriptor_bytes);
    let per_block = block_bytes / descriptor;
    let (of_block, within) = (group / per_block, group % per_block);
    let block = match superblock.first_meta_group {
        Some(first) if of_block >= first => {
            let first_group = of_block * per_block;
            let begin = superblock.first_data_block + first_group * superblock.blocks_per_group;
            let is_late = block_bytes == 1024 && of_block == 0 && superblock.first_data_block == 0;
            begin + u64::from(has_superblock(superblock, first_group)) + u64::from(is_late)
        }
        _ => u64::from(block_bytes == 1024) + 1 + of_block,
    };
    if block >= superblock.info.blocks {
        let what = format!("descriptors in block {block} of {}", superblock.info.blocks);
        return Err(Ext4Error::corrupt(crate::superblock::OFFSET, what));
    }
    Ok(block * block_bytes + within * descriptor)
}

/// True if `group` begins with a copy of the superblock.
fn has_superblock(superblock: &VolumeSuperblock, group: u64) -> bool {
    if group == 0 {
        return true;
    }
    if let Some(backups) = superblock.backups {
        return backups.iter().any(|one| u64::from(*one) == group);
    }
    let is_power = |base: u64| {
        let mut power = base;
        while power < group {
            power *= base;
        }
        power == group
    };
    !superblock.is_sparse || group == 1 || [3, 5, 7].into_iter().any(is_power)
}

/// Returns the first block of the inodes of `group`, whose descriptor `bytes` lies at byte `offset` of the
/// device.
pub fn inode_table(
    superblock: &VolumeSuperblock,
    group: u64,
    bytes: &[u8],
    offset: u64,
) -> Result<u64> {
    if !is_sound(superblock, group, bytes) {
        return Err(Ext4Error::checksum(
            offset,
            format!("the descriptor of group {group}"),
        ));
    }
    let table = match bytes.len() {
        ..64 => u64::from(u32_at(bytes, 0x8)),
        _ => wide(bytes, 0x8, 0x28),
    };
    let table_bytes = u64::from(superblock.inodes_per_group) * u64::from(superblock.inode_bytes);
    let blocks = table_bytes.div_ceil(u64::from(superblock.info.block_bytes));
    if table <= superblock.first_data_block
        || table
            .checked_add(blocks)
            .is_none_or(|end| end > superblock.info.blocks)
    {
        let what = format!("the inodes of group {group} in block {table}");
        return Err(Ext4Error::corrupt(offset, what));
    }
    Ok(table)
}

fn is_sound(superblock: &VolumeSuperblock, group: u64, bytes: &[u8]) -> bool {
    let stored = u16_at(bytes, CHECKSUM);
    // The number of a group has 32 bits here, because an inode's number has 32 bits.
    let number = (group as u32).to_le_bytes();
    let (before, after) = (&bytes[..CHECKSUM], &bytes[CHECKSUM + 2..]);
    match superblock.group_checksum {
        GroupChecksum::None => true,
        GroupChecksum::Crc16 => {
            let parts = [&superblock.info.uuid[..], &number, before, after];
            parts.into_iter().fold(!0, crc16) == stored
        }
        GroupChecksum::Crc32c => {
            let parts = [&number[..], before, &[0, 0], after];
            let seed = superblock.seed.unwrap_or(0);
            parts.into_iter().fold(seed, crc32c) as u16 == stored
        }
    }
}
