//! Format NVM and Sanitize: the controller's support for the requested action is checked before anything is
//! sent.

use crate::controller::Controller;
use crate::controller::session::IdentifyWatch;
use crate::error::{Error, Result};
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::Nsid;
use nvme_core::spec::admin::{self, Format, SanitizeAction, SanitizeFields, cns};
use nvme_core::spec::identify::{IdentifyNamespace, fna, oacs, sanicap};
use nvme_core::spec::log_page::{SanitizeStatus, lid};
use std::time::Duration;
use zerocopy::FromBytes;

impl Controller {
    /// Sends Format NVM for namespace `nsid`, or for every one ([`Nsid::ALL`]): their data is lost, and their blocks
    /// may have another size afterwards. Returns the new properties of each. The command may take `timeout`; `progress`
    /// is called twice a second with the percentage done, if the controller reports it (FPI) and answers meanwhile.
    ///
    /// A [`Namespace`](crate::Namespace) that was opened before is refused from then on if its blocks
    /// changed; open it again.
    ///
    /// # Errors
    /// [`Error::Usage`], before anything is sent, for what the controller cannot do, and for a namespace
    /// when the controller would format every one.
    pub fn format(
        &self,
        nsid: Nsid,
        format: Format,
        timeout: Duration,
        mut progress: impl FnMut(u8),
    ) -> Result<Vec<NamespaceInfo>> {
        let affected = self.formats(nsid, format)?;
        let one = affected.first().copied().unwrap_or(nsid);
        let mut seen = |bytes: &[u8]| {
            let identify = IdentifyNamespace::ref_from_prefix(bytes);
            let fpi = identify.map_or(0, |(identify, _)| identify.fpi);
            // Bit 7: supported; below it the percents that remain.
            if fpi & 0x80 != 0 {
                progress(100 - (fpi & 0x7F).min(100));
            }
        };
        let mut watch = IdentifyWatch::new(admin::identify(cns::NAMESPACE, one), &mut seen);
        self.session()
            .admin_for("Format NVM", format.command(nsid), timeout, &mut watch)?;
        let mut now = Vec::new();
        for nsid in affected {
            let info = NamespaceInfo::from_identify(nsid, &self.identify_namespace(nsid)?);
            self.session().formatted(info);
            now.push(info);
        }
        Ok(now)
    }

    /// Checks a format, and returns the namespaces that it concerns.
    fn formats(&self, nsid: Nsid, format: Format) -> Result<Vec<Nsid>> {
        let identify = self.identify();
        if identify.oacs & oacs::FORMAT == 0 {
            return Err(Error::usage(
                "the controller does not have Format NVM (OACS bit 1)",
                "use another controller, or write-zeroes to erase blocks",
            ));
        }
        let has = |attribute: u8| identify.fna & attribute != 0;
        if format.ses() > 2 || format.ses() == 2 && !has(fna::CRYPTO_ERASE) {
            return Err(Error::usage(
                format!(
                    "secure erase settings {} are not supported (FNA)",
                    format.ses()
                ),
                "use 0 or 1",
            ));
        }
        if nsid == Nsid::ALL && has(fna::NO_BROADCAST) {
            return Err(Error::usage(
                "the controller does not format every namespace at once (FNA bit 3)",
                "name one namespace",
            ));
        }
        let all = self.namespaces()?;
        let every = has(fna::FORMAT_ALL) || format.ses() != 0 && has(fna::ERASE_ALL);
        if every && nsid != Nsid::ALL && all.len() > 1 {
            return Err(Error::usage(
                format!(
                    "the controller would format all {} namespaces (FNA), not {nsid} alone",
                    all.len()
                ),
                format!("use namespace {:#x} if that is what you want", Nsid::ALL.0),
            ));
        }
        let affected = if nsid == Nsid::ALL { all } else { vec![nsid] };
        for nsid in &affected {
            check_format(*nsid, &self.identify_namespace(*nsid)?, format)?;
        }
        Ok(affected)
    }

    /// Starts a sanitize of the whole NVM subsystem: every namespace of every controller loses its data. The
    /// controller executes it in the background, also across resets; [`sanitize_status`](Self::sanitize_status)
    /// returns its progress.
    ///
    /// # Errors
    /// [`Error::Usage`] for an action that the controller does not support; nothing is sent.
    pub fn sanitize(&self, fields: SanitizeFields) -> Result<()> {
        let can = self.identify().sanicap;
        let needs = match fields.action {
            SanitizeAction::ExitFailureMode => {
                sanicap::CRYPTO_ERASE | sanicap::BLOCK_ERASE | sanicap::OVERWRITE
            }
            SanitizeAction::BlockErase => sanicap::BLOCK_ERASE,
            SanitizeAction::Overwrite => sanicap::OVERWRITE,
            SanitizeAction::CryptoErase => sanicap::CRYPTO_ERASE,
        };
        if can & needs == 0 {
            return Err(Error::usage(
                format!("the controller does not have this sanitize action (SANICAP {can:#x})"),
                "choose one of those that `nvme-gpu identify ctrl` prints beside sanicap",
            ));
        }
        if fields.no_deallocate && can & sanicap::NO_DEALLOCATE_INHIBITED != 0 {
            return Err(Error::usage(
                "the controller inhibits no-deallocate after sanitize (SANICAP bit 29)",
                "leave it out",
            ));
        }
        self.admin("Sanitize", admin::sanitize(fields), 0).map(drop)
    }

    /// Returns the Sanitize Status log page.
    pub fn sanitize_status(&self) -> Result<SanitizeStatus> {
        let bytes = self.log_page(lid::SANITIZE, Nsid::ALL, size_of::<SanitizeStatus>())?;
        SanitizeStatus::read_from_bytes(&bytes)
            .map_err(|_| Error::device("the log is not 512 bytes", "report this"))
    }
}

/// Checks that namespace `nsid`, with Identify data `identify`, can be formatted with `format`.
fn check_format(nsid: Nsid, identify: &IdentifyNamespace, format: Format) -> Result<()> {
    let index = usize::from(format.lbafl() | format.lbafu() << 4);
    let formats = identify.lba_formats();
    let chosen = identify.lbaf[index];
    if index >= formats || chosen.block_bytes().is_none() {
        return Err(Error::usage(
            format!(
                "namespace {nsid} has no LBA format {index}, only 0 to {}",
                formats - 1
            ),
            "choose one that `nvme-gpu identify ns` prints",
        ));
    }
    let protected = format.pi() != 0;
    // DPC bits 2:0 are the types.
    if format.pi() > 3 || protected && identify.dpc & 1 << (format.pi() - 1) == 0 {
        return Err(Error::usage(
            format!(
                "namespace {nsid} has no protection of type {} (DPC)",
                format.pi()
            ),
            "use --pi 0",
        ));
    }
    // DPC bit 3 is protection in the first bytes of the metadata, MC bits 0 and 1 its place.
    let place = match format.mset() {
        true => 1 << 0,
        false => 1 << 1,
    };
    let first = protected && format.pil() && identify.dpc & 1 << 3 == 0;
    let misplaced = chosen.ms > 0 && identify.mc & place == 0;
    if first || misplaced || format.mset() && chosen.ms == 0 {
        return Err(Error::usage(
            format!("namespace {nsid} does not place metadata so in format {index} (MC, DPC)"),
            "change --ms or --pil, or choose a format without metadata",
        ));
    }
    Ok(())
}
