//! The superblock: sizes and features.
//!
//! Linux, Documentation/filesystems/ext4, "Super Block".

use crate::bytes::{u16_at, u32_at, wide};
use crate::crc::crc32c;
use crate::error::{Ext4Error, Result};

/// Offset of the superblock on the device.
pub const OFFSET: u64 = 1024;
pub const BYTES: usize = 1024;
const MAGIC: u16 = 0xEF53;
/// The largest block: 64 KiB.
const MOST_LOG_BLOCK: u32 = 6;
const OLDEST_INODE: u32 = 11;
const CLEAN: u16 = 1;
const ERRORS: u16 = 2;

mod compat {
    pub const SPARSE_SUPER2: u32 = 0x200;
}

mod incompat {
    pub const COMPRESSION: u32 = 0x1;
    pub const FILETYPE: u32 = 0x2;
    pub const RECOVER: u32 = 0x4;
    pub const JOURNAL_DEV: u32 = 0x8;
    pub const META_BG: u32 = 0x10;
    pub const EXTENTS: u32 = 0x40;
    pub const BITS_64: u32 = 0x80;
    pub const MMP: u32 = 0x100;
    pub const FLEX_BG: u32 = 0x200;
    pub const EA_INODE: u32 = 0x400;
    pub const CSUM_SEED: u32 = 0x2000;
    pub const LARGEDIR: u32 = 0x4000;
    pub const INLINE_DATA: u32 = 0x8000;
    pub const ENCRYPT: u32 = 0x1_0000;
    pub const CASEFOLD: u32 = 0x2_0000;
    pub const READ: u32 = FILETYPE
        | META_BG
        | EXTENTS
        | BITS_64
        | MMP
        | FLEX_BG
        | EA_INODE
        | CSUM_SEED
        | LARGEDIR
        | INLINE_DATA
        | ENCRYPT
        | CASEFOLD;
}

mod ro_compat {
    pub const SPARSE_SUPER: u32 = 0x1;
    pub const GDT_CSUM: u32 = 0x10;
    pub const METADATA_CSUM: u32 = 0x400;
}

/// Facts about a file system, from its superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Inodes in all.
    pub inodes: u32,
    /// UUID of the file system.
    pub uuid: [u8; 16],
    /// Label of the file system.
    pub label: String,
    /// True if the metadata have checksums, which are verified.
    pub has_checksums: bool,
    /// True if the kernel has recorded errors in the file system.
    pub has_errors: bool,
}

/// Returns a UUID as text, as in /dev/disk/by-uuid.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        for digit in [byte >> 4, byte & 0xF] {
            text.extend(char::from_digit(digit.into(), 16));
        }
    }
    text
}

/// Protection of the group descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupChecksum {
    None,
    Crc16,
    Crc32c,
}

#[derive(Clone, Debug)]
pub struct VolumeSuperblock {
    pub info: VolumeInfo,
    pub first_data_block: u64,
    pub blocks_per_group: u64,
    pub inodes_per_group: u32,
    pub inode_bytes: u16,
    pub descriptor_bytes: u16,
    /// First group whose descriptors lie in a meta group; the descriptors of earlier groups lie together.
    pub first_meta_group: Option<u64>,
    pub has_file_types: bool,
    pub is_sparse: bool,
    /// Groups with copies of the superblock, for sparse_super2.
    pub backups: Option<[u32; 2]>,
    /// Seed of checksums of metadata, if there are any.
    pub seed: Option<u32>,
    pub group_checksum: GroupChecksum,
}

impl GroupChecksum {
    fn of(read_only_features: u32) -> Self {
        match read_only_features {
            found if found & ro_compat::METADATA_CSUM != 0 => Self::Crc32c,
            found if found & ro_compat::GDT_CSUM != 0 => Self::Crc16,
            _ => Self::None,
        }
    }
}

