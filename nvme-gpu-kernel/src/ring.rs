//! Ranges of bytes of a drive that pass through the slots of a warp in order, as [pieces](RangePieces), each read
//! by one command.
//!
//! For a [`RangeRing`], one range, a byte's offset in the slots is its address modulo [`WARP_BYTES`]: consecutive
//! pieces are adjacent, so data that crosses from one to the next needs care only where the ring wraps.
//! [`ScatteredPieces`] pieces are anywhere on the drive, and each has a separate stage of the slots; so has each
//! piece of a row of [`RowPieces`].

use crate::rows::WARP_BYTES;
use core::num::NonZeroU32;

/// Lower limit of log2 of a piece's bytes: the ring then holds as many pieces as a warp has lanes.
pub const LEAST_SHIFT: u32 = 12;
/// Upper limit of log2 of a piece's bytes: three pieces are in flight while the warp uses one.
pub const MOST_SHIFT: u32 = 15;

const _: () = assert!(WARP_BYTES.is_power_of_two() && WARP_BYTES >> LEAST_SHIFT == 32);

/// Ranges of bytes of a namespace that pass through the stages of a warp's slots in the order of their
/// numbers.
///
/// The order of calls for a warp: for each piece number in ascending order, wait for the piece, use its
/// bytes, and only then ask for the next one; the stage of a used piece is refilled by a later piece.
pub trait RangePieces {
    /// Returns the number of pieces in the slots at once, a power of two, at most 32.
    fn stages(&self) -> u32;

    /// Returns the number of the last piece.
    fn last(&self) -> u64;

    /// Returns the first byte of piece `number`, and one past its last.
    fn piece(&self, number: u64) -> (u64, u64);

    /// Returns the offset, in the slots of the warp, of the block at byte `block` of the drive, in which
    /// piece `number` begins.
    fn slot(&self, number: u64, block: u64) -> u64;

    /// True if piece `number` is read. The warp must not wait for one that is not.
    #[inline(always)]
    fn is_read(&self, _number: u64) -> bool {
        true
    }

    /// Returns the number of pieces that are used before their stages are refilled together: a power of two,
    /// fewer than the stages.
    #[inline(always)]
    fn batch(&self) -> u64 {
        1
    }

    /// Returns the stage of piece `number`.
    #[inline(always)]
    fn stage(&self, number: u64) -> u32 {
        number as u32 & (self.stages() - 1)
    }

    /// Returns the first piece from `number` on, inclusive, that passes through `stage`.
    #[inline(always)]
    fn next_at(&self, stage: u32, number: u64) -> u64 {
        number + u64::from(stage.wrapping_sub(number as u32) & (self.stages() - 1))
    }
}

/// Pieces of one length, numbered from 0, at locations that `byte_of` returns.
#[derive(Clone, Copy, Debug)]
pub struct ScatteredPieces<F> {
    /// Function that returns the first byte of a piece.
    pub byte_of: F,
    /// Bytes of each piece.
    pub bytes: u32,
    /// Number of pieces, at least 1.
    pub count: u64,
    /// log2 of the bytes of a stage, from [`LEAST_SHIFT`] to [`MOST_SHIFT`]: the blocks of a piece fit into a
    /// stage.
    pub stage_shift: u32,
}

impl<F: Fn(u64) -> u64> RangePieces for ScatteredPieces<F> {
    #[inline(always)]
    fn stages(&self) -> u32 {
        (WARP_BYTES >> self.stage_shift) as u32
    }

    #[inline(always)]
    fn last(&self) -> u64 {
        self.count - 1
    }

    #[inline(always)]
    fn piece(&self, number: u64) -> (u64, u64) {
        let begin = (self.byte_of)(number);
        (begin, begin + u64::from(self.bytes))
    }

    #[inline(always)]
    fn slot(&self, number: u64, _block: u64) -> u64 {
        u64::from(self.stage(number)) << self.stage_shift
    }

    #[inline(always)]
    fn batch(&self) -> u64 {
        u64::from(self.stages() / 4)
    }
}

/// The division of a row of any length into pieces: all but the last one have the same length.
///
/// A row longer than a stage is read by several commands, each into a separate stage; the warp uses the parts
/// one by one, so rows may be longer than all slots together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSplit {
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Limit of the bytes of a piece, a multiple of a block.
    pub piece_bytes: u32,
    /// Number of pieces of a row.
    pub of_row: NonZeroU32,
    /// log2 of the bytes of a stage: the blocks that a piece touches fit into a stage.
    pub stage_shift: u32,
}

