//! The errors of the core. Each variant's doc and message name the remedy.

use crate::spec::{Cid, PageSize, Status};
use core::fmt;

/// The reason why a buffer cannot become a data pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerError {
    /// No bytes. Give a length above 0.
    Empty,
    /// An address is not dword aligned, or a page of a table not page aligned. Align the buffer.
    Misaligned,
    /// The list memory cannot hold the entries. Split the transfer or give each slot more list memory.
    ListTooSmall,
    /// The buffer leaves the address space, or the page table ends before it. Shorten the transfer.
    TooLong,
}

impl fmt::Display for PointerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the transfer has no bytes: give a length above 0",
            Self::Misaligned => "the buffer is not aligned: start it at a multiple of 4 bytes, pages at page boundaries",
            Self::ListTooSmall => "the transfer needs more list memory than its slot has: split it",
            Self::TooLong => "the buffer ends before the transfer does: shorten the transfer",
        })
    }
}

impl core::error::Error for PointerError {}

/// The reason why a command was not submitted. Nothing was queued; the caller keeps the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitError {
    /// Every slot is taken. Retry after `poll` has returned a completion.
    QueueFull,
    /// The queue was closed for its deletion, or its commands were reclaimed. Restart it, or use another.
    Closed,
    /// The data pointer could not be built.
    Map(PointerError),
    /// The result cell is past the end, or still belongs to a command. Use another, or wait for
    /// that command. Two commands that share a cell would overwrite each other's result.
    CellBusy,
    /// A kernel's queue takes no commands: the controller violated the protocol, which the queue's `fault`
    /// names, or the queue was closed for its deletion. Reset or delete, and recover the queue.
    Refused,
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueFull => f.write_str("the queue is full: poll for completions, then retry"),
            Self::Closed => f.write_str(
                "the queue's commands were ended by a reset, a shutdown or its deletion: restart the queue, or use another one",
            ),
            Self::Map(error) => error.fmt(f),
            Self::CellBusy => f.write_str(
                "the result cell belongs to a command in flight, or there is none: use another cell",
            ),
            Self::Refused => f.write_str("the queue is refused after a controller fault: reset the controller and recover the queue"),
        }
    }
}

impl core::error::Error for SubmitError {}

/// The reason why a wait for one command ended without its result. The command is still in flight: its cell,
/// slot and buffer stay reserved until it completes or the queue is recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitError {
    /// The deadline passed. Wait again, or abort the command and reset the controller.
    TimedOut,
    /// The controller broke the protocol, as the queue's `fault` says. Reset it and recover the queue.
    Refused,
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str(
                "the command did not complete by its deadline: wait longer, or abort it and reset the controller",
            ),
            Self::Refused => f.write_str("the queue is refused after a controller fault: reset the controller and recover the queue"),
        }
    }
}

impl core::error::Error for WaitError {}

/// A completion that no working controller posts. The remedy is always a controller reset; the
/// entry was consumed and changed nothing. Until that reset the queue takes no command, because
/// nothing it says can be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerFault {
    /// The CID names no command that the controller can have: it was never published, or has completed
    /// already.
    UnknownCid(Cid),
    /// The CID's slot is in flight with another generation: a completion of an earlier command.
    StaleCid(Cid),
    /// SQHD is outside the ring or, on a [`QueuePair`](crate::QueuePair), outside the entries that were
    /// published after the command's own.
    SqHead(u16),
    /// The completion names another submission queue.
    SqId(u16),
}

impl ControllerFault {
    /// Encodes the fault as a word other than 0, for reports of kernels.
    pub const fn code(self) -> u32 {
        match self {
            Self::UnknownCid(cid) => 1 << 16 | cid.0 as u32,
            Self::StaleCid(cid) => 2 << 16 | cid.0 as u32,
            Self::SqHead(head) => 3 << 16 | head as u32,
            Self::SqId(qid) => 4 << 16 | qid as u32,
        }
    }

    /// Decodes a word of [`code`](Self::code); `None` for 0 and for any other word.
    pub const fn from_code(code: u32) -> Option<Self> {
        let value = code as u16;
        match code >> 16 {
            1 => Some(Self::UnknownCid(Cid(value))),
            2 => Some(Self::StaleCid(Cid(value))),
            3 => Some(Self::SqHead(value)),
            4 => Some(Self::SqId(value)),
            _ => None,
        }
    }
}