impl VolumeSuperblock {
    /// Parses the superblock; the device has `len` bytes.
    pub fn parse(bytes: &[u8], len: u64) -> Result<Self> {
        let magic = u16_at(bytes, 0x38);
        if magic != MAGIC {
            return Err(Ext4Error::NotExt4 {
                what: format!("the magic number is {magic:#06x}, not {MAGIC:#06x}"),
            });
        }
        if u32_at(bytes, 0x4C) == 0 {
            return Err(Ext4Error::Unsupported {
                feature: "revision 0".to_owned(),
                remedy: "copy its files to an ext4",
            });
        }
        let features = u32_at(bytes, 0x60);
        let read_only = u32_at(bytes, 0x64);
        let has_checksums = read_only & ro_compat::METADATA_CSUM != 0;
        if has_checksums {
            check_sum(bytes)?;
        }
        check_features(features)?;
        check_state(u16_at(bytes, 0x3A))?;
        let is_wide = features & incompat::BITS_64 != 0;
        let (block_bytes, blocks) = blocks(bytes, len, is_wide)?;
        let (first_data_block, blocks_per_group) = groups(bytes, blocks)?;
        let groups = (blocks - first_data_block).div_ceil(blocks_per_group);
        let (inode_bytes, inodes, inodes_per_group) = inodes(bytes, block_bytes, groups)?;
        let descriptor_bytes = descriptor_bytes(bytes, block_bytes, is_wide)?;
        let uuid: [u8; 16] = std::array::from_fn(|at| bytes[0x68 + at]);
        let label = &bytes[0x78..0x88];
        let label = label.split(|byte| *byte == 0).next().unwrap_or(&[]);
        let seed = match features & incompat::CSUM_SEED {
            0 => crc32c(!0, &uuid),
            _ => u32_at(bytes, 0x270),
        };
        Ok(Self {
            info: VolumeInfo {
                block_bytes,
                blocks,
                inodes,
                uuid,
                label: String::from_utf8_lossy(label).into_owned(),
                has_checksums,
                has_errors: u16_at(bytes, 0x3A) & ERRORS != 0,
            },
            first_data_block,
            blocks_per_group,
            inodes_per_group,
            inode_bytes,
            descriptor_bytes,
            first_meta_group: (features & incompat::META_BG != 0)
                .then(|| u64::from(u32_at(bytes, 0x104))),
            has_file_types: features & incompat::FILETYPE != 0,
            is_sparse: read_only & ro_compat::SPARSE_SUPER != 0,
            backups: (u32_at(bytes, 0x5C) & compat::SPARSE_SUPER2 != 0)
                .then(|| [u32_at(bytes, 0x24C), u32_at(bytes, 0x250)]),
            seed: has_checksums.then_some(seed),
            group_checksum: GroupChecksum::of(read_only),
        })
    }
}

fn corrupt(at: u64, what: String) -> Ext4Error {
    Ext4Error::corrupt(OFFSET + at, what)
}

fn check_sum(bytes: &[u8]) -> Result<()> {
    let kind = bytes.get(0x175).copied().unwrap_or(0);
    if kind != 1 {
        return Err(corrupt(0x175, format!("checksums of the type {kind}")));
    }
    match crc32c(!0, &bytes[..0x3FC]) == u32_at(bytes, 0x3FC) {
        true => Ok(()),
        false => Err(Ext4Error::checksum(OFFSET, "the superblock")),
    }
}

/// Returns the bytes of a block, and how many there are on a device of `len` bytes.
fn blocks(bytes: &[u8], len: u64, is_wide: bool) -> Result<(u32, u64)> {
    let log_block = u32_at(bytes, 0x18);
    if log_block > MOST_LOG_BLOCK {
        return Err(corrupt(0x18, format!("blocks of 2^{log_block} KiB")));
    }
    let block_bytes = 1024u32 << log_block;
    let blocks = match is_wide {
        true => wide(bytes, 0x4, 0x150),
        false => u64::from(u32_at(bytes, 0x4)),
    };
    let end = blocks.checked_mul(u64::from(block_bytes));
    match end.is_some_and(|end| end <= len) {
        true => Ok((block_bytes, blocks)),
        false => Err(corrupt(
            0x4,
            format!("{blocks} blocks of {block_bytes} bytes on a device of {len} bytes"),
        )),
    }
}

