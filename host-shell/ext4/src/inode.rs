//! Inodes: kind, size and attributes of files.
//!
//! Linux, Documentation/filesystems/ext4, "Index Nodes".

use crate::bytes::{u16_at, u32_at};
use crate::crc::crc32c;
use crate::error::{Ext4Error, Result};

/// The inode of the root directory.
pub const ROOT: u32 = 2;
/// Bytes of an inode of ext2; longer inodes hold further times and attributes.
pub const OLD_BYTES: usize = 128;
const CHECKSUM_LOW: usize = 0x7C;
const CHECKSUM_HIGH: usize = 0x82;

/// Bits of [`FileInode::flags`].
pub mod flags {
    /// Some blocks are compressed (e2compr).
    pub const COMPRESSED_BLOCKS: u32 = 0x200;
    /// The file does not change.
    pub const IMMUTABLE: u32 = 0x10;
    /// Data and names are encrypted.
    pub const ENCRYPTED: u32 = 0x800;
    /// A directory with an index of hashes.
    pub const INDEX: u32 = 0x1000;
    /// The file's blocks are extents.
    pub const EXTENTS: u32 = 0x8_0000;
    /// The file is protected by fs-verity.
    pub const VERITY: u32 = 0x10_0000;
    /// The data lie in the inode.
    pub const INLINE_DATA: u32 = 0x1000_0000;
    /// A directory whose names are looked up without regard to case.
    pub const CASEFOLD: u32 = 0x4000_0000;
}

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Bytes.
    File,
    /// Names of other files.
    Directory,
    /// A path to another file.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A device of characters.
    CharDevice,
    /// A device of blocks.
    BlockDevice,
    /// A socket.
    Socket,
}

impl FileKind {
    fn of_mode(mode: u16) -> Option<Self> {
        Some(match mode >> 12 {
            0x1 => Self::Fifo,
            0x2 => Self::CharDevice,
            0x4 => Self::Directory,
            0x6 => Self::BlockDevice,
            0x8 => Self::File,
            0xA => Self::Symlink,
            0xC => Self::Socket,
            _ => return None,
        })
    }

    /// Converts the number that directories store.
    pub(crate) fn of_entry(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            _ => return None,
        })
    }

    /// Returns the bits of this kind in `st_mode` (S_IFMT).
    pub fn mode_bits(self) -> u32 {
        let number = match self {
            Self::Fifo => 0x1,
            Self::CharDevice => 0x2,
            Self::Directory => 0x4,
            Self::BlockDevice => 0x6,
            Self::File => 0x8,
            Self::Symlink => 0xA,
            Self::Socket => 0xC,
        };
        number << 12
    }

    /// Returns one word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symlink",
            Self::Fifo => "fifo",
            Self::CharDevice => "char-device",
            Self::BlockDevice => "block-device",
            Self::Socket => "socket",
        }
    }
}

/// A file's inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInode {
    /// Number of the inode.
    pub number: u32,
    /// Kind of the file.
    pub kind: FileKind,
    /// The lower 12 bits of the mode: permissions, sticky, set-uid and set-gid.
    pub permissions: u16,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes of data.
    pub size: u64,
    /// Names that it has.
    pub links: u16,
    /// Bits of [`flags`].
    pub flags: u32,
    /// Generation number: differs between files that used the same inode.
    pub generation: u32,
    /// Seconds since 1970 and nanoseconds of the last change of the data.
    pub modified: (i64, u32),
    /// Time of the last change of the inode, in seconds and nanoseconds like `modified`.
    pub changed: (i64, u32),
    /// Offset of the inode on the device.
    pub(crate) offset: u64,
    /// The root of the tree of extents, a link's target, or data.
    pub(crate) root: Vec<u8>,
    /// Bytes after the known members: attributes.
    pub(crate) attributes: Vec<u8>,
    /// Seed of checksums of structures that belong to the inode.
    pub(crate) seed: Option<u32>,
}

