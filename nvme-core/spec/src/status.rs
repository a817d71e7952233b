//! The status field of a completion: status code type, status code and retry hints.
//!
//! NVMe Base 2.0c, 3.3.3.2.1 (Status Field Definition).

use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A completion's status field without the phase tag, as 15 bits.
///
/// Status code in bits 7:0, status code type in 10:8, command retry delay in 12:11, more in 13, do
/// not retry in 14. Every value is representable; the ones that no revision names have no
/// [`name`](Self::name).
///
/// NVMe Base 2.0c, 3.3.3.2.1 (Status Field Definition).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Status(pub u16);

/// Status code types: the table that the status code belongs to.
pub mod sct {
    /// Generic command status.
    pub const GENERIC: u8 = 0x0;
    /// Command specific status: the meaning of a code depends on the command.
    pub const COMMAND_SPECIFIC: u8 = 0x1;
    /// Media and data integrity errors.
    pub const MEDIA: u8 = 0x2;
    /// Path related status.
    pub const PATH: u8 = 0x3;
    /// Vendor specific.
    pub const VENDOR: u8 = 0x7;
}

const CODE: u16 = 0x07FF;
const CRD_SHIFT: u16 = 11;
const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

impl Status {
    /// Makes a status with this type and code, no retry delay, more and do-not-retry clear.
    ///
    /// Bits of `sct` above 2:0 are ignored.
    #[inline]
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((sct as u16 & 7) << 8 | sc as u16)
    }

    /// Returns the status code type, 0 to 7: one of [`sct`] or a reserved value.
    #[inline]
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Returns the status code.
    #[inline]
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// Returns type and code together, `sct << 8 | sc`, as in the named constants.
    #[inline]
    pub const fn code(self) -> u16 {
        self.0 & CODE
    }

    /// Returns the command retry delay: 0 is none, 1 to 3 select CRDT1 to CRDT3 of Identify Controller.
    #[inline]
    pub const fn crd(self) -> u8 {
        (self.0 >> CRD_SHIFT) as u8 & 3
    }

    /// True if the error log page holds an entry for this command (More).
    #[inline]
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }

    /// True if the same command would fail again (Do Not Retry).
    ///
    /// A command without this bit may succeed when it is repeated, after the delay of [`crd`](Self::crd) if
    /// there is one.
    #[inline]
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// Returns this status with do-not-retry set.
    #[inline]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// Returns this status with more set.
    #[inline]
    pub const fn with_more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// Returns this status with command retry delay `crd`; only its bits 1:0 are used.
    #[inline]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !(3 << CRD_SHIFT) | (crd as u16 & 3) << CRD_SHIFT)
    }

    /// True if the command succeeded: type 0, code 0.
    #[inline]
    pub const fn is_success(self) -> bool {
        self.code() == 0
    }

    /// True if `self` and `other` have the same type and code, whatever their retry hints.
    #[inline]
    pub const fn is(self, other: Self) -> bool {
        self.code() == other.code()
    }
}

macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $(#[doc = $text] pub const $name: Self = Self($code);)*

            /// Every status that has a name, in order of [`code`](Self::code).
            pub const NAMED: &'static [Self] = &[$(Self($code)),*];

            /// Returns the specification's name of this type and code, or `None` for reserved and vendor
            /// values.
            ///
            /// Codes of the fabrics commands share numbers with those of the NVM command set; this returns
            /// the latter.
            pub const fn name(self) -> Option<&'static str> {
                match self.code() {
                    $($code => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0x000, "Successful Completion";
    INVALID_OPCODE = 0x001, "Invalid Command Opcode";
    INVALID_FIELD = 0x002, "Invalid Field in Command";
    CID_CONFLICT = 0x003, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0x004, "Data Transfer Error";
    ABORTED_POWER_LOSS = 0x005, "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0x006, "Internal Error";
    ABORT_REQUESTED = 0x007, "Command Abort Requested";
    ABORTED_SQ_DELETION = 0x008, "Command Aborted due to SQ Deletion";
    ABORTED_FAILED_FUSED = 0x009, "Command Aborted due to Failed Fused Command";
    ABORTED_MISSING_FUSED = 0x00A, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0x00B, "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0x00C, "Command Sequence Error";
    INVALID_SGL_SEGMENT = 0x00D, "Invalid SGL Segment Descriptor";
    INVALID_SGL_COUNT = 0x00E, "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = 0x00F, "Data SGL Length Invalid";
    METADATA_SGL_LENGTH_INVALID = 0x010, "Metadata SGL Length Invalid";
    SGL_TYPE_INVALID = 0x011, "SGL Descriptor Type Invalid";
    INVALID_CMB_USE = 0x012, "Invalid Use of Controller Memory Buffer";
    INVALID_PRP_OFFSET = 0x013, "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, "Atomic Write Unit Exceeded";
    OPERATION_DENIED = 0x015, "Operation Denied";
    SGL_OFFSET_INVALID = 0x016, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT_FORMAT = 0x018, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0x019, "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = 0x01A, "Keep Alive Timeout Invalid";
    ABORTED_PREEMPT = 0x01B, "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = 0x01C, "Sanitize Failed";
    SANITIZE_IN_PROGRESS = 0x01D, "Sanitize In Progress";
    SGL_GRANULARITY_INVALID = 0x01E, "SGL Data Block Granularity Invalid";
    NOT_SUPPORTED_FOR_CMB_QUEUE = 0x01F, "Command Not Supported for Queue in CMB";
    NAMESPACE_WRITE_PROTECTED = 0x020, "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0x021, "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0x022, "Transient Transport Error";
    PROHIBITED_BY_LOCKDOWN = 0x023, "Command Prohibited by Command and Feature Lockdown";
    ADMIN_MEDIA_NOT_READY = 0x024, "Admin Command Media Not Ready";
    LBA_OUT_OF_RANGE = 0x080, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0x081, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0x082, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0x083, "Reservation Conflict";
    FORMAT_IN_PROGRESS = 0x084, "Format In Progress";
    INVALID_VALUE_SIZE = 0x085, "Invalid Value Size";
    INVALID_KEY_SIZE = 0x086, "Invalid Key Size";
    KEY_DOES_NOT_EXIST = 0x087, "KV Key Does Not Exist";
    UNRECOVERED_ERROR = 0x088, "Unrecovered Error";
    KEY_EXISTS = 0x089, "Key Exists";

    INVALID_CQ = 0x100, "Completion Queue Invalid";
    INVALID_QID = 0x101, "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = 0x102, "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = 0x103, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 0x105, "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = 0x106, "Invalid Firmware Slot";
    INVALID_FIRMWARE_IMAGE = 0x107, "Invalid Firmware Image";
    INVALID_INTERRUPT_VECTOR = 0x108, "Invalid Interrupt Vector";
    INVALID_LOG_PAGE = 0x109, "Invalid Log Page";
    INVALID_FORMAT = 0x10A, "Invalid Format";
    FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x10B, "Firmware Activation Requires Conventional Reset";
    INVALID_QUEUE_DELETION = 0x10C, "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = 0x10D, "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 0x10E, "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F, "Feature Not Namespace Specific";
    FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x110, "Firmware Activation Requires NVM Subsystem Reset";
    FIRMWARE_NEEDS_CONTROLLER_RESET = 0x111, "Firmware Activation Requires Controller Level Reset";
    FIRMWARE_NEEDS_MAX_TIME = 0x112, "Firmware Activation Requires Maximum Time Violation";
    FIRMWARE_ACTIVATION_PROHIBITED = 0x113, "Firmware Activation Prohibited";
    OVERLAPPING_RANGE = 0x114, "Overlapping Range";
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115, "Namespace Insufficient Capacity";
    NAMESPACE_ID_UNAVAILABLE = 0x116, "Namespace Identifier Unavailable";
    NAMESPACE_ALREADY_ATTACHED = 0x118, "Namespace Already Attached";
    NAMESPACE_IS_PRIVATE = 0x119, "Namespace Is Private";
    NAMESPACE_NOT_ATTACHED = 0x11A, "Namespace Not Attached";
    THIN_PROVISIONING_NOT_SUPPORTED = 0x11B, "Thin Provisioning Not Supported";
    CONTROLLER_LIST_INVALID = 0x11C, "Controller List Invalid";
    SELF_TEST_IN_PROGRESS = 0x11D, "Device Self-test In Progress";
    BOOT_PARTITION_WRITE_PROHIBITED = 0x11E, "Boot Partition Write Prohibited";
    INVALID_CONTROLLER_ID = 0x11F, "Invalid Controller Identifier";
    INVALID_SECONDARY_STATE = 0x120, "Invalid Secondary Controller State";
    INVALID_RESOURCE_COUNT = 0x121, "Invalid Number of Controller Resources";
    INVALID_RESOURCE_ID = 0x122, "Invalid Resource Identifier";
    SANITIZE_PROHIBITED_PMR = 0x123, "Sanitize Prohibited While Persistent Memory Region is Enabled";
    ANA_GROUP_ID_INVALID = 0x124, "ANA Group Identifier Invalid";
    ANA_ATTACH_FAILED = 0x125, "ANA Attach Failed";
    INSUFFICIENT_CAPACITY = 0x126, "Insufficient Capacity";
    NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 0x127, "Namespace Attachment Limit Exceeded";
    LOCKDOWN_NOT_SUPPORTED = 0x128, "Prohibition of Command Execution Not Supported";
    COMMAND_SET_NOT_SUPPORTED = 0x129, "I/O Command Set Not Supported";
    COMMAND_SET_NOT_ENABLED = 0x12A, "I/O Command Set Not Enabled";
    COMMAND_SET_COMBINATION_REJECTED = 0x12B, "I/O Command Set Combination Rejected";
    INVALID_COMMAND_SET = 0x12C, "Invalid I/O Command Set";
    IDENTIFIER_UNAVAILABLE = 0x12D, "Identifier Unavailable";
    STREAM_ALLOCATION_FAILED = 0x17F, "Stream Resource Allocation Failed";
    CONFLICTING_ATTRIBUTES = 0x180, "Conflicting Attributes";
    INVALID_PROTECTION_INFORMATION = 0x181, "Invalid Protection Information";
    WRITE_TO_READ_ONLY = 0x182, "Attempted Write to Read Only Range";
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183, "Command Size Limit Exceeded";
    ZONE_BOUNDARY_ERROR = 0x1B8, "Zoned Boundary Error";
    ZONE_IS_FULL = 0x1B9, "Zone Is Full";
    ZONE_IS_READ_ONLY = 0x1BA, "Zone Is Read Only";
    ZONE_IS_OFFLINE = 0x1BB, "Zone Is Offline";
    ZONE_INVALID_WRITE = 0x1BC, "Zone Invalid Write";
    TOO_MANY_ACTIVE_ZONES = 0x1BD, "Too Many Active Zones";
    TOO_MANY_OPEN_ZONES = 0x1BE, "Too Many Open Zones";
    INVALID_ZONE_TRANSITION = 0x1BF, "Invalid Zone State Transition";

    WRITE_FAULT = 0x280, "Write Fault";
    UNRECOVERED_READ_ERROR = 0x281, "Unrecovered Read Error";
    GUARD_CHECK_ERROR = 0x282, "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK_ERROR = 0x283, "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK_ERROR = 0x284, "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = 0x285, "Compare Failure";
    ACCESS_DENIED = 0x286, "Access Denied";
    DEALLOCATED_BLOCK = 0x287, "Deallocated or Unwritten Logical Block";
    STORAGE_TAG_CHECK_ERROR = 0x288, "End-to-end Storage Tag Check Error";

    INTERNAL_PATH_ERROR = 0x300, "Internal Path Error";
    ANA_PERSISTENT_LOSS = 0x301, "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 0x302, "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 0x303, "Asymmetric Access Transition";
    CONTROLLER_PATHING_ERROR = 0x360, "Controller Pathing Error";
    HOST_PATHING_ERROR = 0x370, "Host Pathing Error";
    ABORTED_BY_HOST = 0x371, "Command Aborted By Host";
}

impl fmt::Display for Status {
    /// `Invalid Field in Command (0x0002, DNR)`: the name, type and code, and the hints that are set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or(match self.sct() {
            sct::GENERIC => "Unknown generic status",
            sct::COMMAND_SPECIFIC => "Unknown command specific status",
            sct::MEDIA => "Unknown media error",
            sct::PATH => "Unknown path error",
            sct::VENDOR => "Vendor specific status",
            _ => "Unknown status type",
        });
        write!(f, "{name} ({:#06x}", self.code())?;
        if self.crd() != 0 {
            write!(f, ", CRD {}", self.crd())?;
        }
        if self.more() {
            f.write_str(", More")?;
        }
        if self.dnr() {
            f.write_str(", DNR")?;
        }
        f.write_str(")")
    }
}

impl core::error::Error for Status {}
