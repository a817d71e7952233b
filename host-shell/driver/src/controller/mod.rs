//! A controller in use: bring-up by the core's state machine with a real clock, admin commands, events, recovery
//! and shutdown, and the queues and namespaces that are created from it.
//!
//! `Controller::start` brings a device up; namespaces and queues are created from the controller and keep its
//! session alive. A command that misses its deadline is aborted, then the controller is reset; both happen on the
//! thread that waits, under the admin lock. No transport, no GPU and no file system belongs here.

pub mod config;
pub(crate) mod effect;
mod erase;
mod events;
pub(crate) mod facts;
mod features;
mod identify;
mod log_page;
mod masked_events;
pub(crate) mod namespace;
pub(crate) mod notice;
pub mod outage;
pub mod passthru;
pub mod queue;
pub mod queue_inner;
mod reset;
pub mod session;
mod shared;
pub mod statistics;

use crate::controller::events::EventRequests;
use crate::controller::facts::DeviceFacts;
use crate::controller::notice::DeviceEvent;
use crate::controller::queue::DriverQueue;
use crate::controller::session::{AdminSession, ControllerSession};
use crate::controller::statistics::QueueStatistics;
use crate::device::Device;
use crate::device::interrupt::VectorEvents;
#[cfg(feature = "cuda")]
use crate::device::ring_memory::RingMemory;
use crate::dma::{DmaBuffer, OwnedPair, PairShape, ScratchPage};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sysfs::SysfsHost;
use config::{ControllerConfig, RingLocation};
use nvme_core::BringupError;
use nvme_core::bringup::{
    self, BringupMachine, ControllerInfo, MAX_WALK, NamespaceInfo, QueueCapabilities,
};
use nvme_core::spec::admin::cns;
use nvme_core::spec::identify::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace};
use nvme_core::spec::{Nsid, Qid, Sqe};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;
use zerocopy::FromBytes;

/// Entries of the admin queue pair.
const ADMIN_ENTRIES: u32 = 32;
/// The longest transfer of an admin command.
pub(crate) const ADMIN_BYTES: u64 = 64 << 10;

/// A controller in use. Shut down on drop, which ends every queue made of it.
///
/// A command that is not answered within [`ControllerConfig::timeout`] is aborted; if that does not end it, the
/// controller is reset and its queues are created again. The command is reported late, the others in
/// flight as aborted; all queues work afterwards.
///
/// ```
/// use nvme_driver::core::spec::{Lba, Nsid, nvm};
/// use nvme_driver::{ControllerConfig, Controller, Error};
/// use std::time::Duration;
///
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// // The simulated controller loses the first read.
/// let device = nvme_driver::open("sim:mem?size=16MiB&block=4096&fault=drop@op=read,nth=1")?;
/// let config = ControllerConfig {
///     timeout: Duration::from_millis(200),
///     ..ControllerConfig::default()
/// };
/// let controller = Controller::start(device, &config)?;
/// let mut queue = controller.create_queue_pair(16)?;
/// let mut buffer = controller.alloc(4096)?;
/// let mut attempts = 0;
/// loop {
///     attempts += 1;
///     queue
///         .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
///         .map_err(|rejected| Error::device(rejected.error.to_string(), "poll first"))?;
///     queue.ring();
///     let done = queue.wait()?.expect("one command is in flight");
///     if done.is_success() {
///         break;
///     }
///     // The error states the fate of the command; the buffer is ours again.
///     let error = queue.error_of(&done, "Read");
///     assert!(matches!(error, Error::Timeout { .. }), "{error}");
///     buffer = done.buffer.expect("the command had a buffer");
/// }
/// assert_eq!(attempts, 2);
/// # }
/// # Ok(())
/// # }
/// ```
pub struct Controller {
    session: Arc<ControllerSession>,
    identify: Box<IdentifyController>,
}

