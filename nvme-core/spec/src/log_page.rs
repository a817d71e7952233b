//! Log pages, and the asynchronous events that name them.
//!
//! 128-bit counts are byte arrays; [`u128()`] and [`bytes`] convert. Fields are at the specification's
//! offsets, asserted below each structure.
//!
//! NVMe Base 2.0c, 5.16.1 (Log Specific Information).

pub use super::async_event::{
    AsyncEvent, command_set_event, error_event, event_type, notice_event, smart_event,
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! pages {
    ($($name:ident = $lid:literal, $text:literal;)*) => {
        /// Log page identifiers (CDW10 bits 7:0 of Get Log Page).
        pub mod lid {
            $(#[doc = $text] pub const $name: u8 = $lid;)*
        }

        /// Returns the specification's name of log page `lid`, or `None` for reserved and vendor values.
        pub const fn name(lid: u8) -> Option<&'static str> {
            match lid {
                $($lid => Some($text),)*
                _ => None,
            }
        }
    };
}

pages! {
    SUPPORTED = 0x00, "Supported Log Pages";
    ERROR = 0x01, "Error Information";
    SMART = 0x02, "SMART / Health Information";
    FIRMWARE = 0x03, "Firmware Slot Information";
    CHANGED_NAMESPACES = 0x04, "Changed Namespace List";
    COMMANDS_SUPPORTED = 0x05, "Commands Supported and Effects";
    SELF_TEST = 0x06, "Device Self-test";
    TELEMETRY_HOST = 0x07, "Telemetry Host-Initiated";
    TELEMETRY_CONTROLLER = 0x08, "Telemetry Controller-Initiated";
    ENDURANCE_GROUP = 0x09, "Endurance Group Information";
    PREDICTABLE_LATENCY = 0x0A, "Predictable Latency Per NVM Set";
    PREDICTABLE_LATENCY_EVENTS = 0x0B, "Predictable Latency Event Aggregate";
    ANA = 0x0C, "Asymmetric Namespace Access";
    PERSISTENT_EVENT = 0x0D, "Persistent Event Log";
    LBA_STATUS = 0x0E, "LBA Status Information";
    ENDURANCE_GROUP_EVENTS = 0x0F, "Endurance Group Event Aggregate";
    MEDIA_UNIT_STATUS = 0x10, "Media Unit Status";
    SUPPORTED_CAPACITY = 0x11, "Supported Capacity Configuration List";
    FEATURE_EFFECTS = 0x12, "Feature Identifiers Supported and Effects";
    MI_EFFECTS = 0x13, "NVMe-MI Commands Supported and Effects";
    LOCKDOWN = 0x14, "Command and Feature Lockdown";
    BOOT_PARTITION = 0x15, "Boot Partition";
    ROTATIONAL_MEDIA = 0x16, "Rotational Media Information";
    DISCOVERY = 0x70, "Discovery";
    RESERVATION = 0x80, "Reservation Notification";
    SANITIZE = 0x81, "Sanitize Status";
}

/// Returns the value of a 128-bit little-endian count.
#[inline]
pub const fn u128(bytes: &[u8; 16]) -> u128 {
    u128::from_le_bytes(*bytes)
}

/// Returns a 128-bit count as the bytes of its field.
#[inline]
pub const fn bytes(value: u128) -> [u8; 16] {
    value.to_le_bytes()
}

/// One entry of the Error Information log page (LID 01h), the newest first.
///
/// NVMe Base 2.0c, 5.16.1.2 (Error Information).
///
/// The error count is retained across power cycles. A controller writes an entry for a failed command whose
/// completion has the More bit set, and may write others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ErrorEntry {
    /// Number of the error, from 1 over the controller's life; 0 marks an empty entry.
    pub error_count: u64,
    /// Submission queue of the command.
    pub sqid: u16,
    /// Command identifier; FFFFh when the error belongs to no single command.
    pub cid: u16,
    /// Status field of the completion in bits 15:1; bit 0 may hold the phase tag.
    pub phase_status: u16,
    /// Location of the error in the command: byte in bits 7:0 and bit in 10:8; FFFFh when unspecific.
    pub parameter_error_location: u16,
    /// First block that the error concerns.
    pub lba: u64,
    /// Namespace.
    pub nsid: u32,
    /// Log page with vendor specific information; 0 is none.
    pub vendor_log_page: u8,
    /// Transport type: 0 is not a fabric.
    pub trtype: u8,
    /// Reserved.
    pub reserved30: [u8; 2],
    /// Command specific information.
    pub command_specific: u64,
    /// Transport type specific information.
    pub trtype_specific: u16,
    /// Reserved.
    pub reserved42: [u8; 22],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

impl ErrorEntry {
    /// Returns the status of the command.
    #[inline]
    pub const fn status(&self) -> super::Status {
        super::Status(self.phase_status >> 1)
    }
}

offsets!(ErrorEntry: error_count @ 0, sqid @ 8, cid @ 10, phase_status @ 12,
    parameter_error_location @ 14, lba @ 16, nsid @ 24, vendor_log_page @ 28, trtype @ 29,
    command_specific @ 32, trtype_specific @ 40);

/// Critical Warning bits of [`SmartData`].
pub mod critical_warning {
    /// Available spare has fallen below its threshold.
    pub const SPARE: u8 = 1 << 0;
    /// A temperature is over or under its threshold.
    pub const TEMPERATURE: u8 = 1 << 1;
    /// The subsystem's reliability is degraded.
    pub const RELIABILITY: u8 = 1 << 2;
    /// All media is read only.
    pub const READ_ONLY: u8 = 1 << 3;
    /// The volatile memory backup has failed.
    pub const BACKUP: u8 = 1 << 4;
    /// The persistent memory region is read only or unreliable.
    pub const PERSISTENT_MEMORY: u8 = 1 << 5;
}

/// SMART / Health Information (LID 02h).
///
/// NVMe Base 2.0c, 5.16.1.3 (SMART / Health Information).
///
/// Counters cover the life of the drive and are retained across power cycles; values of a namespace are
/// available only if [`lpa::SMART_PER_NAMESPACE`](super::identify::lpa::SMART_PER_NAMESPACE) is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SmartData {
    /// Critical warnings: [`critical_warning`].
    pub critical_warning: u8,
    /// Composite temperature in kelvins, little endian; see [`kelvins`](Self::kelvins).
    pub temperature: [u8; 2],
    /// Available spare, in percent.
    pub available_spare: u8,
    /// Available spare threshold, in percent.
    pub spare_threshold: u8,
    /// Share of the estimated life that is used, in percent; may exceed 100, stops at 255.
    pub percentage_used: u8,
    /// Endurance group critical warning summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data read, in thousands of 512-byte units, rounded up.
    pub data_units_read: [u8; 16],
    /// Data written, in thousands of 512-byte units, rounded up.
    pub data_units_written: [u8; 16],
    /// Read-like commands completed (Read, Compare, Verify).
    pub host_reads: [u8; 16],
    /// Write commands completed.
    pub host_writes: [u8; 16],
    /// Minutes with at least one I/O command outstanding.
    pub busy_minutes: [u8; 16],
    /// Power cycles.
    pub power_cycles: [u8; 16],
    /// Power-on hours.
    pub power_on_hours: [u8; 16],
    /// Losses of power without a shutdown.
    pub unsafe_shutdowns: [u8; 16],
    /// Media and data integrity errors.
    pub media_errors: [u8; 16],
    /// Entries ever made in the error log.
    pub error_log_entries: [u8; 16],
    /// Minutes at or above WCTEMP and below CCTEMP.
    pub warning_minutes: u32,
    /// Minutes at or above CCTEMP.
    pub critical_minutes: u32,
    /// Temperature sensors 1 to 8 in kelvins; 0 is not implemented.
    pub temperature_sensors: [u16; 8],
    /// Thermal management temperature 1: transitions.
    pub tmt1_transitions: u32,
    /// Thermal management temperature 2: transitions.
    pub tmt2_transitions: u32,
    /// Thermal management temperature 1: seconds.
    pub tmt1_seconds: u32,
    /// Thermal management temperature 2: seconds.
    pub tmt2_seconds: u32,
    /// Reserved.
    pub reserved232: [u8; 280],
}
const _: () = assert!(size_of::<SmartData>() == 512);

