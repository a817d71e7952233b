//! Ranges of bytes that one launch reads, and their division into pieces, each read by one command.

use super::GatherLaunch;
use core::mem::offset_of;

/// Limit of the ranges in a launch's parameters, whose size CUDA limits.
pub const RANGES: usize = 96;

/// A range of bytes of a drive, and its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RangeTarget {
    /// First byte in the namespace.
    pub byte: u64,
    /// Number of bytes, at least 1.
    pub bytes: u64,
    /// Address of the target.
    pub to: u64,
    /// Number of pieces of all ranges before it.
    pub first: u64,
}

/// The division of ranges into pieces, each read by one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RangeSplit {
    /// Number of ranges, at least 1.
    pub range_count: u32,
    /// log2 of the bytes of a piece.
    pub piece_shift: u32,
}

/// Parameters of a launch that reads ranges of bytes: `nvme_read_ranges`. A piece of a range ends at a byte
/// of the drive that is a multiple of `row_bytes`, a power of two and whole blocks.
///
/// `count` of the gather is the number of pieces of all ranges. Its ids, table, output and row status are not
/// used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RangesLaunch {
    /// Parameters of the gather. Its `unit_shift` holds for pieces of `row_bytes` bytes.
    pub gather: GatherLaunch,
    /// Division of the ranges.
    pub split: RangeSplit,
    /// The ranges.
    pub ranges: [RangeTarget; RANGES],
}

// Limit of a kernel's parameters on sm_80.
const _: () = assert!(size_of::<RangesLaunch>() <= 4096);

/// The header of a list in GPU memory, before its [`RangeTarget`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ListHead {
    /// Number of ranges.
    pub range_count: u64,
    /// Number of pieces of all ranges.
    pub pieces: u64,
}

/// Parameters of a launch that reads ranges of bytes which an earlier kernel listed: `nvme_read_listed`.
///
/// As for [`RangesLaunch`], with `count` as the limit of the pieces; `status` of the gather has a code for each
/// piece. A list with more ranges or pieces than the launch accepts is rejected as a whole, before anything
/// is read: each of its pieces gets `OUT_OF_RANGE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ListedLaunch {
    /// Parameters of the gather.
    pub gather: GatherLaunch,
    /// Address of a [`ListHead`] in GPU memory, followed by its ranges.
    pub list: u64,
    /// Limit of the ranges, at most [`LIST_RANGES`].
    pub most_ranges: u32,
    /// log2 of the bytes of a piece.
    pub piece_shift: u32,
}

impl ListedLaunch {
    /// True if the launch accepts a list with this header.
    #[inline(always)]
    pub fn takes(&self, head: &ListHead) -> bool {
        head.range_count <= u64::from(self.most_ranges) && head.pieces <= self.gather.count
    }
}

/// Largest number of ranges in a list: the byte offset of a range in the list has 32 bits.
pub const LIST_RANGES: u32 = (u32::MAX / size_of::<RangeTarget>() as u32) + 1;

/// A piece of a range, read by one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangePiece {
    /// Number of its range.
    pub range: u32,
    /// First byte in the namespace.
    pub byte: u64,
    /// Number of bytes; 0 for a piece that the ranges do not have.
    pub bytes: u32,
    /// Address of its target.
    pub to: u64,
}

impl RangeTarget {
    /// Returns the number of pieces of the range.
    pub const fn pieces(&self, piece_shift: u32) -> u64 {
        ((self.byte + self.bytes - 1) >> piece_shift) - (self.byte >> piece_shift) + 1
    }
}

impl RangeSplit {
    /// Returns piece `index` of all, out of at most `most` ranges. `word` returns the `u64` at a byte offset
    /// in the ranges.
    #[inline(always)]
    pub fn piece(&self, index: u64, most: u32, word: impl Fn(u32) -> u64) -> RangePiece {
        let of =
            |range: u32, field: usize| word(range * size_of::<RangeTarget>() as u32 + field as u32);
        // A binary search for the last range that begins at the piece or before it.
        let mut at = 0;
        let mut step = most.next_power_of_two() / 2;
        while step != 0 {
            let next = at + step;
            if next < self.range_count && of(next, offset_of!(RangeTarget, first)) <= index {
                at = next;
            }
            step /= 2;
        }
        let first = of(at, offset_of!(RangeTarget, byte));
        // A list comes from a kernel of another program. Whatever its words are, a piece stays inside its
        // range.
        let past = first.saturating_add(of(at, offset_of!(RangeTarget, bytes)));
        let before = index.wrapping_sub(of(at, offset_of!(RangeTarget, first)));
        let number = (first >> self.piece_shift).wrapping_add(before);
        let byte = first.max(number << self.piece_shift);
        let end = past.min(number.wrapping_add(1) << self.piece_shift);
        RangePiece {
            range: at,
            byte,
            bytes: end.saturating_sub(byte) as u32,
            to: of(at, offset_of!(RangeTarget, to)).wrapping_add(byte - first),
        }
    }
}

impl RangesLaunch {
    /// Returns piece `index` of all.
    pub fn piece(&self, index: u64) -> RangePiece {
        self.split.piece(index, RANGES as u32, |at| self.word(at))
    }

    /// Returns the `u64` at byte `at` of the ranges; 0 past the last one.
    fn word(&self, at: u32) -> u64 {
        let at = at as usize;
        let Some(range) = self.ranges.get(at / size_of::<RangeTarget>()) else {
            return 0;
        };
        match at % size_of::<RangeTarget>() / 8 {
            0 => range.byte,
            1 => range.bytes,
            2 => range.to,
            _ => range.first,
        }
    }
}
