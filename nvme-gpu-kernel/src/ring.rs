//! Bytes of a drive that pass through the slots of a warp in their order, in pieces.
//!
//! A byte's place in the slots is its address modulo [`WARP_BYTES`]: a piece lies behind the one before it, and what
//! begins in one and ends in the next needs no care but where the ring begins anew.

use crate::rows::WARP_BYTES;

/// log2 of the bytes of a piece, at least: no more pieces fit into the ring than a warp has lanes.
pub const LEAST_SHIFT: u32 = 12;
/// The same at most: three pieces are under way while the warp uses one.
pub const MOST_SHIFT: u32 = 15;

const _: () = assert!(WARP_BYTES.is_power_of_two() && WARP_BYTES >> LEAST_SHIFT == 32);

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
    /// Pieces that are in the ring at a time.
    #[inline(always)]
    pub const fn stages(&self) -> u32 {
        (WARP_BYTES >> self.piece_shift) as u32
    }

    /// The number of the first piece. Numbers count up.
    #[inline(always)]
    pub const fn first(&self) -> u64 {
        self.begin >> self.piece_shift
    }

    /// The number of the last piece.
    #[inline(always)]
    pub const fn last(&self) -> u64 {
        (self.end - 1) >> self.piece_shift
    }

    /// The stage of piece `number`.
    #[inline(always)]
    pub const fn stage(&self, number: u64) -> u32 {
        number as u32 & (self.stages() - 1)
    }

    /// The piece from `number` on, `number` included, that passes through `stage`.
    #[inline(always)]
    pub const fn next_at(&self, stage: u32, number: u64) -> u64 {
        number + (stage.wrapping_sub(number as u32) & (self.stages() - 1)) as u64
    }

    /// The first byte of piece `number`, and one past its last.
    #[inline(always)]
    pub const fn piece(&self, number: u64) -> (u64, u64) {
        let begin = number << self.piece_shift;
        let end = (number + 1) << self.piece_shift;
        (
            if begin > self.begin {
                begin
            } else {
                self.begin
            },
            if end < self.end { end } else { self.end },
        )
    }

    /// Where a byte lies in the slots of the warp.
    #[inline(always)]
    pub const fn place(byte: u64) -> u64 {
        byte & (WARP_BYTES - 1)
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