offsets!(SmartData: critical_warning @ 0, temperature @ 1, available_spare @ 3, spare_threshold @ 4,
    percentage_used @ 5, endurance_group_warning @ 6, data_units_read @ 32, data_units_written @ 48,
    host_reads @ 64, host_writes @ 80, busy_minutes @ 96, power_cycles @ 112, power_on_hours @ 128,
    unsafe_shutdowns @ 144, media_errors @ 160, error_log_entries @ 176, warning_minutes @ 192,
    critical_minutes @ 196, temperature_sensors @ 200, tmt1_transitions @ 216,
    tmt2_transitions @ 220, tmt1_seconds @ 224, tmt2_seconds @ 228);

impl SmartData {
    /// Bytes in one data unit: 1,000 times 512.
    pub const DATA_UNIT_BYTES: u64 = 512_000;

    /// Returns the composite temperature in kelvins.
    pub const fn kelvins(&self) -> u16 {
        u16::from_le_bytes(self.temperature)
    }

    /// Sets the composite temperature in kelvins.
    pub const fn set_kelvins(&mut self, kelvins: u16) {
        self.temperature = kelvins.to_le_bytes();
    }
}

/// Firmware Slot Information (LID 03h).
///
/// NVMe Base 2.0c, 5.16.1.4 (Firmware Slot Information).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FirmwareSlots {
    /// Active firmware: slot in bits 2:0, slot after the next reset in bits 6:4 (0 is unchanged).
    pub afi: u8,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// Revisions in slots 1 to 7, ASCII; all zero is an empty slot.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}
