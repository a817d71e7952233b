//! Changes of a namespace that its users did not make: another host or a management tool formats, shrinks,
//! deletes or write-protects it, or another drive answers after a reset.
//!
//! [`NamespaceInfo::change`] compares two identifications; nothing here sends a command.

use super::NamespaceInfo;
use crate::spec::{Status, nvm};
use core::fmt;

/// The reason why an earlier identification of a namespace no longer holds. `Display` continues a sentence
/// that begins with "namespace 1".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceChange {
    /// The namespace is no longer active; this is the status of Identify Namespace.
    Deleted(Status),
    /// The size of its blocks in bytes has changed.
    Formatted {
        /// Bytes of a block before.
        before: u32,
        /// Bytes of a block now.
        now: u32,
    },
    /// The metadata of its blocks, or the protection type, have changed.
    Metadata {
        /// Bytes of metadata of a block before.
        before: u16,
        /// Bytes of metadata of a block now.
        now: u16,
    },
    /// The namespace has fewer blocks.
    Shrunk {
        /// Blocks before.
        before: u64,
        /// Blocks now.
        now: u64,
    },
    /// NGUID or EUI-64 have changed: it is another namespace.
    Replaced,
    /// The namespace is write protected now.
    WriteProtected,
}

impl NamespaceChange {
    /// True if an NVM command with `opcode` may still be sent: a write-protected namespace can still be read.
    pub const fn allows(self, opcode: u8) -> bool {
        let only_reads = matches!(
            opcode,
            nvm::opcode::READ | nvm::opcode::COMPARE | nvm::opcode::VERIFY | nvm::opcode::FLUSH
        );
        matches!(self, Self::WriteProtected) && only_reads
    }
}

impl fmt::Display for NamespaceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deleted(Status::SUCCESS) => f.write_str("was deleted or detached"),
            Self::Deleted(status) => {
                write!(
                    f,
                    "was deleted or detached (Identify Namespace ended with {status})"
                )
            }
            Self::Formatted { before, now } => {
                write!(f, "was formatted ({before} -> {now} bytes a block)")
            }
            Self::Metadata { before, now } if before == now => {
                f.write_str("was formatted with other protection information")
            }
            Self::Metadata { before, now } => {
                write!(
                    f,
                    "was formatted ({before} -> {now} bytes of metadata a block)"
                )
            }
            Self::Shrunk { before, now } => {
                write!(f, "has become smaller ({before} -> {now} blocks)")
            }
            Self::Replaced => f.write_str("is another one than before (NGUID or EUI-64 differ)"),
            Self::WriteProtected => f.write_str("has become write protected"),
        }
    }
}

impl core::error::Error for NamespaceChange {}

impl NamespaceInfo {
    /// Returns the change that forbids a handle made for `self` to be used on `now`, the namespace as just
    /// identified.
    ///
    /// A namespace that has grown, or has another optimal boundary, is no change: every block that the handle
    /// can name still exists.
    pub fn change(&self, now: &Self) -> Option<NamespaceChange> {
        let format = |of: &Self| (of.metadata_bytes, of.protection, of.extended);
        if !now.identified.is_success() || now.blocks == 0 && self.blocks != 0 {
            return Some(NamespaceChange::Deleted(now.identified));
        }
        if self.block_bytes != now.block_bytes {
            return Some(NamespaceChange::Formatted {
                before: self.block_bytes,
                now: now.block_bytes,
            });
        }
        if format(self) != format(now) {
            return Some(NamespaceChange::Metadata {
                before: self.metadata_bytes,
                now: now.metadata_bytes,
            });
        }
        if (self.nguid, self.eui64) != (now.nguid, now.eui64) {
            return Some(NamespaceChange::Replaced);
        }
        if now.blocks < self.blocks {
            return Some(NamespaceChange::Shrunk {
                before: self.blocks,
                now: now.blocks,
            });
        }
        (now.write_protected && !self.write_protected).then_some(NamespaceChange::WriteProtected)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::spec::Nsid;

    /// A namespace that differs in any one of these facts is another one.
    #[test]
    fn each_fact_that_differs_alone_is_a_change() {
        let before = NamespaceInfo {
            blocks: 80,
            block_bytes: 512,
            ..NamespaceInfo::unknown(Nsid(1), Status::SUCCESS)
        };
        let differs = |change: fn(&mut NamespaceInfo)| {
            let mut now = before;
            change(&mut now);
            before.change(&now)
        };
        let metadata = |now| Some(NamespaceChange::Metadata { before: 0, now });
        let deleted = |status| Some(NamespaceChange::Deleted(status));
        assert_eq!(
            differs(|now| now.identified = Status::INVALID_FIELD),
            deleted(Status::INVALID_FIELD)
        );
        assert_eq!(differs(|now| now.blocks = 0), deleted(Status::SUCCESS));
        assert_eq!(
            differs(|now| now.block_bytes = 4096),
            Some(NamespaceChange::Formatted {
                before: 512,
                now: 4096
            })
        );
        assert_eq!(differs(|now| now.metadata_bytes = 8), metadata(8));
        assert_eq!(differs(|now| now.protection = 1), metadata(0));
        assert_eq!(differs(|now| now.extended = true), metadata(0));
        let replaced = Some(NamespaceChange::Replaced);
        assert_eq!(differs(|now| now.nguid[15] = 1), replaced);
        assert_eq!(differs(|now| now.eui64[7] = 1), replaced);
        assert_eq!(
            differs(|now| now.blocks = 79),
            Some(NamespaceChange::Shrunk {
                before: 80,
                now: 79
            })
        );
        assert_eq!(
            differs(|now| now.write_protected = true),
            Some(NamespaceChange::WriteProtected)
        );
        assert_eq!(differs(|now| now.blocks = 81), None);
        assert_eq!(differs(|now| now.boundary_blocks = 8), None);
    }
}