impl FileInode {
    /// Reads the inode `number`, whose `bytes` lie at byte `offset` of the device.
    pub(crate) fn parse(number: u32, bytes: &[u8], offset: u64, seed: Option<u32>) -> Result<Self> {
        let generation = u32_at(bytes, 0x64);
        let extra = match bytes.len() {
            ..=OLD_BYTES => 0,
            _ => usize::from(u16_at(bytes, 0x80)),
        };
        if OLD_BYTES + extra > bytes.len() || !extra.is_multiple_of(4) {
            let what = format!("inode {number} with {extra} extra bytes of {}", bytes.len());
            return Err(Ext4Error::corrupt(offset, what));
        }
        let known = OLD_BYTES + extra;
        let seed = seed.map(|seed| {
            let seed = crc32c(seed, &number.to_le_bytes());
            crc32c(seed, &generation.to_le_bytes())
        });
        if seed.is_some_and(|seed| !is_sound(bytes, known, seed)) {
            return Err(Ext4Error::checksum(offset, format!("inode {number}")));
        }
        let mode = u16_at(bytes, 0);
        let Some(kind) = FileKind::of_mode(mode) else {
            let what = format!("inode {number} has the mode {mode:#o}");
            return Err(Ext4Error::corrupt(offset, what));
        };
        let halves = |low: usize, high: usize| {
            u32::from(u16_at(bytes, high)) << 16 | u32::from(u16_at(bytes, low))
        };
        let time = |at: usize, extra_at: usize| {
            let seconds = i64::from(u32_at(bytes, at) as i32);
            match extra_at + 4 <= known {
                true => {
                    let extra = u32_at(bytes, extra_at);
                    (seconds + (i64::from(extra & 3) << 32), extra >> 2)
                }
                false => (seconds, 0),
            }
        };
        Ok(Self {
            number,
            kind,
            permissions: mode & 0xFFF,
            uid: halves(0x2, 0x78),
            gid: halves(0x18, 0x7A),
            size: u64::from(u32_at(bytes, 0x6C)) << 32 | u64::from(u32_at(bytes, 0x4)),
            links: u16_at(bytes, 0x1A),
            flags: u32_at(bytes, 0x20),
            generation,
            modified: time(0x10, 0x88),
            changed: time(0xC, 0x84),
            offset,
            root: bytes[0x28..0x64].to_vec(),
            attributes: bytes[known..].to_vec(),
            seed,
        })
    }

    /// True if the inode has the bit `flag` of [`flags`].
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Returns the names of the inode's bits that are in [`flags`].
    pub fn flag_names(&self) -> Vec<&'static str> {
        let all = [
            (flags::IMMUTABLE, "immutable"),
            (flags::COMPRESSED_BLOCKS, "compressed"),
            (flags::ENCRYPTED, "encrypted"),
            (flags::INDEX, "index"),
            (flags::EXTENTS, "extents"),
            (flags::VERITY, "verity"),
            (flags::INLINE_DATA, "inline_data"),
            (flags::CASEFOLD, "casefold"),
        ];
        let set = all.into_iter().filter(|(flag, _)| self.has(*flag));
        set.map(|(_, name)| name).collect()
    }
}

/// True if the checksum is right; `known` is the number of bytes with known members.
fn is_sound(bytes: &[u8], known: usize, seed: u32) -> bool {
    let mut cleared = bytes.to_vec();
    cleared[CHECKSUM_LOW..CHECKSUM_LOW + 2].fill(0);
    let low = u16_at(bytes, CHECKSUM_LOW);
    if known >= CHECKSUM_HIGH + 2 {
        cleared[CHECKSUM_HIGH..CHECKSUM_HIGH + 2].fill(0);
        let stored = u32::from(u16_at(bytes, CHECKSUM_HIGH)) << 16 | u32::from(low);
        crc32c(seed, &cleared) == stored
    } else {
        crc32c(seed, &cleared) as u16 == low
    }
}

#[cfg(test)]
mod tests {
    use super::FileKind;

    #[test]
    fn kinds_have_the_bits_that_they_are_read_from() {
        let kinds = (0..16).filter_map(|number| Some((number, FileKind::of_mode(number << 12)?)));
        let kinds: Vec<_> = kinds.collect();
        assert_eq!(kinds.len(), 7);
        for (number, kind) in kinds {
            assert_eq!(kind.mode_bits(), u32::from(number) << 12, "{}", kind.name());
        }
    }
}
