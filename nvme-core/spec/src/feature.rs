//! Features: identifiers and the dwords that carry their values.
//!
//! Set Features sends a value in command dword 11 (and rarely more); Get Features returns the same
//! layout in dword 0 of the completion.
//!
//! NVMe Base 2.0c, 5.27 (Set Features command).

use super::addr::{Iova, Nsid};
use super::admin;
use super::command::Sqe;
use bitfield::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! features {
    ($($name:ident = $fid:literal, $text:literal;)*) => {
        /// Feature identifiers (CDW10 bits 7:0 of Get and Set Features).
        pub mod fid {
            $(#[doc = $text] pub const $name: u8 = $fid;)*
        }

        /// Returns the specification's name of feature `fid`, or `None` for reserved and vendor values.
        pub const fn name(fid: u8) -> Option<&'static str> {
            match fid {
                $($fid => Some($text),)*
                _ => None,
            }
        }
    };
}

features! {
    ARBITRATION = 0x01, "Arbitration";
    POWER_MANAGEMENT = 0x02, "Power Management";
    LBA_RANGE_TYPE = 0x03, "LBA Range Type";
    TEMPERATURE = 0x04, "Temperature Threshold";
    ERROR_RECOVERY = 0x05, "Error Recovery";
    VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
    NUMBER_OF_QUEUES = 0x07, "Number of Queues";
    INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
    INTERRUPT_VECTOR = 0x09, "Interrupt Vector Configuration";
    WRITE_ATOMICITY = 0x0A, "Write Atomicity Normal";
    ASYNC_EVENT = 0x0B, "Asynchronous Event Configuration";
    AUTONOMOUS_POWER = 0x0C, "Autonomous Power State Transition";
    HOST_MEMORY_BUFFER = 0x0D, "Host Memory Buffer";
    TIMESTAMP = 0x0E, "Timestamp";
    KEEP_ALIVE = 0x0F, "Keep Alive Timer";
    THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
    NON_OPERATIONAL_POWER = 0x11, "Non-Operational Power State Config";
    READ_RECOVERY_LEVEL = 0x12, "Read Recovery Level Config";
    PREDICTABLE_LATENCY = 0x13, "Predictable Latency Mode Config";
    PREDICTABLE_LATENCY_WINDOW = 0x14, "Predictable Latency Mode Window";
    LBA_STATUS_INTERVAL = 0x15, "LBA Status Information Report Interval";
    HOST_BEHAVIOR = 0x16, "Host Behavior Support";
    SANITIZE_CONFIG = 0x17, "Sanitize Config";
    ENDURANCE_GROUP_EVENT = 0x18, "Endurance Group Event Configuration";
    COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
    SPINUP_CONTROL = 0x1A, "Spinup Control";
    ENHANCED_CONTROLLER_METADATA = 0x7D, "Enhanced Controller Metadata";
    CONTROLLER_METADATA = 0x7E, "Controller Metadata";
    NAMESPACE_METADATA = 0x7F, "Namespace Metadata";
    SOFTWARE_PROGRESS = 0x80, "Software Progress Marker";
    HOST_IDENTIFIER = 0x81, "Host Identifier";
    RESERVATION_NOTIFICATION = 0x82, "Reservation Notification Mask";
    RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
    WRITE_PROTECTION = 0x84, "Namespace Write Protection Config";
}

/// Returns the bytes of data that a feature has beside dword 0, 0 for none; `None` if unknown: a vendor's
/// feature, or one of a later revision.
///
/// NVMe Base 2.0c, 5.27.1 (Feature Specific Information).
pub const fn data_bytes(fid: u8) -> Option<usize> {
    Some(match fid {
        fid::LBA_RANGE_TYPE
        | fid::HOST_MEMORY_BUFFER
        | fid::ENHANCED_CONTROLLER_METADATA
        | fid::CONTROLLER_METADATA
        | fid::NAMESPACE_METADATA => 4096,
        fid::AUTONOMOUS_POWER => AUTONOMOUS_POWER_BYTES,
        fid::TIMESTAMP => 8,
        fid::PREDICTABLE_LATENCY | fid::HOST_BEHAVIOR => 512,
        fid::HOST_IDENTIFIER => 16,
        _ if name(fid).is_some() => 0,
        _ => return None,
    })
}

/// CDW10 bit 31 of Set Features: keep the value across resets and power cycles.
pub const SAVE: u32 = 1 << 31;

bitfield! {
    /// Dword 0 of Get Features with [`FeatureSelect::Capabilities`](super::admin::FeatureSelect).
    ///
    /// NVMe Base 2.0c, 5.15 (Get Features command).
    ///
    /// Controllers that do not support the Select field report the current value instead, so a driver checks
    /// ONCS ([`oncs::SAVE_SELECT`](super::identify::oncs::SAVE_SELECT)) first.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Capabilities(u32);
    impl Debug;
    /// The value can be saved.
    pub saveable, set_saveable: 0;
    /// The value belongs to a namespace, not to the controller.
    pub namespace_specific, set_namespace_specific: 1;
    /// The value can be changed.
    pub changeable, set_changeable: 2;
}

