//! Identify structures beside those that every use of a namespace needs.

use crate::controller::Controller;
use crate::controller::passthru::CommandSet;
use crate::error::{Error, Result};
use nvme_core::spec::admin::cns;
use nvme_core::spec::identify::{ActiveNamespaces, IdentifyNamespace, descriptors, nidt, vwc};
use nvme_core::spec::{Nsid, nvm};
use zerocopy::FromBytes;

/// The most namespaces that lists of a controller may name, so that one that answers nonsense is not asked for ever.
const MOST_LISTED: usize = 1 << 20;

impl Controller {
    /// Returns the active namespaces, ascending, all of them. A controller without a list (NVMe 1.0) is asked
    /// for each.
    ///
    /// # Errors
    /// The errors of Identify; [`Error::Device`] for a list that is none, and without a list and with too many
    /// identifiers to try.
    pub fn namespaces(&self) -> Result<Vec<Nsid>> {
        let mut all: Vec<Nsid> = Vec::new();
        loop {
            let after = all.last().copied().unwrap_or(Nsid::NONE);
            let what = "Identify Active Namespaces";
            let list = self.session().identify(what, cns::ACTIVE_NAMESPACES, after);
            let buffer = match list {
                Err(Error::Command { .. }) if all.is_empty() => return self.walk(),
                list => list?,
            };
            let list = ActiveNamespaces::read_from_bytes(buffer.as_slice())
                .map_err(|_| Error::internal("the namespace list is not 4,096 bytes"))?;
            if append_listed(&list, self.info().max_nsid, &mut all)? < list.0.len() {
                return Ok(all);
            }
        }
    }

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

/// Appends the identifiers of one more list of active namespaces to `all`, and returns their number.
///
/// # Errors
/// [`Error::Device`] for identifiers that do not ascend, are above `max_nsid`, or are too many.
pub(super) fn append_listed(
    list: &ActiveNamespaces,
    max_nsid: u32,
    all: &mut Vec<Nsid>,
) -> Result<usize> {
    let before = all.len();
    for nsid in list.iter() {
        let last = all.last().copied().unwrap_or(Nsid::NONE);
        let wrong = match () {
            _ if nsid <= last => format!("{nsid} after {last}"),
            _ if nsid.0 > max_nsid => format!("{nsid}, and the largest is {max_nsid} (NN)"),
            _ if all.len() == MOST_LISTED => format!("more than {MOST_LISTED} of them"),
            _ => {
                all.push(nsid);
                continue;
            }
        };
        return Err(Error::device(
            format!("the controller's list of active namespaces is not usable: it names {wrong}"),
            "name a namespace with --namespace-id, or update the firmware",
        ));
    }
    Ok(all.len() - before)
}

/// Returns LBSTM, bytes 7:0 of Identify Namespace of the NVM Command Set.
fn mask_of(page: &[u8]) -> Option<u64> {
    page.first_chunk().copied().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_namespaces_ascends_and_ends_with_the_largest() {
        let list = |some: &[u32]| {
            let mut all = ActiveNamespaces([0; 1024]);
            all.0[..some.len()].copy_from_slice(some);
            all
        };
        let mut all = Vec::new();
        assert_eq!(append_listed(&list(&[1, 5]), 9, &mut all).unwrap(), 2);
        assert_eq!(append_listed(&list(&[9]), 9, &mut all).unwrap(), 1);
        assert_eq!(all, [1, 5, 9].map(Nsid));
        for (wrong, part) in [
            (&[3, 3][..], "3 after 3"),
            (&[4, 2][..], "2 after 4"),
            (&[4, 10][..], "the largest is 9"),
        ] {
            let error = append_listed(&list(wrong), 9, &mut Vec::new()).unwrap_err();
            assert!(matches!(error, Error::Device { .. }));
            assert!(error.to_string().contains(part), "{error}");
        }
        // The same list again, by a controller that does not look at the identifier to begin after.
        assert!(append_listed(&list(&[1, 5]), 9, &mut all).is_err());
        let mut full: Vec<Nsid> = (1..=MOST_LISTED as u32).map(Nsid).collect();
        let error = append_listed(&list(&[u32::MAX - 1]), u32::MAX, &mut full).unwrap_err();
        assert!(error.to_string().contains("more than 1048576"), "{error}");
    }

    #[test]
    fn the_storage_tag_mask_is_the_first_quadword() {
        let mut page = [0xAA; 4096];
        page[..8].copy_from_slice(&[0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01]);
        assert_eq!(mask_of(&page), Some(0x0123_4567_89AB_CDEF));
        assert_eq!(mask_of(&page[..7]), None);
    }
}
