//! Namespaces as bring-up identifies them, and the reasons why this driver cannot use one.

use crate::spec::identify::IdentifyNamespace;
use crate::spec::{Lba, Nsid, Status};
use core::fmt;

/// A namespace as bring-up found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Namespace identifier.
    pub nsid: Nsid,
    /// Status of Identify Namespace. Unless it is success, everything below is 0.
    pub identified: Status,
    /// Size in blocks (NSZE).
    pub blocks: u64,
    /// Bytes per block, without metadata; 0 when LBADS is out of range.
    pub block_bytes: u32,
    /// Metadata bytes per block.
    pub metadata_bytes: u16,
    /// End-to-end protection type, 0 for none.
    pub protection: u8,
    /// Metadata is at the end of each block (extended LBA) rather than in a separate buffer.
    pub extended: bool,
    /// Boundary in blocks that commands should not cross; 0 for none.
    pub boundary_blocks: u32,
    /// True if the namespace is write protected now (NSATTR bit 0).
    pub write_protected: bool,
    /// Namespace globally unique identifier; 0 for none.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier; 0 for none.
    pub eui64: [u8; 8],
}

/// The reason why this driver cannot read and write a namespace. The other namespaces of the
/// controller are not affected. `Display` gives the reason in words for a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnusableNamespace {
    /// Identify Namespace ended with this status, for example because the namespace belongs to another
    /// command set.
    Identify(Status),
    /// The namespace has no blocks: it is not active, or has a command set without blocks.
    NoBlocks,
    /// LBADS gives blocks that are not of 512 bytes to 64 KiB. The bytes, or 0 for a reserved LBADS.
    BlockBytes(u32),
    /// Each block has this many bytes of metadata.
    Metadata(u16),
    /// The namespace has 2^64 bytes or more.
    TooLarge,
}

impl fmt::Display for UnusableNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identify(status) => write!(
                f,
                "Identify Namespace ended with {status}: it may be of another command set than NVM"
            ),
            Self::NoBlocks => f.write_str("it has no blocks: choose another namespace"),
            Self::BlockBytes(0) => f.write_str(
                "its block size (LBADS) is not valid: format it with 512 or 4096 byte blocks",
            ),
            Self::BlockBytes(bytes) => write!(
                f,
                "it has blocks of {bytes} bytes: format it with 512 or 4096 byte blocks"
            ),
            Self::Metadata(bytes) => write!(
                f,
                "it has {bytes} bytes of metadata per block: format it without metadata"
            ),
            Self::TooLarge => f.write_str("it says that it has 2^64 bytes or more: format it"),
        }
    }
}

impl core::error::Error for UnusableNamespace {}

impl NamespaceInfo {
    /// Describes a namespace whose identifier and status of Identify Namespace alone are known.
    pub fn unknown(nsid: Nsid, identified: Status) -> Self {
        Self {
            nsid,
            identified,
            blocks: 0,
            block_bytes: 0,
            metadata_bytes: 0,
            protection: 0,
            extended: false,
            boundary_blocks: 0,
            write_protected: false,
            nguid: [0; 16],
            eui64: [0; 8],
        }
    }

    /// Extracts the fields that a driver needs from an Identify Namespace structure.
    pub fn from_identify(nsid: Nsid, identify: &IdentifyNamespace) -> Self {
        Self {
            nsid,
            identified: Status::SUCCESS,
            blocks: identify.nsze,
            block_bytes: identify.block_bytes().unwrap_or(0),
            metadata_bytes: identify.lba_format().ms,
            protection: identify.dps & 7,
            extended: identify.flbas & 1 << 4 != 0,
            boundary_blocks: u32::from(identify.noiob),
            write_protected: identify.nsattr & 1 != 0,
            nguid: identify.nguid,
            eui64: identify.eui64,
        }
    }

    /// Returns the last block.
    pub fn last(&self) -> Lba {
        Lba(self.blocks.saturating_sub(1))
    }

    /// Returns the reason why this driver cannot read and write the namespace, or `None` when it can: blocks
    /// of 512 bytes to 64 KiB, no metadata, and a size in bytes that fits into 64 bits.
    pub fn unusable(&self) -> Option<UnusableNamespace> {
        if !self.identified.is_success() {
            return Some(UnusableNamespace::Identify(self.identified));
        }
        if self.blocks == 0 {
            return Some(UnusableNamespace::NoBlocks);
        }
        if !(512..=65_536).contains(&self.block_bytes) {
            return Some(UnusableNamespace::BlockBytes(self.block_bytes));
        }
        if self.metadata_bytes != 0 {
            return Some(UnusableNamespace::Metadata(self.metadata_bytes));
        }
        let bytes = self.blocks.checked_mul(u64::from(self.block_bytes));
        bytes.is_none().then_some(UnusableNamespace::TooLarge)
    }

    /// True if this driver can read and write it: [`unusable`](Self::unusable) has no reason against it.
    pub fn is_supported(&self) -> bool {
        self.unusable().is_none()
    }
}