bitfield! {
    /// Arbitration (FID 01h). NVMe Base 2.0c, 5.27.1.1 (Arbitration).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Arbitration(u32);
    impl Debug;
    u8;
    /// Arbitration burst: 2^AB commands from one queue in a row; 7 is no limit.
    pub ab, set_ab: 2, 0;
    /// Low priority weight, 0's based.
    pub lpw_z, set_lpw_z: 15, 8;
    /// Medium priority weight, 0's based.
    pub mpw_z, set_mpw_z: 23, 16;
    /// High priority weight, 0's based.
    pub hpw_z, set_hpw_z: 31, 24;
}

bitfield! {
    /// Power Management (FID 02h). NVMe Base 2.0c, 5.27.1.2 (Power Management).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct PowerManagement(u32);
    impl Debug;
    u8;
    /// Power state to enter, an index into the controller's descriptors.
    pub ps, set_ps: 4, 0;
    /// Workload hint, 0 for none.
    pub wh, set_wh: 7, 5;
}

bitfield! {
    /// Temperature Threshold (FID 04h). NVMe Base 2.0c, 5.27.1.3 (Temperature Threshold).
    ///
    /// A temperature beyond a threshold raises an asynchronous event if the host has enabled those events,
    /// and sets a bit of the critical warnings in the SMART log page.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct TemperatureThreshold(u32);
    impl Debug;
    u16;
    /// Threshold in kelvins.
    pub tmpth, set_tmpth: 15, 0;
    u8;
    /// Sensor: 0 composite, 1 to 8 a sensor, Fh all (Set Features only).
    pub tmpsel, set_tmpsel: 19, 16;
    /// Threshold type: 0 over temperature, 1 under temperature.
    pub thsel, set_thsel: 21, 20;
}

bitfield! {
    /// Error Recovery (FID 05h). NVM Command Set 1.0c, "Error Recovery".
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct ErrorRecovery(u32);
    impl Debug;
    u16;
    /// Time limited error recovery in units of 100 ms; 0 is no limit.
    pub tler, set_tler: 15, 0;
    /// Deallocated or unwritten logical block error enable.
    pub bool, dulbe, set_dulbe: 16;
}

bitfield! {
    /// Volatile Write Cache (FID 06h). NVMe Base 2.0c, 5.27.1.4 (Volatile Write Cache).
    ///
    /// With the cache enabled a completed write may be lost with the power until a Flush of its namespace has
    /// completed. A write with FUA completes only once its data is on the medium.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct VolatileWriteCache(u32);
    impl Debug;
    /// Volatile write cache enable.
    pub wce, set_wce: 0;
}

bitfield! {
    /// Number of Queues (FID 07h), both directions 0's based.
    ///
    /// NVMe Base 2.0c, 5.27.1.5 (Number of Queues).
    ///
    /// The request has to come before the first I/O queue is created; afterwards it is an error, and the
    /// first answer stays valid until the controller is reset.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct NumberOfQueues(u32);
    impl Debug;
    u16;
    /// I/O submission queues, 0's based.
    pub nsq_z, set_nsq_z: 15, 0;
    /// I/O completion queues, 0's based.
    pub ncq_z, set_ncq_z: 31, 16;
}

impl NumberOfQueues {
    /// Returns command dword 11 of a request for `sqs` and `cqs` I/O queues, each clamped to 1 to 65,535.
    pub fn request(sqs: u32, cqs: u32) -> u32 {
        let zero_based = |queues: u32| queues.clamp(1, 65_535) - 1;
        zero_based(sqs) | zero_based(cqs) << 16
    }

    /// Returns the I/O submission and completion queues that dword 0 of the completion grants, 1 to 65,536
    /// each.
    ///
    /// A controller may grant more than requested; the host creates no more than the smaller number.
    pub fn granted(dw0: u32) -> (u32, u32) {
        let value = Self(dw0);
        (u32::from(value.nsq_z()) + 1, u32::from(value.ncq_z()) + 1)
    }
}

bitfield! {
    /// Interrupt Coalescing (FID 08h). NVMe Base 2.0c, 5.27.1.6 (Interrupt Coalescing).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct InterruptCoalescing(u32);
    impl Debug;
    u8;
    /// Aggregation threshold in completions, 0's based.
    pub thr_z, set_thr_z: 7, 0;
    /// Aggregation time in units of 100 microseconds; 0 is no delay.
    pub time, set_time: 15, 8;
}