impl Controller {
    /// Brings up the controller behind `device`, whatever its state.
    ///
    /// # Errors
    /// [`Error::Device`] when the controller cannot be used, [`Error::Gone`] and [`Error::Timeout`] when it does not
    /// answer; memory that it may still write to is leaked then. [`Error::Usage`] if [`ControllerConfig::changes`] is
    /// set and the system uses a namespace through another controller of the subsystem, and [`Error::Environment`] if
    /// that cannot be seen.
    pub fn start(device: Arc<dyn Device>, config: &ControllerConfig) -> Result<Self> {
        let begin = Instant::now();
        let name = device.name();
        let span = tracing::info_span!(target: "nvme_gpu", "bring_up", device = name);
        let _span = span.enter();
        let refused = |error: BringupError| refused(&*device, error);
        let capabilities = QueueCapabilities::read(device.registers()).map_err(refused)?;
        let shape = PairShape {
            qid: Qid::ADMIN,
            entries: ADMIN_ENTRIES,
            page: capabilities.page,
            max_bytes: ADMIN_BYTES,
            sgl_bytes: false,
            dstrd: capabilities.dstrd,
            vector: None,
        };
        let ring_memory = match &config.rings {
            RingLocation::Host => None,
            RingLocation::Controller => Some(device.controller_memory()?),
            RingLocation::Peer(memory) => Some(Arc::clone(memory)),
        };
        let interrupts = interrupts(&*device, config)?;
        let pair = OwnedPair::new(&device, shape, None)?;
        let scratch = ScratchPage::new(&device)?;
        let machine = BringupMachine::new(
            device.registers(),
            bringup::BringupConfig::default(),
            scratch.words(),
        );
        let mut info = machine.map_err(refused)?.info().clone();
        // The rings were sized by these capabilities, even if the controller reports others each time.
        info.capabilities = capabilities;
        let facts = DeviceFacts::default();
        let start = AdminSession {
            pair,
            scratch,
            info,
            host_memory: None,
            resets: 0,
            events: EventRequests::new(&facts.alarm),
            facts_page: Some(DmaBuffer::new(&device, IDENTIFY_BYTES)?),
            failed: None,
        };
        let session = Arc::new(ControllerSession::new(
            Arc::clone(&device),
            config.clone(),
            ring_memory,
            interrupts,
            start,
            facts,
        ));
        first_bring_up(&session).map_err(|error| match session.is_interrupted() {
            true => Error::Interrupted,
            false => refused(error),
        })?;
        let identify = match session.identify("Identify Controller", cns::CONTROLLER, Nsid::NONE) {
            Ok(buffer) => IdentifyController::read_from_bytes(buffer.as_slice()).map_err(drop),
            Err(error) => {
                let _ = session.shut_down();
                return Err(error);
            }
        };
        let identify =
            identify.map_err(|_| Error::internal("Identify Controller is not 4,096 bytes"))?;
        session.facts.observe_fna(identify.fna);
        let controller = Self {
            session,
            identify: Box::new(identify),
        };
        let device = controller.device();
        if let Some(scope) = config.changes
            && device.guards_data()
        {
            shared::refuse(
                &SysfsHost::here(),
                &device.name(),
                &controller.identify,
                scope,
            )?;
        }
        let took_ms = begin.elapsed().as_millis() as u64;
        tracing::info!(target: "nvme_gpu", device = name, took_ms, "the controller is up");
        Ok(controller)
    }

    /// Returns the results of bring-up.
    pub fn info(&self) -> ControllerInfo {
        lock(&self.session.admin).info.clone()
    }