impl fmt::Display for ControllerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownCid(cid) => write!(
                f,
                "the controller completed command {cid}, which is not in flight"
            )?,
            Self::StaleCid(cid) => write!(
                f,
                "the controller completed command {cid} a second time or late"
            )?,
            Self::SqHead(head) => write!(
                f,
                "the controller reported submission queue head {head}, which cannot be"
            )?,
            Self::SqId(qid) => write!(
                f,
                "the controller posted a completion of queue {qid} to another queue"
            )?,
        }
        f.write_str(": reset the controller")
    }
}

impl core::error::Error for ControllerFault {}

/// The reason why a controller did not come up, or did not shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringupError {
    /// Registers read as all ones: the device is gone. Re-seat, rescan or re-bind it.
    DeviceGone,
    /// CSTS.CFS is set. Reset the function.
    FatalStatus,
    /// CSTS.RDY did not become `ready` within `ms`. Reset the function.
    ReadyTimeout {
        /// Value waited for.
        ready: bool,
        /// Limit, in milliseconds.
        ms: u32,
    },
    /// CSTS.SHST did not report completion within `ms`; the device may lose cached writes.
    ShutdownTimeout {
        /// Limit, in milliseconds.
        ms: u32,
    },
    /// CAP offers neither the NVM command set nor a list of command sets.
    NoNvmCommandSet(u8),
    /// CAP.MPSMIN is above the 64 KiB that this driver maps, or above CAP.MPSMAX.
    PageSize {
        /// CAP.MPSMIN.
        mpsmin: u8,
        /// CAP.MPSMAX.
        mpsmax: u8,
    },
    /// The controller returned from a reset with another page size or doorbell stride than doorbells, rings
    /// and lists were laid out for. Open it again.
    Changed {
        /// Page size before and now.
        page: (PageSize, PageSize),
        /// CAP.DSTRD before and now.
        dstrd: (u8, u8),
    },
    /// Registers, admin queue or proof belong to another controller than the machine does, or something else
    /// enabled the controller meanwhile. Use the parts of one controller, and one machine at a time.
    OtherController,
    /// A given ring is longer than CAP.MQES or 4,096 entries (admin), or not page aligned.
    AdminRing,
    /// An admin command ended with an error status.
    Command {
        /// The opcode.
        opcode: u8,
        /// The controller's answer.
        status: Status,
    },
    /// An admin command did not complete by its deadline. Reset the function.
    CommandTimeout {
        /// The opcode.
        opcode: u8,
    },
    /// The admin queue refused a command.
    Submit(SubmitError),
    /// The admin completion queue holds an impossible completion.
    Fault(ControllerFault),
    /// Identify Controller requires entries of other sizes than 64 and 16 bytes.
    EntrySize {
        /// Required SQ entry size, log2.
        sqes: u8,
        /// Required CQ entry size, log2.
        cqes: u8,
    },
}

impl fmt::Display for BringupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeviceGone => f.write_str(
                "registers read as all ones: the device has left the bus; re-seat or re-bind it",
            ),
            Self::FatalStatus => {
                f.write_str("the controller reports a fatal error (CSTS.CFS): reset the function")
            }
            Self::ReadyTimeout { ready, ms } => {
                write!(
                    f,
                    "CSTS.RDY did not become {} within {ms} ms: reset the function",
                    u8::from(*ready)
                )
            }
            Self::ShutdownTimeout { ms } => write!(
                f,
                "the controller did not finish its shutdown within {ms} ms: cached writes may be lost"
            ),
            Self::NoNvmCommandSet(css) => {
                write!(
                    f,
                    "the controller has no NVM command set (CAP.CSS {css:#04x}): use another device"
                )
            }
            Self::PageSize { mpsmin, mpsmax } => write!(
                f,
                "the controller's memory page sizes (MPSMIN {mpsmin}, MPSMAX {mpsmax}) are not supported: 4 to 64 KiB are"
            ),
            Self::Changed { page, dstrd } => write!(
                f,
                "the controller came back with pages of {} bytes and doorbell stride {} (before: {} and {}): open it anew",
                page.1.bytes(),
                dstrd.1,
                page.0.bytes(),
                dstrd.0
            ),
            Self::AdminRing => f.write_str(
                "the admin rings do not fit the controller: 2 to 4096 entries, page aligned",
            ),
            Self::OtherController => f.write_str(
                "registers, admin queue and proof are not of one controller as it is now: use one machine for one controller at a time",
            ),
            Self::Command { opcode, status } => {
                write!(f, "admin command {opcode:#04x} failed: {status}")
            }
            Self::CommandTimeout { opcode } => {
                write!(
                    f,
                    "admin command {opcode:#04x} was not answered in time: reset the function"
                )
            }
            Self::Submit(error) => write!(f, "admin queue: {error}"),
            Self::Fault(fault) => write!(f, "admin queue: {fault}"),
            Self::EntrySize { sqes, cqes } => write!(
                f,
                "the controller requires queue entries of 2^{sqes} and 2^{cqes} bytes; only 64 and 16 are supported"
            ),
        }
    }
}