bitfield! {
    /// Interrupt Vector Configuration (FID 09h). NVMe Base 2.0c, 5.27.1.7 (Interrupt Vector Configuration).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct InterruptVector(u32);
    impl Debug;
    u16;
    /// Interrupt vector to configure.
    pub iv, set_iv: 15, 0;
    /// Coalescing disable.
    pub bool, cd, set_cd: 16;
}

bitfield! {
    /// Write Atomicity Normal (FID 0Ah). NVM Command Set 1.0c, "Write Atomicity Normal".
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct WriteAtomicity(u32);
    impl Debug;
    /// Disable normal: only AWUPF and NAWUPF hold, not AWUN and NAWUN.
    pub dn, set_dn: 0;
}

bitfield! {
    /// Autonomous Power State Transition (FID 0Ch). NVMe Base 2.0c, 5.27.1.9 (Autonomous Power State Transition).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct AutonomousPower(u32);
    impl Debug;
    /// Autonomous power state transition enable. Set Features also transfers 32 table entries of 8 bytes.
    pub apste, set_apste: 0;
}

/// Bytes of the table that goes with [`AutonomousPower`].
pub const AUTONOMOUS_POWER_BYTES: usize = 256;

/// Host Memory Buffer (FID 0Dh), CDW11 bit 0: enable host memory.
pub const HMB_ENABLE: u32 = 1 << 0;
/// Host Memory Buffer (FID 0Dh), CDW11 bit 1: the same memory is released with its content unchanged.
pub const HMB_MEMORY_RETURN: u32 = 1 << 1;

/// Makes Set Features, Host Memory Buffer: gives the controller `pages` memory pages (of CC.MPS), described
/// by the `entries` [`HmbDescriptor`]s at `list`; or disables the buffer (`enable` false).
///
/// `list` is 16-byte aligned. `memory_return` tells the controller that it had the same memory with the same
/// content before a reset. The controller owns the memory until a disabling command has completed.
///
/// NVMe Base 2.0c, 5.27.1.10 (Host Memory Buffer).
pub fn host_memory_buffer(
    enable: bool,
    memory_return: bool,
    pages: u32,
    list: Iova,
    entries: u32,
) -> Sqe {
    let mut cdw11 = 0;
    if enable {
        cdw11 |= HMB_ENABLE;
    }
    if memory_return {
        cdw11 |= HMB_MEMORY_RETURN;
    }
    let mut sqe = admin::set_features(fid::HOST_MEMORY_BUFFER, Nsid::NONE, cdw11);
    sqe.cdw12 = pages;
    sqe.cdw13 = list.0 as u32 & !0xF;
    sqe.cdw14 = (list.0 >> 32) as u32;
    sqe.cdw15 = entries;
    sqe
}

/// One range of the host memory buffer.
///
/// NVMe Base 2.0c, 5.27.1.10 (Host Memory Buffer), "Host Memory Buffer Descriptor Entry".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HmbDescriptor {
    /// Buffer address (BADD), aligned to the memory page size.
    pub address: u64,
    /// Buffer size (BSIZE) in memory pages of CC.MPS.
    pub pages: u32,
    /// Reserved.
    pub reserved: u32,
}
const _: () = assert!(size_of::<HmbDescriptor>() == 16);
offsets!(HmbDescriptor: address @ 0, pages @ 8, reserved @ 12);

bitfield! {
    /// The 8 data bytes of Timestamp (FID 0Eh), as a little-endian word.
    ///
    /// NVMe Base 2.0c, 5.27.1.11 (Timestamp).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Timestamp(u64);
    impl Debug;
    u64;
    /// Milliseconds since 1970-01-01 00:00:00 UTC, or since the last reset (see `origin`).
    pub milliseconds, set_milliseconds: 47, 0;
    /// The controller may have stopped counting at times (Get Features only).
    pub bool, synch, set_synch: 48;
    u8;
    /// 0 counts from the last controller level reset, 1 from a value that a host set.
    pub origin, set_origin: 51, 49;
}

bitfield! {
    /// Namespace Write Protection Config (FID 84h). NVMe Base 2.0c, 5.27.1.28 (Namespace Write Protection Config).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct WriteProtection(u32);
    impl Debug;
    u8;
    /// 0 none, 1 write protect, 2 until power cycle, 3 permanent.
    pub state, set_state: 2, 0;
}

/// The data of Host Behavior Support (FID 16h): the abilities of the host. Each byte is 0 or 1.
///
/// NVMe Base 2.0c, "Host Behavior Support".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HostBehavior {
    /// Advanced command retry enable: the host handles Command Interrupted and the retry delays.
    pub acre: u8,
    /// Extended telemetry data area 4 supported.
    pub etdas: u8,
    /// LBA format extension enable: the host handles more than 16 LBA formats.
    pub lbafee: u8,
    /// Reserved.
    pub reserved3: [u8; 509],
}
const _: () = assert!(size_of::<HostBehavior>() == 512);
offsets!(HostBehavior: acre @ 0, etdas @ 1, lbafee @ 2, reserved3 @ 3);
