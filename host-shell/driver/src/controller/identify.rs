//! Identify structures beside those that every use of a namespace needs.

use crate::controller::Controller;
use crate::controller::passthru::CommandSet;
use crate::error::{Error, Result};
use nvme_core::spec::admin::cns;
use nvme_core::spec::identify::{IdentifyNamespace, descriptors, nidt, vwc};
use nvme_core::spec::{Nsid, nvm};
use zerocopy::FromBytes;

impl Controller {
    /// Returns the command set of a namespace; `None` if it is NVM or if the controller does not report one.
    pub(super) fn command_set(&self, nsid: Nsid) -> Result<Option<String>> {
        let what = "Identify Namespace Identification Descriptors";
        let list = self
            .session()
            .identify(what, cns::NAMESPACE_DESCRIPTORS, nsid);
        let list = match list {
            Ok(list) => list,
            // There are no such descriptors before NVMe 1.3, nor for a namespace that is not active.
            Err(Error::Command { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let of_set = descriptors(list.as_slice()).find(|one| one.nidt == nidt::CSI);
        Ok(match of_set.and_then(|one| one.nid.first()) {
            None | Some(0) => None,
            Some(1) => Some("1 (key value)".to_owned()),
            Some(2) => Some("2 (zoned)".to_owned()),
            Some(other) => Some(other.to_string()),
        })
    }

    /// Returns the capabilities that all namespaces have in common (Identify Namespace with FFFFFFFFh).
    ///
    /// # Errors
    /// [`Error::Command`] where the controller does not report them: that needs Namespace Management.
    pub fn identify_common(&self) -> Result<IdentifyNamespace> {
        let what = "Identify Namespace (of all)";
        let buffer = self.session().identify(what, cns::NAMESPACE, Nsid::ALL)?;
        IdentifyNamespace::read_from_bytes(buffer.as_slice())
            .map_err(|_| Error::internal("Identify Namespace is not 4,096 bytes"))
    }

    /// Returns the Logical Block Storage Tag Mask of a namespace, where the controller has the structure of the
    /// NVM command set (CNS 05h).
    ///
    /// # Errors
    /// The errors of Identify, but for its refusal.
    pub fn storage_tag_mask(&self, nsid: Nsid) -> Result<Option<u64>> {
        let what = "Identify Namespace (NVM Command Set)";
        match self.session().identify(what, cns::CSI_NAMESPACE, nsid) {
            Ok(page) => Ok(mask_of(page.as_slice())),
            Err(Error::Command { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Commits everything written to every namespace, by one Flush command.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the controller takes no such command (VWC bits 2:1).
    pub fn flush_all(&self) -> Result<()> {
        if self.identify().vwc & vwc::BROADCAST == vwc::BROADCAST_NOT_SUPPORTED {
            return Err(Error::Unsupported {
                what: "Flush of all namespaces",
                bit: "bit 1 of VWC",
            });
        }
        self.passthru(CommandSet::Nvm, nvm::flush(Nsid::ALL), &[])
            .map(drop)
    }
}

/// Returns LBSTM, bytes 7:0 of Identify Namespace of the NVM Command Set.
fn mask_of(page: &[u8]) -> Option<u64> {
    page.first_chunk().copied().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_storage_tag_mask_is_the_first_quadword() {
        let mut page = [0xAA; 4096];
        page[..8].copy_from_slice(&[0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01]);
        assert_eq!(mask_of(&page), Some(0x0123_4567_89AB_CDEF));
        assert_eq!(mask_of(&page[..7]), None);
    }
}
