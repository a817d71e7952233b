//! Commands that the caller composes from dwords: the direction and length of their data, the commands that are refused
//! because they would break the driver's own state, and those that change nothing and need no permission.

use crate::controller::{ADMIN_BYTES, Controller};
use crate::error::{Error, Result};
use nvme_core::SubmitError;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::admin::{self, opcode};
use nvme_core::spec::feature::{self, fid};
use nvme_core::spec::log_page::{self, lid};
use nvme_core::spec::{Nsid, Sqe, nvm};

/// Queue that a command is sent to, which decides the meaning of its opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandSet {
    /// The admin command set, on the admin queue.
    Admin,
    /// The NVM command set, on an I/O queue.
    Nvm,
}

/// Direction in which an opcode transfers data: its bits 1:0, for standard and vendor specific commands alike.
///
/// NVMe Base 2.0c, 3.3.3.1 (Submission Queue Entry), "Data Transfer".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferDirection {
    /// 00b: no data.
    None,
    /// 01b: from the host to the controller.
    ToController,
    /// 10b: from the controller to the host.
    FromController,
    /// 11b: both ways.
    Both,
}

impl TransferDirection {
    /// Returns the direction that `opcode` encodes.
    pub const fn of(opcode: u8) -> Self {
        match opcode & 3 {
            0 => Self::None,
            1 => Self::ToController,
            2 => Self::FromController,
            _ => Self::Both,
        }
    }

    /// True if the host sends data.
    pub const fn sends(self) -> bool {
        matches!(self, Self::ToController | Self::Both)
    }

    /// True if the host receives data.
    pub const fn receives(self) -> bool {
        matches!(self, Self::FromController | Self::Both)
    }
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassthruAnswer {
    /// Command-specific dword 0 of the completion.
    pub dw0: u32,
    /// The data buffer afterwards; empty for a command without data.
    pub data: Vec<u8>,
}

/// Number of bytes that a command transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PassthruLength {
    /// Exact number of bytes, by the command's own fields.
    Exactly(u64),
    /// Upper bound in bytes, whatever the command's fields say.
    AtMost(u64),
    /// The fields of this command are not known: the controller may transfer any number of bytes.
    Unknown,
}

/// The most bytes that a feature of the specification has.
const FEATURE_BYTES: u64 = 4096;

/// True if the feature is a vendor's, whose data may have any length.
fn is_vendor_feature(fid: u8) -> bool {
    fid >= 0xC0 && feature::data_bytes(fid).is_none()
}

/// Returns the size of the buffer for a feature's data: one page for the specification's features: none has
/// more, and the largest transfer of an admin command for a vendor's. `most` is the longest transfer of the controller.
pub(super) fn room_of_feature(fid: u8, most: u64) -> usize {
    let room = match is_vendor_feature(fid) {
        true => most.min(ADMIN_BYTES),
        false => 0,
    };
    room.max(FEATURE_BYTES) as usize
}

/// True if the driver sets the feature itself, and relies on the value: another one would change the controller under
/// it.
pub fn is_set_by_driver(fid: u8) -> bool {
    matches!(
        fid,
        fid::NUMBER_OF_QUEUES | fid::HOST_MEMORY_BUFFER | fid::ASYNC_EVENT
    )
}