    /// Returns the Identify Controller structure.
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// Returns the device behind it.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.session.device
    }

    /// Returns the number of controller resets since the start.
    pub fn resets(&self) -> u32 {
        lock(&self.session.admin).resets
    }

    /// Returns the count of recoveries since the start, which keeps growing: commands that were aborted, and controller resets.
    pub fn recoveries(&self) -> &Arc<AtomicU64> {
        &self.session.recoveries
    }

    /// Returns the asynchronous events that the controller has reported since the last call, the latest 64 of
    /// them. Does not wait for any: call it now and then. [`ControllerConfig::notify`] is called with each as it is
    /// found.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller can no longer be used.
    pub fn events(&self) -> Result<Vec<DeviceEvent>> {
        self.session.events()
    }

    /// Returns the longest transfer of one command in bytes, by MDTS and [`ControllerConfig::max_transfer`].
    pub fn max_transfer(&self) -> u64 {
        self.session.max_transfer(&lock(&self.session.admin).info)
    }

    /// Names the limit that bounds one command to `most` bytes, which is at most
    /// [`max_transfer`](Self::max_transfer).
    pub fn whose_limit(&self, most: u64) -> &'static str {
        let by_controller = self.info().max_transfer.unwrap_or(u64::MAX);
        match most {
            _ if most == by_controller => "the controller's largest transfer (MDTS)",
            _ if most == self.session.config.max_transfer => "this driver's largest transfer",
            ADMIN_BYTES => "this driver's largest transfer of an admin command",
            _ => "65,536 blocks, the most of one command",
        }
    }

    /// Allocates memory that queues of this controller can lend to it.
    pub fn alloc(&self, bytes: usize) -> Result<DmaBuffer> {
        DmaBuffer::new(&self.session.device, bytes)
    }

    /// Creates an I/O queue pair of `entries` entries, cut to what the controller supports.
    ///
    /// # Errors
    /// [`Error::Usage`] when every queue pair that the controller granted is in use.
    pub fn create_queue_pair(&self, entries: u32) -> Result<DriverQueue> {
        let inner = self.session.create_queue(entries, None)?;
        Ok(DriverQueue::new(Arc::clone(&self.session), inner))
    }

    /// Creates a queue pair with its rings in `memory`.
    #[cfg(feature = "cuda")]
    pub fn create_queue_pair_in(
        &self,
        entries: u32,
        memory: &Arc<RingMemory>,
    ) -> Result<DriverQueue> {
        let inner = self.session.create_queue(entries, Some(memory))?;
        Ok(DriverQueue::new(Arc::clone(&self.session), inner))
    }

    /// Returns the Identify Namespace data structure.
    ///
    /// # Errors
    /// [`Error::Usage`] when `nsid` is not an active namespace.
    pub fn identify_namespace(&self, nsid: Nsid) -> Result<IdentifyNamespace> {
        self.check_nsid(nsid)?;
        // Whoever opens a namespace relies on its present properties, so they are read now.
        self.session.look();
        self.session.verify()?;
        let buffer = self
            .session
            .identify("Identify Namespace", cns::NAMESPACE, nsid)?;
        let identify = IdentifyNamespace::read_from_bytes(buffer.as_slice())
            .map_err(|_| Error::internal("Identify Namespace is not 4,096 bytes"))?;
        // An inactive namespace is answered with zeroes.
        if identify.nsze == 0 {
            return Err(unknown(nsid));
        }
        let facts = &self.session.facts;
        facts.tell(NamespaceInfo::from_identify(nsid, &identify));
        Ok(identify)
    }

    /// Rejects an identifier that cannot be a namespace of this controller, before anything is sent.
    fn check_nsid(&self, nsid: Nsid) -> Result<()> {
        match (1..=self.info().max_nsid).contains(&nsid.0) && nsid != Nsid::ALL {
            true => Ok(()),
            false => Err(unknown(nsid)),
        }
    }

    /// Returns the active namespaces of a controller without a list of them.
    fn walk(&self) -> Result<Vec<Nsid>> {
        let most = self.info().max_nsid;
        if most > MAX_WALK {
            return Err(Error::device(
                format!("the controller has no list of its namespaces, and up to {most} of them"),
                format!("name one with --namespace-id; up to {MAX_WALK} are tried"),
            ));
        }
        let mut all = Vec::new();
        for nsid in (1..=most).map(Nsid) {
            match self.identify_namespace(nsid) {
                Ok(_) => all.push(nsid),
                Err(Error::Usage { .. } | Error::Command { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// Returns the properties of a namespace that this driver can read and write.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown one; [`Error::Device`] with the reason for one that cannot be used, such
    /// as one of another command set or with metadata.
    pub fn usable_namespace(&self, nsid: Nsid) -> Result<NamespaceInfo> {
        self.usable(nsid).map(|(info, _)| info)
    }

    pub(super) fn usable(&self, nsid: Nsid) -> Result<(NamespaceInfo, IdentifyNamespace)> {
        let refused = |why: String| {
            Error::device(
                format!("namespace {nsid} cannot be used: {why}"),
                "choose another namespace (`nvme-gpu list-ns`)",
            )
        };
        self.check_nsid(nsid)?;
        // First: some controllers describe a namespace of another command set as if it were of NVM.
        if let Some(set) = self.command_set(nsid)? {
            return Err(refused(format!("it belongs to command set {set}")));
        }
        let identify = self.identify_namespace(nsid).map_err(|error| match error {
            Error::Command { status, .. } => {
                refused(format!("Identify Namespace ended with {status}"))
            }
            error => error,
        })?;
        let info = NamespaceInfo::from_identify(nsid, &identify);
        let Some(why) = info.unusable() else {
            return Ok((info, identify));
        };
        let text = why.to_string();
        let (cause, remedy) = text.split_once(": ").unwrap_or((&text, "choose another"));
        Err(Error::device(
            format!("namespace {nsid} cannot be used: {cause}"),
            remedy,
        ))
    }

    /// Sends an admin command that returns `bytes` bytes (0 for none): dword 0 and the bytes.
    ///
    /// `what` is the command in words, for the error.
    pub fn admin(&self, what: &str, sqe: Sqe, bytes: usize) -> Result<(u32, Vec<u8>)> {
        let buffer = if bytes == 0 {
            None
        } else {
            Some(self.alloc(bytes)?)
        };
        let (dw0, buffer) = self.session.admin(what, sqe, buffer)?;
        Ok((
            dw0,
            buffer
                .map(|buffer| buffer.as_slice().to_vec())
                .unwrap_or_default(),
        ))
    }

    /// Counts of the queues that exist now, by identifier.
    pub fn statistics(&self) -> Vec<(Qid, QueueStatistics)> {
        let table = lock(&self.session.queues);
        table
            .iter()
            .map(|(qid, inner)| (Qid(*qid), lock(inner).statistics))
            .collect()
    }

    /// Returns the state that its handles share.
    pub fn session(&self) -> &Arc<ControllerSession> {
        &self.session
    }

    /// Shuts the controller down and returns the result; dropping the controller shuts it down and ignores the result.
    pub fn shut_down(self) -> Result<()> {
        self.session.shut_down()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // Callers who want the result call `shut_down`.
        let _ = self.session.shut_down();
    }
}

/// Returns the interrupts if the configuration asks for them: one for the admin queue and one for each pair, or fewer
/// if the device has fewer.
fn interrupts(device: &dyn Device, config: &ControllerConfig) -> Result<VectorEvents> {
    if !config.interrupts {
        return Ok(VectorEvents::default());
    }
    let wanted = config.queue_pairs.saturating_add(1).min(2048);
    Ok(VectorEvents::new(device.interrupts(wanted as u16)?))
}

/// Brings the controller up. A session whose controller does not come up accepts no commands; if the controller
/// may still write to its memory, the memory is leaked.
fn first_bring_up(session: &Arc<ControllerSession>) -> std::result::Result<(), BringupError> {
    let mut admin = lock(&session.admin);
    let result = session.bring_up(&mut admin);
    if let Err(error) = &result {
        admin.failed = Some(error.to_string());
        drop(admin);
        if session.device.gone().is_none() {
            // The controller may still write to the rings and to the page for Identify.
            std::mem::forget(Arc::clone(session));
        }
    }
    result
}

fn unknown(nsid: Nsid) -> Error {
    Error::usage(
        format!("there is no namespace {nsid}"),
        "choose one that `nvme-gpu list-ns` prints",
    )
}

fn refused(device: &dyn Device, error: BringupError) -> Error {
    if let Some(cause) = device.gone() {
        return Error::Gone { cause };
    }
    let name = device.name();
    let text = error.to_string();
    let (cause, remedy) = text
        .rsplit_once([':', ';'])
        .unwrap_or((text.as_str(), "try another device"));
    match error {
        BringupError::DeviceGone
        | BringupError::ReadyTimeout { .. }
        | BringupError::ShutdownTimeout { .. }
        | BringupError::CommandTimeout { .. } => Error::Gone {
            cause: format!("{name}: {text}"),
        },
        _ => Error::device(format!("{name}: {cause}"), remedy.trim()),
    }
}
