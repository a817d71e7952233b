//! Reads the facts that handles rely on again, when an event, a status or a reset reports a possible change.
//!
//! The completion of an event request is seen by every wait for an admin command, by each look at the admin queue
//! (`glance_at_events`), and by recovery; it raises the alarm at once. The session looks at the admin queue
//! - before each blocking call, each batch of submissions to a queue and each launch of a kernel: two loads while
//!   nothing has arrived ([`CompletionView`](crate::dma::CompletionView)),
//! - by threads that wait for completions, every 10 ms,
//! - by the watch over gathers of a store with a GPU, every 2 ms, whatever the host does.
//!
//! So no command is submitted by old facts once the event has been posted. Commands that were submitted before it are
//! in flight, and the controller may execute them after the change: the calls that sent them end with the error.
//! Kernels that run meanwhile are stopped by their gate.

use super::{AdminSession, ControllerSession};
#[cfg(feature = "cuda")]
use crate::controller::facts::QueueFacts;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::admin::{self, cns};
use nvme_core::spec::identify::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace};
use nvme_core::spec::register::{ALL_ONES, Csts, offset};
use nvme_core::spec::{Nsid, Status};
#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex};
use zerocopy::FromBytes;

/// Outcome of comparing a user's facts with the device.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub enum FactsStanding {
    /// The facts hold: nothing has happened.
    Holds,
    /// Something has happened since the last look, and the facts were not read again.
    Unknown,
    /// Reason why the facts no longer hold: [`Error::Changed`], or the error of the last reading.
    Refused(Error),
}

/// Facts on which a user without a queue handle relies, such as launches of kernels; shared by threads.
#[cfg(feature = "cuda")]
pub struct UserFacts {
    session: Arc<ControllerSession>,
    nsid: Nsid,
    basis: Mutex<QueueFacts>,
}

#[cfg(feature = "cuda")]
impl UserFacts {
    /// Creates the record for users who rely on `info`.
    pub fn new(session: &Arc<ControllerSession>, info: NamespaceInfo) -> Self {
        let mut basis = QueueFacts::new(&session.facts);
        basis.goes_by(info);
        Self {
            session: Arc::clone(session),
            nsid: info.nsid,
            basis: Mutex::new(basis),
        }
    }

    /// Examines the `status` with which a command ended.
    pub fn saw(&self, status: Status) {
        self.session.facts.alarm.see(status);
    }

    /// Returns the result of [`check`](Self::check) by the facts that are known now: sends nothing and waits for
    /// nothing.
    pub fn standing(&self, opcode: u8) -> FactsStanding {
        let facts = &self.session.facts;
        let mut basis = lock(&self.basis);
        let count = facts.alarm.count();
        if !basis.is_current(&facts.alarm) && facts.checked() == count {
            basis.compare(facts, count);
        }
        match basis.refusal(self.nsid.0, opcode) {
            Some(error) => FactsStanding::Refused(error),
            None if basis.is_current(&facts.alarm) => FactsStanding::Holds,
            None => FactsStanding::Unknown,
        }
    }

    /// Compares with the facts that were read last, although something may have happened since.
    ///
    /// # Errors
    /// [`Error::Changed`].
    pub fn check_read(&self, opcode: u8) -> Result<()> {
        let mut basis = lock(&self.basis).clone();
        basis.compare(&self.session.facts, 0);
        basis.check(self.nsid, opcode)
    }

    /// Checks whether commands with `opcode` may still be sent.
    ///
    /// # Errors
    /// [`Error::Changed`] when they may not; those of Identify when that is not known.
    pub fn check(&self, opcode: u8) -> Result<()> {
        let session = &self.session;
        session.look();
        let is_current = lock(&self.basis).is_current(&session.facts.alarm);
        let looked = if is_current {
            None
        } else {
            Some(session.verify())
        };
        let mut basis = lock(&self.basis);
        match looked {
            None => {}
            Some(Ok(count)) => basis.compare(&session.facts, count),
            Some(Err(error)) => {
                basis.could_not_look(&error);
                return Err(error);
            }
        }
        basis.check(self.nsid, opcode)
    }
}

