//! Identify Controller: the controller's identity, capabilities and limits.

use super::IDENTIFY_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Optional Admin Command Support (`oacs`).
pub mod oacs {
    /// Security Send and Security Receive.
    pub const SECURITY: u16 = 1 << 0;
    /// Format NVM.
    pub const FORMAT: u16 = 1 << 1;
    /// Firmware Commit and Firmware Image Download.
    pub const FIRMWARE: u16 = 1 << 2;
    /// Namespace Management and Namespace Attachment.
    pub const NS_MANAGEMENT: u16 = 1 << 3;
    /// Device Self-test.
    pub const SELF_TEST: u16 = 1 << 4;
    /// Directive Send and Directive Receive.
    pub const DIRECTIVES: u16 = 1 << 5;
    /// NVMe-MI Send and NVMe-MI Receive.
    pub const NVME_MI: u16 = 1 << 6;
    /// Virtualization Management.
    pub const VIRTUALIZATION: u16 = 1 << 7;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u16 = 1 << 8;
    /// Get LBA Status.
    pub const GET_LBA_STATUS: u16 = 1 << 9;
    /// Command and Feature Lockdown.
    pub const LOCKDOWN: u16 = 1 << 10;
}

/// Optional NVM Command Support (`oncs`).
pub mod oncs {
    /// Compare.
    pub const COMPARE: u16 = 1 << 0;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u16 = 1 << 1;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// The Save field of Set Features and the Select field of Get Features.
    pub const SAVE_SELECT: u16 = 1 << 4;
    /// Reservations.
    pub const RESERVATIONS: u16 = 1 << 5;
    /// The Timestamp feature.
    pub const TIMESTAMP: u16 = 1 << 6;
    /// Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// Copy.
    pub const COPY: u16 = 1 << 8;
}

/// Optional Asynchronous Events Supported (`oaes`) and, with the same bits, the Asynchronous Event
/// Configuration feature.
pub mod oaes {
    /// Namespace attribute notices.
    pub const NAMESPACE_ATTRIBUTE: u32 = 1 << 8;
    /// Firmware activation notices.
    pub const FIRMWARE_ACTIVATION: u32 = 1 << 9;
    /// Asymmetric namespace access change notices.
    pub const ANA_CHANGE: u32 = 1 << 11;
    /// Normal NVM subsystem shutdown events.
    pub const SUBSYSTEM_SHUTDOWN: u32 = 1 << 15;
}

/// Log Page Attributes (`lpa`).
pub mod lpa {
    /// The SMART log page exists per namespace.
    pub const SMART_PER_NAMESPACE: u8 = 1 << 0;
    /// The Commands Supported and Effects log page.
    pub const COMMANDS_SUPPORTED: u8 = 1 << 1;
    /// Extended data for Get Log Page: a 32-bit length and the log page offset.
    pub const EXTENDED_DATA: u8 = 1 << 2;
    /// The telemetry log pages.
    pub const TELEMETRY: u8 = 1 << 3;
    /// The Persistent Event log page.
    pub const PERSISTENT_EVENT: u8 = 1 << 4;
    /// The Supported Log Pages and effects log pages (LIDs 00h, 12h, 13h).
    pub const SUPPORTED_PAGES: u8 = 1 << 5;
}

/// Volatile Write Cache (`vwc`).
pub mod vwc {
    /// A volatile write cache is present.
    pub const PRESENT: u8 = 1 << 0;
    /// Bits 2:1: behaviour of Flush with the broadcast NSID.
    pub const BROADCAST: u8 = 3 << 1;
    /// BROADCAST value: Flush fails with the broadcast NSID.
    pub const BROADCAST_NOT_SUPPORTED: u8 = 2 << 1;
    /// BROADCAST value: Flush with the broadcast NSID flushes every namespace.
    pub const BROADCAST_SUPPORTED: u8 = 3 << 1;
}

/// SGL Support (`sgls`).
pub mod sgls {
    /// Bits 1:0: 0 no SGLs, 1 without alignment requirement, 2 dword aligned and granular.
    pub const SUPPORT: u32 = 3;
    /// SUPPORT value: any alignment.
    pub const ANY_ALIGNMENT: u32 = 1;
    /// SUPPORT value: data blocks are dword aligned and a multiple of dwords.
    pub const DWORD_ALIGNMENT: u32 = 2;
    /// SGL bit bucket descriptors.
    pub const BIT_BUCKET: u32 = 1 << 16;
    /// MPTR may be a byte-aligned contiguous buffer.
    pub const BYTE_ALIGNED_MPTR: u32 = 1 << 17;
    /// The SGL may describe more bytes than the command transfers.
    pub const LONGER_THAN_TRANSFER: u32 = 1 << 18;
    /// MPTR may point at an SGL segment.
    pub const MPTR_SGL: u32 = 1 << 19;
}

