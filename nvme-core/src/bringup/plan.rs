//! What bring-up is given, what it asks for, and what it learned.

use super::namespace::NamespaceInfo;
use crate::error::BringupError;
use crate::quiesced::Quiesced;
use crate::registers::Registers;
use crate::spec::register::{Cap, Crto, offset};
use crate::spec::{Iova, PageSize, Qid};
use heapless::Vec;

pub(super) const NS_PER_MS: u64 = 1_000_000;
/// How often a waiting machine wants to look again.
pub(super) const POLL_NS: u64 = 100_000;
/// The most namespaces that [`Info`] lists; others can be identified one by one.
pub const MAX_NAMESPACES: usize = 32;
/// The highest namespace identifier that is tried where the controller has no list of active ones (NVMe 1.0).
pub const MAX_WALK: u32 = 1024;

/// An I/O queue pair to be created during bring-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePlan {
    /// Identifier of both queues, from 1 on.
    pub qid: Qid,
    /// Entries of the submission ring.
    pub sq_entries: u32,
    /// Where it lies, page aligned.
    pub sq_iova: Iova,
    /// Entries of the completion ring.
    pub cq_entries: u32,
    /// Where it lies, page aligned.
    pub cq_iova: Iova,
    /// Interrupt vector of the completion queue, or none for polling.
    pub vector: Option<u16>,
}

/// What to bring up.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    /// I/O queue pairs to ask for (Number of Queues); the controller may grant fewer.
    pub queue_pairs: u32,
    /// Pairs to create at once, in order. Those whose identifier is 0 or above the number of pairs granted are
    /// left out: a controller that grants N pairs takes identifiers 1 to N.
    pub plans: &'a [QueuePlan],
    /// Deadline of each admin command.
    pub command_timeout_ns: u64,
    /// Least time given to CSTS.RDY, whatever CAP.TO says.
    pub min_ready_timeout_ms: u32,
    /// Capabilities that doorbells, rings and lists were made for, when they are older than the machine:
    /// a controller that has another page size or doorbell stride now is not enabled.
    pub made_for: Option<Capabilities>,
}

impl Default for Config<'_> {
    /// 16 queue pairs, none created at once, 5 s per command, 500 ms at least for readiness, everything
    /// made for the capabilities that the machine finds.
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

/// What the capabilities say, before anything is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Largest I/O queue, in entries: 2 to 65,536. A controller that says 1, less than the least that the
    /// specification has, is taken to mean 2.
    pub max_entries: u32,
    /// Doorbell stride: doorbells are 4 << DSTRD bytes apart.
    pub dstrd: u8,
    /// The memory page size that bring-up will set: 4 KiB, or MPSMIN if that is larger.
    pub page: PageSize,
    /// Unit of MDTS: CAP.MPSMIN.
    pub mdts_unit: PageSize,
    /// How long CSTS.RDY may take, in milliseconds.
    pub ready_timeout_ms: u32,
    /// CC.CSS to be set.
    pub css: u8,
}

impl Capabilities {
    /// Reads CAP (and CRTO), and checks that this driver can work with the controller.
    ///
    /// # Errors
    /// [`BringupError::DeviceGone`], [`BringupError::NoNvmCommandSet`], [`BringupError::PageSize`].
    pub fn read(registers: &dyn Registers) -> Result<Self, BringupError> {
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

/// How long CSTS.RDY may take to follow CC.EN, in milliseconds.
///
/// CRTO replaces CAP.TO where the controller reports its ready modes; a controller that says 0 there is given
/// CAP.TO after all.
pub(crate) fn ready_timeout_ms(cap: Cap, registers: &dyn Registers) -> u32 {
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

/// What bring-up learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The capabilities.
    pub capabilities: Capabilities,
    /// Version register: major 31:16, minor 15:8, tertiary 7:0.
    pub version: u32,
    /// I/O queue pairs granted.
    pub queue_pairs: u32,
    /// Of the planned pairs, how many were created.
    pub created: u32,
    /// Largest transfer in bytes, or `None` for no limit.
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

impl Info {
    pub(super) fn new(capabilities: Capabilities, version: u32) -> Self {
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

/// A host memory buffer to give to the controller. It stays the controller's until shutdown, reset
/// or a Set Features that takes it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Size in pages of CC.MPS.
    pub pages: u32,
    /// Where the descriptor list lies, 16-byte aligned.
    pub list: Iova,
    /// Descriptors in the list.
    pub entries: u32,
}

/// What the machine wants next.
#[derive(Debug)]
pub enum Step<'r> {
    /// Call again at `until_ns` or before.
    Wait {
        /// On the caller's clock.
        until_ns: u64,
    },
    /// The controller is disabled: reclaim and restart queues, then call [`Bringup::enable`](super::Bringup::enable).
    Disabled(Quiesced<'r>),
    /// The controller would like a host memory buffer: call [`Bringup::host_memory`](super::Bringup::host_memory).
    HostMemory {
        /// Preferred size in bytes.
        preferred: u64,
        /// Least size that helps, in bytes; 0 when any does.
        minimum: u64,
    },
    /// The controller works.
    Ready,
}
