//! NVM command set: opcodes, builders and the fields that a controller reads back.
//!
//! A builder with a count outside its range makes a command that changes and moves nothing: its NSID is 0,
//! which every controller rejects with Invalid Namespace or Format.
//!
//! NVM Command Set 1.0c, 3 (I/O Commands for the NVM Command Set).

use super::addr::{Lba, Nsid};
use super::command::Sqe;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Opcodes of the NVM command set.
pub mod opcode {
    /// Flush: commit data and metadata to non-volatile media.
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
    /// Reservation Register.
    pub const RESERVATION_REGISTER: u8 = 0x0D;
    /// Reservation Report.
    pub const RESERVATION_REPORT: u8 = 0x0E;
    /// Reservation Acquire.
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    /// I/O Management Receive.
    pub const IO_MANAGEMENT_RECEIVE: u8 = 0x12;
    /// Reservation Release.
    pub const RESERVATION_RELEASE: u8 = 0x15;
    /// Copy.
    pub const COPY: u8 = 0x19;
    /// I/O Management Send.
    pub const IO_MANAGEMENT_SEND: u8 = 0x1D;
    /// Zone Management Send.
    pub const ZONE_MANAGEMENT_SEND: u8 = 0x79;
    /// Zone Management Receive.
    pub const ZONE_MANAGEMENT_RECEIVE: u8 = 0x7A;
    /// Zone Append.
    pub const ZONE_APPEND: u8 = 0x7D;
}

/// Limit of the blocks of one command: NLB is 16 bits and 0's based.
pub const MAX_BLOCKS: u32 = 65_536;

/// CDW12 bit 31: limited retry.
pub const LIMITED_RETRY: u32 = 1 << 31;
/// CDW12 bit 30: force unit access.
pub const FUA: u32 = 1 << 30;
/// CDW12 bit 25 of Write Zeroes: deallocate.
pub const DEAC: u32 = 1 << 25;
/// CDW12 bits 29:26: protection information action and checks.
pub const PRINFO: u32 = 0xF << 26;

/// Returns `nsid`, or NSID 0 if `count` is not 1 to `most`.
///
/// A count that a 0's based field cannot hold would appear there as another count, and the command would move
/// or erase the wrong number of blocks. NSID 0 is no namespace, so every controller rejects such a command
/// with Invalid Namespace or Format (NVMe Base 2.0c, "Namespace Identifier (NSID)").
#[inline]
fn counted(nsid: Nsid, count: u32, most: u32) -> Nsid {
    if count.wrapping_sub(1) < most {
        nsid
    } else {
        Nsid::NONE
    }
}

fn with_range(opcode: u8, nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, counted(nsid, blocks, MAX_BLOCKS));
    sqe.cdw10 = lba.0 as u32;
    sqe.cdw11 = (lba.0 >> 32) as u32;
    sqe.cdw12 = blocks.wrapping_sub(1) & 0xFFFF;
    sqe
}

/// Makes Read of `blocks` (1 to 65,536) blocks from `lba` on.
///
/// NVM Command Set 1.0c, 3.2.4 (Read command).
#[inline]
pub fn read(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::READ, nsid, lba, blocks)
}

/// Makes Write of `blocks` (1 to 65,536) blocks from `lba` on; set [`FUA`] in CDW12 for force unit access.
///
/// NVM Command Set 1.0c, 3.2.6 (Write command).
#[inline]
pub fn write(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::WRITE, nsid, lba, blocks)
}

/// Makes Compare of `blocks` (1 to 65,536) blocks with the buffer; a difference ends in [`Compare
/// Failure`](super::Status::COMPARE_FAILURE).
///
/// NVM Command Set 1.0c, 3.2.1 (Compare command).
pub fn compare(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::COMPARE, nsid, lba, blocks)
}

/// Makes Write Zeroes: sets `blocks` (1 to 65,536) blocks to zero without a buffer.
///
/// NVM Command Set 1.0c, 3.2.8 (Write Zeroes command).
pub fn write_zeroes(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::WRITE_ZEROES, nsid, lba, blocks)
}