impl CommandSet {
    /// Returns the specification's name of `opcode`.
    pub fn name(self, opcode: u8) -> Option<&'static str> {
        match self {
            Self::Admin => admin_name(opcode),
            Self::Nvm => nvm_name(opcode),
        }
    }

    /// True if the command changes neither data nor state that outlives it. Every command that is not known to be
    /// harmless counts as a change.
    pub fn is_harmless(self, sqe: &Sqe) -> bool {
        match self {
            Self::Admin => match sqe.opcode() {
                opcode::GET_LOG_PAGE => is_plain_log_page(sqe),
                opcode::IDENTIFY
                | opcode::GET_FEATURES
                | opcode::KEEP_ALIVE
                | opcode::GET_LBA_STATUS => true,
                _ => false,
            },
            Self::Nvm => {
                use nvm::opcode::{COMPARE, FLUSH, READ, RESERVATION_REPORT, VERIFY};
                matches!(
                    sqe.opcode(),
                    COMPARE | FLUSH | READ | RESERVATION_REPORT | VERIFY
                )
            }
        }
    }

    /// Rejects commands that would change the controller under the driver, such as deleting its queues.
    fn check_owner(self, sqe: &Sqe) -> Result<()> {
        let own = match (self, sqe.opcode()) {
            (
                Self::Admin,
                opcode::DELETE_IO_SQ
                | opcode::CREATE_IO_SQ
                | opcode::DELETE_IO_CQ
                | opcode::CREATE_IO_CQ,
            ) => "queues are created and deleted by the driver itself",
            (Self::Admin, opcode::ASYNC_EVENT_REQUEST) => {
                "asynchronous events are requested by the driver itself"
            }
            (Self::Admin, opcode::DOORBELL_BUFFER_CONFIG) => {
                "the driver does not use a doorbell buffer"
            }
            (Self::Admin, opcode::SET_FEATURES) if is_set_by_driver(sqe.cdw10 as u8) => {
                "this feature is set by the driver itself"
            }
            _ => return Ok(()),
        };
        let name = self.name(sqe.opcode()).unwrap_or("this command");
        Err(Error::usage(
            format!("{name} is refused: {own}"),
            "choose another command",
        ))
    }

    /// Returns the number of bytes that the command transfers. `block` is the block size in bytes.
    fn moves(self, sqe: &Sqe, block: u32) -> PassthruLength {
        match (TransferDirection::of(sqe.opcode()), self) {
            (TransferDirection::None, _) => PassthruLength::Exactly(0),
            (_, Self::Admin) => admin_moves(sqe),
            (_, Self::Nvm) => nvm_moves(sqe, block),
        }
    }
}

/// True if Get Log Page asks for a page of the specification and for nothing besides. The Log Specific Field (bits 14:8)
/// of the host's telemetry captures new data, and that of the persistent event log takes or releases its context.
fn is_plain_log_page(sqe: &Sqe) -> bool {
    let (lid, specific) = (sqe.cdw10 as u8, sqe.cdw10 >> 8 & 0x7F);
    let acts = matches!(lid, lid::TELEMETRY_HOST | lid::PERSISTENT_EVENT) && specific != 0;
    log_page::name(lid).is_some() && !acts
}

/// Returns the bytes of a 0's based number of dwords.
fn dwords(count_z: u32) -> u64 {
    (u64::from(count_z) + 1) * 4
}

/// Returns the bytes of an admin command. NVMe Base 2.0c, 5 (Admin Command Set).
fn admin_moves(sqe: &Sqe) -> PassthruLength {
    match sqe.opcode() {
        opcode::IDENTIFY | opcode::NAMESPACE_ATTACHMENT => PassthruLength::Exactly(4096),
        opcode::NAMESPACE_MANAGEMENT => match sqe.cdw10 & 0xF {
            0 => PassthruLength::Exactly(4096),
            _ => PassthruLength::Exactly(0),
        },
        opcode::GET_LOG_PAGE => PassthruLength::Exactly(admin::log_page_bytes(sqe)),
        opcode::FIRMWARE_DOWNLOAD => PassthruLength::Exactly(dwords(sqe.cdw10)),
        opcode::GET_LBA_STATUS => PassthruLength::Exactly(dwords(sqe.cdw12)),
        opcode::SECURITY_SEND | opcode::SECURITY_RECEIVE => {
            PassthruLength::Exactly(sqe.cdw11.into())
        }
        // Some operations of these commands have no data, whatever the count says.
        opcode::DIRECTIVE_SEND | opcode::DIRECTIVE_RECEIVE => {
            PassthruLength::AtMost(dwords(sqe.cdw10))
        }
        opcode::GET_FEATURES | opcode::SET_FEATURES => match is_vendor_feature(sqe.cdw10 as u8) {
            true => PassthruLength::Unknown,
            false => PassthruLength::AtMost(FEATURE_BYTES),
        },
        _ => PassthruLength::Unknown,
    }
}