impl RowSplit {
    /// Chooses stages as short as the rows allow, at most `1 << most_shift` bytes. `is_aligned` rows begin
    /// and end at blocks. Returns `None` for rows without a byte, and for unaligned rows if a stage has only
    /// one block.
    pub fn new(
        row_bytes: u32,
        block_shift: u32,
        is_aligned: bool,
        most_shift: u32,
    ) -> Option<Self> {
        let most_shift = most_shift.min(MOST_SHIFT);
        // A row that does not begin at a block touches up to one block more than its bytes fill, and the
        // stage must hold that block, too.
        let beside = if is_aligned { 0 } else { 1 << block_shift };
        let touched = u64::from(row_bytes) + u64::from(beside);
        let stage_shift = touched.next_power_of_two().ilog2();
        let stage_shift =
            stage_shift.clamp(LEAST_SHIFT.max(block_shift), most_shift.max(LEAST_SHIFT));
        let piece_bytes = (1u32 << stage_shift)
            .checked_sub(beside)
            .filter(|bytes| *bytes > 0)?;
        Some(Self {
            row_bytes,
            piece_bytes,
            of_row: NonZeroU32::new(row_bytes.div_ceil(piece_bytes))?,
            stage_shift,
        })
    }
}

/// Rows at any location, each divided into pieces. `byte_of` returns the first byte of the row with an index,
/// or `None` for a row that is not read.
#[derive(Clone, Copy, Debug)]
pub struct RowPieces<F> {
    /// Function that returns the first byte of a row.
    pub byte_of: F,
    /// Division of a row.
    pub split: RowSplit,
    /// Number of rows, at least 1.
    pub rows: u64,
    /// One past the last byte of all rows: bytes of a row past it are not read.
    pub end: u64,
}

impl<F: Fn(u64) -> Option<u64>> RangePieces for RowPieces<F> {
    #[inline(always)]
    fn stages(&self) -> u32 {
        (WARP_BYTES >> self.split.stage_shift) as u32
    }

    #[inline(always)]
    fn last(&self) -> u64 {
        self.rows * u64::from(self.split.of_row.get()) - 1
    }

    #[inline(always)]
    fn piece(&self, number: u64) -> (u64, u64) {
        let (row, part) = self.row_of(number);
        let begin = part * self.split.piece_bytes;
        let left = self.split.row_bytes - begin;
        let bytes = if left < self.split.piece_bytes {
            left
        } else {
            self.split.piece_bytes
        };
        // A row that is not read has no bytes; the warp does not wait for its pieces.
        let begin = (self.byte_of)(row).unwrap_or(0) + u64::from(begin);
        let end = begin + u64::from(bytes);
        (begin, if end < self.end { end } else { self.end })
    }

    #[inline(always)]
    fn slot(&self, number: u64, _block: u64) -> u64 {
        u64::from(self.stage(number)) << self.split.stage_shift
    }

    #[inline(always)]
    fn is_read(&self, number: u64) -> bool {
        let (row, part) = self.row_of(number);
        let begin = u64::from(part * self.split.piece_bytes);
        (self.byte_of)(row).is_some_and(|byte| byte + begin < self.end)
    }

    #[inline(always)]
    fn batch(&self) -> u64 {
        u64::from(self.stages() / 4)
    }
}

impl<F> RowPieces<F> {
    /// Returns the row of piece `number`, and the piece's number in it.
    #[inline(always)]
    fn row_of(&self, number: u64) -> (u64, u32) {
        let of_row = u64::from(self.split.of_row.get());
        if of_row == 1 {
            return (number, 0);
        }
        let row = number.checked_div(of_row).unwrap_or(0);
        (row, (number - row * of_row) as u32)
    }
}

/// A range of bytes of a namespace in pieces, and the stages of the ring that they pass through. A piece ends
/// at a byte of the drive that is a multiple of the piece's length.
///
/// Every piece except the first and the last has the full length. The same byte of the drive always has the
/// same offset in the slots, which makes addresses a single mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeRing {
    /// First byte of the range.
    pub begin: u64,
    /// One past the last byte of the range, more than `begin`.
    pub end: u64,
    /// log2 of the bytes of a piece, from [`LEAST_SHIFT`] to [`MOST_SHIFT`].
    pub piece_shift: u32,
}

impl RangeRing {
    /// Returns the number of the first piece. Numbers count up from there.
    #[inline(always)]
    pub const fn first(&self) -> u64 {
        self.begin >> self.piece_shift
    }

    /// Returns the offset of a byte in the slots of the warp.
    #[inline(always)]
    pub const fn place(byte: u64) -> u64 {
        byte & (WARP_BYTES - 1)
    }
}

impl RangePieces for RangeRing {
    #[inline(always)]
    fn stages(&self) -> u32 {
        (WARP_BYTES >> self.piece_shift) as u32
    }

    #[inline(always)]
    fn last(&self) -> u64 {
        (self.end - 1) >> self.piece_shift
    }

    #[inline(always)]
    fn piece(&self, number: u64) -> (u64, u64) {
        let begin = number << self.piece_shift;
        let end = (number + 1) << self.piece_shift;
        (begin.max(self.begin), end.min(self.end))
    }

