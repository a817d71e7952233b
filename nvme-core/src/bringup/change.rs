//! What may become of a namespace behind the back of those who use it: another host, or a management tool, formats,
//! shrinks, deletes or write-protects it, or another drive answers after a reset.

use super::NamespaceInfo;
use crate::spec::{Status, nvm};
use core::fmt;

/// Why what was known of a namespace does not hold any more. `Display` goes on after "namespace 1".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceChange {
    /// It is not active any more; the end of Identify Namespace.
    Deleted(Status),
    /// Its blocks have another size in bytes.
    Formatted {
        /// Bytes of a block that were known.
        before: u32,
        /// Bytes of a block now.
        now: u32,
    },
    /// Its blocks have other metadata or another protection type.
    Metadata {
        /// Bytes of metadata that were known.
        before: u16,
        /// Bytes of metadata now.
        now: u16,
    },
    /// It has fewer blocks.
    Shrunk {
        /// Blocks that were known.
        before: u64,
        /// Blocks now.
        now: u64,
    },
    /// NGUID or EUI-64 are another namespace's.
    Replaced,
    /// It takes no writes any more.
    WriteProtected,
}

impl NamespaceChange {
    /// Whether an NVM command with `opcode` may still be sent: a namespace that is write protected can be read.
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
    /// Why a handle that goes by `self` may not be used for `now`, which is what the namespace is now. More blocks
    /// than before change nothing for it, nor does another optimal boundary.
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

    /// Each fact is compared by itself: a namespace that differs in nothing else is another one.
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
