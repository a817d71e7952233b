//! Input of bring-up ([`BringupConfig`], [`QueuePlan`]), its requests ([`BringupStep`]) and its result
//! ([`ControllerInfo`]).

use super::namespace::NamespaceInfo;
use crate::error::BringupError;
use crate::quiesced::Quiesced;
use crate::registers::RegisterAccess;
use crate::spec::register::{Cap, Crto, offset};
use crate::spec::{Iova, PageSize, Qid};
use heapless::Vec;

pub(super) const NS_PER_MS: u64 = 1_000_000;
/// Interval at which a waiting machine asks to be called, in nanoseconds.
pub(super) const POLL_NS: u64 = 100_000;
/// Limit of the namespaces that [`ControllerInfo`] lists; others can be identified one by one.
pub const MAX_NAMESPACES: usize = 32;
/// Highest namespace identifier that is tried on a controller without a list of active ones (NVMe 1.0).
pub const MAX_WALK: u32 = 1024;

/// An I/O queue pair to be created during bring-up.
///
/// The caller zeroes the rings before bring-up creates the queues. The completion queue is created first,
/// since the submission queue names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePlan {
    /// Identifier of both queues, from 1 on.
    pub qid: Qid,
    /// Entries of the submission ring.
    pub sq_entries: u32,
    /// I/O address of the submission ring, page aligned.
    pub sq_iova: Iova,
    /// Entries of the completion ring.
    pub cq_entries: u32,
    /// I/O address of the completion ring, page aligned.
    pub cq_iova: Iova,
    /// Interrupt vector of the completion queue, or none for polling.
    pub vector: Option<u16>,
}

/// Parameters of a bring-up.
#[derive(Clone, Copy, Debug)]
pub struct BringupConfig<'a> {
    /// I/O queue pairs to ask for (Number of Queues); the controller may grant fewer.
    pub queue_pairs: u32,
    /// Pairs to create at once, in order. Those whose identifier is 0 or above the number of pairs granted are
    /// left out: a controller that grants N pairs takes identifiers 1 to N.
    pub plans: &'a [QueuePlan],
    /// Deadline of each admin command.
    pub command_timeout_ns: u64,
    /// Least time allowed for CSTS.RDY, in milliseconds, whatever CAP.TO says.
    pub min_ready_timeout_ms: u32,
    /// Capabilities that doorbells, rings and lists were laid out for, if they are older than the machine. A
    /// controller that has another page size or doorbell stride now is not enabled.
    pub made_for: Option<QueueCapabilities>,
}

impl Default for BringupConfig<'_> {
    /// Returns a plan of 16 queue pairs, none created at once, 5 s per command, at least 500 ms for readiness, laid out
    /// for the capabilities that the machine reads.
    fn default() -> Self {
        Self {
            queue_pairs: 16,
            plans: &[],
            command_timeout_ns: 5_000 * NS_PER_MS,
            min_ready_timeout_ms: 500,
            made_for: None,
        }
    }
}

/// The capabilities of a controller, read before anything is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCapabilities {
    /// Largest I/O queue, in entries: 2 to 65,536. A controller that reports 1, below the specification's
    /// minimum, is treated as one that reports 2.
    pub max_entries: u32,
    /// Doorbell stride: doorbells are 4 << DSTRD bytes apart.
    pub dstrd: u8,
    /// Memory page size that bring-up will set: 4 KiB, or MPSMIN if that is larger.
    pub page: PageSize,
    /// Unit of MDTS: CAP.MPSMIN.
    pub mdts_unit: PageSize,
    /// Limit of a change of CSTS.RDY, in milliseconds.
    pub ready_timeout_ms: u32,
    /// Value for CC.CSS.
    pub css: u8,
}

impl QueueCapabilities {
    /// Reads CAP (and CRTO), and checks that this driver can work with the controller.
    ///
    /// # Errors
    /// [`BringupError::DeviceGone`], [`BringupError::NoNvmCommandSet`], [`BringupError::PageSize`].
    pub fn read(registers: &dyn RegisterAccess) -> Result<Self, BringupError> {
        let raw = registers.read64(offset::CAP);
        if raw == u64::MAX {
            return Err(BringupError::DeviceGone);
        }
        let cap = Cap(raw);
        let css = match cap.css() {
            css if css & 1 << 6 != 0 => 0b110,
            css if css & 1 != 0 => 0b000,
            css => return Err(BringupError::NoNvmCommandSet(css)),
        };
        let (mpsmin, mpsmax) = (cap.mpsmin(), cap.mpsmax());
        let error = BringupError::PageSize { mpsmin, mpsmax };
        let page = PageSize::from_mps(mpsmin).filter(|_| mpsmin <= 4 && mpsmin <= mpsmax);
        let page = page.ok_or(error)?;
        Ok(Self {
            max_entries: cap.mqes().max(2),
            dstrd: cap.dstrd(),
            page,
            mdts_unit: page,
            ready_timeout_ms: ready_timeout_ms(cap, registers),
            css,
        })
    }
}