const _: () = assert!(size_of::<FirmwareSlots>() == 512);
offsets!(FirmwareSlots: afi @ 0, frs @ 8, reserved64 @ 64);

impl FirmwareSlots {
    /// Returns the running slot, 1 to 7.
    pub const fn active_slot(&self) -> u8 {
        self.afi & 7
    }

    /// Returns the slot to be activated at the next controller reset, or 0 when none is selected.
    pub const fn next_slot(&self) -> u8 {
        self.afi >> 4 & 7
    }
}

/// Bits of the dwords of [`CommandsSupported`].
pub mod effects {
    /// The command is supported. All other bits are valid only together with this one.
    pub const SUPPORTED: u32 = 1 << 0;
    /// Logical block content may change.
    pub const BLOCK_CONTENT: u32 = 1 << 1;
    /// Namespace capabilities may change.
    pub const NAMESPACE_CAPABILITY: u32 = 1 << 2;
    /// The set of namespaces may change.
    pub const NAMESPACE_INVENTORY: u32 = 1 << 3;
    /// Controller capabilities may change.
    pub const CONTROLLER_CAPABILITY: u32 = 1 << 4;
    /// Bits 18:16, submission and execution: 0 no restriction, 1 alone on its namespace, 2 alone on every namespace.
    pub const SUBMISSION: u32 = 7 << 16;
    /// UUID selection is supported.
    pub const UUID_SELECTION: u32 = 1 << 19;
    /// Scope (bits 31:20): one namespace.
    pub const SCOPE_NAMESPACE: u32 = 1 << 20;
    /// Scope: the controller.
    pub const SCOPE_CONTROLLER: u32 = 1 << 21;
    /// Scope: an NVM set.
    pub const SCOPE_NVM_SET: u32 = 1 << 22;
    /// Scope: an endurance group.
    pub const SCOPE_ENDURANCE_GROUP: u32 = 1 << 23;
    /// Scope: a domain.
    pub const SCOPE_DOMAIN: u32 = 1 << 24;
    /// Scope: the NVM subsystem.
    pub const SCOPE_SUBSYSTEM: u32 = 1 << 25;
}

/// Commands Supported and Effects (LID 05h): one dword of [`effects`] per opcode.
///
/// NVMe Base 2.0c, 5.16.1.6 (Commands Supported and Effects).
///
/// A driver that passes commands of its users through to the controller uses it to decide which of them need
/// exclusive access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CommandsSupported {
    /// Admin commands, by opcode.
    pub acs: [u32; 256],
    /// I/O commands, by opcode.
    pub iocs: [u32; 256],
    /// Reserved.
    pub reserved2048: [u8; 2048],
}
const _: () = assert!(size_of::<CommandsSupported>() == 4096);
offsets!(CommandsSupported: acs @ 0, iocs @ 1024, reserved2048 @ 2048);

