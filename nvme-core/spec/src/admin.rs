//! Admin commands: opcodes, builders and the values of their fields.
//!
//! NVMe Base 2.0c, 5 (Admin Command Set).

use super::addr::{Cid, Iova, Nsid, Qid};
use super::command::Sqe;
use bitfield::bitfield;

/// Admin opcodes.
pub mod opcode {
    /// Delete I/O Submission Queue.
    pub const DELETE_IO_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_IO_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_IO_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_IO_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    /// Firmware Commit.
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    /// Firmware Image Download.
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    /// Device Self-test.
    pub const DEVICE_SELF_TEST: u8 = 0x14;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Directive Send.
    pub const DIRECTIVE_SEND: u8 = 0x19;
    /// Directive Receive.
    pub const DIRECTIVE_RECEIVE: u8 = 0x1A;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7C;
    /// Format NVM.
    pub const FORMAT_NVM: u8 = 0x80;
    /// Security Send.
    pub const SECURITY_SEND: u8 = 0x81;
    /// Security Receive.
    pub const SECURITY_RECEIVE: u8 = 0x82;
    /// Sanitize.
    pub const SANITIZE: u8 = 0x84;
    /// Get LBA Status.
    pub const GET_LBA_STATUS: u8 = 0x86;
}

/// Controller or Namespace Structure (CNS): the data structure that Identify returns (CDW10 bits 7:0).
pub mod cns {
    /// One namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// The controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace identifiers above CDW1.NSID.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace identification descriptors.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// Command-set specific namespace data (2.0).
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// Command-set specific controller data (2.0).
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// Command-set independent namespace data (2.0).
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Allocated namespace identifiers.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// One allocated namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers attached to a namespace.
    pub const NAMESPACE_CONTROLLERS: u8 = 0x12;
    /// Controllers of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
}

/// The parameters of a queue to be created.
///
/// The ring has to stay allocated until the queue was deleted or the controller was reset, since the
/// controller reads or writes it at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueParams {
    /// Identifier, 1 to 65,535.
    pub qid: Qid,
    /// Entries, 2 to 65,536. Any other number is sent as a size of 1 entry, which every controller rejects
    /// with Invalid Queue Size.
    pub entries: u32,
    /// Page-aligned start of the physically contiguous ring.
    pub iova: Iova,
}

/// CDW11 bit 0 of Create I/O SQ/CQ: physically contiguous.
pub const QUEUE_CONTIGUOUS: u32 = 1 << 0;
/// CDW11 bit 1 of Create I/O CQ: interrupts enabled.
pub const CQ_INTERRUPTS: u32 = 1 << 1;

fn create_queue(opcode: u8, params: QueueParams) -> Sqe {
    let mut sqe = Sqe::new(opcode, Nsid::NONE).with_prps(params.iova.0, 0);
    let entries_z = match params.entries {
        2..=65_536 => params.entries - 1,
        _ => 0,
    };
    sqe.cdw10 = u32::from(params.qid.0) | entries_z << 16;
    sqe.cdw11 = QUEUE_CONTIGUOUS;
    sqe
}

/// Makes Create I/O Completion Queue: contiguous, with interrupt vector `vector` or none (polled).
///
/// The ring must be zeroed before the command is sent.
///
/// NVMe Base 2.0c, 5.4 (Create I/O Completion Queue command).
pub fn create_io_cq(params: QueueParams, vector: Option<u16>) -> Sqe {
    let mut sqe = create_queue(opcode::CREATE_IO_CQ, params);
    if let Some(vector) = vector {
        sqe.cdw11 |= CQ_INTERRUPTS | u32::from(vector) << 16;
    }
    sqe
}

/// Makes Create I/O Submission Queue: contiguous, bound to completion queue `cqid`.
///
/// NVMe Base 2.0c, 5.5 (Create I/O Submission Queue command).
pub fn create_io_sq(params: QueueParams, cqid: Qid) -> Sqe {
    let mut sqe = create_queue(opcode::CREATE_IO_SQ, params);
    sqe.cdw11 |= u32::from(cqid.0) << 16;
    sqe
}

/// Makes Delete I/O Submission Queue. On success the controller has completed or aborted every command in it.
///
/// NVMe Base 2.0c, 5.7 (Delete I/O Submission Queue command).
pub fn delete_io_sq(qid: Qid) -> Sqe {
    let mut sqe = Sqe::new(opcode::DELETE_IO_SQ, Nsid::NONE);
    sqe.cdw10 = u32::from(qid.0);
    sqe
}

