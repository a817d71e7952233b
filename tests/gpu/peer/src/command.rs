//! One I/O command: its parameters, and whether they are valid.

use crate::{Args, MDTS, is_reached};
use nvme_spec::nvm::{self, opcode};
use nvme_spec::{Nsid, Psdt, Sqe, Status};

/// The one namespace.
pub const NSID: Nsid = Nsid(1);
/// Bytes of a memory page: CC.MPS = 0.
pub const PAGE: u64 = 4096;

/// The way in which a command moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Move {
    /// The command moves no data.
    None,
    /// The data move to the driver's memory.
    Read,
    /// The data move to the medium.
    Write,
    /// The data are compared with the medium.
    Compare,
    /// The medium is set to zero.
    Zero,
}

/// A command that was looked at.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub cid: u16,
    /// Success, or the reason of its refusal; nothing moves then.
    pub status: u16,
    pub how: Move,
    pub bytes: u32,
    /// Address in the medium.
    pub medium: u64,
    pub prp1: u64,
    pub prp2: u64,
}

impl Work {
    /// The value for a lane without a command, which no fault strikes.
    pub const NONE: Self = Self {
        cid: 0,
        status: 0,
        how: Move::None,
        bytes: 0,
        medium: 0,
        prp1: 0,
        prp2: 0,
    };

    /// Looks at `sqe`.
    #[inline(always)]
    pub fn of(args: &Args, sqe: &Sqe) -> Self {
        let how = match sqe.opcode() {
            opcode::READ => Move::Read,
            opcode::WRITE => Move::Write,
            opcode::COMPARE => Move::Compare,
            opcode::WRITE_ZEROES => Move::Zero,
            _ => Move::None,
        };
        let blocks = u64::from(nvm::blocks(sqe));
        let bytes = blocks << args.block_shift;
        let lba = nvm::slba(sqe).0;
        let mut work = Self {
            cid: sqe.cid().0,
            status: 0,
            how,
            bytes: bytes as u32,
            medium: args.medium.wrapping_add(lba << args.block_shift),
            prp1: sqe.dptr[0],
            prp2: sqe.dptr[1],
        };
        let refused = if how == Move::None && sqe.opcode() != opcode::FLUSH {
            Status::INVALID_OPCODE
        } else if sqe.fuse() != 0 || sqe.psdt() != Psdt::Prp {
            Status::INVALID_FIELD
        } else if sqe.nsid != NSID.0 && !(how == Move::None && sqe.nsid == Nsid::ALL.0) {
            Status::INVALID_NAMESPACE
        } else if how == Move::None {
            Status::SUCCESS
        } else if lba > args.blocks || blocks > args.blocks - lba {
            Status::LBA_OUT_OF_RANGE
        } else if how != Move::Zero && bytes > PAGE << MDTS {
            Status::INVALID_FIELD
        } else if how != Move::Zero && !work.prps_are_possible() {
            Status::INVALID_PRP_OFFSET
        } else {
            Status::SUCCESS
        };
        if !refused.is_success() {
            work.refuse(refused.with_dnr());
        }
        work
    }

    /// Ends the command with `status`; nothing moves.
    #[inline(always)]
    pub fn refuse(&mut self, status: Status) {
        (self.status, self.how) = (status.0, Move::None);
    }

    /// Bytes in the page of PRP1.
    #[inline(always)]
    pub fn first(&self) -> u32 {
        self.bytes.min((PAGE - self.prp1 % PAGE) as u32)
    }

    /// NVMe Base 2.0c, 4.1.1 (Physical Region Page Entry and List): dwords; a second page from its start, a list at
    /// whole entries.
    #[inline(always)]
    fn prps_are_possible(&self) -> bool {
        let rest = self.bytes - self.first();
        let second = match u64::from(rest) {
            0 => true,
            1..=PAGE => self.prp2.is_multiple_of(PAGE),
            _ => self.prp2.is_multiple_of(8),
        };
        self.prp1.is_multiple_of(4) && second
    }

    /// True for a read or write of 512 bytes in one page: such commands are moved eight at a time.
    #[inline(always)]
    pub fn is_small(&self, args: &Args) -> bool {
        matches!(self.how, Move::Read | Move::Write)
            && self.bytes == 512
            && self.first() == 512
            && (self.prp1 | self.medium).is_multiple_of(16)
            && is_reached(args, self.prp1, 512)
    }
}