/// Returns the block with which the first group begins, and the blocks of a group.
fn groups(bytes: &[u8], blocks: u64) -> Result<(u64, u64)> {
    let first_data_block = u64::from(u32_at(bytes, 0x14));
    if first_data_block > 1 || first_data_block >= blocks {
        return Err(corrupt(
            0x14,
            format!("the first data block {first_data_block}"),
        ));
    }
    match u64::from(u32_at(bytes, 0x20)) {
        0 => Err(corrupt(0x20, "no blocks in a group".to_owned())),
        blocks_per_group => Ok((first_data_block, blocks_per_group)),
    }
}

/// Returns the bytes of an inode, how many there are, and how many in a group.
fn inodes(bytes: &[u8], block_bytes: u32, groups: u64) -> Result<(u16, u32, u32)> {
    let inode_bytes = u16_at(bytes, 0x58);
    let is_fit = inode_bytes >= 128 && u32::from(inode_bytes) <= block_bytes;
    if !is_fit || !inode_bytes.is_power_of_two() {
        return Err(corrupt(0x58, format!("inodes of {inode_bytes} bytes")));
    }
    let inodes_per_group = u32_at(bytes, 0x28);
    let inodes = u32_at(bytes, 0x0);
    let most = groups.checked_mul(u64::from(inodes_per_group));
    if inodes < OLDEST_INODE || most.is_none_or(|most| u64::from(inodes) > most) {
        return Err(corrupt(
            0x0,
            format!("{inodes} inodes in {groups} groups of {inodes_per_group}"),
        ));
    }
    Ok((inode_bytes, inodes, inodes_per_group))
}

fn descriptor_bytes(bytes: &[u8], block_bytes: u32, is_wide: bool) -> Result<u16> {
    let found = match is_wide {
        true => u16_at(bytes, 0xFE),
        false => 32,
    };
    let is_fit = u32::from(found) <= block_bytes.min(1024);
    match !is_fit || !found.is_power_of_two() || is_wide && found < 64 {
        true => Err(corrupt(0xFE, format!("descriptors of {found} bytes"))),
        false => Ok(found),
    }
}

fn check_features(features: u32) -> Result<()> {
    let known = [
        (
            incompat::RECOVER,
            "its journal has to be replayed",
            "unmount it where it is mounted; else mount and unmount it, or run e2fsck on it",
        ),
        (
            incompat::JOURNAL_DEV,
            "it is the journal of another file system",
            "name the device that holds the files",
        ),
        (
            incompat::COMPRESSION,
            "it has compressed files",
            "copy its files to an ext4",
        ),
    ];
    for (flag, feature, remedy) in known {
        if features & flag != 0 {
            return Err(Ext4Error::Unsupported {
                feature: feature.to_owned(),
                remedy,
            });
        }
    }
    match features & !incompat::READ {
        0 => Ok(()),
        unknown => Err(Ext4Error::Unsupported {
            feature: format!("the unknown incompatible features {unknown:#x}"),
            remedy: "copy its files to an ext4 without them",
        }),
    }
}

/// Rejects a file system that is mounted for writing without a journal: the device has older data than the
/// kernel, and nothing else indicates that. (With a journal the feature "recover" does.)
fn check_state(state: u16) -> Result<()> {
    match state & CLEAN {
        0 => Err(Ext4Error::Unsupported {
            feature: "it is mounted for writing elsewhere, or was not unmounted cleanly".to_owned(),
            remedy: "unmount it where it is mounted; else run e2fsck on it",
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_is_written_in_its_five_parts() {
        let uuid = std::array::from_fn(|at| at as u8 * 17);
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(super::uuid_text(&uuid), text);
    }
}