/// Makes Delete I/O Completion Queue; its submission queues must have been deleted before.
///
/// NVMe Base 2.0c, 5.6 (Delete I/O Completion Queue command).
pub fn delete_io_cq(qid: Qid) -> Sqe {
    let mut sqe = Sqe::new(opcode::DELETE_IO_CQ, Nsid::NONE);
    sqe.cdw10 = u32::from(qid.0);
    sqe
}

/// Makes Identify: 4,096 bytes of structure `cns`.
///
/// NVMe Base 2.0c, 5.17 (Identify command).
pub fn identify(cns: u8, nsid: Nsid) -> Sqe {
    let mut sqe = Sqe::new(opcode::IDENTIFY, nsid);
    sqe.cdw10 = u32::from(cns);
    sqe
}

/// Makes Get Log Page: `bytes` of page `lid` from byte `offset` on. It asks for the whole dwords that fit
/// into `bytes`, and for one at least.
///
/// NVMe Base 2.0c, 5.16 (Get Log Page command).
pub fn get_log_page(lid: u8, nsid: Nsid, bytes: u32, offset: u64) -> Sqe {
    let numd_z = (bytes / 4).saturating_sub(1);
    let mut sqe = Sqe::new(opcode::GET_LOG_PAGE, nsid);
    sqe.cdw10 = u32::from(lid) | numd_z << 16;
    sqe.cdw11 = numd_z >> 16;
    sqe.cdw12 = offset as u32;
    sqe.cdw13 = (offset >> 32) as u32;
    sqe
}

/// The fields of a Get Log Page command beside page, length and offset.
///
/// NVMe Base 2.0c, 5.16 (Get Log Page command).
///
/// The default is a plain read of a page. Controllers of older revisions ignore the fields that they do not
/// know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Log specific field, 7 bits.
    pub lsp: u8,
    /// Log specific identifier.
    pub lsi: u16,
    /// Retain asynchronous event: reading the page does not clear the event, so no further events of its type
    /// are reported.
    pub rae: bool,
    /// UUID index, 7 bits; 0 is none.
    pub uuid_index: u8,
    /// Command set identifier.
    pub csi: u8,
    /// The offset is an index into the page's list of structures instead of bytes.
    pub index_offset: bool,
}

impl LogOptions {
    /// Sets these fields in `sqe`, a Get Log Page command.
    pub fn apply(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 |= u32::from(self.lsp & 0x7F) << 8 | u32::from(self.rae) << 15;
        sqe.cdw11 |= u32::from(self.lsi) << 16;
        sqe.cdw14 |= u32::from(self.uuid_index & 0x7F)
            | u32::from(self.index_offset) << 23
            | u32::from(self.csi) << 24;
        sqe
    }
}

/// Returns the number of bytes that a Get Log Page command asks for.
pub const fn log_page_bytes(sqe: &Sqe) -> u64 {
    let numd_z = (sqe.cdw10 >> 16) as u64 | ((sqe.cdw11 & 0xFFFF) as u64) << 16;
    (numd_z + 1) * 4
}

/// Value that Get Features returns (CDW10 bits 10:8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureSelect {
    /// The current value.
    Current,
    /// The value after a reset without saved values.
    Default,
    /// The saved value.
    Saved,
    /// Attributes of the feature: saveable, namespace specific, changeable.
    Capabilities,
}

/// Makes Get Features.
///
/// NVMe Base 2.0c, 5.15 (Get Features command).
pub fn get_features(fid: u8, select: FeatureSelect, nsid: Nsid, cdw11: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode::GET_FEATURES, nsid);
    sqe.cdw10 = u32::from(fid) | (select as u32) << 8;
    sqe.cdw11 = cdw11;
    sqe
}

/// Makes Set Features, not saved across resets.
///
/// NVMe Base 2.0c, 5.27 (Set Features command).
pub fn set_features(fid: u8, nsid: Nsid, cdw11: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode::SET_FEATURES, nsid);
    sqe.cdw10 = u32::from(fid);
    sqe.cdw11 = cdw11;
    sqe
}