/// Makes Verify: checks that `blocks` (1 to 65,536) blocks are readable, without a transfer.
///
/// NVM Command Set 1.0c, 3.2.5 (Verify command).
pub fn verify(nsid: Nsid, lba: Lba, blocks: u32) -> Sqe {
    with_range(opcode::VERIFY, nsid, lba, blocks)
}

/// Makes Flush, which commits everything written to `nsid` ([`Nsid::ALL`] for every namespace).
///
/// NVMe Base 2.0c, 7.1 (Flush command).
pub fn flush(nsid: Nsid) -> Sqe {
    Sqe::new(opcode::FLUSH, nsid)
}

/// Makes Dataset Management that deallocates the ranges in the buffer: 1 to 256 [`DsmRange`]s.
///
/// NVM Command Set 1.0c, 3.2.3 (Dataset Management command).
pub fn deallocate(nsid: Nsid, ranges: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode::DATASET_MANAGEMENT, counted(nsid, ranges, 256));
    sqe.cdw10 = ranges.wrapping_sub(1) & 0xFF;
    sqe.cdw11 = DSM_DEALLOCATE;
    sqe
}

/// CDW11 bit 2 of Dataset Management: deallocate.
pub const DSM_DEALLOCATE: u32 = 1 << 2;

/// Returns the starting LBA of a command that names a range.
#[inline]
pub const fn slba(sqe: &Sqe) -> Lba {
    Lba(sqe.cdw10_11())
}

/// Returns the number of blocks of a command that names a range, 1 to 65,536.
#[inline]
pub const fn blocks(sqe: &Sqe) -> u32 {
    (sqe.cdw12 & 0xFFFF) + 1
}

/// One range of a Dataset Management command.
///
/// Deallocation is advisory: a controller may ignore any range, and what a deallocated block reads as is in
/// the namespace's `dlfeat`.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type Builder = fn(Nsid, Lba, u32) -> Sqe;
    const RANGES: [(u8, Builder); 5] = [
        (opcode::READ, read),
        (opcode::WRITE, write),
        (opcode::COMPARE, compare),
        (opcode::WRITE_ZEROES, write_zeroes),
        (opcode::VERIFY, verify),
    ];

    /// NVM Command Set 1.0c, "Number of Logical Blocks (NLB)": 0's based, 16 bits.
    #[test]
    fn the_number_of_blocks_is_one_less_in_the_command() {
        for (opcode, build) in RANGES {
            for (blocks, nlb) in [(1, 0), (2, 1), (65_535, 65_534), (65_536, 65_535)] {
                let sqe = build(Nsid(7), Lba(0x1_2345_6789), blocks);
                assert_eq!((sqe.opcode(), sqe.nsid), (opcode, 7));
                assert_eq!((sqe.cdw10, sqe.cdw11), (0x2345_6789, 1));
                assert_eq!(sqe.cdw12, nlb, "{blocks} blocks of {opcode:#04x}");
                assert_eq!(super::blocks(&sqe), blocks);
            }
        }
    }

    #[test]
    fn a_count_out_of_range_makes_a_command_that_is_refused() {
        for (_, build) in RANGES {
            for blocks in [0, 65_537, 131_072, u32::MAX] {
                assert_eq!(build(Nsid(7), Lba(0), blocks).nsid, 0, "{blocks} blocks");
            }
        }
        for ranges in [0, 257, 512, u32::MAX] {
            assert_eq!(deallocate(Nsid(7), ranges).nsid, 0, "{ranges} ranges");
        }
    }

    /// NVM Command Set 1.0c, "Number of Ranges (NR)": 0's based, 8 bits.
    #[test]
    fn the_number_of_ranges_is_one_less_in_the_command() {
        for (ranges, nr) in [(1, 0), (255, 254), (256, 255)] {
            let sqe = deallocate(Nsid(7), ranges);
            assert_eq!((sqe.nsid, sqe.cdw10, sqe.cdw11), (7, nr, 4));
        }
    }
}
