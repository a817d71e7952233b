//! Identify of the namespaces in use that bring-up does not list: it lists the first ones alone
//! ([`MAX_NAMESPACES`](nvme_core::bringup::MAX_NAMESPACES)). After a reset kernels use the facts that were read within
//! it.

use super::verify::namespace_of;
use super::{AdminSession, ControllerSession, data_of};
use nvme_core::CommandOutcome;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::Nsid;
use nvme_core::spec::admin::{self, cns};

impl ControllerSession {
    /// Reads the properties of the namespaces in use that the bring-up within a reset did not list. The caller
    /// holds the locks of all queues, so a command that is not answered must not cause another reset.
    ///
    /// # Errors
    /// The cause, when Identify was not answered: the reset has failed then.
    pub(super) fn read_unlisted(&self, admin: &mut AdminSession) -> Result<(), String> {
        if !admin.info.more_namespaces {
            return Ok(());
        }
        let is_listed = |nsid: &Nsid| admin.info.namespaces.iter().any(|one| one.nsid == *nsid);
        let mut unlisted = self.facts.namespaces();
        unlisted.retain(|nsid| !is_listed(nsid));
        for nsid in unlisted {
            let info = self.identify_in_reset(admin, nsid)?;
            self.facts.observe(info);
        }
        Ok(())
    }

    fn identify_in_reset(
        &self,
        admin: &mut AdminSession,
        nsid: Nsid,
    ) -> Result<NamespaceInfo, String> {
        let page = self
            .take_facts_page(admin)
            .map_err(|error| error.to_string())?;
        let deadline_ns = self.now_ns().saturating_add(self.timeout_ns());
        let sqe = admin::identify(cns::NAMESPACE, nsid);
        let data = data_of(Some(&page));
        let queue = admin.pair.queue();
        let cid = queue
            .submit(sqe, data, Some(page), deadline_ns)
            .map_err(|rejected| format!("Identify Namespace: {}", rejected.error))?;
        queue.ring();
        loop {
            self.admin_view.advance(&admin.pair);
            let Some(done) = admin
                .pair
                .queue()
                .poll()
                .map_err(|fault| fault.to_string())?
            else {
                if self.now_ns() >= deadline_ns || self.is_gone() {
                    return Err(format!("Identify of namespace {nsid} got no answer"));
                }
                self.sleep_until(self.now_ns() + 10_000);
                continue;
            };
            if done.cid != cid {
                admin.events.take(done);
                continue;
            }
            let info = match (done.outcome, &done.buffer) {
                (outcome, Some(page)) if outcome.is_success() => {
                    namespace_of(nsid, page.as_slice()).map_err(|error| error.to_string())?
                }
                (CommandOutcome::Completed(status), _) => NamespaceInfo::unknown(nsid, status),
                (CommandOutcome::Aborted(_), _) => {
                    return Err(format!("Identify of namespace {nsid} was aborted"));
                }
            };
            admin.facts_page = done.buffer;
            return Ok(info);
        }
    }
}