/// Makes Abort of command `cid` of submission queue `sqid`. Best effort: dword 0 bit 0 of the completion is 1
/// if the command was not aborted.
///
/// NVMe Base 2.0c, 5.1 (Abort command).
pub fn abort(sqid: Qid, cid: Cid) -> Sqe {
    let mut sqe = Sqe::new(opcode::ABORT, Nsid::NONE);
    sqe.cdw10 = u32::from(sqid.0) | u32::from(cid.0) << 16;
    sqe
}

/// Makes Asynchronous Event Request, which completes when the controller has an event to report.
///
/// NVMe Base 2.0c, 5.2 (Asynchronous Event Request command).
pub fn async_event_request() -> Sqe {
    Sqe::new(opcode::ASYNC_EVENT_REQUEST, Nsid::NONE)
}

/// Makes Keep Alive.
///
/// NVMe Base 2.0c, 5.18 (Keep Alive command).
pub fn keep_alive() -> Sqe {
    Sqe::new(opcode::KEEP_ALIVE, Nsid::NONE)
}

bitfield! {
    /// Command dword 10 of Format NVM.
    ///
    /// NVMe Base 2.0c, 5.14 (Format NVM command).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Format(u32);
    impl Debug;
    u8;
    /// LBA format, bits 3:0 of its index.
    pub lbafl, set_lbafl: 3, 0;
    /// Metadata settings: metadata follows each block in the data buffer.
    pub bool, mset, set_mset: 4;
    /// Protection information: 0 none, 1 to 3 its type.
    pub pi, set_pi: 7, 5;
    /// Protection information location: the first bytes of the metadata instead of the last.
    pub bool, pil, set_pil: 8;
    /// Secure erase settings: 0 none, 1 user data erase, 2 cryptographic erase.
    pub ses, set_ses: 11, 9;
    /// LBA format, bits 5:4 of its index.
    pub lbafu, set_lbafu: 13, 12;
}

impl Format {
    /// Selects LBA format `lbaf` (0 to 63) with secure erase settings `ses` (0 to 7); no metadata settings,
    /// no protection.
    ///
    /// A number outside these ranges makes a command with `ses` 7, a reserved value that the controller
    /// rejects; cut to its field it could name another format, and the format would destroy data for nothing.
    pub fn new(lbaf: u8, ses: u8) -> Self {
        let mut format = Self(0);
        format.set_lbafl(lbaf & 0xF);
        format.set_lbafu(lbaf >> 4 & 3);
        format.set_ses(if lbaf > 63 { 7 } else { ses.min(7) });
        format
    }

    /// Makes Format NVM of namespace `nsid`, or of every namespace ([`Nsid::ALL`]).
    pub fn command(self, nsid: Nsid) -> Sqe {
        let mut sqe = Sqe::new(opcode::FORMAT_NVM, nsid);
        sqe.cdw10 = self.0;
        sqe
    }
}

/// Makes Format NVM: LBA format `lbaf` (0 to 63), no protection, `ses` 0 none, 1 user data erase, 2
/// cryptographic.
///
/// NVMe Base 2.0c, 5.14 (Format NVM command).
pub fn format_nvm(nsid: Nsid, lbaf: u8, ses: u8) -> Sqe {
    Format::new(lbaf, ses).command(nsid)
}

/// Action of a Sanitize command (CDW10 bits 2:0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SanitizeAction {
    /// Leaves the failed state of an earlier operation that allowed it ([`SanitizeFields::unrestricted`]).
    ExitFailureMode = 1,
    /// Starts a block erase.
    BlockErase = 2,
    /// Starts an overwrite.
    Overwrite = 3,
    /// Starts a cryptographic erase.
    CryptoErase = 4,
}

/// The fields of a Sanitize command.
///
/// A sanitize operation cannot be stopped once it has started; until it has completed, most I/O commands fail
/// with Sanitize In Progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SanitizeFields {
    /// Sanitize action (SANACT).
    pub action: SanitizeAction,
    /// Allow unrestricted sanitize exit (AUSE): after a failure the drive may be used again without a
    /// successful sanitize operation.
    pub unrestricted: bool,
    /// Overwrite pass count (OWPASS), 1 to 16; 0 is sent as 16.
    pub passes: u8,
    /// Overwrite invert pattern between passes (OIPBP).
    pub invert: bool,
    /// No-deallocate after sanitize (NDAS).
    pub no_deallocate: bool,
    /// Overwrite pattern (OVRPAT).
    pub pattern: u32,
}