impl ControllerSession {
    /// Reads the facts on which handles rely again, unless nothing has happened since, and returns the alarm's count
    /// for which they are current. Waits for an admin command that another thread has in flight. The caller holds no
    /// lock of the session or of a queue.
    ///
    /// # Errors
    /// The errors of Identify.
    pub(crate) fn verify(&self) -> Result<u64> {
        let checked = self.facts.checked();
        if checked == self.facts.alarm.count() {
            return Ok(checked);
        }
        let mut admin = lock(&self.admin);
        // A page that is read after the facts would re-arm the event after a change that they do
        // not contain. The page is therefore read first, and Identify after it.
        self.settle_events(&mut admin)?;
        // An alarm that is raised meanwhile is handled by the next call; otherwise a controller could keep this
        // one busy forever.
        let count = self.facts.alarm.count();
        if self.facts.checked() != count {
            self.wait_for_activation();
            self.read_facts(&mut admin)?;
            self.facts.set_checked(count);
        }
        Ok(count)
    }

    /// Waits until no firmware activation delays commands (CSTS.PP), for as long as a command may take.
    fn wait_for_activation(&self) {
        let deadline_ns = self.now_ns().saturating_add(self.timeout_ns());
        loop {
            let csts = self.device.registers().read32(offset::CSTS);
            let now_ns = self.now_ns();
            if csts == ALL_ONES
                || !Csts(csts).pp()
                || now_ns >= deadline_ns
                || self.is_interrupted()
            {
                return;
            }
            self.sleep_until(now_ns + 100_000);
        }
    }

    fn read_facts(&self, admin: &mut AdminSession) -> Result<()> {
        let page =
            self.identify_into(admin, "Identify Controller", (cns::CONTROLLER, Nsid::NONE))?;
        let identify = IdentifyController::read_from_bytes(&page[..])
            .map_err(|_| Error::internal("Identify Controller is not 4,096 bytes"))?;
        let unit = admin.info.capabilities.mdts_unit.shift();
        let max_transfer = match identify.mdts {
            0 => u64::MAX,
            mdts => 1u64.checked_shl(unit + u32::from(mdts)).unwrap_or(u64::MAX),
        };
        self.facts.observe_controller(identify.sn, max_transfer);
        self.facts.observe_fna(identify.fna);
        // Queues that are created from now on transfer at most this many bytes with one command.
        admin.info.max_transfer = Some(max_transfer).filter(|bytes| *bytes != u64::MAX);
        for nsid in self.facts.namespaces() {
            let read = self.identify_into(admin, "Identify Namespace", (cns::NAMESPACE, nsid));
            let info = match read {
                Ok(page) => namespace_of(nsid, &page[..])?,
                Err(Error::Command { status, .. }) if status.is(Status::INVALID_NAMESPACE) => {
                    NamespaceInfo::unknown(nsid, status)
                }
                Err(error) => return Err(error),
            };
            self.facts.observe(info);
        }
        Ok(())
    }

    /// Reads an identify structure into a page that is reserved for it. Mapping memory here could call the
    /// driver of a GPU whose kernel waits for this controller, and neither would ever return.
    fn identify_into(
        &self,
        admin: &mut AdminSession,
        what: &str,
        (cns, nsid): (u8, Nsid),
    ) -> Result<Box<[u8; IDENTIFY_BYTES]>> {
        let page = self.take_facts_page(admin)?;
        let sqe = admin::identify(cns, nsid);
        let (_, page) = self.admin_locked(admin, what, sqe, Some(page))?;
        let page = page.ok_or_else(|| Error::internal(format!("{what} lost its buffer")))?;
        let mut copy = Box::new([0; IDENTIFY_BYTES]);
        copy.copy_from_slice(page.as_slice());
        admin.facts_page = Some(page);
        Ok(copy)
    }

    /// Takes the page that is reserved for facts; another one if a command that was lost has it.
    pub(super) fn take_facts_page(&self, admin: &mut AdminSession) -> Result<DmaBuffer> {
        match admin.facts_page.take() {
            Some(page) => Ok(page),
            None => DmaBuffer::new(&self.device, IDENTIFY_BYTES),
        }
    }
}

/// Returns the properties of a namespace from its Identify Namespace data.
pub(super) fn namespace_of(nsid: Nsid, page: &[u8]) -> Result<NamespaceInfo> {
    let identify = IdentifyNamespace::read_from_bytes(page)
        .map_err(|_| Error::internal("Identify Namespace is not 4,096 bytes"))?;
    Ok(NamespaceInfo::from_identify(nsid, &identify))
}