/// Returns the bytes of an I/O command. NVM Command Set 1.0c, 3 (I/O Commands for the NVM Command
/// Set); Zoned Namespace Command Set 1.1, 3.
fn nvm_moves(sqe: &Sqe, block: u32) -> PassthruLength {
    use nvm::opcode as io;
    match sqe.opcode() {
        io::READ | io::WRITE | io::COMPARE | io::ZONE_APPEND => {
            PassthruLength::Exactly(u64::from(nvm::blocks(sqe)) * u64::from(block))
        }
        io::DATASET_MANAGEMENT => PassthruLength::Exactly((u64::from(sqe.cdw10 & 0xFF) + 1) * 16),
        io::RESERVATION_REPORT => PassthruLength::Exactly(dwords(sqe.cdw10)),
        io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE => PassthruLength::Exactly(16),
        io::RESERVATION_RELEASE => PassthruLength::Exactly(8),
        io::IO_MANAGEMENT_RECEIVE => PassthruLength::Exactly(dwords(sqe.cdw11)),
        // Bits 31:16 count identifiers of 2 bytes, 0's based.
        io::IO_MANAGEMENT_SEND => PassthruLength::AtMost((u64::from(sqe.cdw10 >> 16) + 1) * 2),
        io::COPY => {
            let descriptor = match sqe.cdw12 >> 8 & 0xF {
                0 | 2 => 32,
                _ => 40,
            };
            PassthruLength::Exactly((u64::from(sqe.cdw12 & 0xFF) + 1) * descriptor)
        }
        // A zone descriptor extension has up to 255 times 64 bytes; other actions send nothing.
        io::ZONE_MANAGEMENT_SEND => PassthruLength::AtMost(255 * 64),
        io::ZONE_MANAGEMENT_RECEIVE => PassthruLength::Exactly(dwords(sqe.cdw12)),
        _ => PassthruLength::Unknown,
    }
}

impl Controller {
    /// Sends the command `sqe`, whose identifier and data pointer are the driver's to fill in. `data` is
    /// what it sends, or what the buffer holds before it receives; empty for a command without data.
    ///
    /// # Errors
    /// [`Error::Usage`], before anything is sent, for a command that the driver needs for itself, for data that does
    /// not match the opcode, and for a length other than the command's fields require: the controller would move more
    /// bytes than the buffer has. A command whose fields do not contain a length gets a buffer of the largest size.
    /// [`Error::Command`] with the controller's answer.
    pub fn passthru(&self, set: CommandSet, sqe: Sqe, data: &[u8]) -> Result<PassthruAnswer> {
        let room = self.check_passthru(set, &sqe, data.len() as u64)?;
        let what = in_words(set, sqe.opcode());
        let mut buffer = None;
        if room > 0 {
            let filled = buffer.insert(self.alloc(room)?);
            filled.as_mut_slice()[..data.len()].copy_from_slice(data);
        }
        let (dw0, buffer) = match set {
            CommandSet::Admin => self.session().admin(&what, sqe, buffer)?,
            CommandSet::Nvm => {
                let mut queue = self.create_queue_pair(2)?;
                let cid = queue.submit(sqe, buffer).map_err(|refused| {
                    refused.error.into_error(|error| {
                        let remedy = match error {
                            SubmitError::QueueFull => "report this",
                            _ => "use less data",
                        };
                        Error::device(format!("{what}: {error}"), remedy)
                    })
                })?;
                queue.ring();
                let done = queue.wait()?.filter(|done| done.cid == cid);
                let Some(done) = done else {
                    return Err(Error::device(format!("{what} was lost"), "report this"));
                };
                if !done.is_success() {
                    return Err(queue.error_of(&done, &what));
                }
                (done.dw0, done.buffer)
            }
        };
        let len = data.len();
        let data = buffer.map(|buffer| buffer.as_slice()[..len].to_vec());
        Ok(PassthruAnswer {
            dw0,
            data: data.unwrap_or_default(),
        })
    }