    #[inline(always)]
    fn slot(&self, _number: u64, block: u64) -> u64 {
        Self::place(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_each_other_and_none_is_longer_than_a_stage() {
        for piece_shift in LEAST_SHIFT..=MOST_SHIFT {
            for (begin, bytes) in [
                (0, 1),
                (5, 1 << 20),
                (4096, 4096),
                (32_767, 2),
                (1 << 40, 300_001),
            ] {
                let ring = RangeRing {
                    begin,
                    end: begin + bytes,
                    piece_shift,
                };
                let mut at = begin;
                for number in ring.first()..=ring.last() {
                    let (begin, end) = ring.piece(number);
                    assert_eq!(begin, at);
                    assert!(end > begin);
                    // The whole piece lies in its stage.
                    let stage = |byte| RangeRing::place(byte) >> piece_shift;
                    assert_eq!(stage(begin), u64::from(ring.stage(number)));
                    assert_eq!(stage(end - 1), u64::from(ring.stage(number)));
                    at = end;
                }
                assert_eq!(at, ring.end);
            }
        }
    }

    #[test]
    fn scattered_pieces_have_a_stage_each() {
        let pieces = ScatteredPieces {
            byte_of: |number| (100 - number) * 8192,
            bytes: 8192,
            count: 50,
            stage_shift: 13,
        };
        assert_eq!((pieces.stages(), pieces.last()), (16, 49));
        assert_eq!(pieces.piece(3), (97 * 8192, 98 * 8192));
        let slots: Vec<u64> = (20..36).map(|number| pieces.slot(number, 0)).collect();
        let mut sorted = slots.clone();
        sorted.sort_unstable();
        assert_eq!(
            sorted,
            (0..16).map(|stage| stage * 8192).collect::<Vec<_>>()
        );
        assert_eq!(pieces.slot(36, 0), slots[0]);
    }

    #[test]
    fn pieces_of_rows_have_every_byte_once_and_fit_into_stages() {
        for (row_bytes, block_shift, first, most_shift) in [
            (2, 9, 0, 15),
            (512, 9, 512, 15),
            (4096, 12, 4096, 15),
            (4096, 12, 4094, 15),
            (4608, 9, 0, 15),
            (70_000, 9, 6, 12),
            (1 << 20, 12, 1 << 30, 15),
            (100_002, 12, 2, 14),
        ] {
            let is_aligned = (row_bytes | first) & ((1 << block_shift) - 1) == 0;
            let split = RowSplit::new(row_bytes, block_shift, is_aligned, most_shift).unwrap();
            let pieces = RowPieces {
                byte_of: |row| {
                    (row != 1).then(|| u64::from(first) + (9 - row) * u64::from(row_bytes))
                },
                split,
                rows: 3,
                end: u64::MAX,
            };
            let of_row = u64::from(split.of_row.get());
            assert_eq!(pieces.last() + 1, 3 * of_row);
            for row in [0, 2] {
                let mut at = (pieces.byte_of)(row).unwrap();
                for number in row * of_row..(row + 1) * of_row {
                    assert!(pieces.is_read(number) && !pieces.is_read(of_row + number % of_row));
                    let (begin, end) = pieces.piece(number);
                    assert!(begin == at && end > begin, "{split:?}");
                    let blocks = ((end - 1) >> block_shift) - (begin >> block_shift) + 1;
                    assert!(blocks << block_shift <= 1 << split.stage_shift, "{split:?}");
                    assert!(split.stage_shift <= most_shift.max(block_shift));
                    at = end;
                }
                assert_eq!(at, (pieces.byte_of)(row).unwrap() + u64::from(row_bytes));
            }
            assert!(pieces.batch() >= 1 && pieces.batch() < u64::from(pieces.stages()));
        }
        // The last row is shorter.
        let short = RowPieces {
            byte_of: |row| Some(row * 10_000),
            split: RowSplit::new(10_000, 9, false, 12).unwrap(),
            rows: 2,
            end: 13_700,
        };
        let read = (0..=short.last()).filter(|number| short.is_read(*number));
        let read: Vec<_> = read.map(|number| short.piece(number)).collect();
        let (first, last) = ((0, 3584), (13_584, 13_700));
        assert_eq!((read.len(), read[0], read[4]), (5, first, last));
        assert_eq!(RowSplit::new(0, 9, true, 15), None);
        assert_eq!(RowSplit::new(100, 12, false, 12), None);
    }

    #[test]
    fn each_stage_gets_the_next_piece_of_its_own() {
        let ring = RangeRing {
            begin: 77 << 14,
            end: 1 << 30,
            piece_shift: 14,
        };
        assert_eq!(ring.stages(), 8);
        for number in 77..100 {
            let mut ahead: Vec<u64> = (0..8).map(|stage| ring.next_at(stage, number)).collect();
            for (stage, piece) in (0..8).zip(&ahead) {
                assert_eq!(ring.stage(*piece), stage);
            }
            ahead.sort_unstable();
            assert_eq!(ahead, (number..number + 8).collect::<Vec<_>>());
        }
    }
}
