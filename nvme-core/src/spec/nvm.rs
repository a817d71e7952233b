//! NVM command set: opcodes, builders and the fields a controller reads back.
//!
//! NVM Command Set 1.0c, 3 (I/O Commands for the NVM Command Set).

use super::addr::{Lba, Nsid};
use super::command::Sqe;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Opcodes of the NVM command set.
pub mod opcode {
    /// Commit data and metadata to non-volatile media.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0C;
    /// Reservation Report.
    pub const RESERVATION_REPORT: u8 = 0x0E;
}

/// The most blocks one command can name: NLB is 16 bits and 0's based.
pub const MAX_BLOCKS: u32 = 65_536;

/// CDW12 bit 31: limited retry.
pub const LIMITED_RETRY: u32 = 1 << 31;
/// CDW12 bit 30: force unit access.
pub const FUA: u32 = 1 << 30;
/// CDW12 bit 25 of Write Zeroes: deallocate.
pub const DEAC: u32 = 1 << 25;
/// CDW12 bits 29:26: protection information action and checks.
pub const PRINFO: u32 = 0xF << 26;

fn with_range(opcode: u8, nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    debug_assert!((1..=MAX_BLOCKS).contains(&blocks));
    let mut sqe = Sqe::new(opcode, nsid);
    sqe.cdw10 = lba.0 as u32;
    sqe.cdw11 = (lba.0 >> 32) as u32;
    sqe.cdw12 = blocks.wrapping_sub(1) & 0xFFFF;
    sqe
}

/// Read `blocks` (1 to 65,536) blocks from `lba` on.
///
/// NVM Command Set 1.0c, 3.2.4 (Read command).
#[inline]
pub fn read(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::READ, nsid, lba, blocks)
}

/// Write `blocks` (1 to 65,536) blocks from `lba` on; or in [`FUA`] for force unit access.
///
/// NVM Command Set 1.0c, 3.2.6 (Write command).
#[inline]
pub fn write(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::WRITE, nsid, lba, blocks)
}

/// Compare `blocks` blocks with the buffer; a difference is [`Compare Failure`](super::Status::COMPARE_FAILURE).
///
/// NVM Command Set 1.0c, 3.2.1 (Compare command).
pub fn compare(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::COMPARE, nsid, lba, blocks)
}

/// Set `blocks` blocks to zero without a buffer.
///
/// NVM Command Set 1.0c, 3.2.8 (Write Zeroes command).
pub fn write_zeroes(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::WRITE_ZEROES, nsid, lba, blocks)
}

/// Check that `blocks` blocks are readable, without a transfer.
///
/// NVM Command Set 1.0c, 3.2.5 (Verify command).
pub fn verify(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::VERIFY, nsid, lba, blocks)
}

/// Commit everything written to `nsid` ([`Nsid::ALL`] for every namespace).
///
/// NVMe Base 2.0c, 7.1 (Flush command).
pub fn flush(nsid: Nsid) -> Sqe {
    Sqe::new(opcode::FLUSH, nsid)
}

/// Deallocate the ranges in the buffer: 1 to 256 [`DsmRange`]s.
///
/// NVM Command Set 1.0c, 3.2.3 (Dataset Management command).
pub fn deallocate(nsid: Nsid, ranges: u32) -> Sqe {
    debug_assert!((1..=256).contains(&ranges));
    let mut sqe = Sqe::new(opcode::DATASET_MANAGEMENT, nsid);
    sqe.cdw10 = ranges.wrapping_sub(1) & 0xFF;
    sqe.cdw11 = DSM_DEALLOCATE;
    sqe
}

/// CDW11 bit 2 of Dataset Management: deallocate.
pub const DSM_DEALLOCATE: u32 = 1 << 2;

/// The starting LBA of a command that names a range.
#[inline]
pub const fn slba(sqe: &Sqe) -> Lba {
    Lba(sqe.cdw10_11())
}

/// The number of blocks of a command that names a range, 1 to 65,536.
#[inline]
pub const fn blocks(sqe: &Sqe) -> u32 {
    (sqe.cdw12 & 0xFFFF) + 1
}

/// One range of a Dataset Management command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DsmRange {
    /// Context attributes: hints, 0 for none.
    pub attributes: u32,
    /// Length in blocks. Not 0's based.
    pub blocks: u32,
    /// First block.
    pub slba: u64,
}
const _: () = assert!(size_of::<DsmRange>() == 16);
