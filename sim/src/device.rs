//! The state of the controller, without the memory that it reaches by DMA.
//!
//! This folder only keeps values and the rules between them. The functions that act on them are in
//! `command` (one command) and `engine` (queues, registers, resets).

pub(crate) mod control;
pub(crate) mod external_change;
pub(crate) mod faults;
pub(crate) mod features;
pub(crate) mod logs;
pub(crate) mod sanitize;

use crate::bus::doorbell::Doorbells;
use crate::bus::interrupt::InterruptVectors;
use crate::bus::queue::{QueueSlot, SCRATCH_BYTES};
use crate::bus::registers::PropertyRegisters;
use crate::config::settings::{Config, ConfigError};
use crate::medium::latency::LatencyModel;
use crate::medium::namespace::NamespaceImage;
use crate::memory::{LockGuard, SpinLock};
use crate::observer::AuditObserver;
use alloc::boxed::Box;
use control::AdminState;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use external_change::ExternalChanges;
use faults::FaultInjector;
use logs::LogPages;
use nvme_spec::register::Cap;
use nvme_spec::{PageSize, Sqe, Status};
use sanitize::SanitizeState;

/// State of a controller, without the memory that it reaches.
pub(crate) struct ControllerState {
    /// Configuration as given, without the namespaces, which have moved to `namespaces`.
    pub config: Config,
    pub registers: PropertyRegisters,
    pub doorbells: Doorbells,
    pub slots: Box<[QueueSlot]>,
    pub namespaces: Box<[NamespaceImage]>,
    pub control: SpinLock<AdminState>,
    pub logs: SpinLock<LogPages>,
    pub sanitize: SanitizeState,
    pub faults: FaultInjector,
    pub external: ExternalChanges,
    pub pacing: LatencyModel,
    pub vectors: InterruptVectors,
    pub observer: Option<AuditObserver>,
    /// True while the volatile cache may hold writes (feature 06h).
    pub write_back: AtomicBool,
    /// True if an event or an Asynchronous Event Request is new: the admin queue then has work
    /// without a doorbell.
    pub attention: AtomicBool,
    /// Virtual time of the last step, in nanoseconds.
    pub clock_ns: AtomicU64,
    /// Time at which the transition in progress ends; `u64::MAX` for none.
    pub transition_ns: AtomicU64,
    /// Highest queue identifier created since the last reset.
    pub highest: AtomicU16,
    running: AtomicBool,
    off_bus: AtomicBool,
}

impl ControllerState {
    /// Makes the state after power on. The caller has checked the configuration.
    ///
    /// # Errors
    /// The option for which there is not enough memory.
    pub fn new(mut config: Config) -> Result<Self, ConfigError> {
        let mut cap = Cap(0);
        cap.set_mqes(config.mqes);
        cap.set_cqr(config.cqr);
        // Rounded up, and doubled: the clock of the driver may run faster than the simulator's
        // virtual one.
        let units = (config.ready_delay_ns / 500_000_000 * 2 + 2).min(255);
        cap.set_to(units as u8);
        cap.set_dstrd(config.dstrd);
        cap.set_nssrs(config.nssr);
        cap.set_css(1);
        cap.set_mpsmin(config.mpsmin);
        cap.set_mpsmax(config.mpsmax);
        cap.set_crms(1);
        let cache = config.write_cache.then_some(config.cache_bytes);
        let namespaces = core::mem::take(&mut config.namespaces)
            .into_iter()
            .map(|one| {
                let made =
                    NamespaceImage::new(one.store, one.block_bytes, one.metadata_bytes, cache);
                let too_much = "there is not that much memory for the metadata of all blocks";
                let mut namespace = made.ok_or(ConfigError::new("meta", too_much))?;
                if one.read_only {
                    namespace.protect();
                }
                namespace.noiob = one.noiob;
                Ok(namespace)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            registers: PropertyRegisters::new(cap, units as u16),
            doorbells: Doorbells::new(config.max_queues, config.dstrd),
            slots: (0..=config.max_queues).map(|_| QueueSlot::new()).collect(),
            namespaces,
            control: SpinLock::new(AdminState::new(&config)),
            logs: SpinLock::new(LogPages::new()),
            sanitize: SanitizeState::new(),
            faults: FaultInjector::new(&config.faults),
            external: ExternalChanges::new(config.mdts),
            pacing: LatencyModel::new(config.profile, config.faults.seed),
            vectors: InterruptVectors::new(config.vectors),
            observer: config.audit.then(AuditObserver::default),
            write_back: AtomicBool::new(config.write_cache),
            attention: AtomicBool::new(false),
            clock_ns: AtomicU64::new(0),
            transition_ns: AtomicU64::new(u64::MAX),
            highest: AtomicU16::new(0),
            running: AtomicBool::new(false),
            off_bus: AtomicBool::new(false),
            config,
        })
    }

    /// True if commands are processed.
    #[inline]
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire) // Acquire: pairs with the end of enable.
    }

    /// Starts or stops the processing of commands. A release: a thread that sees the controller running also
    /// sees the admin queue and the registers that enabling has set up before.
    pub fn set_running(&self, running: bool) {
        self.running.store(running, Ordering::Release); // Release: pairs with is_running.
    }

    /// True if the controller has left the bus.
    pub fn is_off_bus(&self) -> bool {
        self.off_bus.load(Ordering::Relaxed)
    }

    /// Removes the controller from the bus.
    pub fn leave_bus(&self) {
        self.off_bus.store(true, Ordering::Relaxed);
        self.set_running(false);
    }

    /// Stops with CSTS.CFS.
    #[cold]
    pub fn fail(&self) {
        self.set_running(false);
        self.registers.change_csts(|csts| csts.set_cfs(true));
    }

    /// Returns CC.MPS, which was checked when the controller was enabled.
    pub fn page(&self) -> PageSize {
        PageSize::from_mps(self.registers.cc().mps()).unwrap_or(PageSize::KIB4)
    }

    /// Returns the most bytes that a command may move.
    pub fn max_bytes(&self) -> u64 {
        match self.external.mdts() {
            0 => u64::MAX,
            mdts => 4096u64 << self.config.mpsmin << mdts,
        }
    }

    /// True if commands can be delayed, so that queues need room for them.
    pub fn delays(&self) -> bool {
        !self.pacing.is_none() || !self.faults.is_empty()
    }

    /// Returns the size of an I/O queue's staging buffer: smaller if every store is in memory, since only Compare and
    /// lists are staged then.
    pub fn scratch_bytes(&self) -> usize {
        let in_memory = |one: &NamespaceImage| one.store.span().is_some();
        match self.namespaces.iter().all(in_memory) {
            true => SCRATCH_BYTES / 16,
            false => SCRATCH_BYTES,
        }
    }

    /// Puts a controller that had left the bus back. Its registers are as they were: it has to be
    /// reset.
    pub fn plug_in(&self) {
        self.off_bus.store(false, Ordering::Relaxed);
    }

    /// Waits until no command of an I/O queue is executing, by taking each queue's lock once.
    /// Commands that start afterwards see the caller's earlier changes, since the lock orders them.
    pub fn barrier(&self) {
        for slot in self.slots.iter().skip(1) {
            drop::<LockGuard<'_, _>>(slot.sq.lock());
        }
    }

    #[cold]
    pub(crate) fn refused(&self, qid: u16, sqe: &Sqe, status: Status) {
        self.logs.lock().failed(qid, sqe, status);
    }

    #[cold]
    pub(crate) fn bad_doorbell(&self, exists: bool) {
        self.logs.lock().bad_doorbell(exists);
        self.attention.store(true, Ordering::Relaxed);
    }
}