impl core::error::Error for BringupError {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FAULTS: [ControllerFault; 4] = [
        ControllerFault::UnknownCid(Cid(0xABCD)),
        ControllerFault::StaleCid(Cid(0xFFFE)),
        ControllerFault::SqHead(u16::MAX),
        ControllerFault::SqId(0),
    ];

    #[test]
    fn faults_survive_their_code_and_no_other_word_is_one() {
        for fault in FAULTS {
            assert_ne!(fault.code(), 0);
            assert_eq!(ControllerFault::from_code(fault.code()), Some(fault));
        }
        for code in [0, 0xFFFF, 5 << 16, u32::MAX] {
            assert_eq!(ControllerFault::from_code(code), None, "{code:#x}");
        }
    }

    #[test]
    fn every_error_is_one_line_with_its_values_and_its_remedy() {
        let text = |error: &dyn core::error::Error| error.to_string();
        let refused = SubmitError::Refused;
        let cases: [(String, &str, &str); 29] = [
            (text(&PointerError::Empty), "no bytes", "above 0"),
            (text(&PointerError::Misaligned), "not aligned", "4 bytes"),
            (text(&PointerError::ListTooSmall), "list memory", "split"),
            (text(&PointerError::TooLong), "ends before", "shorten"),
            (text(&SubmitError::QueueFull), "full", "poll"),
            (text(&SubmitError::Closed), "ended by a reset", "restart"),
            (
                text(&SubmitError::Map(PointerError::Empty)),
                "no bytes",
                "above 0",
            ),
            (text(&SubmitError::CellBusy), "cell", "another"),
            (text(&refused), "controller fault", "reset"),
            (text(&WaitError::TimedOut), "deadline", "wait longer"),
            (text(&WaitError::Refused), "controller fault", "reset"),
            (text(&FAULTS[0]), "0xabcd", "reset"),
            (text(&FAULTS[1]), "0xfffe", "reset"),
            (text(&FAULTS[2]), "65535", "reset"),
            (text(&FAULTS[3]), "queue 0", "reset"),
            (text(&BringupError::DeviceGone), "all ones", "re-seat"),
            (text(&BringupError::FatalStatus), "CSTS.CFS", "reset"),
            (
                text(&BringupError::ReadyTimeout {
                    ready: true,
                    ms: 42,
                }),
                "become 1 within 42 ms",
                "reset",
            ),
            (
                text(&BringupError::ShutdownTimeout { ms: 43 }),
                "43 ms",
                "may be lost",
            ),
            (
                text(&BringupError::NoNvmCommandSet(0x80)),
                "0x80",
                "another device",
            ),
            (
                text(&BringupError::PageSize {
                    mpsmin: 5,
                    mpsmax: 7,
                }),
                "MPSMIN 5, MPSMAX 7",
                "4 to 64 KiB",
            ),
            (
                text(&BringupError::Changed {
                    page: (PageSize::KIB4, PageSize::from_mps(4).unwrap()),
                    dstrd: (0, 2),
                }),
                "65536 bytes and doorbell stride 2 (before: 4096 and 0)",
                "open it anew",
            ),
            (
                text(&BringupError::AdminRing),
                "admin rings",
                "page aligned",
            ),
            (
                text(&BringupError::OtherController),
                "not of one controller",
                "one machine for one controller",
            ),
            (
                text(&BringupError::Command {
                    opcode: 6,
                    status: Status(2),
                }),
                "0x06",
                "Invalid Field",
            ),
            (
                text(&BringupError::CommandTimeout { opcode: 9 }),
                "0x09",
                "reset",
            ),
            (text(&BringupError::Submit(refused)), "admin queue", "reset"),
            (
                text(&BringupError::Fault(FAULTS[2])),
                "admin queue",
                "reset",
            ),
            (
                text(&BringupError::EntrySize { sqes: 7, cqes: 5 }),
                "2^7 and 2^5",
                "64 and 16",
            ),
        ];
        for (text, cause, remedy) in cases {
            assert!(text.contains(cause) && text.contains(remedy), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}