/// CDW10 bits of Sanitize.
pub mod sanitize_bits {
    /// Bits 2:0: sanitize action.
    pub const SANACT: u32 = 7;
    /// Allow unrestricted sanitize exit.
    pub const AUSE: u32 = 1 << 3;
    /// Bits 7:4: overwrite pass count; 0 is 16.
    pub const OWPASS: u32 = 0xF << 4;
    /// Overwrite invert pattern between passes.
    pub const OIPBP: u32 = 1 << 8;
    /// No-deallocate after sanitize.
    pub const NDAS: u32 = 1 << 9;
}

impl SanitizeAction {
    /// Returns the action in CDW10, or `None` for a reserved value.
    pub const fn of(cdw10: u32) -> Option<Self> {
        match cdw10 & sanitize_bits::SANACT {
            1 => Some(Self::ExitFailureMode),
            2 => Some(Self::BlockErase),
            3 => Some(Self::Overwrite),
            4 => Some(Self::CryptoErase),
            _ => None,
        }
    }
}

impl SanitizeFields {
    /// Selects one pass of `action` without further options.
    pub const fn new(action: SanitizeAction) -> Self {
        Self {
            action,
            unrestricted: false,
            passes: 1,
            invert: false,
            no_deallocate: false,
            pattern: 0,
        }
    }
}

/// Makes Sanitize, which erases every namespace of the subsystem. The command completes when the operation
/// has started; its state and progress are in the Sanitize Status log page.
///
/// `passes` 0 and above 15 are sent as 16, the maximum; passes and pattern are sent for an overwrite only.
///
/// NVMe Base 2.0c, 5.24 (Sanitize command).
pub fn sanitize(fields: SanitizeFields) -> Sqe {
    let bit = |on: bool, bit: u32| if on { bit } else { 0 };
    let mut sqe = Sqe::new(opcode::SANITIZE, Nsid::NONE);
    sqe.cdw10 = fields.action as u32 | bit(fields.unrestricted, sanitize_bits::AUSE);
    sqe.cdw10 |= bit(fields.no_deallocate, sanitize_bits::NDAS);
    if fields.action == SanitizeAction::Overwrite {
        let passes = if fields.passes > 15 {
            0
        } else {
            u32::from(fields.passes)
        };
        sqe.cdw10 |= passes << 4 | bit(fields.invert, sanitize_bits::OIPBP);
        sqe.cdw11 = fields.pattern;
    }
    sqe
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// NVMe Base 2.0c, "Queue Size (QSIZE)": 0's based, 16 bits; a size of 1 entry (0h) is refused.
    #[test]
    fn a_queue_of_an_impossible_size_is_sent_as_one_that_is_refused() {
        for (entries, size) in [
            (0, 0),
            (1, 0),
            (2, 1),
            (65_535, 65_534),
            (65_536, 65_535),
            (65_537, 0),
            (u32::MAX, 0),
        ] {
            let params = QueueParams {
                qid: Qid(3),
                entries,
                iova: Iova(0x1000),
            };
            let sqes = [create_io_cq(params, None), create_io_sq(params, Qid(3))];
            for sqe in sqes {
                assert_eq!(sqe.cdw10, size << 16 | 3, "{entries} entries");
            }
        }
    }

    /// NVMe Base 2.0c, "Number of Dwords (NUMDL, NUMDU)": 0's based.
    #[test]
    fn a_format_past_the_last_is_sent_as_one_that_is_refused() {
        let fields = |lbaf, ses| {
            let format = Format::new(lbaf, ses);
            (format.lbafl(), format.lbafu(), format.ses())
        };
        assert_eq!(fields(63, 2), (15, 3, 2));
        assert_eq!(fields(64, 0).2, 7);
        assert_eq!(fields(1, 200), (1, 0, 7));
    }

    #[test]
    fn a_log_page_is_never_longer_than_the_bytes_asked_for() {
        for (bytes, dwords) in [(0, 1), (3, 1), (4, 1), (7, 1), (8, 2), (4096, 1024)] {
            let sqe = get_log_page(2, Nsid::ALL, bytes, 0);
            assert_eq!(log_page_bytes(&sqe), dwords * 4, "{bytes} bytes");
        }
        let most = get_log_page(2, Nsid::ALL, u32::MAX, 0);
        assert_eq!(log_page_bytes(&most), u64::from(u32::MAX - 3));
    }
}
