//! Bytes of a drive that pass through the slots of a warp in their order, in [pieces](Pieces).
//!
//! Of a [`Ring`], one range, a byte's place in the slots is its address modulo [`WARP_BYTES`]: a piece lies behind the
//! one before it, and what begins in one and ends in the next needs no care but where the ring begins anew. [`Scattered`]
//! pieces lie anywhere on the drive; each has a stage of the slots.

use crate::rows::WARP_BYTES;

/// log2 of the bytes of a piece, at least: no more pieces fit into the ring than a warp has lanes.
pub const LEAST_SHIFT: u32 = 12;
/// The same at most: three pieces are under way while the warp uses one.
pub const MOST_SHIFT: u32 = 15;

const _: () = assert!(WARP_BYTES.is_power_of_two() && WARP_BYTES >> LEAST_SHIFT == 32);

/// Ranges of bytes of a namespace that pass through the stages of a warp's slots in the order of their numbers.
pub trait Pieces {
    /// Pieces that are in the slots at a time, a power of two, 32 at most.
    fn stages(&self) -> u32;

    /// The number of the last piece.
    fn last(&self) -> u64;

    /// The first byte of piece `number`, and one past its last.
    fn piece(&self, number: u64) -> (u64, u64);

    /// Where the block at byte `block` of the drive, in which piece `number` begins, lies in the slots of the warp.
    fn slot(&self, number: u64, block: u64) -> u64;

    /// The stage of piece `number`.
    #[inline(always)]
    fn stage(&self, number: u64) -> u32 {
        number as u32 & (self.stages() - 1)
    }

    /// The piece from `number` on, `number` included, that passes through `stage`.
    #[inline(always)]
    fn next_at(&self, stage: u32, number: u64) -> u64 {
        number + u64::from(stage.wrapping_sub(number as u32) & (self.stages() - 1))
    }
}

/// Pieces of one length, numbered from 0, which `byte_of` finds.
#[derive(Clone, Copy, Debug)]
pub struct Scattered<F> {
    /// The first byte of a piece.
    pub byte_of: F,
    /// Bytes of each.
    pub bytes: u32,
    /// How many there are, at least 1.
    pub count: u64,
    /// log2 of the bytes of a stage, from [`LEAST_SHIFT`] to [`MOST_SHIFT`]: the blocks of a piece fit.
    pub stage_shift: u32,
}

impl<F: Fn(u64) -> u64> Pieces for Scattered<F> {
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
}

/// A range of bytes of a namespace in pieces, and the stages of the ring that they pass through. A piece ends where the
/// drive's bytes are a multiple of its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Its first byte.
    pub begin: u64,
    /// One past its last byte, more than `begin`.
    pub end: u64,
    /// log2 of the bytes of a piece, from [`LEAST_SHIFT`] to [`MOST_SHIFT`].
    pub piece_shift: u32,
}

impl Ring {
    /// The number of the first piece. Numbers count up.
    #[inline(always)]
    pub const fn first(&self) -> u64 {
        self.begin >> self.piece_shift
    }

    /// Where a byte lies in the slots of the warp.
    #[inline(always)]
    pub const fn place(byte: u64) -> u64 {
        byte & (WARP_BYTES - 1)
    }
}

impl Pieces for Ring {
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
                let ring = Ring {
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
                    let stage = |byte| Ring::place(byte) >> piece_shift;
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
        let pieces = Scattered {
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
    fn each_stage_gets_the_next_piece_of_its_own() {
        let ring = Ring {
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