/// Returns the time that CSTS.RDY may take to follow CC.EN, in milliseconds.
///
/// CRTO replaces CAP.TO where the controller reports its ready modes. Some controllers report modes and leave
/// CRTO at 0; a limit of 0 would fail at once, so CAP.TO is used for them.
pub(crate) fn ready_timeout_ms(cap: Cap, registers: &dyn RegisterAccess) -> u32 {
    let crwmt = match cap.crms() {
        0 => 0,
        _ => Crto(registers.read32(offset::CRTO)).crwmt(),
    };
    let units = if crwmt == 0 {
        u32::from(cap.to())
    } else {
        u32::from(crwmt)
    };
    units * 500
}

/// The result of bring-up.
///
/// Fields are 0, `None` or empty until bring-up has reached the command that fills them in; after an error
/// they tell how far it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// The capabilities.
    pub capabilities: QueueCapabilities,
    /// Version register: major 31:16, minor 15:8, tertiary 7:0.
    pub version: u32,
    /// I/O queue pairs granted.
    pub queue_pairs: u32,
    /// Number of the planned pairs that were created.
    pub created: u32,
    /// Largest transfer in bytes (MDTS), or `None` for no limit.
    pub max_transfer: Option<u64>,
    /// Optional NVM commands (see [`oncs`](crate::spec::identify::oncs)).
    pub oncs: u16,
    /// A volatile write cache is present.
    pub volatile_write_cache: bool,
    /// I/O commands may use SGLs.
    pub sgl: bool,
    /// Data blocks of an SGL may begin at any byte and have any length; otherwise both are in dwords.
    pub sgl_bytes: bool,
    /// Abort commands that may be outstanding.
    pub abort_limit: u32,
    /// Asynchronous event requests that may be outstanding.
    pub event_limit: u32,
    /// Optional asynchronous events (see [`oaes`](crate::spec::identify::oaes)).
    pub oaes: u32,
    /// Time a normal shutdown may take, in milliseconds.
    pub shutdown_timeout_ms: u32,
    /// Serial number, as Identify Controller has it.
    pub serial: [u8; 20],
    /// Highest namespace identifier.
    pub max_nsid: u32,
    /// The active namespaces, ascending; also those that this driver cannot use
    /// ([`NamespaceInfo::unusable`]).
    pub namespaces: Vec<NamespaceInfo, MAX_NAMESPACES>,
    /// More namespaces are active than the list holds.
    pub more_namespaces: bool,
    /// A host memory buffer was given.
    pub host_memory: bool,
}

impl ControllerInfo {
    pub(super) fn new(capabilities: QueueCapabilities, version: u32) -> Self {
        Self {
            capabilities,
            version,
            queue_pairs: 0,
            created: 0,
            max_transfer: None,
            oncs: 0,
            volatile_write_cache: false,
            sgl: false,
            sgl_bytes: false,
            abort_limit: 1,
            event_limit: 1,
            oaes: 0,
            shutdown_timeout_ms: 0,
            serial: [0; 20],
            max_nsid: 0,
            namespaces: Vec::new(),
            more_namespaces: false,
            host_memory: false,
        }
    }
}

/// A host memory buffer for the controller. The controller owns it until shutdown, reset or a Set
/// Features that disables it. Until one of these has happened its memory must not be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemoryPages {
    /// Size in pages of CC.MPS.
    pub pages: u32,
    /// I/O address of the descriptor list, 16-byte aligned.
    pub list: Iova,
    /// Descriptors in the list.
    pub entries: u32,
}

/// The machine's next request to its caller.
#[derive(Debug)]
pub enum BringupStep<'r> {
    /// Call again at `until_ns` or before.
    Wait {
        /// Time on the caller's clock, in nanoseconds.
        until_ns: u64,
    },
    /// The controller is disabled: reclaim and restart queues, then call
    /// [`BringupMachine::enable`](super::BringupMachine::enable).
    Disabled(Quiesced<'r>),
    /// The controller asks for a host memory buffer: call
    /// [`BringupMachine::host_memory`](super::BringupMachine::host_memory).
    HostMemory {
        /// Preferred size in bytes.
        preferred: u64,
        /// Least useful size in bytes; 0 when any size helps.
        minimum: u64,
    },
    /// The controller is ready for I/O.
    Ready,
}