/// Supported Log Pages (LID 00h): one dword per log page identifier; bit 0 when it is supported.
///
/// NVMe Base 2.0c, 5.16.1.1 (Supported Log Pages).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SupportedPages {
    /// LID supported and index offset supported bits, by log page identifier.
    pub lids: [u32; 256],
}
const _: () = assert!(size_of::<SupportedPages>() == 1024);

/// Feature Identifiers Supported and Effects (LID 12h): one dword of [`effects`] per feature identifier.
/// Bits 18:16 are reserved here.
///
/// NVMe Base 2.0c, "Feature Identifiers Supported and Effects".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FeatureEffects {
    /// Effects by feature identifier.
    pub fis: [u32; 256],
}
const _: () = assert!(size_of::<FeatureEffects>() == 1024);

/// NVMe-MI Commands Supported and Effects (LID 13h): one dword of [`effects`] per NVMe-MI opcode.
///
/// NVMe Base 2.0c, "NVMe-MI Commands Supported and Effects".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MiEffects {
    /// Effects by opcode of NVMe-MI.
    pub mcs: [u32; 256],
    /// Reserved.
    pub reserved1024: [u8; 3072],
}
const _: () = assert!(size_of::<MiEffects>() == 4096);
offsets!(MiEffects: mcs @ 0, reserved1024 @ 1024);

/// Sanitize Status (LID 81h).
///
/// NVMe Base 2.0c, "Sanitize Status".
///
/// A sanitize operation continues across resets and power cycles, so a driver reads this page after a reset,
/// too, before it relies on any data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SanitizeStatus {
    /// Progress (SPROG): a fraction of 65,536 while an operation is in progress, else FFFFh.
    pub sprog: u16,
    /// Status (SSTAT): see [`state`](Self::state), [`passes`](Self::passes),
    /// [`GLOBAL_DATA_ERASED`](Self::GLOBAL_DATA_ERASED).
    pub sstat: u16,
    /// Command dword 10 of the command that started the last operation (SCDW10).
    pub scdw10: u32,
    /// Estimated seconds of an overwrite with 16 passes; FFFFFFFFh is not reported.
    pub eto: u32,
    /// Estimated seconds of a block erase.
    pub etbe: u32,
    /// Estimated seconds of a cryptographic erase.
    pub etce: u32,
    /// The same estimate as `eto`, with no-deallocate media modification.
    pub etond: u32,
    /// The same estimate as `etbe`, with no-deallocate media modification.
    pub etbend: u32,
    /// The same estimate as `etce`, with no-deallocate media modification.
    pub etcend: u32,
    /// Reserved.
    pub reserved32: [u8; 480],
}
const _: () = assert!(size_of::<SanitizeStatus>() == 512);
offsets!(SanitizeStatus: sprog @ 0, sstat @ 2, scdw10 @ 4, eto @ 8, etbe @ 12, etce @ 16, etond @ 20,
    etbend @ 24, etcend @ 28, reserved32 @ 32);

/// The state of the most recent sanitize operation (SSTAT bits 2:0).
pub mod sanitize_state {
    /// No sanitize operation has run.
    pub const NEVER: u16 = 0;
    /// The last operation completed successfully.
    pub const SUCCESS: u16 = 1;
    /// An operation is in progress.
    pub const IN_PROGRESS: u16 = 2;
    /// The last operation failed.
    pub const FAILED: u16 = 3;
    /// The last operation completed successfully, with unrequested deallocation.
    pub const DEALLOCATED: u16 = 4;
}

impl SanitizeStatus {
    /// SSTAT bit 8: no user data was written since the last successful operation.
    pub const GLOBAL_DATA_ERASED: u16 = 1 << 8;
    /// Value of `sprog` while no operation is in progress.
    pub const IDLE: u16 = 0xFFFF;
    /// Value of an estimated time that is not reported.
    pub const NOT_REPORTED: u32 = u32::MAX;

    /// Returns SSTAT bits 2:0: one of [`sanitize_state`].
    pub const fn state(&self) -> u16 {
        self.sstat & 7
    }

    /// Returns SSTAT bits 7:3: completed passes of an overwrite.
    pub const fn passes(&self) -> u16 {
        self.sstat >> 3 & 0x1F
    }

    /// True if no user data was written since the last successful operation.
    pub const fn is_global_data_erased(&self) -> bool {
        self.sstat & Self::GLOBAL_DATA_ERASED != 0
    }
}