/// Format NVM Attributes (`fna`).
pub mod fna {
    /// A format applies to every namespace.
    pub const FORMAT_ALL: u8 = 1 << 0;
    /// A secure erase applies to every namespace.
    pub const ERASE_ALL: u8 = 1 << 1;
    /// Cryptographic erase.
    pub const CRYPTO_ERASE: u8 = 1 << 2;
    /// Format rejects the broadcast NSID.
    pub const NO_BROADCAST: u8 = 1 << 3;
}

/// Sanitize Capabilities (`sanicap`).
pub mod sanicap {
    /// Cryptographic erase.
    pub const CRYPTO_ERASE: u32 = 1 << 0;
    /// Block erase.
    pub const BLOCK_ERASE: u32 = 1 << 1;
    /// Overwrite.
    pub const OVERWRITE: u32 = 1 << 2;
    /// No-deallocate inhibited (NDI).
    pub const NO_DEALLOCATE_INHIBITED: u32 = 1 << 29;
    /// Bits 31:30 (NODMMAS): 1 the media is not modified further after an operation, 2 it is.
    pub const MODIFIES_MEDIA: u32 = 3 << 30;
    /// Value of MODIFIES_MEDIA: the media is not modified further after an operation.
    pub const NOT_MODIFIED: u32 = 1 << 30;
}

/// A power state descriptor.
///
/// NVMe Base 2.0c, 5.17.2.1 (Identify Controller Data Structure), "Power State Descriptor".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PowerState {
    /// Maximum power, in centiwatts, or in 0.0001 W when [`MXPS`](Self::MXPS) is set.
    pub mp: u16,
    /// Reserved.
    pub reserved3: u8,
    /// [`MXPS`](Self::MXPS) and [`NOPS`](Self::NOPS).
    pub flags: u8,
    /// Entry latency in microseconds; 0 is not reported.
    pub enlat: u32,
    /// Exit latency in microseconds; 0 is not reported.
    pub exlat: u32,
    /// Relative read throughput in bits 4:0; lower is better.
    pub rrt: u8,
    /// Relative read latency in bits 4:0.
    pub rrl: u8,
    /// Relative write throughput in bits 4:0.
    pub rwt: u8,
    /// Relative write latency in bits 4:0.
    pub rwl: u8,
    /// Idle power in units of `ips`.
    pub idlp: u16,
    /// Idle power scale in bits 7:6: 1 is 0.0001 W, 2 is 0.01 W.
    pub ips: u8,
    /// Reserved.
    pub reserved19: u8,
    /// Active power in units of `apws` bits 7:6.
    pub actp: u16,
    /// Active power workload in bits 2:0, scale in bits 7:6.
    pub apws: u8,
    /// Reserved.
    pub reserved23: [u8; 9],
}
const _: () = assert!(size_of::<PowerState>() == 32);
offsets!(PowerState: mp @ 0, flags @ 3, enlat @ 4, exlat @ 8, rrt @ 12, rrl @ 13, rwt @ 14, rwl @ 15,
    idlp @ 16, ips @ 18, actp @ 20, apws @ 22);

impl PowerState {
    /// `flags` bit 0: `mp` counts 0.0001 W instead of 0.01 W.
    pub const MXPS: u8 = 1 << 0;
    /// `flags` bit 1: non-operational, no I/O in this state.
    pub const NOPS: u8 = 1 << 1;

    /// Returns the maximum power in units of 0.0001 W; 0 is not reported.
    pub const fn max_power(&self) -> u32 {
        let scale = if self.flags & Self::MXPS != 0 { 1 } else { 100 };
        self.mp as u32 * scale
    }
}