    /// Checks a command with `bytes` bytes of data, and returns the bytes that its buffer needs.
    fn check_passthru(&self, set: CommandSet, sqe: &Sqe, bytes: u64) -> Result<usize> {
        set.check_owner(sqe)?;
        let what = in_words(set, sqe.opcode());
        let direction = TransferDirection::of(sqe.opcode());
        if bytes > 0 && direction == TransferDirection::None {
            return Err(Error::usage(
                format!("{what} moves no data (bits 1:0 of its opcode are 00b)"),
                "leave the data out",
            ));
        }
        let most = match set {
            CommandSet::Admin => self.max_transfer().min(ADMIN_BYTES),
            CommandSet::Nvm => self.max_transfer(),
        };
        if bytes > most {
            return Err(Error::usage(
                format!(
                    "{bytes} bytes are more than one command moves here: {most}, {}",
                    self.whose_limit(most)
                ),
                format!("use at most {most}"),
            ));
        }
        let block = match set {
            CommandSet::Nvm if names_blocks(sqe.opcode()) => self.plain_block(Nsid(sqe.nsid))?,
            _ => 0,
        };
        let room = match set.moves(sqe, block) {
            PassthruLength::Exactly(own) if own != bytes => {
                return Err(Error::usage(
                    format!("{what} moves {own} bytes by its own fields, and the data has {bytes}"),
                    format!("use a data length of {own}, or change the command dwords"),
                ));
            }
            PassthruLength::Exactly(own) => own,
            PassthruLength::AtMost(own) if own > most => {
                return Err(Error::usage(
                    format!(
                        "{what} moves up to {own} bytes by its own fields, which is more than {most}, {}",
                        self.whose_limit(most)
                    ),
                    "change the command dwords",
                ));
            }
            PassthruLength::AtMost(own) => own.max(bytes),
            PassthruLength::Unknown => most.max(bytes),
        };
        Ok(room as usize)
    }

    /// Returns the number of bytes per block of a namespace without metadata.
    fn plain_block(&self, nsid: Nsid) -> Result<u32> {
        let info = NamespaceInfo::from_identify(nsid, &self.identify_namespace(nsid)?);
        if info.is_supported() {
            return Ok(info.block_bytes);
        }
        Err(Error::usage(
            format!(
                "namespace {nsid} has {} bytes of metadata with each block, which commands made by hand do not carry",
                info.metadata_bytes
            ),
            "format it without metadata",
        ))
    }
}

/// True if the opcode transfers the blocks that it names.
fn names_blocks(opcode: u8) -> bool {
    use nvm::opcode::{COMPARE, READ, WRITE, ZONE_APPEND};
    matches!(opcode, READ | WRITE | COMPARE | ZONE_APPEND)
}

fn in_words(set: CommandSet, opcode: u8) -> String {
    let kind = match set {
        CommandSet::Admin => "admin",
        CommandSet::Nvm => "I/O",
    };
    match set.name(opcode) {
        Some(name) => format!("{name} ({opcode:#04x})"),
        None => format!("{kind} command {opcode:#04x}"),
    }
}

fn admin_name(code: u8) -> Option<&'static str> {
    Some(match code {
        opcode::DELETE_IO_SQ => "Delete I/O Submission Queue",
        opcode::CREATE_IO_SQ => "Create I/O Submission Queue",
        opcode::GET_LOG_PAGE => "Get Log Page",
        opcode::DELETE_IO_CQ => "Delete I/O Completion Queue",
        opcode::CREATE_IO_CQ => "Create I/O Completion Queue",
        opcode::IDENTIFY => "Identify",
        opcode::ABORT => "Abort",
        opcode::SET_FEATURES => "Set Features",
        opcode::GET_FEATURES => "Get Features",
        opcode::ASYNC_EVENT_REQUEST => "Asynchronous Event Request",
        opcode::NAMESPACE_MANAGEMENT => "Namespace Management",
        opcode::FIRMWARE_COMMIT => "Firmware Commit",
        opcode::FIRMWARE_DOWNLOAD => "Firmware Image Download",
        opcode::DEVICE_SELF_TEST => "Device Self-test",
        opcode::NAMESPACE_ATTACHMENT => "Namespace Attachment",
        opcode::KEEP_ALIVE => "Keep Alive",
        opcode::DIRECTIVE_SEND => "Directive Send",
        opcode::DIRECTIVE_RECEIVE => "Directive Receive",
        opcode::DOORBELL_BUFFER_CONFIG => "Doorbell Buffer Config",
        opcode::FORMAT_NVM => "Format NVM",
        opcode::SECURITY_SEND => "Security Send",
        opcode::SECURITY_RECEIVE => "Security Receive",
        opcode::SANITIZE => "Sanitize",
        opcode::GET_LBA_STATUS => "Get LBA Status",
        _ => return None,
    })
}

