//! Errors of the reader.

use crate::source::SourceError;
use std::fmt;

/// Result with this crate's [`Ext4Error`].
pub type Result<T> = std::result::Result<T, Ext4Error>;

/// Reason why a file or file system is not read.
#[derive(Debug)]
pub enum Ext4Error {
    /// The device could not be read.
    Read {
        /// First byte of the device.
        offset: u64,
        /// Number of bytes requested.
        bytes: u64,
        /// Error of the device.
        source: SourceError,
    },
    /// The device holds no ext4.
    NotExt4 {
        /// Content that was found instead of an ext4.
        what: String,
    },
    /// The file system has a feature that is not read.
    Unsupported {
        /// Name of the feature.
        feature: String,
        /// Action that avoids it.
        remedy: &'static str,
    },
    /// A structure on the device contradicts the format.
    Corrupt {
        /// The byte of the device at which the structure begins.
        offset: u64,
        /// Description of the structure.
        what: String,
    },
    /// A checksum differs from the one computed over its structure.
    Checksum {
        /// The first byte of the device that the checksum covers.
        offset: u64,
        /// Structure that it covers.
        what: String,
    },
    /// There is no such file.
    NotFound {
        /// Path of the file, up to the part that does not exist.
        path: String,
    },
    /// A file is no directory, but has to be one; or the reverse.
    WrongKind {
        /// The inode.
        inode: u32,
        /// Kind that was expected.
        wanted: &'static str,
    },
    /// The path has more links in a row than are followed.
    TooManyLinks {
        /// The path that was looked up.
        path: String,
    },
    /// The data of this file cannot be read in this form.
    Refused {
        /// The inode.
        inode: u32,
        /// Reason.
        why: DataRefusal,
    },
    /// The inode differs from the one that was read before.
    Changed {
        /// The inode.
        inode: u32,
    },
}

/// Reason why the data of a file are not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataRefusal {
    /// The data are encrypted.
    Encrypted,
    /// The data are compressed (e2compr).
    Compressed,
    /// The data are found by a block map of ext2 and ext3, not by extents.
    BlockMap,
    /// The data lie in the inode, so that they have no extents. Only queries of extents are
    /// refused.
    Inline,
}

impl fmt::Display for DataRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Encrypted => "its data or names are encrypted",
            Self::Compressed => "its data are compressed",
            Self::BlockMap => "it has a block map of ext2 or ext3 in place of extents",
            Self::Inline => "its data lie in the inode, without blocks of their own",
        })
    }
}

impl DataRefusal {
    /// Returns the remedy.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Encrypted => "copy the file where it is unlocked",
            Self::Compressed => "copy the file without compression",
            Self::BlockMap => "copy the file on a file system with extents",
            Self::Inline => "read the file by its bytes",
        }
    }
}

impl fmt::Display for Ext4Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read {
                offset,
                bytes,
                source,
            } => write!(
                f,
                "cannot read {bytes} bytes from byte {offset} on: {source}"
            ),
            Self::NotExt4 { what } => write!(f, "no ext4: {what}"),
            Self::Unsupported { feature, .. } => write!(f, "the ext4 is not read: {feature}"),
            Self::Corrupt { offset, what } => {
                write!(f, "the ext4 is damaged at byte {offset}: {what}")
            }
            Self::Checksum { offset, what } => {
                write!(
                    f,
                    "the ext4 is damaged at byte {offset}: the checksum of {what} is wrong"
                )
            }
            Self::NotFound { path } => write!(f, "{path} does not exist"),
            Self::WrongKind { inode, wanted } => write!(f, "inode {inode} is no {wanted}"),
            Self::TooManyLinks { path } => write!(f, "{path}: too many symbolic links"),
            Self::Refused { inode, why } => write!(f, "inode {inode} is not read: {why}"),
            Self::Changed { inode } => write!(f, "inode {inode} has changed since it was read"),
        }
    }
}

impl std::error::Error for Ext4Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

impl Ext4Error {
    /// Returns the remedy: one clause without a full stop.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Read { .. } => "check the device",
            Self::NotExt4 { .. } => "name the device or partition that holds the ext4",
            Self::Unsupported { remedy, .. } => remedy,
            Self::Corrupt { .. } | Self::Checksum { .. } => {
                "unmount the file system if it is mounted, and run e2fsck on it"
            }
            Self::NotFound { .. } => "list the directory and check the spelling",
            Self::WrongKind { .. } => "look at what kind of file it is with stat",
            Self::TooManyLinks { .. } => "name the file that the links should lead to",
            Self::Refused { why, .. } => why.remedy(),
            Self::Changed { .. } => "unmount the file system elsewhere, and open the file again",
        }
    }

    pub(crate) fn corrupt(offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt {
            offset,
            what: what.into(),
        }
    }

    pub(crate) fn checksum(offset: u64, what: impl Into<String>) -> Self {
        Self::Checksum {
            offset,
            what: what.into(),
        }
    }
}