/// Identify Controller (CNS 01h).
///
/// NVMe Base 2.0c, 5.17.2.1 (Identify Controller Data Structure).
///
/// Fields that a revision does not define are 0, so a driver for later revisions works with older controllers
/// if it treats 0 as not supported.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI vendor ID.
    pub vid: u16,
    /// PCI subsystem vendor ID.
    pub ssvid: u16,
    /// Serial number, ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model number, ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware revision, ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended arbitration burst, 2^RAB commands.
    pub rab: u8,
    /// IEEE OUI, least significant byte first.
    pub ieee: [u8; 3],
    /// Multi-path and namespace sharing capabilities.
    pub cmic: u8,
    /// Maximum data transfer size: 2^MDTS pages of CAP.MPSMIN; 0 is no limit.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: u16,
    /// Version, as the VS property.
    pub ver: u32,
    /// RTD3 resume latency in microseconds.
    pub rtd3r: u32,
    /// RTD3 entry latency in microseconds: the time that a shutdown may take.
    pub rtd3e: u32,
    /// Optional asynchronous events supported: [`oaes`].
    pub oaes: u32,
    /// Controller attributes.
    pub ctratt: u32,
    /// Read recovery levels supported.
    pub rrls: u16,
    /// Reserved.
    pub reserved102: [u8; 9],
    /// Controller type: 1 I/O, 2 discovery, 3 administrative.
    pub cntrltype: u8,
    /// FRU globally unique identifier.
    pub fguid: [u8; 16],
    /// Command retry delay time 1, in units of 100 ms.
    pub crdt1: u16,
    /// Command retry delay time 2, in units of 100 ms.
    pub crdt2: u16,
    /// Command retry delay time 3, in units of 100 ms.
    pub crdt3: u16,
    /// Reserved.
    pub reserved134: [u8; 119],
    /// NVM subsystem report.
    pub nvmsr: u8,
    /// VPD write cycle information.
    pub vwci: u8,
    /// Management endpoint capabilities.
    pub mec: u8,
    /// Optional admin command support: [`oacs`].
    pub oacs: u16,
    /// Abort command limit, 0's based.
    pub acl: u8,
    /// Asynchronous event request limit, 0's based.
    pub aerl: u8,
    /// Firmware updates: slots in bits 3:1, slot 1 read only in bit 0, activation without reset in bit 4.
    pub frmw: u8,
    /// Log page attributes: [`lpa`].
    pub lpa: u8,
    /// Error log page entries, 0's based.
    pub elpe: u8,
    /// Number of power states supported, 0's based.
    pub npss: u8,
    /// Admin vendor specific command configuration.
    pub avscc: u8,
    /// Autonomous power state transitions: bit 0 when supported.
    pub apsta: u8,
    /// Warning composite temperature threshold in kelvins.
    pub wctemp: u16,
    /// Critical composite temperature threshold in kelvins.
    pub cctemp: u16,
    /// Maximum time for firmware activation, in units of 100 ms.
    pub mtfa: u16,
    /// Host memory buffer preferred size, in units of 4 KiB; 0 is no host memory buffer.
    pub hmpre: u32,
    /// Host memory buffer minimum size, in units of 4 KiB.
    pub hmmin: u32,
    /// Total NVM capacity in bytes.
    pub tnvmcap: [u8; 16],
    /// Unallocated NVM capacity in bytes.
    pub unvmcap: [u8; 16],
    /// Replay protected memory block support.
    pub rpmbs: u32,
    /// Extended device self-test time in minutes.
    pub edstt: u16,
    /// Device self-test options.
    pub dsto: u8,
    /// Firmware update granularity, in units of 4 KiB; 0 is not reported, FFh is none.
    pub fwug: u8,
    /// Keep alive support: timer granularity in units of 100 ms; 0 is not supported.
    pub kas: u16,
    /// Host controlled thermal management attributes.
    pub hctma: u16,
    /// Minimum thermal management temperature in kelvins.
    pub mntmt: u16,
    /// Maximum thermal management temperature in kelvins.
    pub mxtmt: u16,
    /// Sanitize capabilities: [`sanicap`].
    pub sanicap: u32,
    /// Host memory buffer minimum descriptor entry size, in units of 4 KiB; 0 is no minimum.
    pub hmminds: u32,
    /// Host memory maximum descriptor entries; 0 is no limit.
    pub hmmaxd: u16,
    /// NVM set identifier maximum.
    pub nsetidmax: u16,
    /// Endurance group identifier maximum.
    pub endgidmax: u16,
    /// ANA transition time in seconds.
    pub anatt: u8,
    /// Asymmetric namespace access capabilities.
    pub anacap: u8,
    /// ANA group identifier maximum.
    pub anagrpmax: u32,
    /// Number of ANA group identifiers.
    pub nanagrpid: u32,
    /// Persistent event log size, in units of 64 KiB.
    pub pels: u32,
    /// Domain identifier.
    pub domainid: u16,
    /// Reserved.
    pub reserved358: [u8; 10],
    /// Maximum endurance group capacity in bytes.
    pub megcap: [u8; 16],
    /// Reserved.
    pub reserved384: [u8; 128],
    /// Submission queue entry size: required in bits 3:0, maximum in bits 7:4, as powers of two.
    pub sqes: u8,
    /// Completion queue entry size: required in bits 3:0, maximum in bits 7:4, as powers of two.
    pub cqes: u8,
    /// Maximum outstanding commands per queue; 0 is not reported on PCIe.
    pub maxcmd: u16,
    /// Number of namespaces: the largest valid NSID.
    pub nn: u32,
    /// Optional NVM command support: [`oncs`].
    pub oncs: u16,
    /// Fused operation support: bit 0 compare and write.
    pub fuses: u16,
    /// Format NVM attributes: [`fna`].
    pub fna: u8,
    /// Volatile write cache: [`vwc`].
    pub vwc: u8,
    /// Atomic write unit normal, in blocks, 0's based.
    pub awun: u16,
    /// Atomic write unit power fail, in blocks, 0's based.
    pub awupf: u16,
    /// I/O command set vendor specific command configuration.
    pub icsvscc: u8,
    /// Namespace write protection capabilities.
    pub nwpc: u8,
    /// Atomic compare and write unit, in blocks, 0's based.
    pub acwu: u16,
    /// Copy descriptor formats supported.
    pub ocfs: u16,
    /// SGL support: [`sgls`].
    pub sgls: u32,
    /// Maximum number of allowed namespaces; 0 means `nn`.
    pub mnan: u32,
    /// Maximum domain namespace attachments.
    pub maxdna: [u8; 16],
    /// Maximum I/O controller namespace attachments.
    pub maxcna: u32,
    /// Reserved.
    pub reserved564: [u8; 204],
    /// NVM subsystem qualified name, UTF-8, ends at the first NUL.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// Fields of NVMe over Fabrics.
    pub fabrics: [u8; 256],
    /// Power state descriptors; `npss + 1` of them are valid.
    pub psd: [PowerState; 32],
    /// Vendor specific.
    pub vs: [u8; 1024],
}
const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY_BYTES);