fn nvm_name(code: u8) -> Option<&'static str> {
    Some(match code {
        nvm::opcode::FLUSH => "Flush",
        nvm::opcode::WRITE => "Write",
        nvm::opcode::READ => "Read",
        nvm::opcode::WRITE_UNCORRECTABLE => "Write Uncorrectable",
        nvm::opcode::COMPARE => "Compare",
        nvm::opcode::WRITE_ZEROES => "Write Zeroes",
        nvm::opcode::DATASET_MANAGEMENT => "Dataset Management",
        nvm::opcode::VERIFY => "Verify",
        nvm::opcode::RESERVATION_REGISTER => "Reservation Register",
        nvm::opcode::RESERVATION_REPORT => "Reservation Report",
        nvm::opcode::RESERVATION_ACQUIRE => "Reservation Acquire",
        nvm::opcode::IO_MANAGEMENT_RECEIVE => "I/O Management Receive",
        nvm::opcode::RESERVATION_RELEASE => "Reservation Release",
        nvm::opcode::COPY => "Copy",
        nvm::opcode::IO_MANAGEMENT_SEND => "I/O Management Send",
        nvm::opcode::ZONE_MANAGEMENT_SEND => "Zone Management Send",
        nvm::opcode::ZONE_MANAGEMENT_RECEIVE => "Zone Management Receive",
        nvm::opcode::ZONE_APPEND => "Zone Append",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "sim")]
    #[test]
    fn what_would_move_other_data_than_there_is_is_never_sent() {
        use crate::controller::ControllerConfig;
        let start =
            |device| Controller::start(crate::open(device).unwrap(), &ControllerConfig::default());
        let controller = start("sim:mem?size=1MiB&meta=8").unwrap();
        let read = nvm::read(Nsid(1), nvme_core::spec::Lba(0), 1);
        let flush = Sqe::new(nvm::opcode::FLUSH, Nsid(1));
        for (sqe, bytes, part) in [
            (read, 4096, "8 bytes of metadata"),
            (flush, 512, "moves no data"),
            (read, 1 << 30, "more than one command moves"),
        ] {
            let error = controller
                .check_passthru(CommandSet::Nvm, &sqe, bytes)
                .unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        let plain = start("sim:mem?size=1MiB").unwrap();
        let error = plain
            .passthru(CommandSet::Nvm, read, &[0; 512])
            .unwrap_err();
        assert!(error.to_string().contains("moves 4096 bytes"), "{error}");
        let mut namespace = plain.namespace(Nsid(1)).unwrap();
        let error = namespace.deallocate(&[]).unwrap_err();
        assert!(error.to_string().contains("no ranges"), "{error}");
    }

    #[test]
    fn every_opcode_of_the_specification_has_one_name() {
        for (set, count) in [(CommandSet::Admin, 24), (CommandSet::Nvm, 18)] {
            let names: Vec<&str> = (0..=255).filter_map(|code| set.name(code)).collect();
            let mut different = names.clone();
            different.sort_unstable();
            different.dedup();
            assert_eq!((names.len(), different.len()), (count, count));
        }
        assert_eq!(in_words(CommandSet::Admin, opcode::ABORT), "Abort (0x08)");
        assert_eq!(in_words(CommandSet::Nvm, 0xC1), "I/O command 0xc1");
        assert_eq!(in_words(CommandSet::Admin, 0xC1), "admin command 0xc1");
    }

    #[test]
    fn commands_that_name_their_length_are_held_to_it() {
        let moves = |set: CommandSet, code, dwords: [u32; 3]| {
            let mut sqe = Sqe::new(code, Nsid(1));
            [sqe.cdw10, sqe.cdw11, sqe.cdw12] = dwords;
            set.moves(&sqe, 512)
        };
        use CommandSet::{Admin, Nvm};
        use PassthruLength::{AtMost, Exactly, Unknown};
        use nvm::opcode as io;
        for (set, code, dwords, expected) in [
            (Admin, opcode::IDENTIFY, [1, 0, 0], Exactly(4096)),
            (Admin, opcode::NAMESPACE_ATTACHMENT, [0; 3], Exactly(4096)),
            (Admin, opcode::NAMESPACE_MANAGEMENT, [0; 3], Exactly(4096)),
            (Admin, opcode::NAMESPACE_MANAGEMENT, [1, 0, 0], Exactly(0)),
            (Admin, opcode::GET_LOG_PAGE, [0x7F_0002, 0, 0], Exactly(512)),
            (Admin, opcode::FIRMWARE_DOWNLOAD, [255, 0, 0], Exactly(1024)),
            (Admin, opcode::GET_LBA_STATUS, [0, 0, 3], Exactly(16)),
            (Admin, opcode::SECURITY_SEND, [0, 8192, 0], Exactly(8192)),
            (Admin, opcode::SECURITY_RECEIVE, [0, 512, 0], Exactly(512)),
            (Admin, opcode::DIRECTIVE_RECEIVE, [2047, 0, 0], AtMost(8192)),
            (Admin, opcode::GET_FEATURES, [0x13, 0, 0], AtMost(4096)),
            (Admin, opcode::GET_FEATURES, [0xC1, 0, 0], Unknown),
            (Admin, opcode::SET_FEATURES, [0x8000_00C1, 0, 0], Unknown),
            (Admin, opcode::FORMAT_NVM, [0; 3], Exactly(0)),
            (Admin, 0xC1, [0; 3], Unknown),
            (Admin, 0x1D, [0; 3], Unknown),
            (Nvm, io::RESERVATION_REPORT, [15, 0, 0], Exactly(64)),
            (Nvm, io::RESERVATION_REGISTER, [0; 3], Exactly(16)),
            (Nvm, io::RESERVATION_ACQUIRE, [0; 3], Exactly(16)),
            (Nvm, io::RESERVATION_RELEASE, [0; 3], Exactly(8)),
            (Nvm, io::READ, [0, 0, 7], Exactly(4096)),
            (Nvm, io::ZONE_APPEND, [0, 0, 15], Exactly(8192)),
            (Nvm, io::DATASET_MANAGEMENT, [255, 4, 0], Exactly(4096)),
            (Nvm, io::COPY, [0, 0, 127], Exactly(4096)),
            (Nvm, io::COPY, [0, 0, 0x1FF], Exactly(10_240)),
            (Nvm, io::IO_MANAGEMENT_RECEIVE, [0, 1023, 0], Exactly(4096)),
            (
                Nvm,
                io::IO_MANAGEMENT_SEND,
                [0xFFFF_0001, 0, 0],
                AtMost(131_072),
            ),
            (Nvm, io::ZONE_MANAGEMENT_SEND, [0; 3], AtMost(16_320)),
            (
                Nvm,
                io::ZONE_MANAGEMENT_RECEIVE,
                [0, 0, 4095],
                Exactly(16_384),
            ),
            (Nvm, io::FLUSH, [0; 3], Exactly(0)),
            (Nvm, 0xC2, [0; 3], Unknown),
        ] {
            assert_eq!(moves(set, code, dwords), expected, "{set:?} {code:#x}");
        }
    }

    /// A command that moves more than a page needs PRP2, so that its buffer always has the length that the command may
    /// move.
    #[cfg(feature = "sim")]
    #[test]
    fn a_command_of_unknown_length_gets_a_buffer_for_all_that_it_may_move() {
        use crate::controller::ControllerConfig;
        let device = crate::open("sim:mem?size=1MiB&mdts=3").unwrap();
        let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
        let room = |set, code, bytes| {
            let sqe = Sqe::new(code, Nsid(1));
            controller.check_passthru(set, &sqe, bytes).unwrap()
        };
        assert_eq!(room(CommandSet::Admin, 0xC2, 16), 32 << 10);
        assert_eq!(room(CommandSet::Nvm, 0xC1, 0), 32 << 10);
        assert_eq!(room(CommandSet::Admin, 0xC0, 0), 0);
        let vendors = admin::get_features(0xC1, admin::FeatureSelect::Current, Nsid::NONE, 0);
        let room_of_vendors = controller.check_passthru(CommandSet::Admin, &vendors, 16);
        assert_eq!(room_of_vendors.unwrap(), 32 << 10);
        assert_eq!(
            room(CommandSet::Nvm, nvm::opcode::ZONE_MANAGEMENT_SEND, 64),
            16_320
        );
        let mut directive = Sqe::new(opcode::DIRECTIVE_RECEIVE, Nsid(1));
        directive.cdw10 = 1 << 20;
        let error = controller.check_passthru(CommandSet::Admin, &directive, 0);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("the controller's largest transfer (MDTS)"),
            "{error}"
        );
        let device = crate::open("sim:mem?size=1MiB&mdts=0").unwrap();
        let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
        let sqe = Sqe::new(0xC2, Nsid(1));
        let error = controller.check_passthru(CommandSet::Admin, &sqe, 65_537);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("65536, this driver's largest transfer of an admin"),
            "{error}"
        );
    }

    #[test]
    fn what_the_driver_needs_for_itself_is_refused() {
        for (code, cdw10, part) in [
            (
                opcode::CREATE_IO_CQ,
                0,
                "Create I/O Completion Queue is refused: queues",
            ),
            (opcode::ASYNC_EVENT_REQUEST, 0, "asynchronous events"),
            (opcode::DOORBELL_BUFFER_CONFIG, 0, "doorbell buffer"),
            (opcode::SET_FEATURES, 0x07, "this feature is set"),
            (opcode::SET_FEATURES, 0x0D, "this feature is set"),
            (opcode::SET_FEATURES, 0x0B, "this feature is set"),
        ] {
            let mut sqe = Sqe::new(code, Nsid::NONE);
            sqe.cdw10 = cdw10;
            let error = CommandSet::Admin.check_owner(&sqe).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let mut sqe = Sqe::new(opcode::SET_FEATURES, Nsid::NONE);
        sqe.cdw10 = 0x04;
        assert!(CommandSet::Admin.check_owner(&sqe).is_ok());
    }

    #[test]
    fn every_named_opcode_that_writes_is_no_harmless_one() {
        let harmless = |set: CommandSet| -> Vec<u8> {
            let is_harmless = |code: &u8| set.is_harmless(&Sqe::new(*code, Nsid::NONE));
            (0..=255).filter(is_harmless).collect()
        };
        assert_eq!(harmless(CommandSet::Admin), [0x02, 0x06, 0x0A, 0x18, 0x86]);
        assert_eq!(harmless(CommandSet::Nvm), [0x00, 0x02, 0x05, 0x0C, 0x0E]);
    }

    #[test]
    fn a_log_page_that_acts_or_is_unknown_is_no_harmless_one() {
        let is_harmless = |lid: u8, specific: u32| {
            let mut sqe = Sqe::new(opcode::GET_LOG_PAGE, Nsid::ALL);
            sqe.cdw10 = u32::from(lid) | specific << 8 | 1 << 15;
            CommandSet::Admin.is_harmless(&sqe)
        };
        for (lid, specific, expected) in [
            (0x02, 0, true),
            (0x0C, 1, true),
            (0x07, 0, true),
            (0x07, 1, false),
            (0x0D, 0, true),
            (0x0D, 1, false),
            (0x0D, 2, false),
            (0x60, 0, false),
            (0xC0, 0, false),
            (0xFF, 0, false),
        ] {
            assert_eq!(is_harmless(lid, specific), expected, "{lid:#x} {specific}");
        }
    }

    #[test]
    fn bits_of_the_opcode_say_the_direction() {
        use TransferDirection::*;
        let table = [
            (0x80, None),
            (0x81, ToController),
            (0x82, FromController),
            (0xC3, Both),
        ];
        for (opcode, direction) in table {
            assert_eq!(TransferDirection::of(opcode), direction, "{opcode:#x}");
        }
    }
}