impl IdentifyController {
    /// Returns the number of Aborts that may be outstanding at once, 1 to 256.
    pub const fn abort_limit(&self) -> u32 {
        self.acl as u32 + 1
    }

    /// Returns the number of Asynchronous Event Requests that may be outstanding at once, 1 to 256.
    pub const fn async_event_limit(&self) -> u32 {
        self.aerl as u32 + 1
    }

    /// Returns the number of entries of the error log page, 1 to 256.
    pub const fn error_entries(&self) -> u32 {
        self.elpe as u32 + 1
    }

    /// Returns the power states, 1 to 32; a larger count from the controller is cut to the table's length.
    pub fn power_states(&self) -> &[PowerState] {
        &self.psd[..(self.npss as usize + 1).min(self.psd.len())]
    }
}

offsets!(IdentifyController: vid @ 0, ssvid @ 2, sn @ 4, mn @ 24, fr @ 64, rab @ 72, ieee @ 73,
    cmic @ 76, mdts @ 77, cntlid @ 78, ver @ 80, rtd3r @ 84, rtd3e @ 88, oaes @ 92, ctratt @ 96,
    rrls @ 100, cntrltype @ 111, fguid @ 112, crdt1 @ 128, crdt2 @ 130, crdt3 @ 132, nvmsr @ 253,
    vwci @ 254, mec @ 255, oacs @ 256, acl @ 258, aerl @ 259, frmw @ 260, lpa @ 261,
    elpe @ 262, npss @ 263, avscc @ 264, apsta @ 265, wctemp @ 266, cctemp @ 268, mtfa @ 270,
    hmpre @ 272, hmmin @ 276, tnvmcap @ 280, unvmcap @ 296, rpmbs @ 312, edstt @ 316, dsto @ 318,
    fwug @ 319, kas @ 320, hctma @ 322, mntmt @ 324, mxtmt @ 326, sanicap @ 328, hmminds @ 332,
    hmmaxd @ 336, nsetidmax @ 338, endgidmax @ 340, anatt @ 342, anacap @ 343, anagrpmax @ 344,
    nanagrpid @ 348, pels @ 352, domainid @ 356, megcap @ 368, sqes @ 512, cqes @ 513,
    maxcmd @ 514, nn @ 516, oncs @ 520, fuses @ 522, fna @ 524, vwc @ 525, awun @ 526, awupf @ 528,
    icsvscc @ 530, nwpc @ 531, acwu @ 532, ocfs @ 534, sgls @ 536, mnan @ 540, maxdna @ 544,
    maxcna @ 560, subnqn @ 768, fabrics @ 1792, psd @ 2048, vs @ 3072);
